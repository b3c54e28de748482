"""Closed form of memory: what a stage holds, from sums over its operators, and the peak of a device from that.

A device holds model states, what microbatches in flight keep, the most that the backward pass of one of them needs
besides (``memory_walk``), and what ZeRO has whole. Gradients that the first backward pass makes are not there yet while
all microbatches are in flight, but for those of the parts behind, which keep nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.closed_forms.interleaved_memory import interleaved_peak_bytes
from simulator.closed_forms.memory_walk import walk
from simulator.closed_forms.operator_needs import never_given_back_bytes, weight_pass_bytes
from simulator.closed_forms.whole_for_a_while import whole_for_a_while
from simulator.closed_forms.zero_bubble_memory import zero_bubble_peak_bytes
from simulator.costs import CostTables
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups
from simulator.lowering.whole_gradients import bucket_buffer_bytes, num_buffers, whole_gradients_begin
from simulator.memory.model_states import reduces_in_backward, static_bytes
from simulator.plan import Plan, batch_replicas
from simulator.saved import needed_for_weights


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
        stays: Parameters that stay gathered from the first forward pass of an iteration to the last backward pass.
        last: What the end of a backward pass needs: gathered units and unscattered gradients.
        for_weights: What weight gradients need: of ``kept``, of what is recomputed, and gradients of outputs.
        input_pass: As ``working``, where weight gradients come later, and what they need stays until then.
        weight_pass: What is there besides ``for_weights`` while these are made.
        flattened: What gradients are copied into before it to be reduced.
        step: What the optimizer step works in, less gradients that have gone before it.
        refreshed: What gathering its results takes.
        buffer: What its operators share and never give back, as do stages of one device.
        forward: A microbatch at most in its forward pass.
        last_working, last_end: As ``working`` and ``last``, in the last backward pass of an iteration, which gives back
            what stays gathered.
    """

    states: float
    anew: float
    kept: float
    working: float
    working_first: float
    gathered: float
    stays: float
    last: float
    for_weights: float
    input_pass: float
    weight_pass: float
    flattened: float
    step: float
    refreshed: float
    buffer: float
    forward: float
    last_working: float
    last_end: float


def held_bytes(view: StageView) -> HeldBytes:
    """Return what a stage holds."""
    problem, plan = view.costs.problem, view.plan
    sharded = reduces_in_backward(plan)
    static = static_bytes(list(parameter_groups(view)), view.costs, sharded_gradients=sharded)
    anew_of, late_of = dict.fromkeys(view.operators, 0.0), dict.fromkeys(view.operators, 0.0)
    for group in parameter_groups(view):
        own_bytes = static_bytes([group], view.costs, sharded_gradients=sharded).anew_bytes
        anew_of[group.operator] += own_bytes
        if sharded and whole_gradients_begin(view, group):
            late_of[group.operator] += own_bytes
    anew = sum(anew_of.values())
    whole = last = whole_for_a_while(view, gives_back=is_followed(plan) and plan.num_microbatches == 1)
    for_weights = {index: _for_weights(view, index) for index in view.operators}
    needed = {index: sum(sizes) for index, sizes in for_weights.items()}
    walked = last_walked = walk(view, whole, anew_of, late_of, needed)
    if is_followed(plan) and plan.num_microbatches == 2:
        last = whole_for_a_while(view, gives_back=True)
        last_walked = walk(view, last, anew_of, late_of, needed)
    bucket = num_buffers(plan) * bucket_buffer_bytes(parameter_groups(view), problem.runtime) if sharded else 0.0
    weighted, to_multiply = (sum(sizes) for sizes in zip(*for_weights.values(), strict=True))
    refreshed = [refreshed_bytes(group, view.costs) for group in parameter_groups(view)]
    return HeldBytes(
        states=float(static.total_bytes + anew),
        anew=float(anew),
        kept=walked.kept,
        working=walked.most - walked.kept + bucket,
        working_first=walked.most_first - walked.kept + bucket,
        gathered=whole.root,
        stays=whole.stays,
        last=whole.end + bucket,
        for_weights=min(weighted, walked.kept + walked.again) + to_multiply,
        input_pass=walked.most_split - walked.kept,
        weight_pass=max(weight_pass_bytes(index, view.cost(index), problem) for index in view.operators)
        + whole.gradients
        + bucket,
        flattened=float(static.flattened),
        step=float(static.step_bytes),
        refreshed=sum(chunks for chunks, _ in refreshed) + max((whole for _, whole in refreshed), default=0.0),
        buffer=max(never_given_back_bytes(view.cost(index), problem) for index in view.operators),
        forward=walked.most_forward,
        last_working=last_walked.most - walked.kept + bucket,
        last_end=last.end + bucket,
    )


