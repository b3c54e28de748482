"""What the items and transfers of a stage take, each alone: prices that closed forms and searchers add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from hardware_models.crowding import CrowdedGroup, together_s, unlike_groups
from simulator.closed_forms.overlap_time import beside_s
from simulator.closed_forms.step_time import step_s
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.copies import COPIES
from simulator.lowering.epilogue import tied_groups
from simulator.lowering.handover import handover_s
from simulator.lowering.items import GRADIENTS, Item
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.program import StageView
from simulator.lowering.step import (
    adam_launches,
    gradient_pass_s,
    num_launches,
    passes_gradients,
    rebuilding_s,
    step_work,
)
from simulator.lowering.synchronisation import handed_over
from simulator.lowering.transfers import Transfer
from simulator.operator_cost import BACKWARD_WEIGHT_ALONE, RECOMPUTED
from simulator.segments import Segment
from workloads.kinds.base import BACKWARD_WEIGHT, FORWARD

ALL = Fidelity()
"""Closed forms have every effect."""


def weights_s(view: StageView, *, first: bool) -> float:
    """Return the seconds of the weight gradients of a stage's operators, in the first microbatch or a later one."""
    return items_s(view, [_gradients(view, (BACKWARD_WEIGHT,), first=first)])


def added_s(view: StageView) -> tuple[float, float]:
    """Return what gradients take longer than the first microbatch's, and launching them a host that runs ahead."""
    if not view.costs.problem.runtime.hands_over_gradients:
        return 0.0, 0.0
    later, first = ([_gradients(view, GRADIENTS, first=first)] for first in (False, True))
    return items_s(view, later) - items_s(view, first), launches_s(view, later) - launches_s(view, first)


def again_s(view: StageView) -> tuple[float, float]:
    """Return what recomputing a stage's operators takes longer than their forward pass, and their host's launches."""
    again, forward = ([Item(phase, [(index, phase) for index in view.operators])] for phase in (RECOMPUTED, FORWARD))
    return items_s(view, again) - items_s(view, forward), launches_s(view, again) - launches_s(view, forward)


def _gradients(view: StageView, phases: tuple[str, ...], *, first: bool) -> Item:
    alone = handed_over(view, first=first)
    parts = [
        (index, BACKWARD_WEIGHT_ALONE if index in alone and phase == BACKWARD_WEIGHT else phase)
        for index in view.operators
        for phase in phases
    ]
    return Item("gradients", parts)


def items_s(view: StageView, items: list[Item]) -> float:
    """Return the seconds of items one after the other, each alone, each operator on the slowest type of the stage.

    But collectives that travel beside gradients of their operator do so. Launches are in it where the host never runs
    ahead.
    """
    total = sent_s = 0.0
    types = view.gpu_types
    for item in items:
        if item.collective is not None:
            seconds = collective_s(view, item.collective) + handover_s(view, item, ALL)
            if item.chained:
                total += seconds
            else:
                sent_s += seconds
            continue
        computed_s = 0.0
        for index, parts in groupby(item.parts, key=itemgetter(0)):
            phases = [phase for _, phase in parts if phase not in COPIES]
            computed_s += max(_operator_s(view, index, phases, gpu_type) for gpu_type in types)
        total += beside_s(computed_s, sent_s, *slowdowns(view)) if sent_s else computed_s
        sent_s = 0.0
    return total + sent_s


def slowdowns(view: StageView) -> tuple[float, float]:
    """Return by how much computation and communication are slower at once, on the type that loses most."""
    found = [view.costs.problem.hardware.overlap_slowdown(gpu_type) for gpu_type in view.gpu_types]
    return max(each[0] for each in found), max(each[1] for each in found)


def _operator_s(view: StageView, index: int, phases: Sequence[str], gpu_type: str) -> float:
    cost = view.costs.operator(index, view.shardings[index], view.samples(index), gpu_type)
    segments: list[Segment] = [getattr(cost, phase) for phase in phases]
    if view.costs.problem.runtime.host_runs_ahead:
        return sum(segment.device_s for segment in segments)
    return max(sum(one.device_s for one in segments), sum(one.host_s for one in segments))


def beyond_host_s(view: StageView, index: int) -> tuple[float, float, float, float]:
    """Return what an operator takes beyond its host: forward the device and the bound, and so backward.

    Each of the type with most of it.
    """
    costs = view.costs
    found = (costs.operator(index, view.shardings[index], view.samples(index), gpu_type) for gpu_type in view.gpu_types)
    of_types = [
        tuple(
            beyond_s
            for segment in (cost.forward, cost.backward)
            for beyond_s in (segment.device_s - segment.host_s, segment.bound_s - segment.host_s)
        )
        for cost in found
    ]
    forward_s, forward_bound_s, backward_s, backward_bound_s = map(max, zip(*of_types, strict=True))
    return forward_s, forward_bound_s, backward_s, backward_bound_s


def collective_s(view: StageView, item: MeshCollective) -> float:
    """Return the seconds of a collective of a stage, all its groups at once: of the slowest group."""
    unlike = view.costs.unlike_groups(view.stage.devices, item.sizes, item.axes)
    return _slowest_s(view.costs, item.collective, item.num_bytes, unlike)


def _slowest_s(costs: CostTables, collective: str, num_bytes: float, groups: Sequence[CrowdedGroup]) -> float:
    hardware = costs.problem.hardware
    return max(
        (
            hardware.crowded_collective_s(collective, num_bytes, group) + costs.collective_delay_s(group.members)
            for group in groups
        ),
        default=0.0,
    )


