"""Closed form of memory: what a stage holds, from sums over its operators, and the peak of a device from that.

A stretch is a recomputed segment, or what lies between two. While its backward pass runs, a device holds model
states, what all microbatches in flight keep up to this stretch, what the segment makes again, and the largest need of
one of its operators. That is above the exact walk (``memory_program``) where what is large comes early in a stretch.
Gradients that the first backward pass makes are not there yet while all microbatches are in flight. Interleaved stages:
``interleaved_memory``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from simulator.closed_forms.interleaved_memory import interleaved_peak_bytes
from simulator.closed_forms.unscattered import unscattered_bytes
from simulator.lowering.crossing import made_in_shards
from simulator.lowering.mesh import batch_degree
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups, units_gathered_for
from simulator.memory.model_states import reduces_in_backward, static_bytes
from simulator.operator_cost import OperatorCost
from simulator.plan import Plan, Sharding, batch_replicas
from simulator.problem import Problem
from simulator.saved import needed_for_weights, saved_tensors
from workloads.operators import Operator


@dataclass(frozen=True)
class HeldBytes:
    """What a stage holds on one device, in bytes.

    Attributes:
        states: Parameters, gradients, optimizer states.
        anew: Of that, gradients that the first backward pass makes.
        kept: One microbatch between its forward and its backward pass.
        working: What is there besides ``kept`` while a microbatch's backward pass needs most.
        gathered: Parameters that ZeRO-3 has gathered: the root, and two units (``gather_units``), or one where none is
            prefetched.
        unsharded: Gradients that are not scattered yet: of two units and the root above them.
        last: What the end of a backward pass needs: unsharded gradients of a layer and all of the root, and what the
            stage's first operator works in, or its first segment takes.
        for_weights: What weight gradients need: of ``kept``, of what is recomputed, and gradients of outputs.
        beyond_kept: Of that, what is not ``kept``.
        step: What the optimizer step works in.
        refreshed: What gathering its results takes.
    """

    states: float
    anew: float
    kept: float
    working: float
    gathered: float
    unsharded: float
    last: float
    for_weights: float
    beyond_kept: float
    step: float
    refreshed: float


def held_bytes(view: StageView) -> HeldBytes:
    """Return what a stage holds."""
    problem, plan = view.costs.problem, view.plan
    static = static_bytes(
        list(parameter_groups(view)),
        problem,
        sharded_gradients=reduces_in_backward(plan),
        reshards=plan.reshard_after_forward,
    )
    anew = sum(static.gradients_anew.values())
    kept, again, peak, lowest = _activations(view)
    weighted = to_multiply = 0.0
    for index in view.operators:
        if problem.workload.parameters(index):
            cost = view.cost(index)
            saved, gradients = needed_for_weights(problem.workload, index, cost)
            weighted, to_multiply = weighted + saved, to_multiply + gradients
    gathered, unsharded, last = _whole_for_a_while(view)
    refreshed = [refreshed_bytes(group, problem) for group in parameter_groups(view)]
    return HeldBytes(
        states=float(sum(static.parameters) + sum(static.gradients) + anew + sum(static.optimizer)),
        anew=float(anew),
        kept=kept,
        working=peak - kept,
        gathered=gathered,
        unsharded=unsharded,
        last=last + lowest,
        for_weights=min(weighted, kept + again) + to_multiply,
        beyond_kept=min(weighted, again) + to_multiply,
        step=float(sum(static.step_workspace)),
        refreshed=sum(chunks for chunks, _ in refreshed) + max((whole for _, whole in refreshed), default=0.0),
    )


def refreshed_bytes(group: ParameterGroup, problem: Problem) -> tuple[float, float]:
    """Return what gathering an updated parameter takes, and the parameter whole, which is cut out last; else zeros."""
    refreshed = static_bytes([group], problem, sharded_gradients=False, reshards=False).refreshed
    whole = float(group.num_elements * problem.runtime.parameter_bytes) if refreshed else 0.0
    return refreshed - whole, whole


def working_bytes(op: Operator, cost: OperatorCost, problem: Problem) -> float:
    """Return what an operator needs besides what is kept: work space, and the gradients of its inputs and outputs."""
    gradient_bytes = problem.runtime.implementation.activation_bytes
    temporary = cost.backward_temporary_bytes(gradient_bytes, inputs=True, weights=True)
    given = problem.workload.input_names
    inputs = {name: size for name, size in zip(op.inputs, cost.input_bytes, strict=True) if name not in given}
    return max(cost.workspace_forward_bytes, temporary + sum(inputs.values()) + sum(cost.output_bytes))


def saved_bytes(made: float, read: float, *, regathers: bool) -> tuple[float, float]:
    """Return what a saved tensor takes as it is made and, besides, as its reader has gathered it.

    Args:
        made, read: Bytes of the tensor where it is made and where it is read.
        regathers: What was gathered is dropped, and gathered again in the backward pass.

    >>> saved_bytes(1.0, 8.0, regathers=True), saved_bytes(1.0, 8.0, regathers=False)
    ((1.0, 0.0), (1.0, 8.0))
    """
    return min(made, read), 0.0 if regathers or read <= made else read


def _activations(view: StageView) -> tuple[float, float, float, float]:
    """Return bytes kept, made again by all segments, the most that one microbatch takes, and needs of the first.

    A segment needs all that its operators read from outside, saved by one of them or not. What comes from another stage
    is there anyway (``_ends``).
    """
    runtime, workload = view.costs.problem.runtime, view.costs.problem.workload
    segment_of = {index: number for number, (a, b) in enumerate(view.stage.recompute) for index in range(a, b)}
    kept: dict[str, float] = {}
    inside: dict[str, float] = {}
    again = most = working = 0.0
    lowest = working_bytes(workload.operators[view.operators[0]], view.cost(view.operators[0]), view.costs.problem)
    for place, index in enumerate(view.operators):
        op, cost, segment = workload.operators[index], view.cost(index), segment_of.get(index)
        for name, size in dict(saved_tensors(workload, index, cost)).items():
            producer = workload.producer.get(name)
            whole = 0.0
            source = None if "/" in name else _source(view, name)
            if source is not None:
                sharding, made, in_shards = source
                alike = batch_degree(sharding) == batch_degree(view.shardings[index])
                regathers = in_shards and alike and not runtime.keeps_gathered_inputs
                size, whole = saved_bytes(made, size, regathers=regathers)
            if segment is None:
                kept[name] = size + whole
            elif producer is not None and segment_of.get(producer) != segment and "/" not in name:
                kept[name] = size
            else:
                inside[name] = size
        if segment is not None:
            for name, read in zip(op.inputs, cost.input_bytes, strict=True):
                producer = workload.producer.get(name)
                if producer in view.shardings and segment_of.get(producer) != segment and name not in kept:
                    kept[name] = min(_made_bytes(view, name), read)
        working = max(working, working_bytes(op, cost, view.costs.problem))
        following = view.operators[place + 1] if place + 1 < len(view.operators) else None
        if following is None or segment_of.get(following) != segment:
            most = max(most, sum(kept.values()) + sum(inside.values()) + working)
            if segment == 0:
                lowest = max(lowest, sum(inside.values()) + working)
            again += sum(inside.values())
            inside, working = {}, 0.0
    ends = sum(_ends(view, kept))
    return sum(kept.values()) + ends, again, most + ends, lowest


def _source(view: StageView, name: str) -> tuple[Sharding, float, bool] | None:
    """Return on which mesh a stage has a tensor, its bytes there, and whether it has shards of the sequence.

    There is where it is made, or where it arrives in such shards.
    """
    costs = view.costs
    workload = costs.problem.workload
    producer = workload.producer.get(name)
    if producer is None:
        return None
    if producer in view.shardings:
        number, sharding = workload.operators[producer].outputs.index(name), view.shardings[producer]
        placements = [split.outputs[number] for split in costs.splits(producer, sharding)]
        return sharding, _made_bytes(view, name), made_in_shards(sharding, placements)
    if name not in view.entering:
        return None
    arrival = view.arrivals[name]
    return arrival.sharding, arrival.arriving_bytes(view.cost(arrival.reader[0])), True


def _made_bytes(view: StageView, name: str) -> float:
    """Return the bytes of a tensor as an operator of the stage makes it."""
    workload = view.costs.problem.workload
    producer = workload.producer[name]
    return view.cost(producer).output_bytes[workload.operators[producer].outputs.index(name)]


def _ends(view: StageView, kept: Container[str]) -> Iterator[float]:
    """Yield the bytes of what a stage received, and of what it sent if that is held, unless kept anyway."""
    if view.costs.problem.runtime.keeps_stage_outputs:
        for name in view.leaving:
            if name not in kept:
                yield _made_bytes(view, name)
    for name, arrival in view.arrivals.items():
        if name not in kept:
            yield arrival.arriving_bytes(view.cost(arrival.reader[0]))


def zero_elements(sharding: Sharding, cost: OperatorCost) -> tuple[float, float]:
    """Return elements of an operator that ZeRO-3 gathers, and gradients that ZeRO-2 or 3 scatters."""
    axes = [axis for axis in sharding if axis.split == "batch" and axis.zero > 0]
    level = max((axis.zero for axis in axes), default=0)
    elements = float(cost.num_parameter_elements) if prod(axis.size for axis in axes) > 1 else 0.0
    return elements if level == 3 else 0.0, elements if level >= 2 else 0.0


def _whole_for_a_while(view: StageView) -> tuple[float, float, float]:
    """Return bytes of gathered parameters, and of unsharded gradients at the most and at the end of a backward pass."""
    runtime, operators, plan = view.costs.problem.runtime, view.costs.problem.workload.operators, view.plan
    units: dict[int, tuple[float, float]] = {}
    roots = set()
    for index in view.operators:
        unit = view.costs.gather_units[index]
        gathered, unsharded = units.get(unit, (0.0, 0.0))
        _, to_scatter = zero_elements(view.shardings[index], view.cost(index))
        units[unit] = gathered, unsharded + to_scatter
        if operators[index].layer in view.costs.root_layers:
            roots.add(unit)
    for group in parameter_groups(view):
        for unit in units_gathered_for(view, group):
            gathered, unsharded = units[unit]
            units[unit] = gathered + group.num_elements, unsharded
    found = [(unit in roots, *units[unit]) for unit in sorted(units)]
    ahead = runtime.prefetches_gathers
    (root, _, pair), (outer, above, largest) = (
        _root_and_pair([(in_root, elements[way]) for in_root, *elements in found], pairs=pairs)
        for way, pairs in enumerate((ahead, True))
    )
    parameter_bytes = runtime.gathered_parameter_bytes if plan.reshard_after_forward else 0
    gradient_bytes = runtime.gradient_accumulation_bytes if reduces_in_backward(plan) else 0
    lowest = next((elements for in_root, _, elements in found if not in_root and elements), 0.0)
    most, end = unscattered_bytes(above, largest, outer, lowest, runtime.waiting_gradient_share)
    return (root + pair) * parameter_bytes, most * gradient_bytes, end * gradient_bytes


def _root_and_pair(units: Sequence[tuple[bool, float]], *, pairs: bool) -> tuple[float, float, float]:
    """Return the sum of all of the root, of the root above the first other unit, and the most of two neighbours.

    Args:
        units: Whether a unit is of the root, and its size; those without anything are no neighbours.
        pairs: Two neighbours are there at once; else the largest counts.
    """
    root = above = before = most = 0.0
    for in_root, size in units:
        if in_root:
            root += size
            above += size if before else 0.0
        elif size:
            most = max(most, before + size if pairs else size)
            before = size
    return root, above, most


def rank_peaks(plan: Plan, held: Sequence[HeldBytes], last_held: Sequence[HeldBytes]) -> tuple[float, ...]:
    """Return the peak of every stage's device: stages on one device add up.

    Args:
        plan: The plan.
        held, last_held: Per stage, with any microbatch but the last, and with the last.
    """
    ranks = plan.rank_of_stage
    num_ranks = max(ranks) + 1
    peaks: dict[int, float] = {}
    for rank in range(num_ranks):
        own = [stage for stage in range(len(plan.stages)) if ranks[stage] == rank]
        in_step = max(sum(held[stage].step for stage in own), max(held[stage].refreshed for stage in own))
        states = sum(held[stage].states for stage in own)
        gathered = max(held[stage].gathered for stage in own)
        if plan.schedule == "interleaved":
            chunks = [
                (held[i].kept, last_held[i].kept, held[i].working + held[i].unsharded, held[i].last, held[i].anew)
                for i in own
            ]
            beyond = interleaved_peak_bytes(np.array(chunks), rank, num_ranks, plan.num_microbatches)
            peaks[rank] = states + max(beyond + gathered, in_step)
            continue
        kept = sum(_kept_bytes(plan, held, stage) for stage in own)
        holds_all = all(in_flight(plan, stage) == plan.num_microbatches for stage in own)
        if holds_all:
            kept -= sum(held[stage].kept - last_held[stage].kept for stage in own)
        before = states - sum(held[stage].anew for stage in own) if holds_all else states
        most = max(held[stage].working for stage in own) + max(held[stage].unsharded for stage in own)
        if plan.schedule == "zb-h1":
            most += max(held[stage].beyond_kept for stage in own)
        last = max(held[stage].last for stage in own)
        later = kept - max(held[stage].kept for stage in own) + (max(most, last) if plan.num_microbatches > 1 else last)
        peaks[rank] = max(before + kept + most + gathered, states + max(later + gathered, in_step))
    return tuple(peaks[rank] for rank in ranks)


def _kept_bytes(plan: Plan, held: Sequence[HeldBytes], stage: int) -> float:
    whole = in_flight(plan, stage) * held[stage].kept
    if plan.schedule == "zb-h1":  # as many microbatches as stages, the later ones without what inputs needed
        waiting = min(plan.num_microbatches, len(plan.stages)) - in_flight(plan, stage)
        return whole + waiting * held[stage].for_weights
    return whole


def in_flight(plan: Plan, stage: int) -> int:
    """Return how many microbatches a stage holds at once."""
    m = plan.num_microbatches
    if plan.schedule == "gpipe":
        return m
    warmup = plan.warmup_in_force()
    if warmup is not None:
        replicas = batch_replicas(plan.stages[stage]) if plan.rotates else 1
        return min(m, -(-warmup[stage] // replicas))
    return min(m, len(plan.stages) - stage)
