"""A closed-form estimate of a plan on the shared cost tables: for searchers, about a millisecond.

Time: that of the passes, by schedule, with what gathers and reductions add to them (``overlap_time``), plus what a
stage does once, when its last pass is through: reductions that are left, the optimizer's step (``step_time``),
refreshed parameters; where all ranks agree on the norm of the gradients, they wait for the slowest before it and behind
it. 1F1B and GPipe: ``pipeline_time``; GPipe of stages that share devices: ``breadth_first_time``; zb-h1:
``zero_bubble_time``; interleaved: ``interleaved_time``. All follow the schedule's own order, with transfers beside
passes where the runtime has them so. Where replicas take whole microbatches in turn, ``rotated_s``, and with a smaller
last one ``queued_s``, transfers in full. Memory: ``estimate_memory``. Groups of one collective, transfers of one
boundary and reductions of one tied weight run at once and share links (``hardware_models.crowding``); nothing else
does, such as two boundaries or stages that meet on a card. No overlap of collectives with the gradients of one
operator, no allocator: the engine has those.

Of the host: where it never runs ahead, nothing hides launches, and an operator takes at least its own. Where it does
and waits for what a pass receives (``host_waits``), a pass takes as long as its device or its host works, whichever is
longer. Else passes take what the device does, so that what comes to a stage is passed on so quickly, and what the host
takes longer for a microbatch lies behind them; what it does before a pass that it waits for, and before the first,
lengthens the way through the stages (``lags_s``). Launching transfers, and gathers of what arrives in parts, is left
out (too fast where the host takes longest, as ``Estimate.host_binds`` says).

Source: the pipeline formula of Aceso (EuroSys 2024) Eq. 1 and Megatron-LM (SC 2021) Section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.breadth_first_time import breadth_first_s
from simulator.closed_forms.estimate_memory import held_bytes, rank_peaks
from simulator.closed_forms.interleaved_time import interleaved_s
from simulator.closed_forms.passes_time import gradients_s
from simulator.closed_forms.pipeline_time import SCRATCH, one_f_one_b_s
from simulator.closed_forms.stage_passes import stage_passes
from simulator.closed_forms.stage_prices import (
    collective_s,
    host_seconds,
    items_s,
    num_passes,
    passes_s,
    rebuilt_s,
    stage_step_s,
    tied_s,
    transfers_s,
    weights_s,
)
from simulator.closed_forms.stage_rows import INPUT, ONCE, WEIGHT
from simulator.closed_forms.step_time import host_goes_on, phases_s, waited_s
from simulator.closed_forms.zero_bubble_time import zero_bubble_s
from simulator.costs import CostTables, cost_tables
from simulator.fidelity import Fidelity
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import stage_views
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.lowering.step import norm_s
from simulator.lowering.synchronisation import parameter_refresh, reshards
from simulator.lowering.transfers import boundary, crossing_tensors, received_gathers
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.schedules.one_f_one_b import warmup_p_a


@dataclass(frozen=True)
class Estimate:
    """What the closed form says.

    Attributes:
        iteration_time_s: Seconds.
        stage_time_s: Forward plus backward of one microbatch, collectives and transfers included.
        peak_bytes: Per stage.
        capacity_bytes: Per stage.
        host_time_s: What launching all microbatches takes the busiest host: kernels, dispatch, collectives, passes.
            None where it was not looked at (``FastEstimator``).
    """

    iteration_time_s: float
    stage_time_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    capacity_bytes: tuple[float, ...]
    host_time_s: float | None = None

    @property
    def host_binds(self) -> bool:
        """A host alone needs longer than the estimate says, which is too fast: simulate."""
        return self.host_time_s is not None and self.host_time_s > self.iteration_time_s * (1 + 1e-9)

    @property
    def fits(self) -> bool:
        """Every stage is within its capacity."""
        return all(peak <= capacity for peak, capacity in zip(self.peak_bytes, self.capacity_bytes, strict=True))


def estimate(plan: Plan, problem: Problem, costs: CostTables | None = None) -> Estimate:
    """Return the closed-form estimate of a legal plan.

    Args:
        plan: Legal for the problem (``simulator.validate``).
        problem: The problem.
        costs: Cost tables; None for those that all calls on the same problem share.
    """
    costs = costs or cost_tables(problem)
    plan = plan.canonical(problem.workload)
    views = stage_views(plan, costs)
    ties_s = tied_s(costs, views)
    stages = last_stages = _stage_times(plan, views, has_ties=ties_s > 0)
    held = last_held = [held_bytes(view) for view in views]
    capacities = tuple(min(map(problem.capacity_bytes, view.stage.devices)) for view in views)
    if plan.last_microbatch_size is not None:
        last_views = stage_views(plan.all_like_last(), costs)
        last_stages = _stage_times(plan, last_views, has_ties=ties_s > 0)
        last_held = [held_bytes(view) for view in last_views]
    blocking = problem.runtime.blocks_on_transfers(plan.schedule)
    iteration = _filled_s(plan, [view.num_turns for view in views], stages, last_stages, blocking=blocking)
    all_hosts = [
        (plan.num_microbatches - 1) * each + last for each, last in zip(stages.hosts, last_stages.hosts, strict=True)
    ]
    iteration += stages.first + ties_s + norm_s(costs, plan.devices)
    iteration += sum(max(_per_rank(plan.rank_of_stage, each)) for each in (stages.passed, stages.updated))
    return Estimate(
        iteration_time_s=iteration,
        stage_time_s=tuple(stages.times),
        peak_bytes=rank_peaks(plan, held, last_held),
        capacity_bytes=capacities,
        host_time_s=max(_per_rank(plan.rank_of_stage, all_hosts)),
    )


@dataclass(frozen=True)
class _StageTimes:
    """Per stage, seconds.

    Attributes:
        times: One microbatch.
        hosts: Its launches.
        passed, updated: What comes once per iteration behind sums of tied weights and the norm, as ``phases_s`` has it.
        rows: float64[stages, NUM_COLUMNS]. As ``stage_rows`` has them.
        first: What the first microbatch takes besides on its way through all stages.
    """

    times: list[float]
    hosts: list[float]
    passed: list[float]
    updated: list[float]
    rows: NDArray[np.float64]
    first: float


def _filled_s(plan: Plan, turns: Sequence[int], stages: _StageTimes, last: _StageTimes, *, blocking: bool) -> float:
    """Return the seconds of all microbatches and of what ranks do behind them until they wait for one another.

    See the module's docstring.
    """
    m, smaller = plan.num_microbatches, plan.last_microbatch_size is not None
    ranks = plan.rank_of_stage
    once_s = max(_per_rank(ranks, stages.rows[:, ONCE].tolist()))
    if plan.rotates and smaller:
        return once_s + queued_s(_per_rank(ranks, stages.times), _per_rank(ranks, last.times), m)
    if plan.rotates:
        whole_s = [time * n for time, n in zip(stages.times, turns, strict=True)]
        own_turns = [turns[ranks.index(rank)] for rank in range(max(ranks) + 1)]
        return once_s + rotated_s(_per_rank(ranks, whole_s), own_turns, m)
    if plan.schedule == "zb-h1":
        return zero_bubble_s(stages.rows, last.rows, m)
    if plan.schedule == "interleaved":
        return interleaved_s(stages.rows, last.rows, max(ranks) + 1, m, blocking)
    if plan.schedule == "gpipe" and max(ranks) + 1 < len(plan.stages):
        return breadth_first_s(stages.rows, last.rows, np.array(ranks), m)
    depths, scratch_s = warmup_depths(plan), np.empty((len(plan.stages), SCRATCH))
    found_s = one_f_one_b_s(stages.rows, last.rows, depths, m, scratch_s, smaller)
    if smaller:
        others = stages.rows.copy()
        others[:, ONCE] = 0.0
        before_s = one_f_one_b_s(others, others, np.minimum(depths, m - 1), m - 1, scratch_s)
        found_s = max(found_s, before_s + last.rows[0, INPUT] + last.rows[0, WEIGHT] + stages.rows[0, ONCE])
    return found_s


def warmup_depths(plan: Plan) -> NDArray[np.int64]:
    """Return how many forwards each stage of a plan under 1F1B or GPipe does before its first backward."""
    p, m = len(plan.stages), plan.num_microbatches
    if plan.schedule == "gpipe":
        return np.full(p, m)
    return np.array(plan.warmup_in_force() or warmup_p_a(p, m))


def _per_rank(ranks: Sequence[int], times: Sequence[float]) -> list[float]:
    found = [0.0] * (max(ranks) + 1)
    for rank, time in zip(ranks, times, strict=True):
        found[rank] += time
    return found


def queued_s(each_s: Sequence[float], last_s: Sequence[float], num_microbatches: int) -> float:
    """Return the seconds of a pipeline whose last microbatch is smaller, by its stages' whole times.

    It queues behind the others up to some stage j: the longest over j of ``(m - 2) * max_{i<=j} t_i + sum_{i<=j} t_i +
    sum_{i>=j} s_i``.

    Args:
        each_s, last_s: Per pipeline rank, a microbatch that is not the last, and the last.
        num_microbatches: At least two.

    >>> queued_s([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], 4), queued_s([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], 4)
    (11.0, 12.0)
    """
    return max(
        (num_microbatches - 2) * max(each_s[: j + 1]) + sum(each_s[: j + 1]) + sum(last_s[j:])
        for j in range(len(each_s))
    )


def rotated_s(whole_s: Sequence[float], turns: Sequence[int], num_microbatches: int) -> float:
    """Return the seconds of a pipeline some of whose stages have replicas that take whole microbatches in turn.

    The longest over stages of: a replica's microbatches one after the other, once through all other stages, and until
    its last replica has its first microbatch.

    Args:
        whole_s: Per stage, a microbatch on one replica.
        turns: Per stage, replicas.
        num_microbatches: At least one.

    >>> rotated_s([1.0, 3.0], [1, 3], 6), rotated_s([1.0, 3.0], [1, 1], 6)
    (9.0, 19.0)
    """
    return max(
        (-(-num_microbatches // own) - 1) * time
        + sum(whole_s)
        + max(((-(-min(own, num_microbatches) // turns[j]) - 1) * whole_s[j] for j in range(position)), default=0.0)
        for position, (time, own) in enumerate(zip(whole_s, turns, strict=True))
    )


def _stage_times(plan: Plan, views: Sequence[StageView], *, has_ties: bool) -> _StageTimes:
    costs = views[0].costs
    crossing = crossing_tensors(views)
    transfers = [
        boundary(first, second, relayed) for first, second, relayed in zip(views, views[1:], crossing, strict=False)
    ]
    times, hosts, rows, all_passes = [], [], [], []
    only_one = plan.num_microbatches == 1
    for view in views:
        builder = ProgramBuilder(view, Fidelity())
        before, after = view.position - 1, view.position + 1
        arrived = received_gathers(view, views[before], crossing[before]) if before >= 0 else []
        returned = received_gathers(view, views[after], crossing[view.position]) if after < len(views) else []
        gather = reshards(view)
        forward = builder.forward(gather=gather, received=arrived)
        backward = builder.backward(GRADIENTS, gather=gather, sync=False, received=returned, first=only_one)
        gathering = forward if gather else builder.forward(gather=True, received=arrived)
        up_s = transfers_s(costs, transfers[before][1]) if before >= 0 else 0.0
        down_s = transfers_s(costs, transfers[view.position][0]) if after < len(views) else 0.0
        arrived_s, returned_s = (
            items_s(view, [item for item in items if item.cause == "transfer"]) for items in (forward, backward)
        )
        found = stage_passes(view, forward, backward, gathering)
        passes, behind_s = found.passes, found.behind
        forward_s = passes.forward + arrived_s
        time = forward_s + passes.backward + returned_s + up_s + down_s + passes.reduced + behind_s
        time += max(passes_s(costs, gpu_type, plan.schedule) for gpu_type in view.gpu_types)
        times.append(time / view.num_turns)
        host = host_seconds(view, forward) + host_seconds(view, backward)
        host += num_passes(plan.schedule) * max(map(costs.pass_s, view.gpu_types))
        hosts.append(host / view.num_turns)
        all_passes.append(found)
        row = _row(view, plan, time, forward_s, down_s, up_s, passes.inline, passes.reduced + behind_s)
        less_s = 0.0
        if costs.problem.runtime.hands_over_gradients and not only_one:
            shorter = builder.backward(GRADIENTS, gather=gather, sync=False, received=returned, first=True)
            less_s = gradients_s(found) - gradients_s(stage_passes(view, forward, shorter, gathering))
        rows.append([*row, found.forward_lag, found.backward_lag, 0.0, less_s])
    own_rows, own_times = np.array(rows), np.array(times)
    passed, updated = [], []
    norm_seconds = norm_s(costs, plan.devices)
    goes_on = len(views) > 1 and host_goes_on(costs.problem.runtime)
    has_own = goes_on and _has_own_ranks(plan)
    for stage, (view, found) in enumerate(zip(views, all_passes, strict=True)):
        ahead_s, once_s = found.ahead, found.passes.once
        if has_own:
            weight_s = own_rows[stage, WEIGHT] if plan.schedule == "zb-h1" else 0.0
            apart = plan.schedule == "gpipe"
            ahead_s += waited_s(own_rows, own_times, stage, plan.num_microbatches, apart, weight_s)
        if not goes_on or has_own:  # Else nobody knows how long its stage waits.
            ahead_s -= found.launching
            once_s = max(once_s, found.last - ahead_s)
        passed_s, updated_s = stage_step_s(view, ahead_s + found.passes.reduced + once_s, norm_seconds)
        updated_s += sum(collective_s(view, item) for item in parameter_refresh(view)) + rebuilt_s(view)
        own_rows[stage, ONCE], *later = phases_s(once_s, passed_s, updated_s, has_ties, norm_seconds > 0)
        passed.append(later[0])
        updated.append(later[1])
    return _StageTimes(times, hosts, passed, updated, own_rows, sum(found.passes.first for found in all_passes))


def _has_own_ranks(plan: Plan) -> bool:
    """Return whether no stage shares its devices with another, or takes whole microbatches in turn."""
    return not plan.rotates and plan.schedule != "interleaved" and len(set(plan.rank_of_stage)) == len(plan.stages)


def _row(
    view: StageView,
    plan: Plan,
    time_s: float,
    forward_s: float,
    down_s: float,
    up_s: float,
    inline_s: float,
    behind_s: float,
) -> list[float]:
    """Return a row of ``stage_rows``, but for lags and what comes once.

    What recomputed layers gather once more counts as of the backward pass.

    Args:
        view, plan: The stage, and of what.
        time_s: All that a microbatch takes there.
        forward_s: Of that, its forward pass, with gathers and what arrives in parts.
        down_s, up_s: Of that, what it sends to the next stage and to the one before.
        inline_s: Of that, what comes with weight gradients, reductions and copies.
        behind_s: Of that, what comes when its gradient has been sent on: reductions, hosts that take longer.
    """
    costs, schedule = view.costs, plan.schedule
    pass_s = max(passes_s(costs, gpu_type, schedule) for gpu_type in view.gpu_types) / num_passes(schedule)
    forward_s += pass_s
    weight_s = behind_s
    if schedule == "zb-h1":
        weight_s += pass_s + weights_s(view, first=plan.num_microbatches == 1) + inline_s
    input_s = time_s - forward_s - weight_s - down_s - up_s
    if costs.problem.runtime.blocks_on_transfers(schedule) and schedule != "interleaved":
        return [forward_s + down_s, input_s + up_s, weight_s, 0.0, 0.0]
    return [forward_s, input_s, weight_s, down_s, up_s]
