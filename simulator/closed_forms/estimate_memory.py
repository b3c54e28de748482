"""Closed form of memory: what a stage holds, from sums over its operators, and the peak of a device from that.

A stretch is a recomputed segment, or what lies between two. While the backward pass of one of its operators runs, a
device holds model states, what all microbatches in flight keep up to this operator, what its segment makes again up to
it, what it works in, and gradients that wait for operators before it (``memory.program`` goes through every event).
Gradients that the first backward pass makes are not there yet while all microbatches are in flight, but for those of
the stretches behind, which keep nothing any more. Interleaved stages: ``interleaved_memory``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.closed_forms.interleaved_memory import interleaved_peak_bytes
from simulator.closed_forms.unscattered import unscattered_bytes
from simulator.costs import CostTables
from simulator.lowering.crossing import made_in_shards
from simulator.lowering.mesh import batch_degree
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import (
    ParameterGroup,
    bucket_buffer_bytes,
    parameter_groups,
    units_gathered_for,
    whole_gradients_begin,
)
from simulator.memory.model_states import reduces_in_backward, static_bytes
from simulator.operator_cost import OperatorCost
from simulator.plan import Plan, Sharding, batch_replicas
from simulator.problem import Problem
from simulator.saved import is_private, needed_for_weights, parted_bytes, saved_tensors


@dataclass(frozen=True)
class HeldBytes:
    """What a stage holds on one device, in bytes.

    Attributes:
        states: Parameters, gradients, optimizer states.
        anew: Of that, gradients that the first backward pass makes.
        kept: One microbatch between its forward and its backward pass.
        working: What is there besides ``kept`` while a microbatch's backward pass needs most.
        working_first: The same in the first backward pass, with those of ``anew`` that it has made by then.
        gathered: Parameters of the root that ZeRO-3 has gathered.
        last: What the end of a backward pass needs: gathered units, unscattered gradients, and what the stage's first
            operator works in, or its first segment takes.
        for_weights: What weight gradients need: of ``kept``, of what is recomputed, and gradients of outputs.
        working_split: As ``working``, where weight gradients come later, and what they need stays until then.
        step: What the optimizer step works in.
        refreshed: What gathering its results takes.
        buffer: What its operators share and never give back, as do stages of one device.
    """

    states: float
    anew: float
    kept: float
    working: float
    working_first: float
    gathered: float
    last: float
    for_weights: float
    working_split: float
    step: float
    refreshed: float
    buffer: float


def held_bytes(view: StageView) -> HeldBytes:
    """Return what a stage holds."""
    problem, plan = view.costs.problem, view.plan
    zero = {"sharded_gradients": reduces_in_backward(plan), "reshards": plan.reshard_after_forward}
    static = static_bytes(list(parameter_groups(view)), view.costs, **zero)
    anew_of = dict.fromkeys(view.operators, 0.0)
    for group in parameter_groups(view):
        anew_of[group.operator] += sum(static_bytes([group], view.costs, **zero).gradients_anew.values())
    anew = sum(anew_of.values())
    whole = whole_for_a_while(view)
    for_weights = {index: _for_weights(view, index) for index in view.operators}
    walked = _walk(view, whole, anew_of, {index: sum(sizes) for index, sizes in for_weights.items()})
    bucket = bucket_buffer_bytes(parameter_groups(view), problem.runtime) if reduces_in_backward(plan) else 0.0
    weighted, to_multiply = (sum(sizes) for sizes in zip(*for_weights.values(), strict=True))
    refreshed = [refreshed_bytes(group, view.costs) for group in parameter_groups(view)]
    return HeldBytes(
        states=float(sum(static.parameters) + sum(static.gradients) + anew + sum(static.optimizer)),
        anew=float(anew),
        kept=walked.kept,
        working=walked.most - walked.kept + bucket,
        working_first=walked.most_first - walked.kept + bucket,
        gathered=whole.root,
        last=max(walked.lowest, whole.end) + bucket,
        for_weights=min(weighted, walked.kept + walked.again) + to_multiply,
        working_split=walked.most_split - walked.kept + bucket,
        step=float(sum(static.step_workspace)),
        refreshed=sum(chunks for chunks, _ in refreshed) + max((whole for _, whole in refreshed), default=0.0),
        buffer=max(never_given_back_bytes(view.cost(index), problem) for index in view.operators),
    )


def never_given_back_bytes(cost: OperatorCost, problem: Problem) -> float:
    """Return what an operator takes once and shares with all others of its device."""
    return cost.lasting_buffer_bytes + problem.matmul_workspace_bytes


def refreshed_bytes(group: ParameterGroup, costs: CostTables) -> tuple[float, float]:
    """Return what gathering an updated parameter takes, and the parameter whole, which is cut out last; else zeros."""
    refreshed = static_bytes([group], costs, sharded_gradients=False, reshards=False).refreshed
    whole = float(group.num_elements * costs.problem.runtime.parameter_bytes) if refreshed else 0.0
    return refreshed - whole, whole


def working_bytes(index: int, cost: OperatorCost, problem: Problem, *, alone: bool = True) -> float:
    """Return what an operator needs besides what is kept: work space, and the gradients of its inputs and outputs.

    Args:
        index, cost, problem: The operator.
        alone: Gradients of inputs count that others read behind it, though these have begun them already.
    """
    workload = problem.workload
    inputs = {
        name: size
        for name, size in zip(workload.operators[index].inputs, cost.input_bytes, strict=True)
        if name not in workload.input_names and (alone or workload.consumers[name][-1] == index)
    }
    forward, backward = own_working_bytes(index, cost, problem)
    return max(forward, backward + sum(inputs.values()))


def own_working_bytes(index: int, cost: OperatorCost, problem: Problem) -> tuple[float, float]:
    """Return what an operator works in forward, and backward with the gradients of its outputs."""
    gradient_bytes = problem.runtime.implementation.activation_bytes
    before, at_product = cost.backward_temporaries_bytes(gradient_bytes, inputs=True, weights=True)
    temporary = max(before, at_product - parted_bytes(problem.workload, index, cost))
    return cost.workspace_forward_bytes, temporary + sum(cost.output_bytes)


def segment_ends_bytes(index: int, cost: OperatorCost, problem: Problem) -> tuple[float, float]:
    """Return what a segment that ends with an operator holds until its backward pass is through.

    That is what it made for those behind it, unless that is saved, and the gradients of all that
    (``Runtime.recompute_holds_ends``), which are the operator's own.
    """
    if not problem.runtime.recompute_holds_ends:
        return 0.0, 0.0
    outputs = problem.workload.operators[index].outputs
    saved = dict(saved_tensors(problem.workload, index, cost))
    made = sum(size for name, size in zip(outputs, cost.output_bytes, strict=True) if name not in saved)
    return made, sum(cost.output_bytes)


def saved_bytes(made: float, read: float, *, regathers: bool) -> tuple[float, float]:
    """Return what a saved tensor takes as it is made and, besides, as its reader has gathered it.

    Args:
        made, read: Bytes of the tensor where it is made and where it is read.
        regathers: What was gathered is dropped, and gathered again in the backward pass.

    >>> saved_bytes(1.0, 8.0, regathers=True), saved_bytes(1.0, 8.0, regathers=False)
    ((1.0, 0.0), (1.0, 8.0))
    """
    return min(made, read), 0.0 if regathers or read <= made else read


class _Walked(NamedTuple):
    """What the backward pass of one microbatch takes, in bytes.

    Attributes:
        kept: Between the passes.
        again: Made again by all segments.
        most: What is there at most of the microbatch.
        most_first: The same with gradients that the first one makes anew.
        most_split: The same without weight gradients, and with what these need.
        lowest: What the first operator of the stage, or its first segment, needs besides what is kept.
    """

    kept: float
    again: float
    most: float
    most_first: float
    most_split: float
    lowest: float


def _for_weights(view: StageView, index: int) -> tuple[float, float]:
    """Return what an operator's weight gradients need: of what is saved, and gradients of its outputs."""
    workload = view.costs.problem.workload
    return needed_for_weights(workload, index, view.cost(index)) if workload.parameters(index) else (0.0, 0.0)


