"""What one operator needs of memory, whatever stands around it, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from simulator.operator_cost import OperatorCost
from simulator.problem import Problem
from simulator.saved import parted_bytes, saved_tensors


def working_bytes(index: int, cost: OperatorCost, problem: Problem, *, alone: bool = True) -> float:
    """Return what an operator needs besides what is kept, forward or backward: see `passes_working_bytes`."""
    return max(passes_working_bytes(index, cost, problem, alone=alone))


def passes_working_bytes(
    index: int, cost: OperatorCost, problem: Problem, *, alone: bool = True
) -> tuple[float, float]:
    """Return what an operator needs besides what is kept: work space forward; backward the gradients around it, too.

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
    return forward, backward + sum(inputs.values())


def own_working_bytes(index: int, cost: OperatorCost, problem: Problem) -> tuple[float, float]:
    """Return what an operator works in forward, and backward with the gradients of its outputs."""
    pairs = zip(problem.workload.operators[index].inputs, cost.input_bytes, strict=True)
    before = cost.beside_input_gradients(sum(size for name, size in pairs if name not in problem.workload.input_names))
    at_product = product_bytes(cost, problem) - parted_bytes(problem.workload, index, cost)
    at_product += sum(cost.output_bytes) - cost.given_back_bytes
    return cost.workspace_forward_bytes, max(before, at_product)


def ends_given_bytes(index: int, cost: OperatorCost, problem: Problem, *, made_here: bool) -> float:
    """Return what an operator that goes backward in place needs more where it ends a recomputed segment.

    While the segment is made again, its first input is there beside the gradients that it was given, unless something
    keeps that.

    Args:
        index, cost, problem: The operator.
        made_here: The segment makes its first input.
    """
    is_kept = problem.workload.operators[index].inputs[0] in dict(saved_tensors(problem.workload, index, cost))
    return min(cost.input_bytes[0], cost.given_back_bytes) if made_here and not is_kept else 0.0


def product_bytes(cost: OperatorCost, problem: Problem) -> float:
    """Return what an operator's weight gradients are made in."""
    return float(sum(cost.product_temporaries(problem.runtime.implementation.activation_bytes)))


def weight_pass_bytes(index: int, cost: OperatorCost, problem: Problem) -> float:
    """Return what a pass of weight gradients alone makes those of an operator in, beside what waits for that pass.

    The latter (``needed_for_weights``) has the gradient at its product already where backward parts late.
    """
    late = problem.workload.operators[index].definition.parts_late and bool(cost.parameters)
    return product_bytes(cost, problem) - (cost.workspace_weight_bytes if late else 0.0)


class HeldEnd(NamedTuple):
    """A tensor that a recomputed segment makes for operators behind it, by name: who makes it, and its bytes."""

    name: str
    maker: int
    num_bytes: float


def held_ends(
    segment: tuple[int, int], cost_of: Callable[[int], OperatorCost], problem: Problem
) -> tuple[HeldEnd, ...]:
    """Return what a segment makes for others, if that is held to the end of its backward pass, as its gradients are.

    See ``Runtime.recompute_holds_ends``.
    """
    if not problem.runtime.recompute_holds_ends:
        return ()
    workload = problem.workload
    return tuple(
        HeldEnd(name, index, size)
        for index in range(*segment)
        for name, size in zip(workload.operators[index].outputs, cost_of(index).output_bytes, strict=True)
        if workload.consumers.get(name, (-1,))[-1] >= segment[1]
    )


def held_ends_bytes(ends: Iterable[HeldEnd], index: int, counted: Mapping[str, float]) -> float:
    """Return what is held of a segment's ends while an operator of it goes backward, beyond what counts anyway.

    Gradients count while their maker is still to come, or at work.

    Args:
        ends: Of the segment.
        index: The operator.
        counted: Bytes of what the segment keeps up to there, by name.
    """
    return sum(
        end.num_bytes * ((counted.get(end.name, 0.0) == 0.0) + (end.maker > index))  # Itself, and its gradient.
        for end in ends
    )


def never_given_back_bytes(cost: OperatorCost, problem: Problem) -> float:
    """Return what an operator takes once and shares with all others of its device."""
    return cost.lasting_buffer_bytes + problem.matmul_workspace_bytes


def saved_bytes(made: float, read: float, *, regathers: bool, keeps_made: bool, in_segment: bool) -> float:
    """Return what a saved tensor takes, as it is made or as its reader has gathered it.

    Args:
        made, read: Bytes of the tensor where it is made and where it is read.
        regathers: What was gathered is dropped, and gathered again in the backward pass.
        keeps_made: The tensor is there as it was made, too, whoever gathers it.
        in_segment: The reader is computed again, and what it gathers with it.

    >>> saved_bytes(1.0, 8.0, regathers=True, keeps_made=False, in_segment=False)
    1.0
    >>> [saved_bytes(1.0, 8.0, regathers=False, keeps_made=keeps, in_segment=False) for keeps in (False, True)]
    [8.0, 9.0]
    """
    if regathers or read <= made or in_segment:
        return min(made, read)
    return read + made if keeps_made else read
