"""Closed form of memory: what a stage holds, from sums over its operators, and the peak of a device from that.

A stretch is a recomputed segment, or what lies between two. While its backward pass runs, a device holds model
states, what all microbatches in flight keep up to this stretch, what the segment makes again, and the largest need of
one of its operators. That is above the exact walk (``memory_program``) where what is large comes early in a stretch.
Gradients that the first backward pass makes are not there yet while all microbatches are in flight, but for those of
the stretches behind, which keep nothing any more. Interleaved stages: ``interleaved_memory``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        beyond_kept: Of that, what is not ``kept``.
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
    beyond_kept: float
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
    kept, again, peak, first_peak, lowest = _activations(view, whole, anew_of)
    bucket = bucket_buffer_bytes(parameter_groups(view), problem.runtime) if reduces_in_backward(plan) else 0.0
    weighted = to_multiply = 0.0
    for index in view.operators:
        if problem.workload.parameters(index):
            cost = view.cost(index)
            saved, gradients = needed_for_weights(problem.workload, index, cost)
            weighted, to_multiply = weighted + saved, to_multiply + gradients
    refreshed = [refreshed_bytes(group, view.costs) for group in parameter_groups(view)]
    return HeldBytes(
        states=float(sum(static.parameters) + sum(static.gradients) + anew + sum(static.optimizer)),
        anew=float(anew),
        kept=kept,
        working=peak - kept + bucket,
        working_first=first_peak - kept + bucket,
        gathered=whole.root,
        last=max(lowest, whole.end) + bucket,
        for_weights=min(weighted, kept + again) + to_multiply,
        beyond_kept=min(weighted, again) + to_multiply,
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


def working_bytes(index: int, cost: OperatorCost, problem: Problem) -> float:
    """Return what an operator needs besides what is kept: work space, and the gradients of its inputs and outputs."""
    gradient_bytes = problem.runtime.implementation.activation_bytes
    before, at_product = cost.backward_temporaries_bytes(gradient_bytes, inputs=True, weights=True)
    temporary = max(before, at_product - parted_bytes(problem.workload, index, cost))
    op, given = problem.workload.operators[index], problem.workload.input_names
    inputs = {name: size for name, size in zip(op.inputs, cost.input_bytes, strict=True) if name not in given}
    return max(cost.workspace_forward_bytes, temporary + sum(inputs.values()) + sum(cost.output_bytes))


def segment_ends_bytes(index: int, cost: OperatorCost, problem: Problem) -> float:
    """Return what a segment that ends with an operator holds besides until its backward pass is through.

    That is what it made for those behind it, and the gradients of that (``Runtime.recompute_holds_ends``).
    """
    if not problem.runtime.recompute_holds_ends:
        return 0.0
    outputs = problem.workload.operators[index].outputs
    saved = dict(saved_tensors(problem.workload, index, cost))
    return sum(size * (1 + (name not in saved)) for name, size in zip(outputs, cost.output_bytes, strict=True))


def saved_bytes(made: float, read: float, *, regathers: bool) -> tuple[float, float]:
    """Return what a saved tensor takes as it is made and, besides, as its reader has gathered it.

    Args:
        made, read: Bytes of the tensor where it is made and where it is read.
        regathers: What was gathered is dropped, and gathered again in the backward pass.

    >>> saved_bytes(1.0, 8.0, regathers=True), saved_bytes(1.0, 8.0, regathers=False)
    ((1.0, 0.0), (1.0, 8.0))
    """
    return min(made, read), 0.0 if regathers or read <= made else read


def _activations(
    view: StageView, whole: Whole, anew_of: Mapping[int, float]
) -> tuple[float, float, float, float, float]:
    """Return bytes kept, made again by all segments, the most that one microbatch takes, and needs of the first.

    The third comes twice: of any microbatch, and with gradients that the first one makes anew. While a stretch works,
    those of the operators behind it are there, and what these kept is not.

    A segment needs all that its operators read from outside, saved by one of them or not. What comes from another stage
    is there anyway (``_ends``).

    Args:
        view: The stage.
        whole: What ZeRO has whole besides. Where that changes a stretch ends; a segment stays one, with what counts at
            its start.
        anew_of: By operator, gradients that the first backward pass makes.
    """
    runtime, workload = view.costs.problem.runtime, view.costs.problem.workload
    segment_of = {index: number for number, (a, b) in enumerate(view.stage.recompute) for index in range(a, b)}
    kept: dict[str, float] = {}
    inside: dict[str, float] = {}
    again = most = most_first = working = beside_bytes = stretch_bytes = 0.0
    behind = sum(anew_of.values())
    first = view.operators[0]
    lowest = working_bytes(first, view.cost(first), view.costs.problem) + whole.first
    for place, index in enumerate(view.operators):
        beside_bytes, behind = whole.beside.get(index, beside_bytes), behind - anew_of[index]
        stretch_bytes = max(stretch_bytes, beside_bytes)
        op, cost, segment = workload.operators[index], view.cost(index), segment_of.get(index)
        for name, size in dict(saved_tensors(workload, index, cost)).items():
            producer = workload.producer.get(name)
            gathered = 0.0
            source = None if is_private(name) else _source(view, name)
            if source is not None:
                sharding, made, in_shards = source
                alike = batch_degree(sharding) == batch_degree(view.shardings[index])
                regathers = in_shards and alike and not runtime.keeps_gathered_inputs
                size, gathered = saved_bytes(made, size, regathers=regathers)
            if segment is None:
                kept[name] = size + gathered
            elif producer is not None and segment_of.get(producer) != segment and not is_private(name):
                kept[name] = size
            else:
                inside[name] = size
        if segment is not None:
            for name, read in zip(op.inputs, cost.input_bytes, strict=True):
                producer = workload.producer.get(name)
                if producer in view.shardings and segment_of.get(producer) != segment and name not in kept:
                    kept[name] = min(_made_bytes(view, name), read)
        working = max(working, working_bytes(index, cost, view.costs.problem))
        following = view.operators[place + 1] if place + 1 < len(view.operators) else None
        if following is None or segment_of.get(following) != segment or (segment is None and following in whole.beside):
            ends_bytes = 0.0 if segment is None else segment_ends_bytes(index, cost, view.costs.problem)
            taken = sum(kept.values()) + sum(inside.values()) + working + stretch_bytes + ends_bytes
            most, most_first = max(most, taken), max(most_first, taken + behind)
            if segment == 0:
                lowest = max(lowest, sum(inside.values()) + working + stretch_bytes + ends_bytes)
            again += sum(inside.values())
            inside, working, stretch_bytes = {}, 0.0, 0.0
    ends = sum(_ends(view, kept))
    return sum(kept.values()) + ends, again, most + ends, most_first + ends, lowest


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
        most, most_first = max(held[i].working for i in own), max(held[i].working_first for i in own)
        beyond = max(held[stage].beyond_kept for stage in own) if plan.schedule == "zb-h1" else 0.0
        most, most_first = most + beyond, (most_first if holds_all else most) + beyond
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
