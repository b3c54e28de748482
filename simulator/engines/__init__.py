"""Engines: a graph of tasks in time, in SimPy and compiled."""
