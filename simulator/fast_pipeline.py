"""Compiled: what the microbatches of a plan take, from what one takes in each stage."""

from __future__ import annotations

import numpy as np

from simulator import fast_arrays, interleaved_time, pipeline_time, zero_bubble_time
from simulator.compiled_cache import compiled, compiled_with
from simulator.fast_arrays import DONE, GPIPE, INTERLEAVED, WEIGHT_S, ZB_H1, Floats, Ints, PlanColumns, TimeTables
from simulator.interleaved_time import interleaved_s
from simulator.pipeline_time import one_f_one_b_s
from simulator.zero_bubble_time import DOWN, FORWARD, INPUT, UP, WEIGHT, zero_bubble_s

_zero_bubble_s = compiled(zero_bubble_s)
_one_f_one_b_s = compiled(one_f_one_b_s)
_interleaved_s = compiled(interleaved_s)


@compiled_with(fast_arrays)
def weights_s(tables: TimeTables, plans: PlanColumns, run_tables: Ints, stage: int, first: int) -> float:
    """Return what the weight gradients of a stage take.

    Args:
        tables, plans, run_tables: See ``fast_time.estimate_times``.
        stage, first: Numbers of the stage, and of its first operator.
    """
    found_s, start = 0.0, first
    for run in range(plans.run_offsets[stage], plans.run_offsets[stage + 1]):
        table, ends = run_tables[run], plans.run_stops[run]
        found_s += tables.sums[table, ends, WEIGHT_S] - tables.sums[table, start, WEIGHT_S]
        start = ends
    return float(found_s)


@compiled
def _shares(placements: Ints, low: int, high: int) -> bool:
    for stage in range(low, high):
        for other in range(low, stage):
            if placements[other] == placements[stage]:
                return True
    return False


@compiled
def _of_ranks(placements: Ints, seconds: Floats, low: int, high: int) -> tuple[float, float, int]:
    """Return the sum over the stages from ``low`` to ``high``, the most of a rank's stages, and the number of ranks.

    Stages on one placement follow one another on it.
    """
    total_s, longest_s, num_ranks = 0.0, 0.0, 0
    for stage in range(low, high):
        total_s += seconds[stage]
        rank_s, is_first = 0.0, True
        for other in range(low, high):
            if placements[other] == placements[stage]:
                rank_s += seconds[other]
                is_first = is_first and other >= stage
        longest_s = max(longest_s, rank_s)
        num_ranks += is_first
    return total_s, longest_s, num_ranks


@compiled
def _shared_s(placements: Ints, stage_s: Floats, low: int, high: int, m: int) -> float:
    """Return the seconds of m microbatches where stages on one placement follow one another on it."""
    total_s, longest_s, num_ranks = _of_ranks(placements, stage_s, low, high)
    chunks = (high - low) / num_ranks
    fill_s = total_s / chunks
    return (m - 1) * longest_s + fill_s + (chunks - 1) * fill_s / num_ranks


@compiled_with(fast_arrays, interleaved_time, pipeline_time, zero_bubble_time)
def add_passes(
    plans: PlanColumns,
    chosen: Ints,
    states: Ints,
    stage_s: Floats,
    once_s: Floats,
    split_s: Floats,
    blocking: bool,
    iteration_s: Floats,
) -> None:
    """Add the passes of all microbatches, and what comes once behind them, to the times of chosen plans that are done.

    For all plans at once: a call for each of them would count references on every array that it is given.

    Args:
        plans, chosen, states, stage_s, blocking, iteration_s: See ``fast_time.estimate_times``.
        once_s: float64[stages]. What reducing gradients and gathering parameters takes each stage.
        split_s: float64[stages, SPLIT]. Of each stage, as ``zero_bubble_s`` has them, but for INPUT: the rest of
            ``stage_s``, which is filled here. Gathers of parameters count as of the backward pass, whichever they are
            for.
    """
    most = 0
    for plan in chosen:
        most = max(most, plans.stage_offsets[plan + 1] - plans.stage_offsets[plan])
    depths, scratch_s = np.empty(most, np.int64), np.empty((most, 2))
    for plan in chosen:
        if states[plan] != DONE:
            continue
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        m, schedule = plans.num_microbatches[plan], plans.schedule[plan]
        if high - low == 1:
            iteration_s[plan] += m * stage_s[low] + once_s[low]
            continue
        shares = schedule == INTERLEAVED or (schedule == GPIPE and _shares(plans.placements, low, high))
        num_ranks = high - low
        if shares:
            _, longest_s, num_ranks = _of_ranks(plans.placements, once_s, low, high)
            iteration_s[plan] += longest_s
        else:
            iteration_s[plan] += np.max(once_s[low:high])
        if shares and schedule == GPIPE:
            iteration_s[plan] += _shared_s(plans.placements, stage_s, low, high, m)
            continue
        for stage in range(low, high):
            forward_s, down_s, up_s = split_s[stage, FORWARD], split_s[stage, DOWN], split_s[stage, UP]
            split_s[stage, INPUT] = stage_s[stage] - forward_s - split_s[stage, WEIGHT] - down_s - up_s
            if blocking and schedule != INTERLEAVED:
                split_s[stage, FORWARD] += down_s
                split_s[stage, INPUT] += up_s
                split_s[stage, DOWN] = split_s[stage, UP] = 0.0
            depths[stage - low] = plans.warmups[stage] if plans.warmups[stage] > 0 else min(high - stage, m)
            if schedule == GPIPE:
                depths[stage - low] = m
        own_s = split_s[low:high]
        if schedule == ZB_H1:
            iteration_s[plan] += _zero_bubble_s(own_s, own_s, m)
        elif schedule == INTERLEAVED:
            iteration_s[plan] += _interleaved_s(own_s, own_s, num_ranks, m, blocking)
        else:
            iteration_s[plan] += _one_f_one_b_s(own_s, own_s, depths, m, scratch_s)
