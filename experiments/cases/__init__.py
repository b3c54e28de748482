"""Measured runs as cases: one file per source, each turns rows into problems, plans and measured values."""
