"""Closed form of the activations of one microbatch: a walk over the operators of a stage.

A stretch is a recomputed segment, or what lies between two. While the backward pass of one of its operators runs, a
device holds what is kept up to this operator, what its segment makes again up to it, what it works in, and gradients
that wait for operators before it (``memory.program`` goes through every event).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from simulator.closed_forms.operator_needs import (
    ends_given_bytes,
    held_ends,
    held_ends_bytes,
    passes_working_bytes,
    saved_bytes,
)
from simulator.closed_forms.whole_for_a_while import Whole
from simulator.lowering.crossing import made_in_shards
from simulator.lowering.mesh import batch_degree
from simulator.lowering.program import StageView
from simulator.memory.tied_gradients import tied_gradients
from simulator.plan import Sharding
from simulator.saved import is_private, saved_tensors
from simulator.schedules.registry import schedule_named


class Walked(NamedTuple):
    """What the backward pass of one microbatch takes, in bytes.

    Attributes:
        kept: Between the passes.
        again: Made again by all segments.
        most: What is there at most of the microbatch.
        most_first: The same with gradients that the first one makes anew.
        most_split: The same without weight gradients, and with what these need.
        most_forward: What is there at most of it in its forward pass.
    """

    kept: float
    again: float
    most: float
    most_first: float
    most_split: float
    most_forward: float


def walk(
    view: StageView,
    whole: Whole,
    anew_of: Mapping[int, float],
    late_of: Mapping[int, float],
    for_weights: Mapping[int, float],
) -> Walked:
    """Return what the backward pass of a microbatch takes.

    A segment needs all that its operators read from outside, saved by one of them or not, to its end. What comes from
    another stage is there anyway (``_ends``).

    Args:
        view: The stage.
        whole: What ZeRO has whole besides.
        anew_of: By operator, gradients that the first backward pass makes.
        late_of: Of those, shards, which are made when the whole gradients of a part have been scattered.
        for_weights: By operator, what its weight gradients need.
    """
    problem, workload = view.costs.problem, view.costs.problem.workload
    segment_of = {index: number for number, (a, b) in enumerate(view.stage.recompute) for index in range(a, b)}
    # (Checkpointing knows nothing of halves of a backward pass, between which nothing is held for others.)
    holds = problem.runtime.recompute_holds_ends and not schedule_named(view.plan.schedule).splits_backward
    ends_of = [held_ends(segment, view.cost, problem) if holds else () for segment in view.stage.recompute]
    kept, inside = _Tally(), _Tally()
    again = most = most_first = most_split = most_forward = highest = highest_first = split = 0.0
    made_by_then, weights_behind = _made_by_then(view, anew_of, late_of), sum(for_weights.values())
    waiting = sum(_held_bytes(view, name) for name in view.arrivals)
    tied = tied_gradients(view)
    for place, index in enumerate(view.operators):
        op, cost, segment = workload.operators[index], view.cost(index), segment_of.get(index)
        in_segment, gathered = segment is not None, 0.0
        held = () if segment is None else ends_of[segment]
        if index in whole.joining:
            joining = (inside if in_segment else kept).total + waiting + whole.joining[index]
            joining += held_ends_bytes(held, index - 1, inside.sizes)
            highest, highest_first = max(highest, joining), max(highest_first, joining + made_by_then[index])
        for name, saved in dict(saved_tensors(workload, index, cost)).items():
            producer = workload.producer.get(name)
            stays, gathers = _saved(view, index, name, saved, in_segment=in_segment)
            gathered += gathers
            from_outside = not is_private(name) and (producer is None or segment_of.get(producer) != segment)
            (kept if not in_segment or from_outside else inside).put(name, stays)
        if in_segment:
            for name, read in zip(op.inputs, cost.input_bytes, strict=True):
                producer = workload.producer.get(name)
                if producer in view.shardings and segment_of.get(producer) != segment and name not in kept.sizes:
                    kept.put(name, min(_held_bytes(view, name), read))
        waiting -= sum(_held_bytes(view, name) for name in dict.fromkeys(op.inputs) if _begins_at(view, name, index))
        following = view.operators[place + 1] if place + 1 < len(view.operators) else None
        ends = following is None or segment_of.get(following) != segment
        forward, backward = passes_working_bytes(index, cost, problem, alone=False)
        # (A segment's forward work is done again in backward; other operators' is beside no gradients.)
        needed = (max(forward, backward) if in_segment else backward) + gathered + waiting
        needed += (inside if in_segment else kept).total
        begins = 0.0 if in_segment else kept.total + forward + gathered + whole.forward[index]
        most_forward = max(most_forward, begins)
        weights_behind -= for_weights[index]
        own = needed + held_ends_bytes(held, index, inside.sizes) + whole.beside[index]
        given = 0.0
        if any(end.maker == index for end in held):
            given = cost.given_back_bytes
        elif in_segment and ends and not holds:
            # (While a segment is made again, the gradients of what its last operator makes are there already.)
            made_here = segment_of.get(workload.producer.get(op.inputs[0], -1)) == segment
            given = ends_given_bytes(index, cost, problem, made_here=made_here)
        own += given
        own += sum(each.num_bytes for each in tied if each.first <= index < each.last)
        highest, highest_first = max(highest, own, begins), max(highest_first, own + made_by_then[index], begins)
        split = max(split, needed + given + whole.gathers[index] + weights_behind, begins)
        waiting += sum(_held_bytes(view, name) for name in op.outputs if name in workload.consumers)
        if ends:
            entered = kept.total if in_segment else 0.0
            most, most_first = max(most, highest + entered), max(most_first, highest_first + entered)
            most_split = max(most_split, split + entered)
            again += inside.total
            inside, highest, highest_first, split = _Tally(), 0.0, 0.0, 0.0
    at_ends = sum(_ends(view, kept.sizes))
    found = (most, most_first, most_split, most_forward)
    return Walked(kept.total + at_ends, again, *(each + at_ends for each in found))


def _made_by_then(view: StageView, anew_of: Mapping[int, float], late_of: Mapping[int, float]) -> dict[int, float]:
    """Return by operator the gradients that are made anew by then: those of its part (``unit_parts``) and behind it.

    But for shards of its own part, and of the root, which come last.
    """
    costs = view.costs
    at_once, later = dict[int, float](), dict[int, float]()
    for index in view.operators:
        part, in_root = costs.unit_parts[index], costs.units[index] in costs.root_units
        at_once[part] = at_once.get(part, 0.0) + anew_of[index] - late_of[index]
        later[part] = later.get(part, 0.0) + (0.0 if in_root else late_of[index])
    made, found = 0.0, dict[int, float]()
    for part in sorted(at_once, reverse=True):
        found[part] = made + at_once[part]
        made = found[part] + later[part]
    return {index: found[costs.unit_parts[index]] for index in view.operators}


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


def _saved(view: StageView, index: int, name: str, read: float, *, in_segment: bool) -> tuple[float, float]:
    """Return the bytes of what an operator saves, and of what backward gathers again of it.

    Args:
        view, index: The operator.
        name, read: What it saves, and the bytes of that as it reads it.
        in_segment: The operator is computed again.
    """
    source = None if is_private(name) else _source(view, name)
    if source is None:
        return read, 0.0
    sharding, made, in_shards = source
    alike = batch_degree(sharding) == batch_degree(view.shardings[index])
    regathers = in_shards and alike and not view.costs.problem.runtime.keeps_gathered_inputs
    stays = saved_bytes(made, read, regathers=regathers, keeps_made=_keeps_made(view, name), in_segment=in_segment)
    return stays, read if read > made and (in_segment or regathers) else 0.0


def _keeps_made(view: StageView, name: str) -> bool:
    """Return whether a stage has a tensor as it is made, whoever gathers it: its maker saves it, or it was received."""
    problem = view.costs.problem
    producer = problem.workload.producer[name]
    if problem.runtime.keeps_gathered_shards or producer not in view.shardings:
        return True
    return name in dict(saved_tensors(problem.workload, producer, view.cost(producer)))


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
