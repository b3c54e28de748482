"""Compiled: activations that a stage holds, from sums and range maxima in tables; see ``estimate_memory``.

The walk over a stage stays in one piece: with what it does for what enters, waits and stays at the ends in functions,
inlined or pasted, batches took 2.6 times as long; with the ends alone 1.1 times.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import DONE, NEVER, ZB_H1, Floats, Ints, PlanColumns, Structure
from simulator.fast.changes import differ, peak_between
from simulator.fast.kept_tensor import kept_bytes, table_at
from simulator.fast.memory import (
    AGAIN,
    AGAIN_PEAK,
    AGAIN_SPLIT_PEAK,
    AGAIN_WAIT_PEAK,
    ANEW,
    ANEW_BYTES,
    END_GRADIENTS,
    ENDS,
    FIRST_WORKING_BYTES,
    FOR_WEIGHTS_BYTES,
    FORWARD_PEAK,
    GATHERED_BYTES,
    INPUT_PASS_BYTES,
    KEPT,
    KEPT_BYTES,
    KEPT_PEAK,
    KEPT_SPLIT_PEAK,
    KEPT_WAIT_PEAK,
    LAST_BYTES,
    OWN,
    PRODUCT,
    SHARD,
    STATES,
    TIED_SCATTERED,
    TO_MULTIPLY,
    UNSHARDED,
    WEIGHT_PASS_BYTES,
    WEIGHTED,
    WHOLE,
    WHOLE_BYTES,
    WORKING_BYTES,
    MemoryTables,
    Savings,
    longest,
)
from simulator.fast.whole_parts import Parts, counts_later, fill_parts


@inlined
def hold_activations(
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
    held: Floats,
    tied_anew: Floats,
) -> None:
    """Fill the columns of activations for the stages of the chosen plans whose state is DONE.

    Args:
        shape, savings, tables, plans, chosen, states, run_tables, keeps_gathered, keeps_outputs, prefetches, apart,
            waits, waiting: See ``peaks.estimate_peaks``.
        held: float64[S, HELD]. Result; has what ``hold_states`` fills.
        tied_anew: As that fills it.
    """
    most_pieces, num_parts = 0, len(shape.part_first)
    whole = Parts(
        np.empty(num_parts), np.empty(num_parts, np.int64), np.empty(num_parts), np.empty(num_parts),
        np.empty(num_parts), np.empty(num_parts), np.empty(num_parts), np.empty(num_parts),
    )  # fmt: skip
    for plan in chosen:
        for stage in range(plans.stage_offsets[plan], plans.stage_offsets[plan + 1]):
            runs = plans.run_offsets[stage + 1] - plans.run_offsets[stage]
            segments = plans.segment_offsets[stage + 1] - plans.segment_offsets[stage]
            most_pieces = max(most_pieces, runs + 2 * segments + num_parts + 3)
    piece_first = np.empty(most_pieces, np.int64)
    piece_run = np.empty(most_pieces, np.int64)
    piece_segment = np.empty(most_pieces, np.int64)  # First operator of the segment; -1 for none.
    crosses_in_shards = np.zeros(len(shape.producers), np.int64)
    # What a segment reads and nobody saves up to there: the stage where that is so, and bytes.
    read_in, read_unsaved = np.full(len(shape.producers), -1), np.empty(len(shape.producers))
    # Where neighbours have another strategy: from which operators on a piece's table has how much too little.
    most_changes = 3 * len(savings.operators) + 2 * len(shape.producers) + 2 * len(shape.tied) + 1
    changes_at, changes = np.empty(most_changes, np.int64), np.empty(most_changes)
    saved_bytes, made_bytes, replicas, maxima = tables.saved_bytes, tables.made_bytes, tables.replicas, tables.maxima
    in_shards = tables.in_shards
    run_stops = plans.run_stops
    all_sums = tables.sums
    for plan in chosen:
        if states[plan] != DONE:
            continue
        sharded = plans.reduces_every[plan] != 0 or (plans.num_microbatches[plan] == 1 and plans.overlaps[plan] != 0)
        first, schedule = 0, plans.schedule[plan]
        for stage in range(plans.stage_offsets[plan], plans.stage_offsets[plan + 1]):
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            stop = plans.run_stops[end - 1]
            kept, inside, again, most, highest = 0.0, 0.0, 0.0, 0.0, 0.0
            # Gradients that the first backward pass makes: of operators so far, and all that it has not made when the
            # part at hand works.
            makes_anew, unmade, made, most_first = held[stage, ANEW_BYTES] > 0.0, 0.0, 0.0, 0.0
            highest_first = 0.0
            weighted, to_multiply, product = 0.0, 0.0, 0.0
            start = first
            for run in range(begin, end):
                sums, ends = all_sums[run_tables[run]], run_stops[run]
                product = max(product, longest(maxima, run_tables[run], PRODUCT, start, ends))
                weighted += sums[ends, WEIGHTED] - sums[start, WEIGHTED]
                to_multiply += sums[ends, TO_MULTIPLY] - sums[start, TO_MULTIPLY]
                start = ends
            # What weight gradients of the operators behind need, where they come later.
            splits, weights_behind, most_split, highest_split = schedule == ZB_H1, weighted + to_multiply, 0.0, 0.0
            num_pieces = 0
            run = begin
            # What ZeRO has whole, by part; of the part at hand, gradients that are made behind the piece at hand.
            has_whole, in_root, end_bytes, gradients = held[stage, WHOLE_BYTES] > 0.0, 0.0, 0.0, 0.0
            parted, gathers, behind_part = False, 0.0, 0.0
            if has_whole:
                in_root, end_bytes, gradients = fill_parts(
                    shape, tables, plans, run_tables, begin, first, stop, plans.reshards[plan] != 0, sharded,
                    prefetches, apart, waits, waiting, tied_anew[stage], whole,
                )  # fmt: skip
                parted = sharded and waits
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
                table, part = run_tables[run], shape.part_of[start]
                begins_part = start == first or start == shape.part_first[part]
                if makes_anew:
                    ends = min(ends, shape.part_stop[part])
                    if begins_part:
                        unmade = made
                        for place in range(len(shape.tied)):
                            unmade += tied_anew[stage, place] if shape.tied[place] < start else 0.0
                        unmade += whole.unmade[part] if has_whole else 0.0
                begins_part = begins_part and has_whole
                beside = 0.0
                if has_whole:
                    ends = min(ends, shape.part_stop[part])
                    beside, gathers = whole.beside[part], whole.gathers[part]
                    behind_part = whole.scattered[part] if begins_part else behind_part
                piece_first[num_pieces] = start
                piece_run[num_pieces] = run
                piece_segment[num_pieces] = segment_first
                num_pieces += 1
                if makes_anew:
                    made += all_sums[table, ends, STATES + ANEW + sharded]
                    made -= all_sums[table, start, STATES + ANEW + sharded]
                in_segment = segment_first >= 0
                kind, summed = (SHARD, AGAIN) if in_segment else (WHOLE, KEPT)
                own = all_sums[table, ends, summed] - all_sums[table, start, summed]
                num_changes, entered = 0, 0.0
                for place in range(savings.entering_offsets[start], savings.entering_offsets[start + 1]):
                    tensor = savings.entering[place]
                    saving, past = savings.offsets[tensor], savings.offsets[tensor + 1]
                    while saving < past and savings.operators[saving] < start:
                        saving += 1
                    if saving == past or savings.operators[saving] >= ends:
                        continue
                    # In the sums, a saving here counts what it keeps more than the one before, all as if makers and
                    # savers had this strategy ...
                    summed_bytes = saved_bytes[table, saving - 1, kind] if saving > savings.offsets[tensor] else 0.0
                    producer, keeps_made = savings.producers[tensor], savings.keeps_made[tensor] != 0
                    given = producer == NEVER
                    inner = in_segment and not given and producer >= segment_first
                    arrived, arrived_replicas = -1.0, -1
                    number = savings.tensors[tensor]
                    if not given and producer < first and number >= 0 and crosses_in_shards[number]:
                        reading = shape.reader_offsets[number]
                        while shape.readers[reading] < first:
                            reading += 1
                        read_by = table_at(plans, run_tables, begin, end - 1, shape.readers[reading])
                        arrived = tables.read_bytes[read_by, reading] / tables.num_parts[read_by, reading]
                        arrived_replicas = replicas[read_by]
                    # ... but of those before, only one that is held in the same way counts.
                    earlier = saving - 1
                    counted = 0.0
                    piece = num_pieces - 1
                    while earlier >= savings.offsets[tensor] and savings.operators[earlier] >= first:
                        while piece_first[piece] > savings.operators[earlier]:
                            piece -= 1
                        its_segment = piece_segment[piece]
                        its_inner = its_segment >= 0 and not given and producer >= its_segment
                        same = its_segment == segment_first if inner else not its_inner
                        if its_inner == inner and same:
                            counted = kept_bytes(
                                saved_bytes, made_bytes, in_shards, replicas, run_stops, run_tables, keeps_gathered,
                                keeps_made, first, begin, producer, number, piece_run[piece], earlier,
                                SHARD if its_segment >= 0 else WHOLE, arrived, arrived_replicas,
                            )  # fmt: skip
                            break
                        earlier -= 1
                    while saving < past and savings.operators[saving] < ends:
                        index = savings.operators[saving]
                        if given or (producer < first and arrived < 0.0):
                            value = saved_bytes[table, saving, OWN]
                        elif producer >= first and (run == begin or run_stops[run - 1] <= producer):
                            value = saved_bytes[table, saving, kind]
                        else:
                            value = kept_bytes(
                                saved_bytes, made_bytes, in_shards, replicas, run_stops, run_tables, keeps_gathered,
                                keeps_made, first, begin, producer, number, run, saving, kind, arrived,
                                arrived_replicas,
                            )  # fmt: skip
                        if counted == 0.0 and value > 0.0 and not inner and number >= 0 and read_in[number] == stage:
                            counted = read_unsaved[number]
                        more = summed_bytes - saved_bytes[table, saving, kind]
                        if not in_segment or inner:
                            more += value - counted
                        else:
                            entered += value - counted
                        own += more
                        num_changes = differ(changes_at, changes, num_changes, index, more)
                        # What is kept in parts is gathered again, and whole while the operator works.
                        summed_bytes, counted = saved_bytes[table, saving, kind], value
                        read = saved_bytes[table, saving, OWN]
                        gathered = (value < read) * read - (summed_bytes < read) * read
                        num_changes = differ(changes_at, changes, num_changes, index, gathered)
                        num_changes = differ(changes_at, changes, num_changes, index + 1, -gathered)
                        saving += 1
                before = (inside if in_segment else kept) - all_sums[table, start, summed]
                if not in_segment:
                    # Forward no gradients wait, nor does ZeRO hold any.
                    forward = before + gathers + peak_between(
                        maxima, table, FORWARD_PEAK, start, ends, changes_at, changes, num_changes
                    )
                    highest, highest_first = max(highest, forward), max(highest_first, forward)
                    highest_split = max(highest_split, forward)
                # Gradients that wait for operators before these.
                begun_bytes = 0.0
                for place in range(shape.crossing_offsets[start], shape.crossing_offsets[start + 1]):
                    tensor = shape.crossing[place]
                    maker, reading = shape.producers[tensor], shape.reader_offsets[tensor]
                    until = shape.readers[shape.reader_offsets[tensor + 1] - 1]
                    alike = maker >= first and (run == begin or run_stops[run - 1] <= maker)
                    if not begins_part and (alike or until == start):
                        continue
                    more = 0.0
                    if alike:
                        more = made_bytes[table, tensor]
                    elif maker >= first:
                        more = made_bytes[table_at(plans, run_tables, begin, run, maker), tensor]
                    else:
                        while shape.readers[reading] < first:
                            reading += 1
                        if shape.readers[reading] < stop:
                            read_by = table_at(plans, run_tables, begin, end - 1, shape.readers[reading])
                            parts = tables.num_parts[read_by, reading] if crosses_in_shards[tensor] else 1
                            more = tables.read_bytes[read_by, reading] / parts
                    begun_bytes += more
                    more -= made_bytes[table, tensor]
                    if until > start:
                        num_changes = differ(changes_at, changes, num_changes, start, more)
                        num_changes = differ(changes_at, changes, num_changes, until, -more)
                following = plans.segment_firsts[segment] if segment < last_segment else stop
                if in_segment:
                    following = plans.segment_stops[segment]
                if splits:
                    weights_behind += all_sums[table, start, WEIGHTED] + all_sums[table, start, TO_MULTIPLY]
                    peak = peak_between(
                        maxima, table, AGAIN_SPLIT_PEAK if in_segment else KEPT_SPLIT_PEAK, start, ends, changes_at,
                        changes, num_changes,
                    )  # fmt: skip
                    highest_split = max(highest_split, before + peak + weights_behind + gathers)
                    weights_behind -= all_sums[table, ends, WEIGHTED] + all_sums[table, ends, TO_MULTIPLY]
                end_gradients = 0.0
                if in_segment and ends == following:
                    end_gradients = all_sums[table, ends, END_GRADIENTS] - all_sums[table, ends - 1, END_GRADIENTS]
                    num_changes = differ(changes_at, changes, num_changes, ends - 1, -end_gradients)
                if begins_part and whole.joining[part] > 0.0:
                    joining = (inside if in_segment else kept) + begun_bytes + whole.joining[part]
                    highest = max(highest, joining)
                    highest_first = max(highest_first, joining + held[stage, ANEW_BYTES] - unmade)
                peak_kind = AGAIN_PEAK if in_segment else KEPT_PEAK
                if parted:
                    # The table has those of its own part; a weight that counts where a later operator has it does not.
                    peak_kind = AGAIN_WAIT_PEAK if in_segment else KEPT_WAIT_PEAK
                    behind_part -= all_sums[table, ends, UNSHARDED] - all_sums[table, start, UNSHARDED]
                    for place in range(len(shape.tied)):
                        index = shape.tied[place]
                        if start <= index < ends and counts_later(
                            shape, tables, plans, run_tables, begin, stop, place
                        ):
                            num_bytes = tables.tied_bytes[table, place, TIED_SCATTERED]
                            behind_part += num_bytes
                            num_changes = differ(changes_at, changes, num_changes, start, -waiting * num_bytes)
                            num_changes = differ(changes_at, changes, num_changes, index, waiting * num_bytes)
                    own_bytes = all_sums[table, shape.part_stop[part], UNSHARDED] - all_sums[table, ends, UNSHARDED]
                    beside += waiting * (behind_part - own_bytes)
                peak = peak_between(maxima, table, peak_kind, start, ends, changes_at, changes, num_changes)
                highest = max(highest, before + peak + beside)
                highest_first = max(highest_first, before + peak + beside + held[stage, ANEW_BYTES] - unmade)
                kept += entered
                if in_segment:
                    inside += own
                else:
                    kept += own
                if in_segment and ends == following:
                    # What enters the segment and none of its operators saves, nor one before.
                    unsaved, past = savings.unsaved_offsets[segment_first], savings.unsaved_offsets[segment_first + 1]
                    for place in range(unsaved, past):
                        tensor, reading = savings.unsaved[place, 0], savings.unsaved[place, 1]
                        reader, maker = shape.readers[reading], shape.producers[tensor]
                        if reader >= ends or maker < first or read_in[tensor] == stage:
                            continue
                        number, is_kept, piece = savings.numbers[tensor], False, 0
                        if number >= 0:
                            for saving in range(savings.offsets[number], savings.offsets[number + 1]):
                                saver = savings.operators[saving]
                                while piece + 1 < num_pieces and piece_first[piece + 1] <= saver:
                                    piece += 1
                                outside = piece_segment[piece] < 0 or maker < piece_segment[piece]
                                stays = saved_bytes[run_tables[piece_run[piece]], saving, OWN] > 0.0
                                is_kept = is_kept or (saver < ends and outside and stays)
                        if not is_kept:
                            made_by = table_at(plans, run_tables, begin, run, maker)
                            read_by = table_at(plans, run_tables, begin, run, reader)
                            read_in[tensor] = stage
                            read_unsaved[tensor] = min(made_bytes[made_by, tensor], tables.read_bytes[read_by, reading])
                            kept += read_unsaved[tensor]
                if ends in (stop, following):
                    held_ends = all_sums[table, ends, ENDS] - all_sums[table, ends - 1, ENDS] if in_segment else 0.0
                    highest += held_ends + end_gradients
                    taken = highest + kept if in_segment else highest
                    most_split = max(most_split, highest_split + kept if in_segment else highest_split)
                    most = max(most, taken)
                    highest_first += held_ends + end_gradients
                    most_first = max(most_first, highest_first + kept if in_segment else highest_first)
                    again += inside
                    inside, highest, highest_first, highest_split = 0.0, 0.0, 0.0, 0.0
                    segment += in_segment
                start = ends

            # What was received, and what was sent if that is held, unless it is kept anyway.
            ends_bytes = 0.0
            for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
                tensor = shape.crossing[place]
                maker, number = shape.producers[tensor], savings.numbers[tensor]
                if maker < first:
                    continue
                made_by = table_at(plans, run_tables, begin, end - 1, maker)
                crosses_in_shards[tensor] = tables.in_shards[made_by, tensor]
                if not keeps_outputs:
                    continue
                is_kept = read_in[tensor] == stage
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
                    read_by = table_at(plans, run_tables, begin, end - 1, shape.readers[reading])
                    parts = tables.num_parts[read_by, reading] if crosses_in_shards[tensor] else 1
                    ends_bytes += tables.read_bytes[read_by, reading] / parts
            kept += ends_bytes
            most += ends_bytes
            most_split += ends_bytes
            row = held[stage]
            row[KEPT_BYTES], row[WORKING_BYTES] = kept, most - kept
            row[FIRST_WORKING_BYTES] = most_first + ends_bytes - kept if makes_anew else most - kept
            row[LAST_BYTES], row[GATHERED_BYTES] = end_bytes, in_root
            row[FOR_WEIGHTS_BYTES] = min(weighted, kept + again) + to_multiply
            row[INPUT_PASS_BYTES] = most_split - kept
            row[WEIGHT_PASS_BYTES] = product + gradients
            first = stop
