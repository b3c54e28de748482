"""Compiled: peaks of plans given as runs of equal strategy, from what their stages hold; see ``estimate_memory``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms import interleaved_memory, zero_bubble_memory
from simulator.closed_forms.interleaved_memory import FLIGHT, interleaved_peak_bytes
from simulator.closed_forms.zero_bubble_memory import zero_bubble_peak_bytes
from simulator.compiled_cache import compiled, compiled_with
from simulator.fast import activations, arrays, changes, kept_tensor, memory, states, whole_parts
from simulator.fast.activations import hold_activations
from simulator.fast.arrays import DONE, GPIPE, INTERLEAVED, ZB_H1, Floats, Ints, PlanColumns, Structure
from simulator.fast.memory import (
    ANEW_BYTES,
    BUCKET_BYTES,
    BUFFER_BYTES,
    FIRST_WORKING_BYTES,
    FOR_WEIGHTS_BYTES,
    GATHERED_BYTES,
    HELD,
    INPUT_PASS_BYTES,
    KEPT_BYTES,
    LAST_BYTES,
    REFRESHED_BYTES,
    STATES_BYTES,
    STEP_BYTES,
    WEIGHT_PASS_BYTES,
    WORKING_BYTES,
    MemoryTables,
    Savings,
)
from simulator.fast.states import hold_states

_interleaved_peak_bytes = compiled(interleaved_peak_bytes)
_zero_bubble_peak_bytes = compiled(zero_bubble_peak_bytes)


@compiled_with(
    activations, arrays, changes, kept_tensor, memory, states, whole_parts, interleaved_memory, zero_bubble_memory
)  # fmt: skip
def estimate_peaks(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    keeps_gathered: bool,
    keeps_outputs: bool,
    prefetches: bool,
    apart: bool,
    waits: bool,
    waiting: float,
    peak_bytes: Floats,
    capacity_bytes: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Fill the peaks of the chosen plans whose state is DONE, as ``estimate`` has them.

    Args:
        shape, savings, tables, plans: See there.
        chosen, states, run_tables: From ``estimate_times``.
        keeps_gathered, keeps_outputs: What an operator gathered, and what a stage sent, is held.
        prefetches: ZeRO-3 holds a unit and the next one.
        apart: A unit is given back before its gradients are copied into what is scattered.
        waits, waiting: Whether there is a ``Runtime.waiting_gradient_share``, and that, or 1.
        peak_bytes, capacity_bytes: Results, per stage.
        fits: Result, per plan.
    """
    held = np.empty((len(plans.placements), HELD))
    tied_anew = np.empty((len(plans.placements), len(shape.tied)))
    hold_states(shape, tables, plans, chosen, states, run_tables, held, tied_anew)
    hold_activations(
        shape, savings, tables, plans, chosen, states, run_tables, keeps_gathered, keeps_outputs, prefetches, apart,
        waits, waiting, held, tied_anew,
    )  # fmt: skip
    most_stages = 0
    for plan in chosen:
        most_stages = max(most_stages, plans.stage_offsets[plan + 1] - plans.stage_offsets[plan])
    flight = np.empty((most_stages, FLIGHT))
    for plan in chosen:
        if states[plan] != DONE:
            continue
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        m = plans.num_microbatches[plan]

        # Stages on one placement add up.
        schedule, num_stages = plans.schedule[plan], high - low
        fits[plan] = True
        for stage in range(low, high):
            is_first = True
            for other in range(low, stage):
                if plans.placements[other] == plans.placements[stage]:
                    is_first = False
                    peak_bytes[stage], capacity_bytes[stage] = peak_bytes[other], capacity_bytes[other]
                    break
            if not is_first:
                continue
            own_states, anew, kept, most_kept, working, count = 0.0, 0.0, 0.0, 0.0, 0.0, 0
            working_first = 0.0
            step, refreshed, gathered, later, buffer = 0.0, 0.0, 0.0, 0.0, 0.0
            holds_all = True
            for other in range(stage, high):
                if plans.placements[other] != plans.placements[stage]:
                    continue
                row = held[other]
                in_flight = min(m, num_stages - (other - low))
                if schedule == GPIPE:
                    in_flight = m
                elif plans.warmups[other] > 0:
                    in_flight = min(m, plans.warmups[other])
                holds_all = holds_all and in_flight == m
                kept += in_flight * row[KEPT_BYTES]
                most_kept = max(most_kept, row[KEPT_BYTES])
                working = max(working, row[WORKING_BYTES] + row[BUCKET_BYTES])
                working_first = max(working_first, row[FIRST_WORKING_BYTES] + row[BUCKET_BYTES])
                own_states += row[STATES_BYTES]
                anew += row[ANEW_BYTES]
                step += row[STEP_BYTES]
                refreshed = max(refreshed, row[REFRESHED_BYTES])
                gathered, later = max(gathered, row[GATHERED_BYTES]), max(later, row[LAST_BYTES] + row[BUCKET_BYTES])
                buffer = max(buffer, row[BUFFER_BYTES])
                if schedule == INTERLEAVED:
                    flight[count, interleaved_memory.KEPT] = row[KEPT_BYTES]
                    flight[count, interleaved_memory.LAST_KEPT] = row[KEPT_BYTES]
                    flight[count, interleaved_memory.WORKING] = row[WORKING_BYTES] + row[BUCKET_BYTES]
                    flight[count, interleaved_memory.LAST] = row[LAST_BYTES] + row[BUCKET_BYTES]
                    flight[count, interleaved_memory.ANEW] = row[ANEW_BYTES]
                    count += 1
            in_first = working_first - anew if holds_all else working
            if m > 1:
                later = max(later, working)
            if schedule == INTERLEAVED:
                in_passes = _interleaved_peak_bytes(flight[:count], stage - low, num_stages // count, m)
            elif schedule == ZB_H1:
                row, bucket = held[stage], held[stage, BUCKET_BYTES]
                in_passes = _zero_bubble_peak_bytes(
                    row[KEPT_BYTES], row[FOR_WEIGHTS_BYTES], row[INPUT_PASS_BYTES] + bucket,
                    row[WEIGHT_PASS_BYTES] + bucket, row[LAST_BYTES] + bucket, row[ANEW_BYTES], stage - low, num_stages,
                    m,
                )  # fmt: skip
                in_passes -= anew
            else:
                in_passes = max(kept + in_first, kept - most_kept + later)
            peak_bytes[stage] = own_states + buffer + max(in_passes + gathered, step, refreshed)
            capacity_bytes[stage] = tables.capacity_bytes[plans.placements[stage]]
            fits[plan] = fits[plan] and peak_bytes[stage] <= capacity_bytes[stage]
