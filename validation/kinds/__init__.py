"""Operators as torch modules and functions, by kind."""
