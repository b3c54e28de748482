"""Compiled: peaks of plans given as runs of equal strategy, from sums and range maxima in tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator import fast_arrays, interleaved_memory
from simulator.compiled_cache import compiled, compiled_with, inlined
from simulator.fast_arrays import DONE, GPIPE, INTERLEAVED, NEVER, ZB_H1, Floats, Ints, PlanColumns, Structure
from simulator.interleaved_memory import FLIGHT, interleaved_peak_bytes

# Columns of ``MemoryTables.sums``: kept bytes (of each tensor the difference to what its saver before keeps), the same
# in recomputed segments, bytes weight gradients need, gradients of outputs of operators with parameters, what ZeRO
# gathers and scatters; model states but for gradients made anew by (gradients sharded, parameters resharded), those
# gradients by sharded, what the optimizer step works in, and what refreshing takes but for its largest tensor.
KEPT, AGAIN, WEIGHTED, TO_MULTIPLY, GATHERED, UNSHARDED, STATES = range(7)
ANEW, STEP, REFRESHED, TIED, NUM_STATES = 4, 6, 7, 8, 9
MEMORY_COLUMNS = STATES + NUM_STATES

# Columns of ``MemoryTables.saved_bytes`` and rows of ``MemoryTables.maxima``.
OWN, SHARD, WHOLE = range(3)
WORKING, LARGEST = range(2)

# Columns of what a stage holds.
_KEPT, _WORKING, _FOR_WEIGHTS, _BEYOND, _GATHERED, _UNSHARDED, _LAST, _STATES, _ANEW, _STEP, _REFRESHED = range(11)

_interleaved_peak_bytes = compiled(interleaved_peak_bytes)


class Savings(NamedTuple):
    """Who saves what in one workload. Q savings of tensors that have a name.

    Attributes:
        offsets, operators: Savings of each tensor, ascending by operator.
        producers: Per tensor; NEVER for inputs of the graph.
        tensors: Per tensor, its number among those that somebody reads; -1 if nobody does.
        numbers: The way back: per tensor that somebody reads, its number here; -1 if nobody saves it.
        entering_offsets, entering: Per cut, tensors made before it (or given) and saved behind it.
        tied: int64[O]. Operators of tied parameters, ascending.
    """

    offsets: Ints
    operators: Ints
    producers: Ints
    tensors: Ints
    numbers: Ints
    entering_offsets: Ints
    entering: Ints
    tied: Ints


class MemoryTables(NamedTuple):
    """Everything worked out so far; the first axis is the number of a table.

    Attributes:
        sums: float64[tables, N + 1, MEMORY_COLUMNS]. Prefix sums.
        saved_bytes: float64[tables, Q, 3]. As its saver reads it; as it is made where its maker has the same strategy;
            and with what the saver has gathered, if that is kept.
        made_bytes, read_bytes: float64[tables, T], [tables, readings]. Sizes of tensors.
        in_shards: int64[tables, T]. Whether a tensor is made in shards of the sequence, and so crosses in such.
        num_parts: int64[tables, readings]. In how many of them it arrives where this reading is a stage's first.
        replicas: int64[tables]. Product of the batch axes.
        maxima: float64[tables, 2, levels, N]. Range maxima of what operators work in and of tensors that are
            refreshed: row k covers 2^k operators.
        tied_bytes: float64[tables, O, NUM_STATES]. Model states of tied parameters; TIED is gathered.
        tied_layouts: int64[tables, O].
        capacity_bytes: float64[placements].
    """

    sums: Floats
    saved_bytes: Floats
    made_bytes: Floats
    read_bytes: Floats
    in_shards: Ints
    num_parts: Ints
    replicas: Ints
    maxima: Floats
    tied_bytes: Floats
    tied_layouts: Ints
    capacity_bytes: Floats


@inlined
def _table_at(plans: PlanColumns, run_tables: Ints, begin: int, run: int, index: int) -> int:
    """Return the table of an operator of a stage, looked for from a run at or behind it down to the stage's first."""
    while run > begin and plans.run_stops[run - 1] > index:
        run -= 1
    return int(run_tables[run])


