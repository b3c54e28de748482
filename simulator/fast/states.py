"""Compiled: model states of stages, and what ZeRO has whole for a while; see ``estimate_memory``."""

from __future__ import annotations

import numpy as np

from simulator.closed_forms.unscattered import unscattered_bytes
from simulator.compiled_cache import inlined
from simulator.fast.arrays import DONE, Floats, Ints, PlanColumns, Structure
from simulator.fast.memory import (
    ABOVE_BYTES,
    ANEW,
    ANEW_BYTES,
    BARE_BYTES,
    BELOW_BYTES,
    BUCKET,
    BUCKET_BYTES,
    BUFFER,
    BUFFER_BYTES,
    FIRST_BYTES,
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
    TIED_GATHERED,
    TIED_SCATTERED,
    UNSHARDED,
    MemoryTables,
    longest,
)

# Columns of what ZeRO has whole of a stage: the root; of it what is above all other units; of those the most of one or
# of two neighbours, the largest, the largest but for the highest, the lowest, and the highest.
ROOT, ABOVE, PAIR, MOST, BELOW, LOWEST, HIGHEST = range(7)
FOUND = 7


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
    alone: float,
    share: float,
    copied: bool,
    found: Floats,
) -> None:
    """Fill what ``found`` has columns for; ``alone``, ``share`` and ``copied`` as in ``estimate_memory``."""
    before, run = 0.0, begin
    found[:] = 0.0
    for part in range(shape.part_of[first], shape.part_of[stop - 1] + 1):
        place, ends = max(first, shape.part_first[part]), min(stop, shape.part_stop[part])
        unit = shape.unit_of[place]
        size = 0.0
        while place < ends:
            while plans.run_stops[run] <= place:
                run += 1
            upto = min(ends, plans.run_stops[run])
            sums = tables.sums[run_tables[run]]
            size += sums[upto, column] - sums[place, column]
            place = upto
        if shape.gathers_of[unit] == 1:
            found[ROOT] += size
            if before > 0:
                found[ABOVE] += size
        elif size > 0:
            found[ABOVE] = 0.0
            found[PAIR], found[BELOW] = max(found[PAIR], alone * size), max(found[BELOW], before)
            found[MOST] = max(found[MOST], size)
            if before > 0:
                found[PAIR] = max(found[PAIR], size + share * (max(before, size) if copied else before))
            if before == 0:
                found[LOWEST] = size
            before = found[HIGHEST] = size


