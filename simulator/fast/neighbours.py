"""Compiled: operators of a run of equal strategy whose neighbours are in another run or stage, by rows of their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    BACKWARD_HOST_S,
    BACKWARD_S,
    FORWARD_HOST_S,
    FORWARD_S,
    PARTED,
    PARTED_S,
    ROW,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.boundaries import key_of_arrivals
from simulator.fast.prices import mixed, wanted

_ROW_KEY = np.uint64(0xAEF17502108EF2D9)


class Unlike(NamedTuple):
    """Room for such operators of one stage, ascending.

    Attributes:
        operators, rows: int64[N]. Operators, and their numbers in ``TimeTables.rows``.
        more_s: float64[N, 2]. What they take more than the sums have, forward: seconds of device and host.
    """

    operators: Ints
    rows: Ints
    more_s: Floats


class PassSums(NamedTuple):
    """Seconds of device and host, forward and backward, and what backward takes the device longer in two halves."""

    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float
    parted_s: float


@inlined
def add_unlike(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    run: int,
    start: int,
    stage: int,
    first: int,
    in_shards: Ints,
    misses: Ints,
    counts: Ints,
    unlike: Unlike,
    count: int,
) -> tuple[int, bool, PassSums]:
    """Add those of a run to ``unlike``; return their number then, whether all are known, and what they take more.

    Args:
        shape, tables, plans, run_tables, misses, counts: See ``time.estimate_times``.
        run, start, stage, first: The run, its first operator, its stage, and that's.
        in_shards: As ``TimeTables.in_shards``; PENDING where not known yet.
        unlike, count: Those of the runs before.
    """
    begin, table, ends = plans.run_offsets[stage], run_tables[run], plans.run_stops[run]
    sums, all_known = tables.sums[table], True
    forward_s, backward_s, forward_host_s, backward_host_s, parted_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for place in range(shape.touched_offsets[start], shape.touched_offsets[start + 1]):
        index = shape.touched[place]
        if index >= ends:
            break
        key = mixed(mixed(_ROW_KEY, shape.classes[index]), tables.aliases[table])
        other = begin
        for near in range(shape.neighbour_offsets[index], shape.neighbour_offsets[index + 1]):
            neighbour = shape.neighbours[near]
            word = 0
            if neighbour >= first:
                while plans.run_stops[other] <= neighbour:
                    other += 1
                word = tables.aliases[run_tables[other]] + 1
            key = mixed(key, word)
        key, known = key_of_arrivals(shape, key, index, first, in_shards)
        row = -1
        if known:
            row = wanted(tables.keys, tables.values, key, misses, counts, ROW, index, stage)
        if row < 0:
            all_known = False
            continue
        own, alike, behind = tables.rows[row], sums[index], sums[index + 1]
        unlike.operators[count], unlike.rows[count] = index, row
        more_s = own[0, 0] - (behind[FORWARD_S] - alike[FORWARD_S])
        more_host_s = own[0, 1] - (behind[FORWARD_HOST_S] - alike[FORWARD_HOST_S])
        unlike.more_s[count, 0], unlike.more_s[count, 1] = more_s, more_host_s
        forward_s += more_s
        forward_host_s += more_host_s
        backward_s += own[1, 0] - (behind[BACKWARD_S] - alike[BACKWARD_S])
        backward_host_s += own[1, 1] - (behind[BACKWARD_HOST_S] - alike[BACKWARD_HOST_S])
        parted_s += own[PARTED, 0] - (behind[PARTED_S] - alike[PARTED_S])
        count += 1
    return count, all_known, PassSums(forward_s, backward_s, forward_host_s, backward_host_s, parted_s)
