"""Compiled: gathers of the units of a stage before they are used, one of each unit, as runs of strategies come."""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    ELEMENTS,
    GATHER,
    GATHER_CHANNEL,
    GATHER_S,
    MAX_FAMILIES,
    MAX_PENDING,
    ROOT_S,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.prices import channels_s
from simulator.fast.ties import tied_elements


class UnitGathers(NamedTuple):
    """Room for the gathers of one unit.

    Attributes:
        keys, channels: int64[MAX_PENDING].
        elements: float64[MAX_PENDING]. Parameters.
    """

    keys: Ints
    channels: Ints
    elements: Floats


@inlined
def add_gathers(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    run: int,
    start: int,
    stage: int,
    first: int,
    reshards: bool,
    gathered_bytes: float,
    pending: UnitGathers,
    count: int,
    pending_unit: int,
    gather_s: Floats,
) -> tuple[int, int]:
    """Add what the units of a run gather, and return ``count`` and ``pending_unit`` as they are then.

    Whole units from sums; parts of units, and units with tied parameters, one by one.

    Args:
        shape, tables, plans, run_tables: See ``time.estimate_times``.
        gathered_bytes: See ``BesideRules``.
        run, start, stage, first: The run, its first operator, its stage, and that's.
        reshards: Units are gathered for each pass.
        pending, count: Gathers of the unit that may not be through; more than MAX_PENDING of them are too many.
        pending_unit: Its number; -1 for none.
        gather_s: float64[2]. Where seconds are added, of the root and of other units.
    """
    begin, table, ends = plans.run_offsets[stage], run_tables[run], plans.run_stops[run]
    sums, families = tables.sums[table], tables.families[table]
    keys, channels, elements = pending
    unit, last_unit = shape.unit_of[start], shape.unit_of[ends - 1]
    whole_first = unit + (shape.unit_first[unit] < start)
    whole_last = last_unit - (shape.unit_stop[last_unit] > ends)
    if whole_first <= whole_last:
        a, b = shape.unit_first[whole_first], shape.unit_stop[whole_last]
        gather_s[0] += sums[b, ROOT_S] - sums[a, ROOT_S]
        gather_s[1] += sums[b, GATHER_S] - sums[a, GATHER_S]
    place, num_tied = 0, len(shape.tied)
    while unit <= last_unit and count <= MAX_PENDING:
        if whole_first <= unit <= whole_last:
            # The next unit with a tied parameter, else the end of the whole ones.
            while place < num_tied and shape.unit_of[shape.tied[place]] < unit:
                place += 1
            unit = whole_last + 1
            if place < num_tied and shape.unit_of[shape.tied[place]] <= whole_last:
                unit = shape.unit_of[shape.tied[place]]
            if unit > last_unit:
                break
        if unit != pending_unit:
            gather_s[shape.gathers_of[pending_unit] - 1] += channels_s(
                tables, channels, elements, count, gathered_bytes
            )
            count, pending_unit = 0, unit
        a, b = max(start, shape.unit_first[unit]), min(ends, shape.unit_stop[unit])
        # Each unit gathers what is tied, but for those that stay gathered: the first of them.
        since = max(first, shape.unit_first[unit])
        if shape.gathers_of[unit] == 1 or not reshards:
            since = first
        for family in range(MAX_FAMILIES):
            own_key = families[family, GATHER]
            if own_key < 0:
                continue
            more = sums[b, ELEMENTS + family] - sums[a, ELEMENTS + family]
            more += tied_elements(shape, tables, plans, run_tables, table, family, since, begin, a, b, False)
            if more > 0:
                at = 0
                while at < count and keys[at] != own_key:
                    at += 1
                if at == MAX_PENDING:
                    count = MAX_PENDING + 1
                    break
                if at == count:
                    count += 1
                    keys[at], elements[at] = own_key, 0.0
                    channels[at] = families[family, GATHER_CHANNEL]
                elements[at] += more
        unit += 1
    return count, pending_unit