def tied_s(costs: CostTables, views: Sequence[StageView]) -> float:
    """Return the seconds of reducing tied weights after the last backward pass.

    Layouts of a stage first, each as if alone, then over stages, all groups at once; one weight after the other.
    """
    inner: dict[str, list[tuple[int, ...]]] = {}
    outer: dict[str, list[tuple[int, ...]]] = {}
    sizes: dict[str, float] = {}
    stages = {view.stage.devices for view in views}
    for tie, devices, size in tied_groups(views):
        (inner if devices in stages else outer).setdefault(tie, []).append(devices)
        sizes[tie] = size
    cluster = costs.problem.hardware.cluster
    return sum(
        _slowest_s(costs, "all_reduce", size, [CrowdedGroup(devices) for devices in inner.get(tie, ())])
        + _slowest_s(costs, "all_reduce", size, unlike_groups(cluster, outer.get(tie, ())))
        for tie, size in sizes.items()
    )


def rebuilt_s(view: StageView) -> float:
    """Return the seconds of putting together what is kept whole of ranks' parts, behind the step."""
    num_rebuilt = step_work(view).num_rebuilt
    count = view.plan.num_microbatches
    return max(rebuilding_s(view.costs, gpu_type, num_rebuilt, count) for gpu_type in view.gpu_types)


def stage_step_s(view: StageView, ahead_s: float, norm_s: float) -> tuple[float, float]:
    """Return the seconds of a stage's step before and behind the norm: on its slowest type, by its slowest host.

    Args:
        view: The stage.
        ahead_s: See ``step_s``.
        norm_s: Of the collective between; 0 for none.
    """
    costs, work = view.costs, step_work(view)
    problem = costs.problem
    runtime, types = problem.runtime, view.gpu_types
    pass_s = 0.0
    if passes_gradients(runtime):
        pass_s = max(gradient_pass_s(costs, gpu_type, work.passed_bytes) for gpu_type in types)
    return step_s(
        pass_s,
        max(problem.hardware.optimizer_step_s(gpu_type, work.touched_bytes) for gpu_type in types),
        num_launches(adam_launches(runtime), work.num_stepped, work.touched_bytes),
        max(map(costs.launch_s, types)),
        ahead_s,
        runtime.host_runs_ahead,
        norm_s > 0 and "optimizer" in runtime.host_waits,
    )


def transfers_s(costs: CostTables, transfers: list[Transfer]) -> float:
    """Return the seconds of transfers that run side by side, and of launching them one by one if nothing hides that."""
    problem = costs.problem
    longest = together_s(problem.hardware.transfer(t.num_bytes, t.source, t.target) for t in transfers)
    if problem.runtime.host_runs_ahead or not transfers:
        return longest
    launches = Counter(transfer.source for transfer in transfers), Counter(transfer.target for transfer in transfers)
    return longest + sum(
        max(count * costs.launch_s(problem.gpu_types[device]) for device, count in side.items()) for side in launches
    )


def passes_s(costs: CostTables, gpu_type: str, schedule: str) -> float:
    """Return what the framework spends on the passes of a microbatch through a stage, if nothing hides it."""
    return 0.0 if costs.problem.runtime.host_runs_ahead else num_passes(schedule) * costs.pass_s(gpu_type)


def pass_host_s(costs: CostTables) -> float:
    """Return what the framework of the slowest host spends on a pass beside what the device does."""
    problem = costs.problem
    return max(map(costs.pass_s, problem.gpu_types)) if problem.runtime.host_runs_ahead else 0.0


def num_passes(schedule: str) -> int:
    """Return how many passes of a stage a microbatch takes: backward for inputs and for weights may be two."""
    return 3 if schedule == "zb-h1" else 2


def launches_s(view: StageView, items: list[Item]) -> float:
    """Return what launching items takes the slowest host of each beside what the device does."""
    if not view.costs.problem.runtime.host_runs_ahead:
        return 0.0
    return sum(host_seconds(view, [item]) for item in items)


def host_seconds(view: StageView, items: list[Item]) -> float:
    """Return what launching items takes the slowest host: kernels, dispatch, collectives."""
    return max(_host_seconds(view, items, gpu_type) for gpu_type in view.gpu_types)


def launch_collective_s(view: StageView, item: MeshCollective, *, listed: bool) -> float:
    """Return what launching a collective takes the slowest host.

    Args:
        view, item: The stage, and what it does.
        listed: The host lists a tensor of each rank.
    """
    costs = view.costs
    unlike = costs.unlike_groups(view.stage.devices, item.sizes, item.axes)
    found_s = max(costs.collective_host_s(group.members) for group in unlike)
    if listed:
        found_s += max(costs.listing_s(group.members, len(group.members)) for group in unlike)
    return found_s + max(map(costs.launch_s, view.gpu_types))


def _host_seconds(view: StageView, items: list[Item], gpu_type: str) -> float:
    costs, total = view.costs, 0.0
    launch_s = costs.launch_s(gpu_type)
    for item in items:
        if item.collective is not None:
            unlike = costs.unlike_groups(view.stage.devices, item.collective.sizes, item.collective.axes)
            total += launch_s + max(costs.collective_host_s(group.members) for group in unlike)
        for index, phase in item.parts:
            if phase in COPIES:
                continue
            cost = costs.operator(index, view.shardings[index], view.samples(index), gpu_type)
            total += getattr(cost, phase).host_s
    return total
