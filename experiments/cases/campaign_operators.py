"""The operators that a campaign's cases hold profiles of, with the kernels that the model says they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.cases.campaigns import units_of
from hardware_models.profile import ProfileRow
from simulator.problem import Problem
from workloads.kernels import Kernel
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Local
from workloads.local import localize
from workloads.operators import Operator, Workload


@dataclass(frozen=True)
class MeasuredOperator:
    """One row of a profile.

    Attributes:
        unit, model: Of the campaign.
        problem: With the profile.
        operator: The middle one of those that have the row's role (``Workload.profile_roles``).
        count: Operators that have it.
        row: What was measured, times what calibration plans took of it: kernels run on in an iteration, where the
            clock gets less rest (0.99 to 1.10 of their time one by one), and a host that is not held back is quicker.
        local: Its shapes on one device.
        forward, backward: Kernels of either pass. Sums of gradients (`Kind.gradient_sums`) are with the operator that
            goes backward next, as they were profiled.
    """

    unit: str
    model: str
    problem: Problem
    operator: Operator
    count: int
    row: ProfileRow
    local: Local
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


def measured_operators(path: Path) -> Iterator[MeasuredOperator]:
    """Yield the rows of every unit's profile.

    Raises:
        DataFileError: If the file of cases breaks a rule.
    """
    for unit, model, problem in units_of(path):
        workload, profile = problem.workload, problem.hardware.operator_profile
        assert profile is not None, unit
        sums = _sums(problem.workload)
        indices: dict[str, list[int]] = {}
        for index, role in enumerate(workload.profile_roles):
            indices.setdefault(role, []).append(index)
        for row in profile.rows:
            if row.tensor_size > 1:
                continue
            own = indices[row.role]
            index = own[len(own) // 2]
            op, local = workload.operators[index], _local(problem, index, row.samples)
            forward, back, weights = (
                op.definition.kernels(phase, local) for phase in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
            )
            alone = back[: len(back) - len(op.definition.gradient_sums(local))]
            first = [
                kernel
                for reader in sums.get(index, ())
                for kernel in workload.operators[reader].definition.gradient_sums(_local(problem, reader, row.samples))
            ]
            backward = (*first, *alone, *weights)
            yield MeasuredOperator(unit, model, problem, op, len(own), row, local, tuple(forward), backward)


def _local(problem: Problem, index: int, samples: int) -> Local:
    """Return what one device sees of an operator."""
    op, shapes = problem.workload.operators[index], problem.workload.input_shapes(index, samples)
    return localize(op.definition, op.attributes, shapes, [], problem.runtime.implementation)


def _sums(workload: Workload) -> dict[int, list[int]]:
    """Return by operator the readers whose sums of gradients are made just before its backward.

    The gradients of a tensor meet behind each of its readers but the last one, which goes backward first: what that one
    adds is made behind the first.
    """
    found: dict[int, list[int]] = {}
    for tensor, readers in workload.consumers.items():
        for reader in readers:
            if workload.operators[reader].inputs[-1] == tensor:
                behind = reader if reader < readers[-1] else readers[0]
                found.setdefault(behind - 1, []).append(reader)
    return found
