"""Compiled: what is kept of one tensor that an operator of a stage saves, made there or not."""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import NEVER, Ints, PlanColumns
from simulator.fast.memory import OWN, WHOLE, MemoryRules, MemoryTables


class StageRuns(NamedTuple):
    """A stage: its number, its runs from ``begin`` on, and its operators from ``first`` on."""

    number: int
    begin: int
    end: int
    first: int
    stop: int


@inlined
def table_at(plans: PlanColumns, run_tables: Ints, begin: int, run: int, index: int) -> int:
    """Return the table of an operator of a stage, looked for from a run at or behind it down to the stage's first."""
    while run > begin and plans.run_stops[run - 1] > index:
        run -= 1
    return int(run_tables[run])


@inlined
def kept_bytes(
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    rules: MemoryRules,
    made_saving: int,
    stage: StageRuns,
    producer: int,
    number: int,
    run: int,
    saving: int,
    kind: int,
    arrived: float,
    arrived_replicas: int,
) -> float:
    """Return what is kept of a tensor once one of its savers has run.

    Args:
        tables, plans, run_tables, rules: See ``peaks.estimate_peaks``.
        made_saving: The saving of its producer, if that can save it; else -1.
        stage: Whose savers these are.
        producer, number: Of the tensor; its number among those that somebody reads.
        run, saving: Of the saver.
        kind: SHARD in segments, else WHOLE.
        arrived, arrived_replicas: Its bytes and replicas where it came in shards of the sequence; -1 where not.
    """
    saved_bytes, replicas = tables.saved_bytes, tables.replicas
    table = run_tables[run]
    value = saved_bytes[table, saving, OWN]
    if arrived >= 0.0:
        own = value
        value = min(arrived, own)
        if own > arrived and kind == WHOLE and (rules.keeps_gathered or arrived_replicas != replicas[table]):
            value += own
    elif producer != NEVER and producer >= stage.first and number >= 0:
        maker = run
        while maker > stage.begin and plans.run_stops[maker - 1] > producer:
            maker -= 1
        if maker == run or run_tables[maker] == table:
            value = saved_bytes[table, saving, kind]
        else:
            made_by = run_tables[maker]
            made, own = tables.made_bytes[made_by, number], value
            value = min(made, own)
            differs = replicas[made_by] != replicas[table] or not tables.in_shards[made_by, number]
            if own > made and kind == WHOLE and (rules.keeps_gathered or differs):
                saves_made = made_saving >= 0 and saved_bytes[made_by, made_saving, OWN] > 0.0
                value = own + made if rules.keeps_shards or saves_made else own
    return float(value)
