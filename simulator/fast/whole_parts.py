"""Compiled: what ZeRO has whole of a stage for a while, by what is whole at once; see ``whole_for_a_while``."""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Floats, Ints, PlanColumns, Structure
from simulator.fast.kept_tensor import StageRuns, table_at
from simulator.fast.memory import (
    GATHERED,
    LATE,
    STATES,
    STAYS,
    TIED_GATHERED,
    TIED_SCATTERED,
    UNSHARDED,
    MemoryRules,
    MemoryTables,
)


class Parts(NamedTuple):
    """Room for what is whole at once, by ``Structure.part_of``: bytes, of the stage that was looked at last.

    Attributes:
        gathered: Parameters of a part, but for those of the root.
        before: The next part below that has any; -1 for none.
        scattered: Gradients of a part.
        gathers: Parameters that are gathered while its operators work; of what stays, less what was given back.
        forward: The same in a forward pass.
        beside: These, and gradients, but for its own that wait.
        joining: The same when its gradients are joined; 0 where they are not.
        late: Of its gradients that the first backward pass makes anew, shards.
        unmade: Of those of it and the parts above, what is not made yet when its operators work.
    """

    gathered: Floats
    before: Ints
    scattered: Floats
    gathers: Floats
    forward: Floats
    beside: Floats
    joining: Floats
    late: Floats
    unmade: Floats


@inlined
def counts_earlier(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    place: int,
    table: int,
) -> bool:
    """Return whether a tied parameter counts where an earlier operator of the stage has it.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        stage: The stage.
        place: Among ``Structure.tied``; in the stage.
        table: Of the operator that has it.
    """
    other = stage.begin
    for before in range(place):
        user = shape.tied[before]
        if user >= stage.first:
            while plans.run_stops[other] <= user:
                other += 1
            if tables.tied_layouts[run_tables[other], before] == tables.tied_layouts[table, place]:
                return True
    return False


@inlined
def counts_later(
    shape: Structure, tables: MemoryTables, plans: PlanColumns, run_tables: Ints, begin: int, stop: int, place: int
) -> bool:
    """Return whether a tied parameter of the root counts where a later operator of the root has it.

    Args:
        shape, tables, plans, run_tables: See ``peaks.estimate_peaks``.
        begin, stop: First run of the stage, and its end.
        place: Among ``Structure.tied``; in the stage.
    """
    if shape.gathers_of[shape.unit_of[shape.tied[place]]] != 1:
        return False
    run = begin
    while plans.run_stops[run] <= shape.tied[place]:
        run += 1
    layout = tables.tied_layouts[run_tables[run], place]
    for other in range(place + 1, len(shape.tied)):
        index = shape.tied[other]
        if index >= stop:
            break
        while plans.run_stops[run] <= index:
            run += 1
        in_root = shape.gathers_of[shape.unit_of[index]] == 1
        if in_root and tables.tied_layouts[run_tables[run], other] == layout:
            return True
    return False


