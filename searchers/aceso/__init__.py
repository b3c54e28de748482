"""Aceso (EuroSys 2024): iterative alleviation of bottlenecks."""
