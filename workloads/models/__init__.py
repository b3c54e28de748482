"""Model families: each composes operator kinds, nothing else."""