@inlined
def hold_states(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    prefetches: bool,
    apart: bool,
    waits: bool,
    waiting: float,
    held: Floats,
    tied_anew: Floats,
) -> None:
    """Fill the columns of states for the stages of the chosen plans whose state is DONE; of LAST_BYTES not activations.

    Args:
        shape, tables, plans, chosen, states, run_tables, prefetches, apart, waits, waiting:
            See ``peaks.estimate_peaks``.
        held: float64[S, HELD]. Result.
        tied_anew: float64[S, O]. Result: gradients made anew of tied parameters, where they count.
    """
    num_tied = len(shape.tied)
    tied_bytes, all_sums = tables.tied_bytes, tables.sums
    ahead = 1.0 if prefetches else 0.0  # Of the next unit's parameters.
    whole = np.zeros((2, FOUND))  # By what is gathered and what is scattered; see ``_add_zero``.
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
            own_states, anew, step, refreshed, refreshed_most = 0.0, 0.0, 0.0, 0.0, 0.0
            buffer, bucket = 0.0, 0.0
            gathered, unsharded, gathered_twice, scattered_twice = 0.0, 0.0, 0.0, 0.0
            start = first
            for run in range(begin, end):
                table, upto = run_tables[run], plans.run_stops[run]
                own_states += all_sums[table, upto, column] - all_sums[table, start, column]
                place = STATES + ANEW + sharded
                anew += all_sums[table, upto, place] - all_sums[table, start, place]
                step += all_sums[table, upto, STATES + STEP] - all_sums[table, start, STATES + STEP]
                gathered += all_sums[table, upto, GATHERED] - all_sums[table, start, GATHERED]
                unsharded += all_sums[table, upto, UNSHARDED] - all_sums[table, start, UNSHARDED]
                buffer = max(buffer, longest(tables.maxima, table, BUFFER, start, upto))
                bucket = max(bucket, longest(tables.maxima, table, BUCKET, start, upto))
                chunks = all_sums[table, upto, STATES + REFRESHED] - all_sums[table, start, STATES + REFRESHED]
                if chunks > 0:
                    refreshed += chunks
                    refreshed_most = max(refreshed_most, longest(tables.maxima, table, LARGEST, start, upto))
                start = upto
            for place in range(num_tied):
                index, tied_anew[stage, place] = shape.tied[place], 0.0
                if first <= index < stop:
                    run = begin
                    while plans.run_stops[run] <= index:
                        run += 1
                    in_root = shape.gathers_of[shape.unit_of[index]] == 1
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
                                stays = stays or (in_root and shape.gathers_of[shape.unit_of[user]] == 1)
                    if stays:
                        gathered_twice += tied_bytes[run_tables[run], place, TIED_GATHERED]
                        scattered_twice += tied_bytes[run_tables[run], place, TIED_SCATTERED]
                    if not seen:
                        table = run_tables[run]
                        own_states += tied_bytes[table, place, column - STATES]
                        tied_anew[stage, place] = tied_bytes[table, place, ANEW + sharded]
                        anew += tied_anew[stage, place]
                        step += tied_bytes[table, place, STEP]
                        refreshed += tied_bytes[table, place, REFRESHED]
            whole[:] = 0.0
            if gathered > 0 and plans.reshards[plan] != 0:
                _add_zero(shape, tables, plans, run_tables, begin, first, stop, GATHERED, 1.0, ahead, False, whole[0])
                whole[0, ROOT] -= gathered_twice
            if unsharded > 0:
                _add_zero(
                    shape, tables, plans, run_tables, begin, first, stop, UNSHARDED, waiting, waiting,
                    waits and not apart, whole[1],
                )  # fmt: skip
                whole[1, ROOT] -= scattered_twice
            row = held[stage]
            pair, in_root = whole[0, PAIR], whole[1, ABOVE] > 0.0
            if not sharded:
                whole[1] = 0.0
            row[GATHERED_BYTES] = whole[0, ROOT]
            in_all, lowest = whole[1, ROOT], whole[1, LOWEST]
            given_back = whole[0, ROOT] if apart else 0.0
            first_bytes, end_bytes = unscattered_bytes(in_all, whole[1, ABOVE], lowest, waiting, waits, given_back)
            gathers = pair if shape.gathers_of[shape.unit_of[first]] != 1 else 0.0
            row[FIRST_BYTES], row[LAST_BYTES] = first_bytes + gathers, end_bytes + (0.0 if apart else gathers)
            row[BELOW_BYTES] = whole[1, PAIR] + pair
            if apart:
                copying = ahead * whole[0, BELOW] + whole[1, MOST] * (1.0 + waiting)
                row[BELOW_BYTES] = max(row[BELOW_BYTES], copying)
            if in_root:
                row[BARE_BYTES], row[ABOVE_BYTES] = 0.0, whole[1, ABOVE] * waiting
                row[BELOW_BYTES] += row[ABOVE_BYTES]
            else:
                row[BARE_BYTES], row[ABOVE_BYTES] = pair, whole[1, HIGHEST] * waiting + pair
            row[STATES_BYTES], row[ANEW_BYTES], row[STEP_BYTES] = own_states + anew, anew, step
            row[REFRESHED_BYTES], row[BUFFER_BYTES] = refreshed + refreshed_most, buffer
            row[BUCKET_BYTES] = bucket if sharded else 0.0
            first = stop
