"""Compiled: peaks of plans given as runs of equal strategy, from sums and range maxima in tables.

Everything compiled here is in this file, constants included: numba looks only at a file's own date.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled
from simulator.fast_time import PlanColumns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
DONE = 0

# Schedules, as ``PlanArrays.schedule`` has them.
ONE_F_ONE_B, GPIPE, INTERLEAVED, ZB_H1 = range(4)

# Columns of ``MemoryTables.sums``: kept bytes (of each tensor the difference to what its saver before keeps), bytes
# the loss keeps, bytes weight gradients need, model states by (gradients sharded, parameters resharded).
KEPT, LOSS, WEIGHTED, STATES = range(4)
MEMORY_COLUMNS = STATES + 4

# Columns of what a stage holds.
_HELD, _LOSS, _SEGMENT, _WORKSPACE, _WEIGHTED, _STATES = range(6)


class Savings(NamedTuple):
    """Who saves what in one workload. Q savings of tensors that have a name.

    Attributes:
        offsets, operators: Savings of each tensor, ascending by operator.
        producers: Per tensor; NEVER for inputs of the graph.
        entering_offsets, entering: Per cut, tensors made before it (or given) and saved behind it.
        tied: int64[O]. Operators of tied parameters, ascending.
    """

    offsets: Ints
    operators: Ints
    producers: Ints
    entering_offsets: Ints
    entering: Ints
    tied: Ints


class MemoryTables(NamedTuple):
    """Everything worked out so far; the first axis is the number of a table.

    Attributes:
        sums: float64[tables, N + 1, MEMORY_COLUMNS]. Prefix sums.
        saved_bytes: float64[tables, Q].
        workspace: float64[tables, levels, N]. Range maxima: row k covers 2^k operators.
        tied_bytes: float64[tables, O, 4]. Model states of tied parameters.
        tied_layouts: int64[tables, O].
        capacity_bytes: float64[placements].
    """

    sums: Floats
    saved_bytes: Floats
    workspace: Floats
    tied_bytes: Floats
    tied_layouts: Ints
    capacity_bytes: Floats


@compiled
def estimate_peaks(
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    run_tables: Ints,
    peak_bytes: Floats,
    capacity_bytes: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Fill the peaks of the chosen plans whose state is DONE, as ``estimate`` has them.

    Args:
        savings, tables, plans: See there.
        chosen, states, run_tables: From ``estimate_times``.
        peak_bytes, capacity_bytes: Results, per stage.
        fits: Result, per plan.
    """
    num_tied = len(savings.tied)
    most_pieces, most_stages = 0, 0
    for plan in chosen:
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        most_stages = max(most_stages, high - low)
        for stage in range(low, high):
            runs = plans.run_offsets[stage + 1] - plans.run_offsets[stage]
            segments = plans.segment_offsets[stage + 1] - plans.segment_offsets[stage]
            most_pieces = max(most_pieces, runs + 2 * segments + 1)
    piece_first = np.empty(most_pieces, np.int64)
    piece_table = np.empty(most_pieces, np.int64)
    piece_segment = np.empty(most_pieces, np.int64)  # First operator of the segment; -1 for none.
    held = np.empty((most_stages, 6))
    for plan in chosen:
        if states[plan] != DONE:
            continue
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        m = plans.num_microbatches[plan]
        sharded = plans.reduces_every[plan] != 0 or (m == 1 and plans.overlaps[plan] != 0)
        column = STATES + 2 * sharded + (plans.reshards[plan] != 0)
        first = 0
        for stage in range(low, high):
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            stop = plans.run_stops[end - 1]
            own_states, kept, loss, weighted, workspace = 0.0, 0.0, 0.0, 0.0, 0.0
            largest, inside = 0.0, 0.0
            num_pieces = 0
            run = begin
            segment, last_segment = plans.segment_offsets[stage], plans.segment_offsets[stage + 1]
            start = first
            while start < stop:
                while plans.run_stops[run] <= start:
                    run += 1
                ends = plans.run_stops[run]
                segment_first = -1
                if segment < last_segment:
                    if plans.segment_firsts[segment] <= start:
                        segment_first = plans.segment_firsts[segment]
                        ends = min(ends, plans.segment_stops[segment])
                    else:
                        ends = min(ends, plans.segment_firsts[segment])
                table = run_tables[run]
                piece_first[num_pieces] = start
                piece_table[num_pieces] = table
                piece_segment[num_pieces] = segment_first
                num_pieces += 1
                sums = tables.sums[table]
                own_states += sums[ends, column] - sums[start, column]
                weighted += sums[ends, WEIGHTED] - sums[start, WEIGHTED]
                level, width = 0, 1
                while 2 * width <= ends - start:
                    width *= 2
                    level += 1
                workspace = max(workspace, tables.workspace[table, level, start])
                workspace = max(workspace, tables.workspace[table, level, ends - width])
                own = sums[ends, KEPT] - sums[start, KEPT]
                for place in range(savings.entering_offsets[start], savings.entering_offsets[start + 1]):
                    tensor = savings.entering[place]
                    saving, past = savings.offsets[tensor], savings.offsets[tensor + 1]
                    while saving < past and savings.operators[saving] < start:
                        saving += 1
                    if saving == past or savings.operators[saving] >= ends:
                        continue
                    # In the sums, the first saving here counts what it keeps more than the one before ...
                    before = tables.saved_bytes[table, saving - 1] if saving > savings.offsets[tensor] else 0.0
                    last = saving
                    while last + 1 < past and savings.operators[last + 1] < ends:
                        last += 1
                    producer = savings.producers[tensor]
                    given = producer == NEVER
                    inner = segment_first >= 0 and (given or producer >= segment_first)
                    # ... but of those before, only one that is held in the same way counts.
                    earlier = saving - 1
                    counted = 0.0
                    piece = num_pieces - 1
                    while earlier >= savings.offsets[tensor] and savings.operators[earlier] >= first:
                        while piece_first[piece] > savings.operators[earlier]:
                            piece -= 1
                        its_segment = piece_segment[piece]
                        its_inner = its_segment >= 0 and (given or producer >= its_segment)
                        same = its_segment == segment_first if inner else not its_inner
                        if its_inner == inner and same:
                            counted = tables.saved_bytes[piece_table[piece], earlier]
                            break
                        earlier -= 1
                    if segment_first < 0 or inner:
                        own += before - counted
                    else:
                        own += before - tables.saved_bytes[table, last]
                        kept += tables.saved_bytes[table, last] - counted
                if segment_first < 0:
                    kept += own
                    loss += sums[ends, LOSS] - sums[start, LOSS]
                else:
                    inside += own
                    if ends == plans.segment_stops[segment]:
                        largest = max(largest, inside)
                        inside = 0.0
                        segment += 1
                start = ends
            for place in range(num_tied):
                index = savings.tied[place]
                if first <= index < stop:
                    run = begin
                    while plans.run_stops[run] <= index:
                        run += 1
                    again = False
                    other = begin
                    for before_place in range(place):
                        if savings.tied[before_place] >= first:
                            while plans.run_stops[other] <= savings.tied[before_place]:
                                other += 1
                            theirs = tables.tied_layouts[run_tables[other], before_place]
                            again = again or theirs == tables.tied_layouts[run_tables[run], place]
                    if not again:
                        own_states += tables.tied_bytes[run_tables[run], place, column - STATES]
            row = held[stage - low]
            row[_HELD], row[_LOSS], row[_SEGMENT] = kept, loss, largest
            row[_WORKSPACE], row[_WEIGHTED], row[_STATES] = workspace, min(weighted, kept), own_states
            first = stop

        # Stages on one placement add up.
        num_ranks = 0
        for stage in range(low, high):
            is_first = True
            for other in range(low, stage):
                is_first = is_first and plans.placements[other] != plans.placements[stage]
            num_ranks += is_first
        schedule, num_stages = plans.schedule[plan], high - low
        rank = -1
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
            rank += 1
            own_states, kept, whole, segment_bytes, workspace, count, last_stage = 0.0, 0.0, 0.0, 0.0, 0.0, 0, stage
            last_flight = 1
            for other in range(stage, high):
                if plans.placements[other] != plans.placements[stage]:
                    continue
                row = held[other - low]
                flight = min(m, num_stages - (other - low))
                if schedule == GPIPE:
                    flight = m
                elif plans.warmups[other] > 0:
                    flight = min(m, plans.warmups[other])
                kept += flight * row[_HELD]
                if schedule == ZB_H1:
                    kept += (min(m, num_stages) - flight) * row[_WEIGHTED]
                whole += row[_HELD]
                own_states += row[_STATES]
                segment_bytes = max(segment_bytes, row[_SEGMENT])
                workspace = max(workspace, row[_WORKSPACE])
                last_flight, last_stage = flight, other
                count += 1
            if schedule == INTERLEAVED:
                chunks = min(2 * (num_ranks - rank - 1) + (count - 1) * num_ranks + 1, m * count)
                kept = chunks * whole / count
            extra = max(segment_bytes, workspace)
            if schedule != GPIPE and last_flight == 1:
                extra = max(held[last_stage - low, _WORKSPACE], extra - held[last_stage - low, _LOSS])
            peak_bytes[stage] = own_states + kept + extra
            capacity_bytes[stage] = tables.capacity_bytes[plans.placements[stage]]
            fits[plan] = fits[plan] and peak_bytes[stage] <= capacity_bytes[stage]