def _walk(
    view: StageView, whole: Whole, anew_of: Mapping[int, float], for_weights: Mapping[int, float]
) -> _Walked:
    """Return what the backward pass of a microbatch takes.

    While a stretch works, gradients that operators behind it make anew are there, and what these kept is not.

    A segment needs all that its operators read from outside, saved by one of them or not, to its end. What comes from
    another stage is there anyway (``_ends``).

    Args:
        view: The stage.
        whole: What ZeRO has whole besides. Where that changes a stretch ends; a segment stays one, with what counts at
            its start.
        anew_of: By operator, gradients that the first backward pass makes.
        for_weights: By operator, what its weight gradients need.
    """
    problem, workload = view.costs.problem, view.costs.problem.workload
    segment_of = {index: number for number, (a, b) in enumerate(view.stage.recompute) for index in range(a, b)}
    kept, inside = _Tally(), _Tally()
    again = most = most_first = most_split = highest = split = beside_bytes = stretch_bytes = 0.0
    behind, weights_behind = sum(anew_of.values()), sum(for_weights.values())
    first = view.operators[0]
    lowest = working_bytes(first, view.cost(first), problem) + whole.first
    waiting = sum(_held_bytes(view, name) for name in view.arrivals)
    for place, index in enumerate(view.operators):
        beside_bytes, behind = whole.beside.get(index, beside_bytes), behind - anew_of[index]
        stretch_bytes = max(stretch_bytes, beside_bytes)
        op, cost, segment = workload.operators[index], view.cost(index), segment_of.get(index)
        in_segment, gathered = segment is not None, 0.0
        for name, saved in dict(saved_tensors(workload, index, cost)).items():
            producer = workload.producer.get(name)
            made, stays, gathers = _saved(view, index, name, saved, in_segment=in_segment)
            gathered += gathers
            if not in_segment:
                kept.put(name, made + stays)
            elif producer is not None and segment_of.get(producer) != segment and not is_private(name):
                kept.put(name, made)
            else:
                inside.put(name, made)
        if in_segment:
            for name, read in zip(op.inputs, cost.input_bytes, strict=True):
                producer = workload.producer.get(name)
                if producer in view.shardings and segment_of.get(producer) != segment and name not in kept.sizes:
                    kept.put(name, min(_held_bytes(view, name), read))
        waiting -= sum(_held_bytes(view, name) for name in dict.fromkeys(op.inputs) if _begins_at(view, name, index))
        following = view.operators[place + 1] if place + 1 < len(view.operators) else None
        ends = following is None or segment_of.get(following) != segment
        ends = ends or (not in_segment and following in whole.beside)
        ends_made, ends_gradients = segment_ends_bytes(index, cost, problem) if in_segment and ends else (0.0, 0.0)
        needed = working_bytes(index, cost, problem, alone=False) + gathered + waiting
        needed += (inside if in_segment else kept).total
        weights_behind -= for_weights[index]
        highest, split = max(highest, needed - ends_gradients), max(split, needed + weights_behind)
        waiting += sum(_held_bytes(view, name) for name in op.outputs if name in workload.consumers)
        if ends:
            highest += stretch_bytes + ends_made + ends_gradients
            entered = kept.total if in_segment else 0.0
            most, most_first = max(most, highest + entered), max(most_first, highest + entered + behind)
            most_split = max(most_split, split + stretch_bytes + entered)
            if segment == 0:
                lowest = max(lowest, highest)
            again += inside.total
            inside, highest, split, stretch_bytes = _Tally(), 0.0, 0.0, 0.0
    at_ends = sum(_ends(view, kept.sizes))
    return _Walked(
        kept.total + at_ends, again, most + at_ends, most_first + at_ends, most_split + at_ends, lowest
    )


