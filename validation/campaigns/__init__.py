"""Shipped campaigns: which plans are run to calibrate, and which to report."""