def is_followed(plan: Plan) -> bool:
    """Return whether it is followed what the last backward pass gives back of what stays gathered.

    Else that counts to the end of passes: where stages share a device, and where weight gradients come later.
    """
    if plan.reshard_after_forward or plan.schedule not in ("1f1b", "gpipe"):
        return False
    return len(set(plan.rank_of_stage)) == len(plan.stages)


def _for_weights(view: StageView, index: int) -> tuple[float, float]:
    """Return what an operator's weight gradients need: of what is saved, and gradients of its outputs."""
    workload = view.costs.problem.workload
    return needed_for_weights(workload, index, view.cost(index)) if workload.parameters(index) else (0.0, 0.0)


def refreshed_bytes(group: ParameterGroup, costs: CostTables) -> tuple[float, float]:
    """Return what gathering an updated parameter takes, and the parameter whole, which is cut out last; else zeros."""
    refreshed = sum(static_bytes([group], costs, sharded_gradients=False).refreshed)
    whole = float(group.num_elements * costs.problem.runtime.parameter_bytes) if refreshed else 0.0
    return refreshed - whole, whole


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
        behind = max(max(held[stage].refreshed, held[stage].flattened) for stage in own)
        in_step = max(sum(held[stage].step for stage in own), behind)
        states = sum(held[stage].states for stage in own) + max(held[stage].buffer for stage in own)
        gathered = max(held[stage].gathered for stage in own) + sum(held[stage].stays for stage in own)
        if plan.schedule == "interleaved":
            chunks = [(held[i].kept, last_held[i].kept, held[i].working, held[i].last, held[i].anew) for i in own]
            beyond = interleaved_peak_bytes(np.array(chunks), rank, num_ranks, plan.num_microbatches)
            peaks[rank] = states + max(beyond + gathered, in_step)
            continue
        if plan.schedule == "zb-h1":
            peaks[rank] = states + max(_zero_bubble_bytes(plan, held[rank], rank) + gathered, in_step)
            continue
        if is_followed(plan) and plan.num_microbatches == 2:
            in_passes = _bytes_of_two(held[rank], last_held[rank], in_flight(plan, rank)) + gathered
            peaks[rank] = states + max(in_passes, in_step)
            continue
        kept = sum(in_flight(plan, stage) * held[stage].kept for stage in own)
        holds_all = all(in_flight(plan, stage) == _turns(plan, stage) for stage in own)
        if holds_all:
            kept -= sum(held[stage].kept - last_held[stage].kept for stage in own)
        before = states - sum(held[stage].anew for stage in own) if holds_all else states
        most, most_first = max(held[i].working for i in own), max(held[i].working_first for i in own)
        most_first = most_first if holds_all else most
        last = max(held[stage].last for stage in own)
        later = kept - max(held[stage].kept for stage in own) + (max(most, last) if plan.num_microbatches > 1 else last)
        peaks[rank] = max(before + kept + most_first + gathered, states + max(later + gathered, in_step))
    return tuple(peaks[rank] for rank in ranks)


def _bytes_of_two(held: HeldBytes, last: HeldBytes, num_in_flight: int) -> float:
    """Return the most that a stage holds beyond its states and what stays gathered, in two microbatches.

    The second backward pass gives that back, and the first makes gradients.
    """
    other = last.kept if num_in_flight == 2 else 0.0
    return max(
        other + held.kept + held.working_first - held.anew,
        other + held.last,
        last.kept + held.last_working,
        held.last_end,
        held.forward if num_in_flight == 1 else 0.0,
    )


def _zero_bubble_bytes(plan: Plan, held: HeldBytes, stage: int) -> float:
    own = held.kept, held.for_weights, held.input_pass, held.weight_pass, held.last, held.anew
    return zero_bubble_peak_bytes(*own, stage, len(plan.stages), plan.num_microbatches) - held.anew


def in_flight(plan: Plan, stage: int) -> int:
    """Return how many microbatches a stage holds at once: each of its replicas, where they take turns."""
    most = _turns(plan, stage)
    if plan.schedule == "gpipe":
        return most
    warmup = plan.warmup_in_force()
    if warmup is not None:
        return min(most, -(-warmup[stage] // _num_in_turn(plan, stage)))
    return min(most, len(plan.stages) - stage)


def _num_in_turn(plan: Plan, stage: int) -> int:
    return batch_replicas(plan.stages[stage]) if plan.rotates else 1


def _turns(plan: Plan, stage: int) -> int:
    """Return the microbatches of an iteration that a replica of a stage has at most."""
    return -(-plan.num_microbatches // _num_in_turn(plan, stage))
