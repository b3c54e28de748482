"""Compiled: seconds of gathering again what recomputed units gathered and gave back (``regathers_recomputed``)."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    ELEMENTS,
    GATHER,
    GATHER_CHANNEL,
    MAX_FAMILIES,
    SHARDED,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.gathers import UnitGathers
from simulator.fast.prices import channels_s
from simulator.fast.ties import tied_elements


@inlined
def add_regathers(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    gathered_bytes: float,
    pending: UnitGathers,
    stage_s: Floats,
) -> None:
    """Add to the times of stages one more gather of every unit that lies whole in a recomputed segment.

    Args:
        shape, tables, plans, run_tables, stage_s: See ``time.estimate_times``.
        plan: Its number.
        gathered_bytes: See ``BesideRules``.
        pending: To work in.
    """
    keys, channels, elements = pending
    first = 0
    for stage in range(plans.stage_offsets[plan], plans.stage_offsets[plan + 1]):
        begin, run = plans.run_offsets[stage], plans.run_offsets[stage]
        for segment in range(plans.segment_offsets[stage], plans.segment_offsets[stage + 1]):
            low, high = plans.segment_firsts[segment], plans.segment_stops[segment]
            for unit in range(shape.unit_of[low], shape.unit_of[high - 1] + 1):
                start, ends = shape.unit_first[unit], shape.unit_stop[unit]
                if start < low or ends > high or shape.gathers_of[unit] == 1:
                    continue
                while plans.run_stops[run] <= start:
                    run += 1
                other, found = run, 0
                while start < ends:
                    table, until = run_tables[other], min(ends, plans.run_stops[other])
                    sums = tables.sums[table]
                    for family in range(MAX_FAMILIES):
                        own_key = tables.families[table, family, GATHER]
                        if own_key < 0 or tables.families[table, family, SHARDED] <= 0:
                            continue
                        more = sums[until, ELEMENTS + family] - sums[start, ELEMENTS + family]
                        since = max(first, shape.unit_first[unit])
                        more += tied_elements(
                            shape, tables, plans, run_tables, table, family, since, begin, start, until, False
                        )
                        if more > 0:
                            at = 0
                            while at < found and keys[at] != own_key:
                                at += 1
                            if at == len(keys):
                                continue  # As many as are added up before, where more are refused.
                            if at == found:
                                found += 1
                                keys[at], elements[at] = own_key, 0.0
                                channels[at] = tables.families[table, family, GATHER_CHANNEL]
                            elements[at] += more
                    start, other = until, other + 1
                stage_s[stage] += channels_s(tables, channels, elements, found, gathered_bytes)
        first = plans.run_stops[plans.run_offsets[stage + 1] - 1]
