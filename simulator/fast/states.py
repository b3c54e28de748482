"""Compiled: model states of stages, and what ZeRO has whole for a while; see ``estimate_memory``."""

from __future__ import annotations

import numpy as np

from simulator.closed_forms.unscattered import unscattered_bytes
from simulator.compiled_cache import inlined
from simulator.fast.arrays import DONE, Floats, Ints, PlanColumns, Structure
from simulator.fast.memory import (
    ANEW,
    ANEW_BYTES,
    GATHERED,
    GATHERED_BYTES,
    LARGEST,
    LAST_BYTES,
    REFRESHED,
    REFRESHED_BYTES,
    STATES,
    STATES_BYTES,
    STEP,
    STEP_BYTES,
    TIED,
    UNSHARDED,
    UNSHARDED_BYTES,
    MemoryTables,
    longest,
)


@inlined
def _add_zero(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    begin: int,
    first: int,
    stop: int,
    column: int,
    pairs: bool,
    found: Floats,
) -> None:
    """Fill sum of the root, of the root above the first other unit, most of two neighbours, and lowest other unit.

    Of one, not two, without ``pairs``.
    """
    before, run = 0.0, begin
    found[:] = 0.0
    for unit in range(shape.unit_of[first], shape.unit_of[stop - 1] + 1):
        place, ends = max(first, shape.unit_first[unit]), min(stop, shape.unit_stop[unit])
        layer = shape.layer_of[place]
        size = 0.0
        while place < ends:
            while plans.run_stops[run] <= place:
                run += 1
            upto = min(ends, plans.run_stops[run])
            sums = tables.sums[run_tables[run]]
            size += sums[upto, column] - sums[place, column]
            place = upto
        if shape.gathers_of[layer] == 1:
            found[0] += size
            if before > 0:
                found[1] += size
        elif size > 0:
            found[2] = max(found[2], before + size if pairs else size)
            if before == 0:
                found[3] = size
            before = size


@inlined
def hold_states(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    prefetches: bool,
    waiting: float,
    held: Floats,
) -> None:
    """Fill the columns of states for the stages of the chosen plans whose state is DONE, and add to LAST_BYTES.

    Args:
        shape, tables, plans, chosen, states, run_tables, prefetches, waiting: See ``peaks.estimate_peaks``.
        held: float64[S, HELD]. Result.
    """
    num_tied = len(shape.tied)
    tied_bytes, all_sums = tables.tied_bytes, tables.sums
    whole = np.zeros((2, 4))  # By what is gathered and what is scattered; see ``_add_zero``.
    for plan in chosen:
        if states[plan] != DONE:
            continue
        m = plans.num_microbatches[plan]
        sharded = plans.reduces_every[plan] != 0 or (m == 1 and plans.overlaps[plan] != 0)
        column = STATES + 2 * sharded + (plans.reshards[plan] != 0)
        first = 0
        for stage in range(plans.stage_offsets[plan], plans.stage_offsets[plan + 1]):
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            stop = plans.run_stops[end - 1]
            own_states, anew, step, refreshed, refreshed_most, twice = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            gathered, unsharded = 0.0, 0.0
            start = first
            for run in range(begin, end):
                table, upto = run_tables[run], plans.run_stops[run]
                own_states += all_sums[table, upto, column] - all_sums[table, start, column]
                place = STATES + ANEW + sharded
                anew += all_sums[table, upto, place] - all_sums[table, start, place]
                step += all_sums[table, upto, STATES + STEP] - all_sums[table, start, STATES + STEP]
                gathered += all_sums[table, upto, GATHERED] - all_sums[table, start, GATHERED]
                unsharded += all_sums[table, upto, UNSHARDED] - all_sums[table, start, UNSHARDED]
                chunks = all_sums[table, upto, STATES + REFRESHED] - all_sums[table, start, STATES + REFRESHED]
                if chunks > 0:
                    refreshed += chunks
                    refreshed_most = max(refreshed_most, longest(tables.maxima, table, LARGEST, start, upto))
                start = upto
            for place in range(num_tied):
                index = shape.tied[place]
                if first <= index < stop:
                    run = begin
                    while plans.run_stops[run] <= index:
                        run += 1
                    in_root = shape.gathers_of[shape.layer_of[index]] == 1
                    seen, stays = False, False
                    other = begin
                    for before_place in range(place):
                        user = shape.tied[before_place]
                        if user >= first:
                            while plans.run_stops[other] <= user:
                                other += 1
                            theirs = tables.tied_layouts[run_tables[other], before_place]
                            if theirs == tables.tied_layouts[run_tables[run], place]:
                                seen = True
                                stays = stays or (in_root and shape.gathers_of[shape.layer_of[user]] == 1)
                    if stays:
                        twice += tied_bytes[run_tables[run], place, TIED]
                    if not seen:
                        table = run_tables[run]
                        own_states += tied_bytes[table, place, column - STATES]
                        anew += tied_bytes[table, place, ANEW + sharded]
                        step += tied_bytes[table, place, STEP]
                        refreshed += tied_bytes[table, place, REFRESHED]
            whole[:] = 0.0
            if gathered > 0 and plans.reshards[plan] != 0:
                _add_zero(shape, tables, plans, run_tables, begin, first, stop, GATHERED, prefetches, whole[0])
                whole[0, 0] -= twice
            if unsharded > 0 and sharded:
                _add_zero(shape, tables, plans, run_tables, begin, first, stop, UNSHARDED, True, whole[1])
            row = held[stage]
            row[GATHERED_BYTES] = whole[0, 0] + whole[0, 2]
            most, end = unscattered_bytes(whole[1, 1], whole[1, 2], whole[1, 0], whole[1, 3], waiting)
            row[UNSHARDED_BYTES] = most
            row[LAST_BYTES] += end
            row[STATES_BYTES], row[ANEW_BYTES], row[STEP_BYTES] = own_states + anew, anew, step
            row[REFRESHED_BYTES] = refreshed + refreshed_most
            first = stop