@inlined
def _value(
    saved_bytes: Floats,
    made_bytes: Floats,
    in_shards: Ints,
    replicas: Ints,
    run_stops: Ints,
    run_tables: Ints,
    keeps_gathered: bool,
    first: int,
    begin: int,
    producer: int,
    number: int,
    run: int,
    saving: int,
    kind: int,
    arrived: float,
    arrived_replicas: int,
) -> float:
    """Return what is kept of a tensor once one of its savers has run: whole arrays, since each costs a reference.

    Args:
        saved_bytes, made_bytes, in_shards, replicas: See ``MemoryTables``.
        run_stops, run_tables, keeps_gathered: See ``estimate_peaks``.
        first, begin: First operator and first run of the stage.
        producer, number: Of the tensor; its number among those that somebody reads.
        run, saving: Of the saver.
        kind: SHARD in segments, else WHOLE.
        arrived, arrived_replicas: Its bytes and replicas where it came in shards of the sequence; -1 where not.
    """
    table = run_tables[run]
    value = saved_bytes[table, saving, OWN]
    if arrived >= 0.0:
        own = value
        value = min(arrived, own)
        if own > arrived and kind == WHOLE and (keeps_gathered or arrived_replicas != replicas[table]):
            value += own
    elif producer != NEVER and producer >= first and number >= 0:
        maker = run
        while maker > begin and run_stops[maker - 1] > producer:
            maker -= 1
        if maker == run or run_tables[maker] == table:
            value = saved_bytes[table, saving, kind]
        else:
            made_by = run_tables[maker]
            made, own = made_bytes[made_by, number], value
            value = min(made, own)
            stays = keeps_gathered or replicas[made_by] != replicas[table] or not in_shards[made_by, number]
            if own > made and kind == WHOLE and stays:
                value += own
    return float(value)


@inlined
def _longest(maxima: Floats, table: int, kind: int, start: int, stop: int) -> float:
    """Return the largest of ``[start, stop)`` from range maxima."""
    level, width = 0, 1
    while 2 * width <= stop - start:
        width *= 2
        level += 1
    return max(float(maxima[table, kind, level, start]), float(maxima[table, kind, level, stop - width]))


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


