"""Compiled: gradients that wait while a piece of a stage goes backward: for operators before it, and for its part."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Ints, PlanColumns, Structure
from simulator.fast.changes import Changes, differ
from simulator.fast.kept_tensor import StageRuns, table_at
from simulator.fast.memory import TIED_SCATTERED, TIED_WAITING, UNSHARDED, MemoryTables
from simulator.fast.whole_parts import counts_earlier, counts_later


@inlined
def wait_for_earlier(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    in_shards: Ints,
    run: int,
    start: int,
    begins_part: bool,
    changes: Changes,
    count: int,
) -> tuple[float, int]:
    """Return the bytes of gradients that wait for operators before a piece, and how many changes there are.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage: The stage.
        in_shards: See ``saved_tensors.Crossing``.
        run, start: The piece's run and its first operator.
        begins_part: Bytes are asked for; else for changes alone.
        changes, count: How the piece differs from its table; added to.
    """
    first, begin, table, made_bytes = stage.first, stage.begin, run_tables[run], tables.made_bytes
    begun_bytes = 0.0
    for place in range(shape.crossing_offsets[start], shape.crossing_offsets[start + 1]):
        tensor = shape.crossing[place]
        maker, reading = shape.producers[tensor], shape.reader_offsets[tensor]
        until = shape.readers[shape.reader_offsets[tensor + 1] - 1]
        alike = maker >= first and (run == begin or plans.run_stops[run - 1] <= maker)
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
            if shape.readers[reading] < stage.stop:
                read_by = table_at(plans, run_tables, begin, stage.end - 1, shape.readers[reading])
                parts = tables.num_parts[read_by, reading] if in_shards[tensor] else 1
                more = tables.read_bytes[read_by, reading] / parts
        begun_bytes += more
        more -= made_bytes[table, tensor]
        if until > start:
            count = differ(changes, count, start, more)
            count = differ(changes, count, until, -more)
    return begun_bytes, count


@inlined
def wait_for_ties(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    sharded: bool,
    start: int,
    ends: int,
    changes: Changes,
    count: int,
) -> int:
    """Let gradients of weights that operators behind a piece, or of it, have too wait in it; return how many changes.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage: The stage.
        sharded: Gradients are, in each pass.
        start, ends: The piece's operators.
        changes, count: How the piece differs from its table; added to.
    """
    first_run = stage.begin
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if index < stage.first or index >= ends:
            continue
        while plans.run_stops[first_run] <= index:
            first_run += 1
        if counts_earlier(shape, tables, plans, run_tables, stage, place, run_tables[first_run]):
            continue
        layout, last, run = tables.tied_layouts[run_tables[first_run], place], index, first_run
        for behind in range(place + 1, len(shape.tied)):
            if shape.tied[behind] < stage.stop:
                while plans.run_stops[run] <= shape.tied[behind]:
                    run += 1
                if tables.tied_layouts[run_tables[run], behind] == layout:
                    last = shape.tied[behind]
        if last > max(index, start):
            num_bytes = tables.tied_bytes[run_tables[first_run], place, TIED_WAITING + sharded]
            count = differ(changes, count, max(index, start), num_bytes)
            count = differ(changes, count, last, -num_bytes)
    return count


@inlined
def wait_for_part(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    run: int,
    start: int,
    ends: int,
    waiting: float,
    behind_bytes: float,
    changes: Changes,
    count: int,
) -> tuple[float, float, int]:
    """Return what is scattered of a part's gradients behind a piece, what waits beside the piece, and the changes.

    The table has those of its own part; a weight that counts where a later operator has it does not.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage: The stage.
        run, start, ends: The piece's run, and its operators.
        waiting: Share of what is scattered that waits.
        behind_bytes: Of the part's gradients, those that are made by this piece and by what comes behind it.
        changes, count: How the piece differs from its table; added to.
    """
    sums = tables.sums[run_tables[run]]
    behind_bytes -= sums[ends, UNSHARDED] - sums[start, UNSHARDED]
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if start <= index < ends and counts_later(shape, tables, plans, run_tables, stage.begin, stage.stop, place):
            num_bytes = tables.tied_bytes[run_tables[run], place, TIED_SCATTERED]
            behind_bytes += num_bytes
            count = differ(changes, count, start, -waiting * num_bytes)
            count = differ(changes, count, index, waiting * num_bytes)
    own_bytes = sums[shape.part_stop[shape.part_of[start]], UNSHARDED] - sums[ends, UNSHARDED]
    return behind_bytes, waiting * (behind_bytes - own_bytes), count