@inlined
def fill_parts(
    shape: Structure,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: StageRuns,
    reshards: bool,
    gives_back: bool,
    sharded: bool,
    stays: float,
    rules: MemoryRules,
    tied_anew: Floats,
    parts: Parts,
) -> tuple[float, float, float]:
    """Fill ``parts`` for a stage; return what of the root is gathered, what is there at the end, and gradients alone.

    Args:
        shape, tables, plans, run_tables, rules: See ``peaks.estimate_peaks``.
        stage: The stage.
        reshards, sharded: Parameters are given back, gradients scattered in each pass.
        gives_back: Parameters that stay gathered are given back in this pass.
        stays: Bytes of these.
        tied_anew: Of the stage, as ``hold_states`` fills it.
        parts: Result.
    """
    begin, first, stop = stage.begin, stage.first, stage.stop
    apart, waits, waiting = rules.apart, rules.waits, rules.waiting
    low, high = shape.part_of[first], shape.part_of[stop - 1]
    run, before, in_root = begin, -1, 0.0
    for part in range(low, high + 1):
        place, ends = max(first, shape.part_first[part]), min(stop, shape.part_stop[part])
        of_root = shape.gathers_of[shape.unit_of[place]] == 1
        gathered, scattered, late = 0.0, 0.0, 0.0
        while place < ends:
            while plans.run_stops[run] <= place:
                run += 1
            upto = min(ends, plans.run_stops[run])
            sums = tables.sums[run_tables[run]]
            column = GATHERED if reshards else STATES + STAYS
            gathered += sums[upto, column] - sums[place, column]
            scattered += sums[upto, UNSHARDED] - sums[place, UNSHARDED]
            late += sums[upto, STATES + LATE] - sums[place, STATES + LATE]
            place = upto
        gathered = gathered if reshards or gives_back else 0.0
        parts.scattered[part], parts.late[part] = (scattered, late) if sharded else (0.0, 0.0)
        parts.gathered[part], parts.before[part] = 0.0 if of_root else gathered, before
        if of_root:
            in_root += gathered if reshards else 0.0
        elif gathered > 0.0:
            before = part
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if sharded and tied_anew[place] > 0.0:
            run = begin
            while plans.run_stops[run] <= index:
                run += 1
            parts.late[shape.part_of[index]] += tables.tied_bytes[run_tables[run], place, LATE]
        if first <= index < stop and counts_later(shape, tables, plans, run_tables, begin, stop, place):
            run = begin
            while plans.run_stops[run] <= index:
                run += 1
            if reshards:
                in_root -= tables.tied_bytes[run_tables[run], place, TIED_GATHERED]
            if sharded:
                parts.scattered[shape.part_of[index]] -= tables.tied_bytes[run_tables[run], place, TIED_SCATTERED]
        if gives_back and first <= index < stop and shape.gathers_of[shape.unit_of[index]] != 1:
            table = table_at(plans, run_tables, begin, stage.end - 1, index)
            if not counts_earlier(shape, tables, plans, run_tables, stage, place, table):
                parts.gathered[shape.part_of[index]] += tables.tied_bytes[table, place, STAYS]
    ahead = 1.0 if rules.prefetches and not gives_back else 0.0
    above, next_above = 0.0, 0.0
    root_above, root_late, travelling, last_but_one, most = 0.0, 0.0, 0.0, 0.0, 0.0
    is_open = in_root > 0.0
    for back in range(high + 1 - low):
        part = high - back
        of_root = shape.gathers_of[shape.unit_of[shape.part_first[part]]] == 1
        root_late += parts.late[part] if of_root else 0.0
        parts.unmade[part] = root_late + (0.0 if of_root else parts.late[part])
        is_open = is_open or parts.gathered[part] > 0.0
        prefetched = ahead * parts.gathered[parts.before[part]] if is_open and parts.before[part] >= 0 else 0.0
        own_bytes, scattered = parts.gathered[part], parts.scattered[part]
        gathers, forward = own_bytes + prefetched, own_bytes + prefetched
        if gives_back:
            gathers = -above
            forward = next_above - above if rules.prefetches_forward else -above
            above += own_bytes
            next_above = own_bytes if own_bytes > 0.0 else next_above
        is_scattered = not of_root and scattered > 0.0
        joined, own = 0.0, root_above * waiting
        if waits:
            own += travelling if apart else 0.0
            if is_scattered:
                joined = root_above * waiting + scattered * (1.0 + waiting)
            most = max(most, max(joined, own + scattered * waiting))
        else:
            own += scattered + travelling + (0.0 if is_scattered else last_but_one)
            most = max(most, own)
        parts.gathers[part], parts.forward[part], parts.beside[part] = gathers, forward, gathers + own
        parts.joining[part] = joined + (prefetched - above if apart else gathers) if joined > 0.0 else 0.0
        if is_scattered:
            travelling, last_but_one = scattered, travelling
        elif of_root:
            root_above += scattered
    end = parts.beside[low]
    if waits:
        at_last = root_above * (1.0 + waiting)
        given_back = stays if gives_back else in_root
        end = at_last + (-given_back if apart else parts.gathers[low])
        if parts.joining[low] != 0.0:
            end = max(end, parts.joining[low])
        most = max(most, at_last)
    return in_root, end, most