class _Tally:
    """Sizes by name, and their sum."""

    def __init__(self) -> None:
        self.sizes: dict[str, float] = {}
        self.total = 0.0

    def put(self, name: str, size: float) -> None:
        self.total += size - self.sizes.get(name, 0.0)
        self.sizes[name] = size


def _begins_at(view: StageView, name: str, index: int) -> bool:
    """Return whether the gradient of a tensor begins in the backward pass of an operator, its last reader of all."""
    workload = view.costs.problem.workload
    return name not in workload.input_names and workload.consumers[name][-1] == index


def _saved(view: StageView, index: int, name: str, read: float, *, in_segment: bool) -> tuple[float, float, float]:
    """Return the bytes of what an operator saves as it is made, as it stays gathered, and as backward gathers it again.

    Args:
        view, index: The operator.
        name, read: What it saves, and the bytes of that as it reads it.
        in_segment: The operator is computed again.
    """
    source = None if is_private(name) else _source(view, name)
    if source is None:
        return read, 0.0, 0.0
    sharding, made, in_shards = source
    alike = batch_degree(sharding) == batch_degree(view.shardings[index])
    regathers = in_shards and alike and not view.costs.problem.runtime.keeps_gathered_inputs
    return *saved_bytes(made, read, regathers=regathers), read if read > made and (in_segment or regathers) else 0.0


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
        return sharding, _held_bytes(view, name), made_in_shards(sharding, placements)
    if name not in view.entering:
        return None
    return view.arrivals[name].sharding, _held_bytes(view, name), True