@compiled_with(fast_arrays, interleaved_memory)
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
    peak_bytes: Floats,
    capacity_bytes: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Fill the peaks of the chosen plans whose state is DONE, as ``estimate`` has them.

    Args:
        shape, savings, tables, plans: See there.
        chosen, states, run_tables: From ``estimate_times``.
        keeps_gathered, keeps_outputs: What an operator gathered, and what a stage sent, is held.
        prefetches: ZeRO-3 holds a layer and the next one.
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
    piece_run = np.empty(most_pieces, np.int64)
    piece_segment = np.empty(most_pieces, np.int64)  # First operator of the segment; -1 for none.
    held, flight = np.empty((most_stages, 11)), np.empty((most_stages, FLIGHT))
    crosses_in_shards = np.zeros(len(shape.producers), np.int64)
    saved_bytes, made_bytes, replicas, maxima = tables.saved_bytes, tables.made_bytes, tables.replicas, tables.maxima
    in_shards = tables.in_shards
    run_stops, tied_bytes = plans.run_stops, tables.tied_bytes
    all_sums = tables.sums
    whole = np.zeros((2, 4))  # By what is gathered and what is scattered; see ``_add_zero``.
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
            own_states, anew, step, refreshed, refreshed_most, twice = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            kept, inside, again, most, working = 0.0, 0.0, 0.0, 0.0, 0.0
            weighted, to_multiply, gathered, unsharded = 0.0, 0.0, 0.0, 0.0
            num_pieces = 0
            run = begin
            lowest = maxima[run_tables[begin], WORKING, 0, first]
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
                piece_run[num_pieces] = run
                piece_segment[num_pieces] = segment_first
                num_pieces += 1
                if start == first or start == plans.run_stops[run - 1]:
                    upto = plans.run_stops[run]
                    own_states += all_sums[table, upto, column] - all_sums[table, start, column]
                    place = STATES + ANEW + sharded
                    anew += all_sums[table, upto, place] - all_sums[table, start, place]
                    step += all_sums[table, upto, STATES + STEP] - all_sums[table, start, STATES + STEP]
                    weighted += all_sums[table, upto, WEIGHTED] - all_sums[table, start, WEIGHTED]
                    to_multiply += all_sums[table, upto, TO_MULTIPLY] - all_sums[table, start, TO_MULTIPLY]
                    gathered += all_sums[table, upto, GATHERED] - all_sums[table, start, GATHERED]
                    unsharded += all_sums[table, upto, UNSHARDED] - all_sums[table, start, UNSHARDED]
                    chunks = all_sums[table, upto, STATES + REFRESHED] - all_sums[table, start, STATES + REFRESHED]
                    if chunks > 0:
                        refreshed += chunks
                        refreshed_most = max(refreshed_most, _longest(maxima, table, LARGEST, start, upto))
                working = max(working, _longest(maxima, table, WORKING, start, ends))
                in_segment = segment_first >= 0
                kind, summed = (SHARD, AGAIN) if in_segment else (WHOLE, KEPT)
                own = all_sums[table, ends, summed] - all_sums[table, start, summed]
                for place in range(savings.entering_offsets[start], savings.entering_offsets[start + 1]):
                    tensor = savings.entering[place]
                    saving, past = savings.offsets[tensor], savings.offsets[tensor + 1]
                    while saving < past and savings.operators[saving] < start:
                        saving += 1
                    if saving == past or savings.operators[saving] >= ends:
                        continue
                    # In the sums, the first saving here counts what it keeps more than the one before, all as if
                    # makers and savers had this strategy ...
                    before = saved_bytes[table, saving - 1, kind] if saving > savings.offsets[tensor] else 0.0
                    last = saving
                    while last + 1 < past and savings.operators[last + 1] < ends:
                        last += 1
                    producer = savings.producers[tensor]
                    given = producer == NEVER
                    inner = in_segment and (given or producer >= segment_first)
                    summed_here = saved_bytes[table, last, kind] - before
                    arrived, arrived_replicas = -1.0, -1
                    number = savings.tensors[tensor]
                    if not given and producer < first and number >= 0 and crosses_in_shards[number]:
                        reading = shape.reader_offsets[number]
                        while shape.readers[reading] < first:
                            reading += 1
                        read_by = _table_at(plans, run_tables, begin, end - 1, shape.readers[reading])
                        arrived = tables.read_bytes[read_by, reading] / tables.num_parts[read_by, reading]
                        arrived_replicas = replicas[read_by]
                    if given or (producer < first and arrived < 0.0):
                        value = saved_bytes[table, last, OWN]
                    elif producer >= first and (run == begin or run_stops[run - 1] <= producer):
                        value = saved_bytes[table, last, kind]
                    else:
                        value = _value(
                            saved_bytes, made_bytes, in_shards, replicas, run_stops, run_tables, keeps_gathered,
                            first, begin, producer, number, run, last, kind, arrived, arrived_replicas,
                        )  # fmt: skip
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
                            counted = _value(
                                saved_bytes, made_bytes, in_shards, replicas, run_stops, run_tables, keeps_gathered,
                                first, begin, producer, number, piece_run[piece], earlier,
                                SHARD if its_segment >= 0 else WHOLE, arrived, arrived_replicas,
                            )  # fmt: skip
                            break
                        earlier -= 1
                    if not in_segment or inner:
                        own += value - counted - summed_here
                    else:
                        own -= summed_here
                        kept += value - counted
                if in_segment:
                    inside += own
                else:
                    kept += own
                following = plans.segment_firsts[segment] if segment < last_segment else stop
                if in_segment:
                    following = plans.segment_stops[segment]
                if ends in (stop, following):
                    most = max(most, kept + inside + working)
                    if in_segment and segment == plans.segment_offsets[stage]:
                        lowest = max(lowest, inside + working)
                    again += inside
                    inside, working = 0.0, 0.0
                    segment += in_segment
                start = ends
            for place in range(num_tied):
                index = savings.tied[place]
                if first <= index < stop:
                    run = begin
                    while plans.run_stops[run] <= index:
                        run += 1
                    in_root = shape.gathers_of[shape.layer_of[index]] == 1
                    seen, stays = False, False
                    other = begin
                    for before_place in range(place):
                        user = savings.tied[before_place]
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

            # What was received, and what was sent if that is held, unless it is kept anyway.
            ends_bytes = 0.0
            for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
                tensor = shape.crossing[place]
                maker, number = shape.producers[tensor], savings.numbers[tensor]
                if maker < first:
                    continue
                made_by = _table_at(plans, run_tables, begin, end - 1, maker)
                crosses_in_shards[tensor] = tables.in_shards[made_by, tensor]
                if not keeps_outputs:
                    continue
                is_kept = False
                if number >= 0:
                    for saving in range(savings.offsets[number], savings.offsets[number + 1]):
                        if first <= savings.operators[saving] < stop:
                            piece = 0
                            while piece + 1 < num_pieces and piece_first[piece + 1] <= savings.operators[saving]:
                                piece += 1
                            is_kept = is_kept or piece_segment[piece] < 0 or maker < piece_segment[piece]
                if not is_kept:
                    ends_bytes += tables.made_bytes[made_by, tensor]
            for place in range(shape.crossing_offsets[first], shape.crossing_offsets[first + 1]):
                tensor = shape.crossing[place]
                number, reading = savings.numbers[tensor], shape.reader_offsets[tensor]
                while shape.readers[reading] < first:
                    reading += 1
                is_kept = shape.readers[reading] >= stop  # Only passed on.
                if number >= 0:
                    for saving in range(savings.offsets[number], savings.offsets[number + 1]):
                        is_kept = is_kept or first <= savings.operators[saving] < stop
                if not is_kept:
                    read_by = _table_at(plans, run_tables, begin, end - 1, shape.readers[reading])
                    parts = tables.num_parts[read_by, reading] if crosses_in_shards[tensor] else 1
                    ends_bytes += tables.read_bytes[read_by, reading] / parts
            kept += ends_bytes
            most += ends_bytes
            whole[:] = 0.0
            if gathered > 0 and plans.reshards[plan] != 0:
                _add_zero(shape, tables, plans, run_tables, begin, first, stop, GATHERED, prefetches, whole[0])
                whole[0, 0] -= twice
            if unsharded > 0 and sharded:
                _add_zero(shape, tables, plans, run_tables, begin, first, stop, UNSHARDED, True, whole[1])
            row = held[stage - low]
            row[_KEPT], row[_WORKING] = kept, most - kept
            row[_FOR_WEIGHTS] = min(weighted, kept + again) + to_multiply
            row[_BEYOND] = min(weighted, again) + to_multiply
            row[_GATHERED], row[_UNSHARDED] = whole[0, 0] + whole[0, 2], whole[1, 1] + whole[1, 2]
            row[_LAST] = whole[1, 0] + whole[1, 3] + lowest
            row[_STATES], row[_ANEW], row[_STEP] = own_states + anew, anew, step
            row[_REFRESHED] = refreshed + refreshed_most
            first = stop

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
            step, refreshed, gathered, unsharded, beyond, later = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
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
                kept += in_flight * row[_KEPT]
                if schedule == ZB_H1:
                    kept += (min(m, num_stages) - in_flight) * row[_FOR_WEIGHTS]
                most_kept, working = max(most_kept, row[_KEPT]), max(working, row[_WORKING])
                own_states += row[_STATES]
                anew += row[_ANEW]
                step += row[_STEP]
                refreshed, beyond = max(refreshed, row[_REFRESHED]), max(beyond, row[_BEYOND])
                gathered, unsharded = max(gathered, row[_GATHERED]), max(unsharded, row[_UNSHARDED])
                later = max(later, row[_LAST])
                if schedule == INTERLEAVED:
                    flight[count, interleaved_memory.KEPT] = row[_KEPT]
                    flight[count, interleaved_memory.LAST_KEPT] = row[_KEPT]
                    flight[count, interleaved_memory.WORKING] = row[_WORKING] + row[_UNSHARDED]
                    flight[count, interleaved_memory.LAST] = row[_LAST]
                    flight[count, interleaved_memory.ANEW] = row[_ANEW]
                    count += 1
            most = working + unsharded
            if schedule == ZB_H1:
                most += beyond
            if m > 1:
                later = max(later, most)
            if schedule == INTERLEAVED:
                in_passes = _interleaved_peak_bytes(flight[:count], stage - low, num_stages // count, m)
            else:
                in_passes = max(kept + most - (anew if holds_all else 0.0), kept - most_kept + later)
            peak_bytes[stage] = own_states + max(in_passes + gathered, step, refreshed)
            capacity_bytes[stage] = tables.capacity_bytes[plans.placements[stage]]
            fits[plan] = fits[plan] and peak_bytes[stage] <= capacity_bytes[stage]
