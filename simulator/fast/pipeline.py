"""Compiled: what the microbatches of a plan take, from what one takes in each stage."""

from __future__ import annotations

from typing import NamedTuple

from simulator.closed_forms import stage_rows
from simulator.closed_forms.breadth_first_time import breadth_first_s
from simulator.closed_forms.interleaved_time import interleaved_s
from simulator.closed_forms.pipeline_time import one_f_one_b_s
from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT, LESS, ONCE, UP, WEIGHT
from simulator.closed_forms.zero_bubble_time import zero_bubble_s
from simulator.compiled_cache import compiled_with, inlined
from simulator.fast.arrays import (
    GPIPE,
    INTERLEAVED,
    PASSED,
    REDUCED,
    UPDATED,
    WEIGHT_S,
    ZB_H1,
    Floats,
    Ints,
    PlanColumns,
    TimeTables,
)

_one_f_one_b_s = inlined(one_f_one_b_s)
_zero_bubble_s = compiled_with(stage_rows)(zero_bubble_s)
_interleaved_s = compiled_with(stage_rows)(interleaved_s)
_breadth_first_s = compiled_with(stage_rows)(breadth_first_s)


class PipelineRoom(NamedTuple):
    """Room for one plan of so many stages.

    Attributes:
        depths, ranks: int64[stages].
        sums_s: float64[stages].
        scratch_s: float64[stages, pipeline_time.SCRATCH].
    """

    depths: Ints
    ranks: Ints
    sums_s: Floats
    scratch_s: Floats


@inlined
def weights_s(tables: TimeTables, plans: PlanColumns, run_tables: Ints, stage: int, first: int) -> float:
    """Return what the weight gradients of a stage take.

    Args:
        tables, plans, run_tables: See ``time.estimate_times``.
        stage, first: Numbers of the stage, and of its first operator.
    """
    found_s, start = 0.0, first
    for run in range(plans.run_offsets[stage], plans.run_offsets[stage + 1]):
        table, ends = run_tables[run], plans.run_stops[run]
        found_s += tables.sums[table, ends, WEIGHT_S] - tables.sums[table, start, WEIGHT_S]
        start = ends
    return float(found_s)


@inlined
def _fill_ranks(placements: Ints, low: int, high: int, ranks: Ints) -> int:
    """Write the rank of each stage from ``low`` to ``high``, and return how many there are: one for each placement."""
    num_ranks = 0
    for stage in range(low, high):
        ranks[stage - low] = -1
        for other in range(low, stage):
            if placements[other] == placements[stage]:
                ranks[stage - low] = ranks[other - low]
        if ranks[stage - low] < 0:
            ranks[stage - low] = num_ranks
            num_ranks += 1
    return num_ranks


@inlined
def _longest_s(ranks: Ints, seconds: Floats, sums_s: Floats) -> float:
    """Return the most of the sums over the stages of a rank; ``sums_s`` is room for them."""
    longest_s = 0.0
    sums_s[:] = 0.0
    for stage in range(len(seconds)):
        sums_s[ranks[stage]] += seconds[stage]
        longest_s = max(longest_s, sums_s[ranks[stage]])
    return longest_s


@inlined
def has_whole_rounds(plans: PlanColumns, plan: int, ranks: Ints) -> bool:
    """Return whether interleaved stages and microbatches come in whole rounds over the ranks; ``ranks`` is room."""
    low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    if plans.schedule[plan] != INTERLEAVED or high - low == 1:
        return True
    num_ranks = _fill_ranks(plans.placements, low, high, ranks)
    return bool((high - low) % num_ranks == 0 and plans.num_microbatches[plan] % num_ranks == 0)


@inlined
def passes_of_plan_s(
    plans: PlanColumns,
    plan: int,
    stage_s: Floats,
    once_s: Floats,
    rows_s: Floats,
    blocking: bool,
    room: PipelineRoom,
) -> float:
    """Return the seconds of the passes of all microbatches of a plan, and of what comes once behind them.

    Args:
        plans, stage_s: See ``time.estimate_times``.
        plan: Its number.
        blocking: See ``PassRules``.
        once_s: float64[3, stages]. What each stage does behind its last pass, as ``step_time.phases_s`` has it.
        rows_s: float64[stages, NUM_COLUMNS]. Of each stage, as ``stage_rows`` has them, but for ONCE, and INPUT,
            the rest of ``stage_s``, which are filled here. What recomputed layers gather once more counts as of the
            backward pass.
        room: To work in.
    """
    low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    m, schedule = plans.num_microbatches[plan], plans.schedule[plan]
    if high - low == 1:
        passes_s = rows_s[low, FORWARD_LAG] + m * stage_s[low] - rows_s[low, LESS]
        return float(passes_s + once_s[REDUCED, low] + once_s[PASSED, low] + once_s[UPDATED, low])
    depths, ranks, sums_s, scratch_s = room
    num_ranks = high - low
    if schedule in (INTERLEAVED, GPIPE):
        num_ranks = _fill_ranks(plans.placements, low, high, ranks)
    else:
        for stage in range(num_ranks):
            ranks[stage] = stage
    behind_s = _longest_s(ranks, once_s[PASSED, low:high], sums_s)
    behind_s += _longest_s(ranks, once_s[UPDATED, low:high], sums_s)
    for stage in range(low, high):
        forward_s, down_s, up_s = rows_s[stage, FORWARD], rows_s[stage, DOWN], rows_s[stage, UP]
        rows_s[stage, ONCE] = once_s[REDUCED, stage]
        rows_s[stage, INPUT] = stage_s[stage] - forward_s - rows_s[stage, WEIGHT] - down_s - up_s
        if blocking and schedule != INTERLEAVED:
            rows_s[stage, FORWARD] += down_s
            rows_s[stage, INPUT] += up_s
            rows_s[stage, DOWN] = rows_s[stage, UP] = 0.0
        depths[stage - low] = plans.warmups[stage] if plans.warmups[stage] > 0 else min(high - stage, m)
        if schedule == GPIPE:
            depths[stage - low] = m
    own_s = rows_s[low:high]
    if schedule == ZB_H1:
        passes_s = _zero_bubble_s(own_s, own_s, m)
    elif schedule == INTERLEAVED:
        passes_s = _interleaved_s(own_s, own_s, num_ranks, m, blocking)
    elif num_ranks < high - low:
        passes_s = _breadth_first_s(own_s, own_s, ranks, m)
    else:
        passes_s = _one_f_one_b_s(own_s, own_s, depths, m, scratch_s)
    return float(behind_s + passes_s)
