"""Compiled: what a stage keeps of tensors that were made before the piece of it that saves them.

A piece is as much of a run of equal strategy as lies in one recomputed segment, or in none.
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import NEVER, Floats, Ints, PlanColumns, Structure
from simulator.fast.changes import Changes, differ
from simulator.fast.kept_tensor import StageRuns, kept_bytes, table_at
from simulator.fast.memory import OWN, SHARD, WHOLE, MemoryRules, MemoryTables, Savings


class Pieces(NamedTuple):
    """Room for the pieces of one stage.

    Attributes:
        first, run: int64[.]. First operator, and run.
        segment: int64[.]. First operator of the segment; -1 for none.
    """

    first: Ints
    run: Ints
    segment: Ints


class Crossing(NamedTuple):
    """Room for tensors that are read behind the operators that make them, by their number among those.

    Attributes:
        in_shards: int64[T]. Whether a tensor left the stage that made it in shards of the sequence.
        read_in, unsaved_bytes: int64[T], float64[T]. The stage where a segment reads a tensor that nobody saved up to
            there, and what is kept of it for that.
    """

    in_shards: Ints
    read_in: Ints
    unsaved_bytes: Floats


@inlined
def _came_in_shards(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    crossing: Crossing,
    producer: int,
    number: int,
) -> tuple[float, int]:
    """Return bytes and replicas of a tensor that came into the stage in shards of the sequence; -1 for another."""
    if producer == NEVER or producer >= stage.first or number < 0 or crossing.in_shards[number] == 0:
        return -1.0, -1
    reading = shape.reader_offsets[number]
    while shape.readers[reading] < stage.first:
        reading += 1
    read_by = table_at(plans, run_tables, stage.begin, stage.end - 1, shape.readers[reading])
    arrived = tables.read_bytes[read_by, reading] / tables.num_parts[read_by, reading]
    return float(arrived), int(tables.replicas[read_by])


@inlined
def save_earlier(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    rules: MemoryRules,
    stage: StageRuns,
    crossing: Crossing,
    pieces: Pieces,
    piece: int,
    ends: int,
    changes: Changes,
) -> tuple[float, float, int]:
    """Return what a piece keeps, for its tensors that were made before it, beyond what its table has summed.

    In the sums a saving counts what it keeps more than the one before, as if makers and savers all had its strategy.

    Args:
        shape, savings, tables, plans, run_tables, rules: See ``peaks.estimate_peaks``.
        stage, crossing: The stage, and what crosses into it.
        pieces, piece, ends: The pieces so far, the number of this one, the last, and where it ends.
        changes: Result: how the piece differs from its table.

    Returns:
        Bytes, those of them that enter the piece's segment, and how many changes there are.
    """
    start, run, segment_first = pieces.first[piece], pieces.run[piece], pieces.segment[piece]
    table, first, begin = run_tables[run], stage.first, stage.begin
    in_segment = segment_first >= 0
    kind = SHARD if in_segment else WHOLE
    saved_bytes = tables.saved_bytes
    own, entered, count = 0.0, 0.0, 0
    for place in range(savings.entering_offsets[start], savings.entering_offsets[start + 1]):
        tensor = savings.entering[place]
        saving, past = savings.offsets[tensor], savings.offsets[tensor + 1]
        while saving < past and savings.operators[saving] < start:
            saving += 1
        if saving == past or savings.operators[saving] >= ends:
            continue
        summed_bytes = saved_bytes[table, saving - 1, kind] if saving > savings.offsets[tensor] else 0.0
        producer, number = savings.producers[tensor], savings.tensors[tensor]
        given, made_saving = producer == NEVER, savings.offsets[tensor]
        if savings.operators[made_saving] != producer:
            made_saving = -1
        inner = in_segment and not given and producer >= segment_first
        arrived, arrived_replicas = _came_in_shards(
            shape, tables, plans, run_tables, stage, crossing, producer, number
        )
        # Of the savings before, only one that is held in the same way counts.
        earlier, counted, its_piece = saving - 1, 0.0, piece
        while earlier >= savings.offsets[tensor] and savings.operators[earlier] >= first:
            while pieces.first[its_piece] > savings.operators[earlier]:
                its_piece -= 1
            its_segment = pieces.segment[its_piece]
            its_inner = its_segment >= 0 and not given and producer >= its_segment
            same = its_segment == segment_first if inner else not its_inner
            if its_inner == inner and same:
                counted = kept_bytes(
                    tables, plans, run_tables, rules, made_saving, stage, producer, number, pieces.run[its_piece],
                    earlier, SHARD if its_segment >= 0 else WHOLE, arrived, arrived_replicas,
                )  # fmt: skip
                break
            earlier -= 1
        while saving < past and savings.operators[saving] < ends:
            index = savings.operators[saving]
            if given or (producer < first and arrived < 0.0):
                value = saved_bytes[table, saving, OWN]
            elif producer >= first and (run == begin or plans.run_stops[run - 1] <= producer):
                value = saved_bytes[table, saving, kind]
            else:
                value = kept_bytes(
                    tables, plans, run_tables, rules, made_saving, stage, producer, number, run, saving, kind, arrived,
                    arrived_replicas,
                )  # fmt: skip
            was_read = not inner and number >= 0 and crossing.read_in[number] == stage.number
            if was_read and counted == 0.0 and value > 0.0:
                counted = crossing.unsaved_bytes[number]
            more = summed_bytes - saved_bytes[table, saving, kind]
            if not in_segment or inner:
                more += value - counted
            else:
                entered += value - counted
            own += more
            count = differ(changes, count, index, more)
            # What is kept in parts is gathered again, and whole while the operator works.
            summed_bytes, counted = saved_bytes[table, saving, kind], value
            read = saved_bytes[table, saving, OWN]
            gathered = (value < read) * read - (summed_bytes < read) * read
            count = differ(changes, count, index, gathered)
            count = differ(changes, count, index + 1, -gathered)
            saving += 1
    return own, entered, count


@inlined
def unsaved_of_segment(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    crossing: Crossing,
    pieces: Pieces,
    num_pieces: int,
    ends: int,
) -> float:
    """Return the bytes of what enters the segment of the last piece and none of its operators saves, nor one before.

    Args:
        shape, savings, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage, crossing: The stage, and what crosses into it; added to.
        pieces, num_pieces: The pieces so far.
        ends: Where the segment ends.
    """
    run, segment_first = pieces.run[num_pieces - 1], pieces.segment[num_pieces - 1]
    found_bytes = 0.0
    for place in range(savings.unsaved_offsets[segment_first], savings.unsaved_offsets[segment_first + 1]):
        tensor, reading = savings.unsaved[place, 0], savings.unsaved[place, 1]
        reader, maker = shape.readers[reading], shape.producers[tensor]
        if reader >= ends or maker < stage.first or crossing.read_in[tensor] == stage.number:
            continue
        number, is_kept, piece = savings.numbers[tensor], False, 0
        if number >= 0:
            for saving in range(savings.offsets[number], savings.offsets[number + 1]):
                saver = savings.operators[saving]
                while piece + 1 < num_pieces and pieces.first[piece + 1] <= saver:
                    piece += 1
                outside = pieces.segment[piece] < 0 or maker < pieces.segment[piece]
                stays = tables.saved_bytes[run_tables[pieces.run[piece]], saving, OWN] > 0.0
                is_kept = is_kept or (saver < ends and outside and stays)
        if not is_kept:
            made_by = table_at(plans, run_tables, stage.begin, run, maker)
            read_by = table_at(plans, run_tables, stage.begin, run, reader)
            crossing.read_in[tensor] = stage.number
            crossing.unsaved_bytes[tensor] = min(
                tables.made_bytes[made_by, tensor], tables.read_bytes[read_by, reading]
            )
            found_bytes += crossing.unsaved_bytes[tensor]
    return found_bytes


@inlined
def kept_at_ends(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    keeps_outputs: bool,
    stage: StageRuns,
    crossing: Crossing,
    pieces: Pieces,
    num_pieces: int,
) -> float:
    """Return the bytes of what a stage received, and of what it sent if that is held, unless they are kept anyway.

    Args:
        shape, savings, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        keeps_outputs: See ``MemoryRules``.
        stage, crossing: The stage, and what crosses into it; and out of it, which is noted.
        pieces, num_pieces: All of its pieces.
    """
    first, stop = stage.first, stage.stop
    found_bytes = 0.0
    for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
        tensor = shape.crossing[place]
        maker, number = shape.producers[tensor], savings.numbers[tensor]
        if maker < first:
            continue
        made_by = table_at(plans, run_tables, stage.begin, stage.end - 1, maker)
        crossing.in_shards[tensor] = tables.in_shards[made_by, tensor]
        if not keeps_outputs:
            continue
        is_kept = crossing.read_in[tensor] == stage.number
        if number >= 0:
            for saving in range(savings.offsets[number], savings.offsets[number + 1]):
                if first <= savings.operators[saving] < stop:
                    piece = 0
                    while piece + 1 < num_pieces and pieces.first[piece + 1] <= savings.operators[saving]:
                        piece += 1
                    if tables.saved_bytes[run_tables[pieces.run[piece]], saving, OWN] > 0.0:
                        is_kept = is_kept or pieces.segment[piece] < 0 or maker < pieces.segment[piece]
        if not is_kept:
            found_bytes += tables.made_bytes[made_by, tensor]
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
            read_by = table_at(plans, run_tables, stage.begin, stage.end - 1, shape.readers[reading])
            parts = tables.num_parts[read_by, reading] if crossing.in_shards[tensor] else 1
            found_bytes += tables.read_bytes[read_by, reading] / parts
    return found_bytes
