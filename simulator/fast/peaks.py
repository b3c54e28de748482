"""Compiled: peaks of plans given as runs of equal strategy, from what their stages hold; see ``estimate_memory``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms import interleaved_memory, zero_bubble_memory
from simulator.closed_forms.interleaved_memory import FLIGHT, interleaved_peak_bytes
from simulator.closed_forms.zero_bubble_memory import zero_bubble_peak_bytes
from simulator.compiled_cache import compiled_with, inlined, uncounted
from simulator.fast import (
    activations,
    arrays,
    changes,
    kept_tensor,
    memory,
    saved_tensors,
    segment_ends,
    states,
    waiting,
    whole_parts,
)
from simulator.fast.activations import WalkRoom, hold_activations
from simulator.fast.arrays import DONE, GPIPE, INTERLEAVED, ZB_H1, Floats, Ints, PlanColumns, Structure
from simulator.fast.changes import Changes
from simulator.fast.kept_tensor import StageRuns
from simulator.fast.memory import (
    ANEW_BYTES,
    BUCKET_BYTES,
    BUFFER_BYTES,
    FIRST_WORKING_BYTES,
    FLATTENED_BYTES,
    FOR_WEIGHTS_BYTES,
    FORWARD_BYTES,
    GATHERED_BYTES,
    HELD,
    INPUT_PASS_BYTES,
    KEPT_BYTES,
    LAST_BYTES,
    LAST_END_BYTES,
    LAST_WORKING_BYTES,
    REFRESHED_BYTES,
    STATES_BYTES,
    STAYS_BYTES,
    STEP_BYTES,
    WEIGHT_PASS_BYTES,
    WORKING_BYTES,
    MemoryRules,
    MemoryTables,
    Savings,
)
from simulator.fast.saved_tensors import Crossing, Pieces
from simulator.fast.states import hold_states
from simulator.fast.whole_parts import Parts

_interleaved_peak_bytes = inlined(interleaved_peak_bytes)
_zero_bubble_peak_bytes = inlined(zero_bubble_peak_bytes)


@uncounted
def _fill(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    rules: MemoryRules,
    peak_bytes: Floats,
    capacity_bytes: Floats,
    fits: NDArray[np.bool_],
    tied_anew: Floats,
    room: WalkRoom,
    held: Floats,
    flight: Floats,
) -> None:
    """Fill the peaks of the chosen plans: ``estimate_peaks``, given room to work in."""
    for plan in chosen:
        if states[plan] != DONE:
            continue
        low, high, first = plans.stage_offsets[plan], plans.stage_offsets[plan + 1], 0
        m, schedule, num_stages = plans.num_microbatches[plan], plans.schedule[plan], high - low
        # Whether it is followed what the last backward pass gives back (``estimate_memory.is_followed``).
        follows = plans.reshards[plan] == 0 and m <= 2 and schedule != INTERLEAVED and schedule != ZB_H1
        for stage in range(low, high):
            for other in range(low, stage):
                follows = follows and plans.placements[other] != plans.placements[stage]
        for number in range(low, high):
            end = plans.run_offsets[number + 1]
            stage_runs = StageRuns(number, plans.run_offsets[number], end, first, plans.run_stops[end - 1])
            row = held[number - low]
            hold_states(shape, tables, plans, run_tables, plan, stage_runs, tied_anew, row)
            working, first_working, pass_end, forward = 0.0, 0.0, 0.0, 0.0
            for microbatch in range(2 if follows and m == 2 else 1):
                gives_back = follows and microbatch == m - 1
                hold_activations(
                    shape, savings, tables, plans, run_tables, rules, plan, stage_runs, gives_back, tied_anew, room, row
                )
                if microbatch == 0:
                    working, first_working = row[WORKING_BYTES], row[FIRST_WORKING_BYTES]
                    pass_end, forward = row[LAST_BYTES], row[FORWARD_BYTES]
                    for tensor in range(len(room.crossing.read_in) if follows and m == 2 else 0):
                        room.crossing.read_in[tensor] = -1
            row[LAST_WORKING_BYTES], row[LAST_END_BYTES] = row[WORKING_BYTES], row[LAST_BYTES]
            row[WORKING_BYTES], row[FIRST_WORKING_BYTES] = working, first_working
            row[LAST_BYTES], row[FORWARD_BYTES] = pass_end, forward
            first = stage_runs.stop

        # Stages on one placement add up.
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
            own_states, anew, kept, most_kept, count = 0.0, 0.0, 0.0, 0.0, 0
            working, working_first, later = -np.inf, -np.inf, -np.inf
            step, refreshed, gathered, buffer, stays = 0.0, 0.0, 0.0, 0.0, 0.0
            holds_all = True
            for other in range(stage, high):
                if plans.placements[other] != plans.placements[stage]:
                    continue
                row = held[other - low]
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
                refreshed = max(refreshed, row[REFRESHED_BYTES], min(row[FLATTENED_BYTES], rules.bucket_bytes))
                gathered, later = max(gathered, row[GATHERED_BYTES]), max(later, row[LAST_BYTES] + row[BUCKET_BYTES])
                buffer = max(buffer, row[BUFFER_BYTES])
                stays += row[STAYS_BYTES]
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
                row, bucket = held[stage - low], held[stage - low, BUCKET_BYTES]
                in_passes = _zero_bubble_peak_bytes(
                    row[KEPT_BYTES], row[FOR_WEIGHTS_BYTES], row[INPUT_PASS_BYTES],
                    row[WEIGHT_PASS_BYTES] + bucket, row[LAST_BYTES] + bucket, row[ANEW_BYTES], stage - low, num_stages,
                    m,
                )  # fmt: skip
                in_passes -= anew
            elif follows and m == 2:
                row, bucket = held[stage - low], held[stage - low, BUCKET_BYTES]
                other_kept = kept - row[KEPT_BYTES]  # Of the microbatch that is not at work.
                in_passes = other_kept + row[KEPT_BYTES] + row[FIRST_WORKING_BYTES] + bucket - anew
                in_passes = max(in_passes, other_kept + row[LAST_BYTES] + bucket)
                in_passes = max(in_passes, row[KEPT_BYTES] + row[LAST_WORKING_BYTES] + bucket)
                in_passes = max(in_passes, row[LAST_END_BYTES] + bucket)
                if other_kept <= 0.0:
                    in_passes = max(in_passes, row[FORWARD_BYTES])
            else:
                in_passes = max(kept + in_first, kept - most_kept + later)
            peak_bytes[stage] = own_states + buffer + max(in_passes + gathered + stays, step, refreshed)
            capacity_bytes[stage] = tables.capacity_bytes[plans.placements[stage]]
            fits[plan] = fits[plan] and peak_bytes[stage] <= capacity_bytes[stage]


@compiled_with(
    activations,
    arrays,
    changes,
    kept_tensor,
    memory,
    saved_tensors,
    segment_ends,
    states,
    waiting,
    whole_parts,
    interleaved_memory,
    zero_bubble_memory,
)
def estimate_peaks(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    rules: MemoryRules,
    peak_bytes: Floats,
    capacity_bytes: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Fill the peaks of the chosen plans whose state is DONE, as ``estimate`` has them.

    Args:
        shape, savings, tables, plans: See there.
        chosen, states, run_tables: From ``estimate_times``.
        rules: Of memory.
        peak_bytes, capacity_bytes: Results, per stage.
        fits: Result, per plan.
    """
    num_parts, num_tensors, num_tied = len(shape.part_first), len(shape.producers), len(shape.tied)
    most_stages, most_pieces = 1, 1
    for plan in chosen:
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        most_stages = max(most_stages, high - low)
        for stage in range(low, high):
            runs = plans.run_offsets[stage + 1] - plans.run_offsets[stage]
            segments = plans.segment_offsets[stage + 1] - plans.segment_offsets[stage]
            most_pieces = max(most_pieces, runs + 2 * segments + num_parts + 3)
    most_changes = 3 * len(savings.operators) + 8 * num_tensors + 4 * num_tied + 2
    room = WalkRoom(
        Pieces(np.empty(most_pieces, np.int64), np.empty(most_pieces, np.int64), np.empty(most_pieces, np.int64)),
        Crossing(np.zeros(num_tensors, np.int64), np.full(num_tensors, -1, np.int64), np.empty(num_tensors)),
        Changes(np.empty(most_changes, np.int64), np.empty(most_changes)),
        Parts(
            np.empty(num_parts), np.empty(num_parts, np.int64), np.empty(num_parts), np.empty(num_parts),
            np.empty(num_parts), np.empty(num_parts), np.empty(num_parts), np.empty(num_parts), np.empty(num_parts),
        ),
    )  # fmt: skip
    _fill(
        shape, savings, tables, plans, chosen, states, run_tables, rules, peak_bytes, capacity_bytes, fits,
        np.empty(num_tied), room, np.empty((most_stages, HELD)), np.empty((most_stages, FLIGHT)),
    )  # fmt: skip
