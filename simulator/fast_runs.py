"""Compiled: which tables the runs of a stage have."""

from __future__ import annotations

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast_arrays import TABLE, Ints, PlanColumns, TimeTables
from simulator.fast_prices import mixed, wanted

_TABLE_KEY = np.uint64(0xD1B54A32D192ED03)


@inlined
def find_tables(
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    size: int,
    num_operators: int,
    misses: Ints,
    counts: Ints,
) -> tuple[int, bool, bool]:
    """Write the tables of a stage's runs; return where it ends, whether all are known, and whether runs are in order.

    Args:
        tables, plans, run_tables, misses, counts: See ``fast_time.estimate_times``.
        stage, first: The stage and its first operator.
        size: Samples of a microbatch.
        num_operators: Of the model.
    """
    begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
    stop, known = first, True
    for run in range(begin, end):
        if plans.run_stops[run] <= stop or plans.run_stops[run] > num_operators:
            return stop, known, False
        stop = plans.run_stops[run]
        key = mixed(_TABLE_KEY, plans.strategies[run])
        key = mixed(mixed(key, tables.placement_shape[plans.placements[stage]]), size)
        found = wanted(tables.keys, tables.values, key, misses, counts, TABLE, run, stage)
        run_tables[run] = found
        known = known and found >= 0
    return stop, known, begin < end