def _held_bytes(view: StageView, name: str) -> float:
    """Return the bytes of a tensor as an operator of the stage makes it, or as it arrives."""
    workload = view.costs.problem.workload
    producer = workload.producer[name]
    if producer not in view.shardings:
        arrival = view.arrivals[name]
        return arrival.arriving_bytes(view.cost(arrival.reader[0]))
    return view.cost(producer).output_bytes[workload.operators[producer].outputs.index(name)]


def _ends(view: StageView, kept: Container[str]) -> Iterator[float]:
    """Yield the bytes of what a stage received, and of what it sent if that is held, unless kept anyway."""
    if view.costs.problem.runtime.keeps_stage_outputs:
        for name in view.leaving:
            if name not in kept:
                yield _held_bytes(view, name)
    for name in view.arrivals:
        if name not in kept:
            yield _held_bytes(view, name)


@dataclass(frozen=True)
class Whole:
    """What ZeRO has whole for a while, in bytes.

    Attributes:
        root: Parameters of the root that are gathered, from a forward pass to the end of its backward pass.
        beside: All else in the backward pass, by the operator from which on it counts, never more than before: in
            units below the first to be scattered; in that one or what of the root is above it; and before any whole
            gradient is made.
        first: All else while the stage's first operator works.
        end: All else when that is through; where the root is given back before it is reduced, less that then.
    """

    root: float
    beside: dict[int, float]
    first: float
    end: float


