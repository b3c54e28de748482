"""Compiled: what a recomputed segment makes for operators behind it, held with its gradients while it goes backward."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Ints, PlanColumns, Structure
from simulator.fast.changes import Changes, differ
from simulator.fast.kept_tensor import StageRuns, table_at
from simulator.fast.memory import GIVEN_BACK, OWN, MemoryTables, Savings


@inlined
def _first_saver(
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    tensor: int,
    stop: int,
) -> int:
    """Return the first operator of a stage before another that saves a tensor; that other one for none."""
    number = savings.numbers[tensor]
    if number >= 0:
        for saving in range(savings.offsets[number], savings.offsets[number + 1]):
            saver = savings.operators[saving]
            if saver >= stop:
                break
            if tables.saved_bytes[table_at(plans, run_tables, stage.begin, stage.end - 1, saver), saving, OWN] > 0.0:
                return int(saver)
    return stop


@inlined
def hold_ends(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    segment: tuple[int, int],
    start: int,
    ends: int,
    changes: Changes,
    count: int,
) -> tuple[float, int]:
    """Return what is held before a piece of a segment beyond what counts anyway, and how many changes there are.

    Args:
        shape, savings, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage: The stage.
        segment: Its first operator, and the first behind it.
        start, ends: The piece's operators.
        changes, count: How the piece differs from its table; added to.
    """
    first, stop = segment
    before, last_maker = 0.0, -1
    for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
        tensor = shape.crossing[place]
        maker = shape.producers[tensor]
        if maker < first:
            continue
        made_by = table_at(plans, run_tables, stage.begin, stage.end - 1, maker)
        num_bytes = tables.made_bytes[made_by, tensor]
        # Itself until one that saves it counts it, and its gradient until its maker does.
        saver = _first_saver(savings, tables, plans, run_tables, stage, tensor, stop)
        for until in (saver, maker):
            if until >= start:
                before += num_bytes
                count = differ(changes, count, start, num_bytes)
                count = differ(changes, count, until, -num_bytes)
        if maker >= start and maker < ends and maker != last_maker:
            given = tables.sums[made_by, maker + 1, GIVEN_BACK] - tables.sums[made_by, maker, GIVEN_BACK]
            count = differ(changes, count, maker, given)
            count = differ(changes, count, maker + 1, -given)
        last_maker = maker
    return before, count
