"""Compiled: what crosses boundaries between stages, in which layout, and how long it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.closed_forms.stage_rows import DOWN, FORWARD, UP
from simulator.compiled_cache import inlined
from simulator.fast.arrays import BOUNDARY, Floats, Ints, PlanColumns, Structure, TimeTables
from simulator.fast.prices import mixed, wanted

BOUNDARY_KEY = np.uint64(0xF1357AEA2E62A9C5)
SHARDS_KEY = np.uint64(0xA24BAED4963EE407)


@inlined
def key_of_arrivals(shape: Structure, key: Any, index: int, first: int, in_shards: Ints) -> tuple[Any, bool]:
    """Return a key that knows which inputs of an operator come in shards of the sequence, and whether that is known."""
    known = True
    for number in range(shape.input_offsets[index], shape.input_offsets[index + 1]):
        tensor = shape.input_tensors[number]
        if tensor >= 0 and shape.input_producers[number] < first and in_shards[tensor] != 0:
            known = known and in_shards[tensor] > 0
            key = mixed(key ^ SHARDS_KEY, number - shape.input_offsets[index])
    return key, known


@inlined
def add_transfers(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    in_shards: Ints,
    plan: int,
    stage_s: Floats,
    rows_s: Floats,
    misses: Ints,
    counts: Ints,
) -> bool:
    """Add to the times of stages what they send over the boundaries between them; return whether all is known.

    Arguments as for ``time.estimate_times``, and ``rows_s`` as for ``pipeline.passes_of_plan_s``.
    """
    low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    size, all_known = plans.microbatch_size[plan], True
    first = 0
    for stage in range(low, high - 1):
        begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
        last = plans.run_offsets[stage + 2]
        cut, stop = plans.run_stops[end - 1], plans.run_stops[last - 1]
        known = True
        for run in range(begin, last):
            known = known and run_tables[run] >= 0
        for place in range(shape.crossing_offsets[cut], shape.crossing_offsets[cut + 1]):
            known = known and in_shards[shape.crossing[place]] >= 0
        if not known:
            first = cut
            continue
        placement, following = plans.placements[stage], plans.placements[stage + 1]
        key = mixed(mixed(BOUNDARY_KEY, size), tables.placement_form[placement])
        key = mixed(key, tables.placement_form[following])
        key = mixed(key, tables.placement_node[following] - tables.placement_node[placement])
        for place in range(shape.crossing_offsets[cut], shape.crossing_offsets[cut + 1]):
            tensor = shape.crossing[place]
            maker = shape.producers[tensor]
            reader = shape.reader_offsets[tensor]
            other = begin
            if maker >= first:
                while plans.run_stops[other] <= maker:
                    other += 1
                sent = tables.made[run_tables[other], tensor]
            else:
                while shape.readers[reader] < first:
                    reader += 1
                if shape.readers[reader] < cut:
                    while plans.run_stops[other] <= shape.readers[reader]:
                        other += 1
                    sent = tables.read[run_tables[other], reader]
                else:
                    sent = tables.passed[run_tables[begin], first]
            while shape.readers[reader] < cut:
                reader += 1
            other = end
            if shape.readers[reader] < stop:
                while plans.run_stops[other] <= shape.readers[reader]:
                    other += 1
                received = tables.read[run_tables[other], reader]
            else:
                received = tables.passed[run_tables[end], cut]
            key = mixed(mixed(mixed(key, 2 * shape.sizes[tensor] + in_shards[tensor]), sent), received)
        number = wanted(tables.keys, tables.values, key, misses, counts, BOUNDARY, stage, plan)
        if number < 0:
            all_known = False
        else:
            stage_s[stage] += tables.boundaries[number, 0] + tables.boundaries[number, 3]
            stage_s[stage + 1] += tables.boundaries[number, 1] + tables.boundaries[number, 2]
            rows_s[stage, DOWN] = tables.boundaries[number, 0]
            rows_s[stage + 1, UP] = tables.boundaries[number, 1]
            rows_s[stage + 1, FORWARD] += tables.boundaries[number, 2]
        first = cut
    return all_known
