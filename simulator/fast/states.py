"""Compiled: model states of stages; see ``estimate_memory``."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Floats, Ints, PlanColumns, Structure
from simulator.fast.kept_tensor import StageRuns, table_at
from simulator.fast.memory import (
    ANEW,
    ANEW_BYTES,
    BUCKET,
    BUCKET_BYTES,
    BUFFER,
    BUFFER_BYTES,
    FLATTENED,
    FLATTENED_BYTES,
    GATHERED,
    LARGEST,
    REFRESHED,
    REFRESHED_BYTES,
    STATES,
    STATES_BYTES,
    STAYS,
    STAYS_BYTES,
    STEP,
    STEP_BYTES,
    UNSHARDED,
    WHOLE_BYTES,
    MemoryTables,
    longest,
)
from simulator.fast.whole_parts import counts_earlier


@inlined
def hold_states(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    stage: StageRuns,
    tied_anew: Floats,
    held: Floats,
) -> None:
    """Fill the columns of states for a stage.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        plan, stage: The plan's number, and its stage.
        tied_anew: float64[O]. Result: gradients made anew of tied parameters, where they count.
        held: float64[HELD]. Result.
    """
    tied_bytes, all_sums, begin, first = tables.tied_bytes, tables.sums, stage.begin, stage.first
    sharded = plans.reduces_every[plan] != 0 or (plans.num_microbatches[plan] == 1 and plans.overlaps[plan] != 0)
    column = STATES + sharded
    own_states, anew, step, refreshed, refreshed_most = 0.0, 0.0, 0.0, 0.0, 0.0
    buffer, bucket, gathered, unsharded, stays, flattened = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    start = first
    for run in range(begin, stage.end):
        table, upto = run_tables[run], plans.run_stops[run]
        sums = all_sums[table]
        own_states += sums[upto, column] - sums[start, column]
        anew += sums[upto, STATES + ANEW + sharded] - sums[start, STATES + ANEW + sharded]
        step += sums[upto, STATES + STEP] - sums[start, STATES + STEP]
        flattened += sums[upto, STATES + FLATTENED] - sums[start, STATES + FLATTENED]
        gathered += sums[upto, GATHERED] - sums[start, GATHERED]
        stays += sums[upto, STATES + STAYS] - sums[start, STATES + STAYS]
        unsharded += sums[upto, UNSHARDED] - sums[start, UNSHARDED]
        buffer = max(buffer, longest(tables.maxima, table, BUFFER, start, upto))
        bucket = max(bucket, longest(tables.maxima, table, BUCKET, start, upto))
        chunks = sums[upto, STATES + REFRESHED] - sums[start, STATES + REFRESHED]
        if chunks > 0:
            refreshed += chunks
            refreshed_most = max(refreshed_most, longest(tables.maxima, table, LARGEST, start, upto))
        start = upto
    for place in range(len(shape.tied)):
        index, tied_anew[place] = shape.tied[place], 0.0
        if not first <= index < stage.stop:
            continue
        table = table_at(plans, run_tables, begin, stage.end - 1, index)
        if not counts_earlier(shape, tables, plans, run_tables, stage, place, table):
            own_states += tied_bytes[table, place, column - STATES]
            stays += tied_bytes[table, place, STAYS]
            tied_anew[place] = tied_bytes[table, place, ANEW + sharded]
            anew += tied_anew[place]
            step += tied_bytes[table, place, STEP]
            flattened += tied_bytes[table, place, FLATTENED]
            refreshed += tied_bytes[table, place, REFRESHED]
    held[STAYS_BYTES] = 0.0 if plans.reshards[plan] != 0 else stays
    held[WHOLE_BYTES] = (gathered if plans.reshards[plan] != 0 else stays) + (unsharded if sharded else 0.0)
    held[STATES_BYTES], held[ANEW_BYTES], held[STEP_BYTES] = own_states + anew, anew, step
    held[REFRESHED_BYTES], held[BUFFER_BYTES] = refreshed + refreshed_most, buffer
    held[FLATTENED_BYTES] = flattened
    held[BUCKET_BYTES] = bucket * (1 + (plans.overlaps[plan] != 0)) if sharded else 0.0
