"""Gradients of a weight that several operators of a stage use: autograd adds them up before it hands them over."""

from __future__ import annotations

from typing import NamedTuple

from hardware_models.runtime import Runtime
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups
from simulator.memory.model_states import reduces_in_backward


class TiedGradient(NamedTuple):
    """A gradient that waits in each backward pass.

    Attributes:
        first, last: Operators: it is made by the last one, and waits until the backward pass of the first is through.
        num_bytes: As products make it.
    """

    first: int
    last: int
    num_bytes: int


def tied_gradients(view: StageView) -> list[TiedGradient]:
    """Return the gradients of a stage that wait for others of the same weight (``Runtime.tied_gradients_wait``)."""
    runtime, scatters = view.costs.problem.runtime, reduces_in_backward(view.plan)
    sized = ((group, waiting_bytes(group, runtime, scatters=scatters)) for group in parameter_groups(view))
    return [
        TiedGradient(group.users[0], group.users[-1], num_bytes)
        for group, num_bytes in sized
        if len(group.users) > 1 and num_bytes
    ]


def waiting_bytes(group: ParameterGroup, runtime: Runtime, *, scatters: bool) -> int:
    """Return the bytes of such a gradient, should others of its weight come later.

    Args:
        group: The weight.
        runtime: Says whether gradients wait, and in what type.
        scatters: ZeRO-2 and 3 scatter gradients in each pass: these are whole for as long, and counted there.
    """
    waits = group.tie is not None and not (scatters and group.zero >= 2)
    return group.num_elements * runtime.tied_gradient_bytes if waits else 0
