"""Compiled: parameters of a stage, added up by what reduces them, gathers them after the step, and before use."""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    COPIES,
    ELEMENTS,
    GATHER,
    MAX_FAMILIES,
    MAX_PENDING,
    REDUCED_KEYS,
    REDUCTION,
    REFRESH,
    REST,
    SCATTER,
    SHARDED,
    BesideRules,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.ties import tied_elements

NUM_BYTES, NUM_BYTES_BACK, TIMES, TIMES_BACK, COPIED = range(5)
"""Of gradients that are copied before they are reduced, and back: bytes read and written, and how often."""


class Synchronised(NamedTuple):
    """Room for the parameters of one stage; the first axis is REDUCED_KEYS, REFRESHED_KEYS, GATHERED_KEYS.

    Attributes:
        num: int64[3]. How many keys there are.
        keys: int64[3, MAX_PENDING]. What does it.
        tables, families: int64[3, MAX_PENDING]. A table and a family of it that says what that takes.
        elements: float64[3, MAX_PENDING].
        starts: int64[MAX_PENDING]. Of what is reduced, the first operator.
    """

    num: Ints
    keys: Ints
    tables: Ints
    families: Ints
    elements: Floats
    starts: Ints


class RunParameters(NamedTuple):
    """How the parameters of a run are gathered.

    Attributes:
        gathers: Before use, as the strategy of the run has it.
        all_gathered: All of them before use.
        any_sharded: Some by ZeRO-3.
        any_stepped: Some of those that ZeRO-1 or 2 steps in shards, beside the first forward pass.
        fits: There was room for what synchronises them.
    """

    gathers: bool
    all_gathered: bool
    any_sharded: bool
    any_stepped: bool
    fits: bool


@inlined
def add_copies(family: Ints, elements: float, rules: BesideRules, copied: Floats) -> None:
    """Add the copies of gradients that are reduced alike.

    Args:
        family: int64[FAMILY]. How they are.
        elements: So many.
        rules: What holds for any plan.
        copied: float64[COPIED]. Where bytes are added, and the most times of any.
    """
    times = family[COPIES]
    if times > 0:
        whole = family[SHARDED] <= 0 and family[SCATTER] < 0
        num_bytes = elements * (rules.whole_copied_bytes if whole else rules.sharded_copied_bytes)
        copied[NUM_BYTES] += times * num_bytes
        copied[TIMES] = max(copied[TIMES], times)
        if whole:
            copied[NUM_BYTES_BACK] += num_bytes
            copied[TIMES_BACK] = 1.0


@inlined
def _first_operator(shape: Structure, tables: TimeTables, table: int, family: int, start: int, stop: int) -> int:
    """Return the first of some operators with a parameter of a family, given that one has."""
    sums = tables.sums[table]
    for index in range(start, stop):
        has = sums[index + 1, ELEMENTS + family] > sums[index, ELEMENTS + family]
        for place in range(len(shape.tied)):
            has = has or (shape.tied[place] == index and tables.tied[table, place, 0] == family)
        if has:
            return index
    return stop


@inlined
def add_parameters(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    run: int,
    start: int,
    stage: int,
    first: int,
    ties_by_use: bool,
    in_parts: bool,
    rules: BesideRules,
    copied: Floats,
    found: Synchronised,
) -> RunParameters:
    """Add the parameters of a run; return how they are gathered.

    Args:
        shape, tables, plans, run_tables: See ``time.estimate_times``.
        run, start, stage, first: The run, its first operator, its stage, and that's.
        ties_by_use: See ``PassRules``.
        in_parts: Gradients are reduced as they are made: those that ZeRO-3 shards apart.
        rules: What else holds for any plan.
        copied: float64[COPIED]. Where copies of gradients are added (``add_copies``).
        found: Those of the runs before; added to.
    """
    begin, table, ends = plans.run_offsets[stage], run_tables[run], plans.run_stops[run]
    sums, families = tables.sums[table], tables.families[table]
    gathers, all_gathered, any_sharded, any_stepped = False, True, False, False
    for family in range(MAX_FAMILIES):
        if families[family, REDUCTION] < 0:
            break
        elements = sums[ends, ELEMENTS + family] - sums[start, ELEMENTS + family]
        by_use = ties_by_use and families[family, REFRESH] < 0 and families[family, GATHER] < 0
        elements += tied_elements(shape, tables, plans, run_tables, table, family, first, begin, start, ends, by_use)
        is_gathered, is_sharded = families[family, GATHER] >= 0, families[family, SHARDED] > 0
        gathers = gathers or is_gathered
        if elements <= 0.0:
            continue
        any_sharded = any_sharded or is_sharded
        any_stepped = any_stepped or (is_gathered and not is_sharded)
        all_gathered = all_gathered and is_gathered
        if families[family, SCATTER] >= 0 or families[family, REST] >= 0:
            add_copies(families[family], elements, rules, copied)
        for way in range(3):
            own_key = families[family, (REDUCTION, REFRESH, GATHER)[way]]
            if own_key < 0:
                continue
            if way == REDUCED_KEYS and in_parts:
                own_key = 2 * own_key + (1 if is_sharded else 0)
            at = 0
            while at < found.num[way] and found.keys[way, at] != own_key:
                at += 1
            if at == MAX_PENDING:
                return RunParameters(gathers, all_gathered, any_sharded, any_stepped, False)
            if at == found.num[way]:
                found.num[way] += 1
                found.keys[way, at], found.elements[way, at] = own_key, 0.0
                found.tables[way, at], found.families[way, at] = table, family
                if way == REDUCED_KEYS and in_parts:
                    found.starts[at] = _first_operator(shape, tables, table, family, start, ends)
            found.elements[way, at] += elements
    return RunParameters(gathers, all_gathered, any_sharded, any_stepped, True)
