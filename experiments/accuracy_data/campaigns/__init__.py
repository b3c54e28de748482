"""Measured results of our own campaigns, as ``windtunnel validate CAMPAIGN --write-cases`` writes them."""
