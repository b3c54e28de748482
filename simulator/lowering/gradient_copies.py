"""Gradients that are copied before they are reduced, and back: which ones, and what that takes."""

from __future__ import annotations

from simulator.lowering.synchronisation import ParameterGroup, is_copied, parameter_groups
from simulator.lowering.view import StageView
from simulator.segments import EMPTY, Segment
from workloads.kernels import MemoryBound

GRADIENT_COPY = "gradient copy"
"""The phase of an operator in which its gradients are gone over once."""


def copied_groups(view: StageView) -> dict[int, list[ParameterGroup]]:
    """Return the parameters whose gradients the runtime copies, by operator; a tied one with its first."""
    if "copied groups" not in view.kept:
        found: dict[int, list[ParameterGroup]] = {}
        for group in parameter_groups(view):
            if is_copied(view, group):
                found.setdefault(group.operator, []).append(group)
        view.kept["copied groups"] = found
    kept: dict[int, list[ParameterGroup]] = view.kept["copied groups"]
    return kept


def copy_segment(view: StageView, operator: int, gpu_type: str) -> Segment:
    """Return the work of going over an operator's gradients once, a kernel per parameter.

    Sharded gradients are read as backward makes them; whole ones are kept as they travel.
    """
    costs = view.costs
    sums = costs.problem.runtime.gradient_accumulation_bytes
    made = costs.problem.runtime.implementation.activation_bytes
    total = EMPTY
    for group in copied_groups(view)[operator]:
        read = min(made, sums) if group.zero else sums
        kernel = MemoryBound(float(group.num_elements * read), float(group.num_elements * sums))
        total = total.then(costs.launched([kernel], gpu_type))
    return total
