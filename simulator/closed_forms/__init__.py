"""Estimates of time and memory without a simulation, as sums and maxima over a plan."""
