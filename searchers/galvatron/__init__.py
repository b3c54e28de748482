"""Galvatron-Base and Galvatron-BMW: decision trees, layer-level dynamic programming, balanced pipelines."""
