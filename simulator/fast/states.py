"""Compiled: model states of stages; see ``estimate_memory``."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import DONE, Floats, Ints, PlanColumns, Structure
from simulator.fast.memory import (
    ANEW,
    ANEW_BYTES,
    BUCKET,
    BUCKET_BYTES,
    BUFFER,
    BUFFER_BYTES,
    GATHERED,
    LARGEST,
    REFRESHED,
    REFRESHED_BYTES,
    STATES,
    STATES_BYTES,
    STEP,
    STEP_BYTES,
    UNSHARDED,
    WHOLE_BYTES,
    MemoryTables,
    longest,
)


@inlined
def hold_states(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    held: Floats,
    tied_anew: Floats,
) -> None:
    """Fill the columns of states for the stages of the chosen plans whose state is DONE.

    Args:
        shape, tables, plans, chosen, states, run_tables: See ``peaks.estimate_peaks``.
        held: float64[S, HELD]. Result.
        tied_anew: float64[S, O]. Result: gradients made anew of tied parameters, where they count.
    """
    num_tied = len(shape.tied)
    tied_bytes, all_sums = tables.tied_bytes, tables.sums
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
                    seen, other = False, begin
                    for before_place in range(place):
                        user = shape.tied[before_place]
                        if user >= first:
                            while plans.run_stops[other] <= user:
                                other += 1
                            theirs = tables.tied_layouts[run_tables[other], before_place]
                            if theirs == tables.tied_layouts[run_tables[run], place]:
                                seen = True
                    if not seen:
                        table = run_tables[run]
                        own_states += tied_bytes[table, place, column - STATES]
                        tied_anew[stage, place] = tied_bytes[table, place, ANEW + sharded]
                        anew += tied_anew[stage, place]
                        step += tied_bytes[table, place, STEP]
                        refreshed += tied_bytes[table, place, REFRESHED]
            row = held[stage]
            row[WHOLE_BYTES] = (gathered if plans.reshards[plan] != 0 else 0.0) + (unsharded if sharded else 0.0)
            row[STATES_BYTES], row[ANEW_BYTES], row[STEP_BYTES] = own_states + anew, anew, step
            row[REFRESHED_BYTES], row[BUFFER_BYTES] = refreshed + refreshed_most, buffer
            row[BUCKET_BYTES] = bucket if sharded else 0.0
            first = stop
