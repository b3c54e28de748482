"""Compiled: how the reductions of what ZeRO-3 leaves whole lie in a stage's backward pass; see ``stage_units``."""

from __future__ import annotations

from simulator.closed_forms.stage_units import bucket_shares
from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    ELEMENTS,
    MAX_FAMILIES,
    REDUCTION,
    REST,
    SCATTER,
    SHARDED,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)

_shares_of_buckets = inlined(bucket_shares)


@inlined
def _reduced_tie(
    places: Ints,
    tied: Ints,
    families: Ints,
    run_stops: Ints,
    run_tables: Ints,
    run: int,
    place: int,
    stop: int,
    by_use: bool,
) -> float:
    """Return elements of a tied parameter, which no operator before has, that replicas reduce and ZeRO-3 leaves whole.

    Args:
        places, tied, families: Of ``Structure.tied`` and of tables.
        run_stops, run_tables: Of plans.
        run: The parameter's.
        place: Which of ``places`` it is.
        stop: Where its stage ends.
        by_use: If whole, it counts for each operator of the stage that has it in this layout.
    """
    table = run_tables[run]
    family = families[table, tied[table, place, 0]]
    own = float(tied[table, place, 1])
    if (family[SCATTER] < 0 and family[REST] < 0) or family[SHARDED] > 0:
        return 0.0
    elements = own
    if by_use and family[SCATTER] < 0:
        for later in range(place + 1, len(places)):
            if places[later] < stop:
                while run_stops[run] <= places[later]:
                    run += 1
                if tied[run_tables[run], later, 2] == tied[table, place, 2]:
                    elements += own
    return elements


@inlined
def _reduced_of_operator(
    shape: Structure,
    tables: TimeTables,
    stops: Ints,
    run_tables: Ints,
    begin: int,
    run: int,
    first: int,
    index: int,
    stop: int,
    ties_by_use: bool,
) -> float:
    """Return elements of an operator that replicas reduce and ZeRO-3 leaves whole, and no operator before has.

    Args:
        shape, tables, run_tables, first, stop, ties_by_use: See ``overlap.stage_sent``.
        stops: Of the plans' runs.
        begin, run, index: The first run of the stage, that of the operator, and it.
    """
    families, sums, table, found = tables.families, tables.sums, run_tables[run], 0.0
    for family in range(MAX_FAMILIES):
        if families[table, family, REDUCTION] < 0:
            break
        is_reduced = families[table, family, SCATTER] >= 0 or families[table, family, REST] >= 0
        if is_reduced and families[table, family, SHARDED] <= 0:
            found += sums[table, index + 1, ELEMENTS + family] - sums[table, index, ELEMENTS + family]
    for place in range(len(shape.tied)):
        if shape.tied[place] == index:
            is_first, other = True, begin
            for before in range(place):
                if shape.tied[before] >= first:
                    while stops[other] <= shape.tied[before]:
                        other += 1
                    theirs = tables.tied[run_tables[other], before, 2]
                    is_first = is_first and theirs != tables.tied[table, place, 2]
            if is_first:
                found += _reduced_tie(
                    shape.tied, tables.tied, families, stops, run_tables, run, place, stop, ties_by_use
                )
    return found


@inlined
def bucket_shares_of(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    stop: int,
    total: float,
    num_buckets: float,
    ties_by_use: bool,
    by_unit: bool,
) -> tuple[float, float, float]:
    """Return what ``bucket_shares`` does, of what ZeRO-3 does not shard of a stage.

    Args:
        shape, tables, plans, run_tables, stage, first, stop, num_buckets, ties_by_use: See ``overlap.stage_sent``.
        total: Elements of that which are reduced.
        by_unit: Each unit is reduced by itself, and the root at once.
    """
    stops = plans.run_stops
    of_root = by_unit and shape.gathers_of[shape.unit_of[first]] == 1
    begin = plans.run_offsets[stage]
    begun, run, index = 0.0, begin, first
    while index < stop and (of_root or begun <= 0.0):
        if of_root and shape.gathers_of[shape.unit_of[index]] != 1:
            index = shape.unit_stop[shape.unit_of[index]]
            continue
        while stops[run] <= index:
            run += 1
        begun += _reduced_of_operator(shape, tables, stops, run_tables, begin, run, first, index, stop, ties_by_use)
        index += 1
    return _shares_of_buckets(num_buckets, begun / total)
