"""Compiled: what the microbatches of a plan take, from what one takes in each stage."""

from __future__ import annotations

from simulator import fast_arrays, zero_bubble_time
from simulator.compiled_cache import compiled, compiled_with, inlined
from simulator.fast_arrays import FORWARD_S, WEIGHT_S, Floats, Ints, PlanColumns, TimeTables
from simulator.zero_bubble_time import DOWN, FORWARD, INPUT, UP, WEIGHT, zero_bubble_s

_zero_bubble_s = compiled(zero_bubble_s)


@compiled_with(fast_arrays, zero_bubble_time)
def split_passes(
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    stage: int,
    first: int,
    passes_s: Floats,
    over_s: Floats,
    num_over: int,
    split_s: Floats,
) -> None:
    """Fill what the forward and the weight-gradient pass of a stage take, but for what leaves it.

    Gathers of parameters count as of the backward pass, whichever they are for.

    Args:
        tables, plans, run_tables, passes_s: See ``fast_time.estimate_times``.
        plan, stage, first: Numbers of the plan and the stage, and of its first operator.
        over_s, num_over: What forward passes of operators between unlike neighbours take more than in ``tables.sums``.
        split_s: See ``split_filled_s``.
    """
    place = stage - plans.stage_offsets[plan]
    forward_s = weight_s = passes_s[plans.schedule[plan]] / 3
    start = first
    for run in range(plans.run_offsets[stage], plans.run_offsets[stage + 1]):
        table, ends = run_tables[run], plans.run_stops[run]
        forward_s += tables.sums[table, ends, FORWARD_S] - tables.sums[table, start, FORWARD_S]
        weight_s += tables.sums[table, ends, WEIGHT_S] - tables.sums[table, start, WEIGHT_S]
        start = ends
    for at in range(num_over):
        forward_s += over_s[at]
    split_s[place, FORWARD], split_s[place, WEIGHT] = forward_s, weight_s
    split_s[place, DOWN], split_s[place, UP] = 0.0, 0.0


@compiled_with(fast_arrays, zero_bubble_time)
def split_filled_s(plans: PlanColumns, plan: int, stage_s: Floats, split_s: Floats, blocking: bool) -> float:
    """Return the seconds of all microbatches under zb-h1.

    Args:
        plans, stage_s: See ``fast_time.estimate_times``.
        plan: Its number.
        split_s: float64[stages, SPLIT]. Of its stages, as ``zero_bubble_s`` has them, but for INPUT: the rest of
            ``stage_s``, which is filled here.
        blocking: A stage goes on only when what it sent has arrived.
    """
    low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    for stage in range(low, high):
        row = split_s[stage - low]
        row[INPUT] = stage_s[stage] - row[FORWARD] - row[WEIGHT] - row[DOWN] - row[UP]
        if blocking:
            row[FORWARD] += row[DOWN]
            row[INPUT] += row[UP]
            row[DOWN] = row[UP] = 0.0
    own_s = split_s[: high - low]
    return float(_zero_bubble_s(own_s, own_s, plans.num_microbatches[plan]))


@inlined
def of_ranks(placements: Ints, seconds: Floats, low: int, high: int) -> tuple[float, float, int]:
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


@inlined
def filled_s(placements: Ints, stage_s: Floats, low: int, high: int, m: int) -> float:
    """Return the seconds of m microbatches through the stages from ``low`` to ``high``, but for zb-h1."""
    total_s, longest_s, num_ranks = of_ranks(placements, stage_s, low, high)
    chunks = (high - low) / num_ranks
    fill_s = total_s / chunks
    return (m - 1) * longest_s + fill_s + (chunks - 1) * fill_s / num_ranks
