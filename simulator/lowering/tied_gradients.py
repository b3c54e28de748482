"""Gradients of a weight that several operators of a stage use: autograd adds them up before it hands them over."""

from __future__ import annotations

from typing import NamedTuple

from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups


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
    return [
        TiedGradient(group.users[0], group.users[-1], waiting_bytes(view, group))
        for group in parameter_groups(view)
        if len(group.users) > 1 and waiting_bytes(view, group)
    ]


def waiting_bytes(view: StageView, group: ParameterGroup) -> int:
    """Return the bytes of such a gradient, should others of its weight come later.

    What ZeRO scatters in each pass is whole for as long, and counted there.
    """
    waits = group.tie is not None and group.zero < 2
    return group.num_elements * view.costs.problem.runtime.tied_gradient_bytes if waits else 0
