"""Runs plans for real and compares prediction with measurement. Only this package imports torch."""
