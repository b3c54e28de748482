"""Compiled: weights that several operators share, as a stage holds them and as they are reduced."""

from __future__ import annotations

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import TIE, Ints, PlanColumns, Structure, TimeTables
from simulator.fast.prices import channel_s, mixed, wanted

TIE_KEY = np.uint64(0x9FB21C651E98DF25)


@inlined
def tied_elements(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    table: int,
    family: int,
    first: int,
    begin: int,
    start: int,
    stop: int,
    by_use: bool,
) -> float:
    """Return elements of tied parameters of ``[start, stop)`` that no operator from ``first`` on has in the layout.

    Args:
        shape, tables, plans, run_tables, table, family: See ``time.estimate_times``.
        first, begin: First operator that counts, and first run of its stage.
        start, stop: Operators.
        by_use: Those that one before has count too.
    """
    elements = 0.0
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if start <= index < stop and tables.tied[table, place, 0] == family:
            again = False
            other = begin
            for before in range(place):
                if shape.tied[before] >= first:
                    while plans.run_stops[other] <= shape.tied[before]:
                        other += 1
                    theirs = tables.tied[run_tables[other], before, 2]
                    again = again or theirs == tables.tied[table, place, 2]
            if by_use or not again:
                elements += tables.tied[table, place, 1]
    return elements


@inlined
def tied_s(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    gradient_bytes: float,
    misses: Ints,
    counts: Ints,
) -> tuple[float, bool]:
    """Return the seconds of reducing tied weights: two layouts of a stage, then over stages; and whether all is known.

    Arguments as for ``time.estimate_times``.
    """
    once_s, all_known = 0.0, True
    low, num_tied, tied_of = plans.stage_offsets[plan], len(shape.tied), tables.tied
    for place in range(num_tied):
        is_first = True
        for before in range(place):
            is_first = is_first and shape.ties[before] != shape.ties[place]
        if not is_first:
            continue
        most, inner_s, num_holders, stage, run = 0.0, 0.0, 0, low, plans.run_offsets[low]
        key, last_stage, known = TIE_KEY, -1, True
        for step in range(2):
            # First the size, then what reduces it: inside stages here, over stages below.
            stage, run, last_stage, layouts, first_layout = low, plans.run_offsets[low], -1, 0, 0
            for other in range(place, num_tied):
                if shape.ties[other] != shape.ties[place]:
                    continue
                while plans.run_stops[run] <= shape.tied[other]:
                    run += 1
                while plans.run_offsets[stage + 1] <= run:
                    stage += 1
                if run_tables[run] < 0:
                    known = False
                    break
                table = run_tables[run]
                layout = tied_of[table, other, 2]
                if stage != last_stage:
                    layouts, first_layout, last_stage = 1, layout, stage
                    if step:
                        key = mixed(key, plans.placements[stage])
                        num_holders += 1
                elif layouts == 1 and layout != first_layout:
                    layouts = 2
                    if step:
                        own_key = mixed(TIE_KEY, plans.placements[stage])
                        channel = wanted(
                            tables.keys, tables.values, own_key, misses, counts, TIE, place, stage
                        )
                        if channel < 0:
                            known = False
                        elif channel > 0:
                            inner_s = max(inner_s, channel_s(tables, channel - 1, most * gradient_bytes))
                most = max(most, tied_of[table, other, 1] / tied_of[table, other, 3])
        if known and num_holders > 1:
            channel = wanted(tables.keys, tables.values, key, misses, counts, TIE, place, -1 - plan)
            if channel < 0:
                known = False
            elif channel > 0:
                once_s += channel_s(tables, channel - 1, most * gradient_bytes)
        all_known = all_known and known
        once_s += inner_s
    return once_s, all_known
