"""Compiled: which tables the runs of a stage have."""

from __future__ import annotations

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import TABLE, Ints, Keys
from simulator.fast.prices import mixed, wanted

_TABLE_KEY = np.uint64(0xD1B54A32D192ED03)


@inlined
def find_tables(
    run_stops: Ints,
    strategies: Ints,
    run_tables: Ints,
    keys: Keys,
    values: Ints,
    begin: int,
    end: int,
    stage: int,
    first: int,
    placement_shape: int,
    size: int,
    num_operators: int,
    misses: Ints,
    counts: Ints,
) -> tuple[int, bool, bool]:
    """Write the tables of a stage's runs; return where it ends, whether all are known, and whether runs are in order.

    Args:
        run_stops, strategies, run_tables, keys, values, misses, counts: Of plans and tables; see
            ``time.estimate_times``.
        begin, end: Runs.
        stage, first, placement_shape: Number of the stage, its first operator, and what prices inside it depend on.
        size: Samples of a microbatch.
        num_operators: Of the model.
    """
    stop, known = first, True
    for run in range(begin, end):
        if run_stops[run] <= stop or run_stops[run] > num_operators:
            return stop, known, False
        stop = run_stops[run]
        key = mixed(_TABLE_KEY, strategies[run])
        key = mixed(mixed(key, placement_shape), size)
        found = wanted(keys, values, key, misses, counts, TABLE, run, stage)
        run_tables[run] = found
        known = known and found >= 0
    return stop, known, begin < end