def whole_for_a_while(view: StageView) -> Whole:
    """Return what ZeRO has whole on one device of a stage."""
    costs, plan, runtime = view.costs, view.plan, view.costs.problem.runtime
    units = {index: costs.unit_parts[index] for index in view.operators}
    gathered, scattered = dict.fromkeys(units.values(), 0.0), dict.fromkeys(units.values(), 0.0)
    made_at = dict.fromkeys(units, 0.0)
    for group in parameter_groups(view):
        for unit in units_gathered_for(view, group):
            gathered[unit] += group.num_elements
        for index in whole_gradients_begin(view, group):
            made_at[index] += group.num_elements
    for index, elements in made_at.items():
        scattered[units[index]] += elements
    roots = {unit for index, unit in units.items() if costs.units[index] in costs.root_units}
    waits, wait = runtime.waiting_gradient_share is not None, runtime.waiting_gradient_share or 1.0
    parameter_bytes = runtime.gathered_parameter_bytes if plan.reshard_after_forward else 0
    gradient_bytes = runtime.gradient_accumulation_bytes if reduces_in_backward(plan) else 0
    root, pair = _root_and_pair(gathered, roots, 1.0, 1.0 if runtime.holds_next("backward") else 0.0)
    apart = waits and not runtime.flattens_sharded  # A unit is given back before its gradients are copied.
    outer, waiting = _root_and_pair(scattered, roots, wait, wait, copied=waits and not apart)
    others = [unit for unit in sorted(scattered) if unit not in roots and scattered[unit]]
    pair_bytes, others_bytes = pair * parameter_bytes, pair * parameter_bytes + waiting * gradient_bytes
    if apart and others:
        below = [gathered[unit] for unit in sorted(gathered) if unit not in roots and gathered[unit]][:-1]
        next_one = max(below, default=0.0) if runtime.holds_next("backward") else 0.0
        copying = max(scattered[unit] for unit in others) * (1.0 + wait)
        others_bytes = max(others_bytes, next_one * parameter_bytes + copying * gradient_bytes)
    root_above = sum(made_at[index] for index in units if others and units[index] > others[-1])
    beside = {}
    if others and others_bytes > 0:
        made = max(index for index in units if made_at[index])
        bare = made if waits else made + 1  # What waits begins to when it is made.
        above = next(index for index in units if units[index] >= others[-1] + (root_above > 0))
        if root_above:
            own_bytes = root_above * wait * gradient_bytes
            beside = {view.operators[0]: own_bytes + others_bytes, above: own_bytes, bare: 0.0}
        else:
            own_bytes = scattered[others[-1]] * wait * gradient_bytes
            beside = {view.operators[0]: others_bytes, above: own_bytes + pair_bytes, bare: pair_bytes}
    root_bytes = root * parameter_bytes
    of_root, above_bytes = outer * gradient_bytes, root_above * gradient_bytes
    lowest_bytes = (scattered[others[0]] if others else 0.0) * gradient_bytes
    given_back_bytes = root_bytes if apart else 0.0
    first, end = unscattered_bytes(of_root, above_bytes, lowest_bytes, wait, waits, given_back_bytes)
    pair_bytes = 0.0 if units[view.operators[0]] in roots else pair_bytes
    return Whole(root_bytes, beside, first + pair_bytes, end + (0.0 if apart else pair_bytes))


def _root_and_pair(
    units: Mapping[int, float], roots: Container[int], alone: float, share: float, *, copied: bool = False
) -> tuple[float, float]:
    """Return the sum of the root, and the most of one other unit and of two neighbours.

    Args:
        units: Sizes by unit; those without anything are no neighbours.
        roots: Units of the root.
        alone: How much of one unit counts, as a share.
        share: Likewise of the lower neighbour of a unit that counts whole.
        copied: Or of that unit, if it is larger: what waited is there beside its copy.
    """
    others = [units[unit] for unit in sorted(units) if unit not in roots and units[unit]]
    most = max((alone * size for size in others), default=0.0)
    for lower, upper in pairwise(others):
        most = max(most, upper + share * (max(lower, upper) if copied else lower))
    return sum(size for unit, size in units.items() if unit in roots), most


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
        states = sum(held[stage].states for stage in own) + max(held[stage].buffer for stage in own)
        gathered = max(held[stage].gathered for stage in own)
        if plan.schedule == "interleaved":
            chunks = [(held[i].kept, last_held[i].kept, held[i].working, held[i].last, held[i].anew) for i in own]
            beyond = interleaved_peak_bytes(np.array(chunks), rank, num_ranks, plan.num_microbatches)
            peaks[rank] = states + max(beyond + gathered, in_step)
            continue
        kept = sum(_kept_bytes(plan, held, stage) for stage in own)
        holds_all = all(in_flight(plan, stage) == plan.num_microbatches for stage in own)
        if holds_all:
            kept -= sum(held[stage].kept - last_held[stage].kept for stage in own)
        before = states - sum(held[stage].anew for stage in own) if holds_all else states
        if plan.schedule == "zb-h1":
            most = most_first = max(held[stage].working_split for stage in own)
        else:
            most, most_first = max(held[i].working for i in own), max(held[i].working_first for i in own)
            most_first = most_first if holds_all else most
        last = max(held[stage].last for stage in own)
        later = kept - max(held[stage].kept for stage in own) + (max(most, last) if plan.num_microbatches > 1 else last)
        peaks[rank] = max(before + kept + most_first + gathered, states + max(later + gathered, in_step))
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
