"""Thousands of different plans at once, pass by pass: equal to the engine but for what only an engine knows."""
