"""What is done with the parts: comparisons, and the command line over everything."""
