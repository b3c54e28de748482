"""MPE: counts of the paper, exactness on additive costs, its path search."""
