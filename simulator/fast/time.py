"""Compiled: iteration times of plans given as runs of equal strategy, from sums in tables.

The cost of a plan grows with its runs and recomputed segments, not with its operators. What a plan needs that
no table holds yet is noted and looked for again once it has been worked out (``estimate``).
"""

from __future__ import annotations

import numpy as np

from simulator.closed_forms import (
    breadth_first_time,
    host_time,
    interleaved_time,
    overlap_time,
    passes_time,
    pipeline_time,
    stage_rows,
    stage_units,
    step_time,
    zero_bubble_time,
)
from simulator.closed_forms.pipeline_time import SCRATCH
from simulator.closed_forms.stage_rows import NUM_COLUMNS
from simulator.compiled_cache import compiled_with, uncounted
from simulator.fast import (
    additions,
    arrays,
    boundaries,
    gathers,
    neighbours,
    overlap,
    parameters,
    pipeline,
    prices,
    recompute,
    regather,
    runs,
    stage_times,
    step,
    ties,
    whole_reductions,
)
from simulator.fast.arrays import (
    ADDED_S,
    BAD_ROUNDS,
    BAD_RUNS,
    DONE,
    ELEMENTS,
    INCOMPLETE,
    LAUNCHED,
    MAX_PENDING,
    STEP_COLUMNS,
    BesideRules,
    Floats,
    Ints,
    PassRules,
    PlanColumns,
    StepRules,
    Structure,
    TimeTables,
)
from simulator.fast.boundaries import add_transfers
from simulator.fast.gathers import UnitGathers
from simulator.fast.neighbours import Unlike
from simulator.fast.parameters import COPIED, Synchronised
from simulator.fast.pipeline import PipelineRoom, has_whole_rounds, passes_of_plan_s
from simulator.fast.regather import add_regathers
from simulator.fast.stage_times import StageRoom, StageTimes, fill_stage
from simulator.fast.step import add_step, find_norm
from simulator.fast.ties import tied_s
from simulator.lowering import step as lowering_step


@uncounted
def _fill(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    chosen: Ints,
    rules: PassRules,
    step_rules: StepRules,
    beside: BesideRules,
    iteration_s: Floats,
    run_tables: Ints,
    states: Ints,
    misses: Ints,
    counts: Ints,
    room: StageRoom,
    step_work: Floats,
    pipeline_room: PipelineRoom,
    times: StageTimes,
) -> None:
    """Fill the times of the chosen plans: ``estimate_times``, given room to work in."""
    for plan in chosen:
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        iteration_s[plan] = np.nan
        state, first, first_s = DONE, 0, 0.0
        for stage in range(low, high):
            first, found, before_s = fill_stage(
                shape, tables, plans, run_tables, plan, stage, first, rules, step_rules, beside, misses, counts, room,
                times,
            )  # fmt: skip
            state = found if found != DONE else state
            if found < 0:
                break
            first_s += before_s
        if state >= 0 and first != len(shape.classes):
            state = BAD_RUNS
        if state >= 0 and not has_whole_rounds(plans, plan, pipeline_room.ranks):
            state = BAD_ROUNDS
        if state < 0:
            states[plan] = state
            continue

        if rules.regathers and plans.reshards[plan] and state == DONE:
            add_regathers(shape, tables, plans, run_tables, plan, beside.gathered_bytes, room.pending, times.stage_s)
        known = add_transfers(
            shape, tables, plans, run_tables, room.in_shards, plan, times.stage_s, times.rows_s, misses, counts
        )
        state = state if known else INCOMPLETE
        ties_s, known = tied_s(shape, tables, plans, run_tables, plan, beside.tied_bytes, misses, counts)
        state = state if known else INCOMPLETE
        norm_s = 0.0
        if step_rules.has_norm:
            norm = find_norm(plans.placements, low, high, plan, tables.keys, tables.values, misses, counts)
            if norm < 0:
                state = INCOMPLETE
            else:
                norm_s = tables.norms_s[norm]
        states[plan] = state
        if state == DONE:
            add_step(
                shape, tables, plans, run_tables, plan, step_rules, ties_s, norm_s, times.launched_s, times.stage_s,
                times.rows_s, times.once_s, step_work,
            )  # fmt: skip
            blocking = rules.blocking[plans.schedule[plan]]
            passes_s = passes_of_plan_s(
                plans, plan, times.stage_s, times.once_s, times.rows_s, blocking, pipeline_room
            )
            iteration_s[plan] = first_s + ties_s + norm_s + passes_s


@compiled_with(
    additions,
    arrays,
    boundaries,
    gathers,
    neighbours,
    overlap,
    parameters,
    pipeline,
    prices,
    recompute,
    regather,
    runs,
    stage_times,
    step,
    ties,
    whole_reductions,
    breadth_first_time,
    host_time,
    interleaved_time,
    overlap_time,
    passes_time,
    pipeline_time,
    stage_rows,
    stage_units,
    step_time,
    zero_bubble_time,
    lowering_step,
)
def estimate_times(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    chosen: Ints,
    rules: PassRules,
    step_rules: StepRules,
    beside: BesideRules,
    iteration_s: Floats,
    stage_s: Floats,
    run_tables: Ints,
    states: Ints,
    misses: Ints,
    counts: Ints,
) -> None:
    """Fill the times of the chosen plans, as ``estimate`` has them.

    Args:
        shape, tables, plans: See there.
        chosen: Numbers of plans.
        rules: Of passes.
        step_rules: Of the optimizer's step.
        beside: Of what is sent beside passes.
        iteration_s, stage_s, run_tables: Results, per plan, stage and run.
        states: Per plan: DONE, INCOMPLETE, or what is wrong with it.
        misses: int64[., 4]. Kind, slot in the hash table, and where it is needed: table (run, stage), row
            (operator, stage), boundary (stage, plan), reduction of a tied weight
            (place in ``Structure.tied``, stage; or -1 - plan for all that hold it), norm (plan).
        counts: int64[1]. How many misses there are.
    """
    num_operators, num_stages, most = len(shape.classes), len(stage_s), 1
    for plan in chosen:
        most = max(most, plans.stage_offsets[plan + 1] - plans.stage_offsets[plan])
    room = StageRoom(
        Unlike(np.empty(num_operators, np.int64), np.empty(num_operators, np.int64), np.empty((num_operators, 2))),
        Synchronised(
            np.zeros(3, np.int64), np.empty((3, MAX_PENDING), np.int64), np.empty((3, MAX_PENDING), np.int64),
            np.empty((3, MAX_PENDING), np.int64), np.empty((3, MAX_PENDING)), np.zeros(MAX_PENDING, np.int64),
        ),
        UnitGathers(np.empty(MAX_PENDING, np.int64), np.empty(MAX_PENDING, np.int64), np.empty(MAX_PENDING)),
        np.zeros(COPIED),
        np.zeros(ELEMENTS - ADDED_S),
        np.zeros(2),
        np.zeros(len(shape.producers), np.int64),
    )  # fmt: skip
    pipeline_room = PipelineRoom(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most), np.empty((most, SCRATCH))
    )
    times = StageTimes(
        np.zeros((3, num_stages)), np.zeros((num_stages, LAUNCHED)), np.empty((num_stages, NUM_COLUMNS)), stage_s
    )
    _fill(
        shape, tables, plans, chosen, rules, step_rules, beside, iteration_s, run_tables, states, misses, counts, room,
        np.empty(STEP_COLUMNS), pipeline_room, times,
    )  # fmt: skip
