"""The closed forms over arrays, compiled: the numbers of `closed_forms.estimate`, hundreds of thousands a second.

`estimate.FastEstimator` is what searchers call. `plans` turns plans into arrays; `structure`, `tables` and `misses` ask
the lowering for what these need, and `store` keeps it; `time` and `peaks` add it up, the other files are their terms.
"""
