"""Alpa: each part against theory or a second solver."""
