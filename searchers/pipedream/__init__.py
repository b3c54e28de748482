"""PipeDream (SOSP 2019): hierarchical dynamic programming over levels of the network."""
