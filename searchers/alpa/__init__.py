"""Alpa (OSDI 2022): intra-operator optimum per stage and mesh, inter-operator dynamic programming."""
