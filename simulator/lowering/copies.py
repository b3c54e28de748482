"""What data parallelism copies beside what it communicates: which tensors, and what that takes."""

from __future__ import annotations

from simulator.costs import CostTables
from simulator.lowering.synchronisation import ParameterGroup, gathered_for, is_copied, parameter_groups, times_reduced
from simulator.lowering.view import StageView
from simulator.segments import EMPTY, Segment
from workloads.kernels import MemoryBound

GRADIENT_COPY, GATHERED_COPY = COPIES = ("gradient copy", "gathered copy")
"""Phases of an operator: its gradients are gone over once; what was gathered of its unit is copied into parameters."""


def copied_groups(view: StageView) -> dict[int, list[ParameterGroup]]:
    """Return the parameters whose gradients the runtime copies, by operator; a tied one with its first."""
    if "copied groups" not in view.kept:
        found: dict[int, list[ParameterGroup]] = {}
        for group in parameter_groups(view):
            if is_copied(view, group):
                found.setdefault(group.operator, []).extend([group] * times_reduced(view, group))
        view.kept["copied groups"] = found
    kept: dict[int, list[ParameterGroup]] = view.kept["copied groups"]
    return kept


def copy_segment(view: StageView, phase: str, operator: int, gpu_type: str) -> Segment:
    """Return the work of one of COPIES."""
    if phase == GRADIENT_COPY:
        return gradient_copy(view, operator, gpu_type)
    return _gathered_copy(view, operator, gpu_type)


def gradient_copy(view: StageView, operator: int, gpu_type: str) -> Segment:
    """Return the work of going over an operator's gradients once, a kernel per parameter.

    Sharded gradients are read as backward makes them; whole ones are kept as they travel.
    """
    costs = view.costs
    sums = costs.problem.runtime.travelling_gradient_bytes
    made = costs.problem.runtime.implementation.activation_bytes
    total = EMPTY
    for group in copied_groups(view)[operator]:
        read = min(made, sums) if group.scattered else sums
        kernel = MemoryBound(float(group.num_elements * read), float(group.num_elements * sums))
        total = total.then(costs.launched([kernel], gpu_type))
    return total


def copying_s(costs: CostTables, gpu_type: str) -> tuple[float, float]:
    """Return the seconds of copying no bytes, and of each that is read or written."""
    problem = costs.problem
    most_s, half_s = (
        problem.hardware.kernel_time_s(gpu_type, MemoryBound(size, size), problem.runtime.implementation.dtype)
        for size in (1e11, 5e10)
    )
    start_s = 2 * half_s - most_s
    if not problem.runtime.host_runs_ahead:
        start_s = max(start_s, costs.launch_s(gpu_type))
    return start_s, (most_s - half_s) / 1e11


def _gathered_copy(view: StageView, operator: int, gpu_type: str) -> Segment:
    """Return the work of copying what was gathered of an operator's unit into its parameters, in one kernel."""
    if "gathered elements" not in view.kept:
        found: dict[int, int] = {}
        for group in parameter_groups(view):
            for unit in gathered_for(view, group):
                found[unit] = found.get(unit, 0) + group.num_elements
        view.kept["gathered elements"] = found
    elements: int = view.kept["gathered elements"][view.costs.units[operator]]
    size = float(elements * view.costs.problem.runtime.gathered_parameter_bytes)
    return view.costs.launched([MemoryBound(size, size)], gpu_type)
