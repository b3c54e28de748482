"""Piper (NeurIPS 2021): two-level dynamic programming over down-sets of the layer graph."""
