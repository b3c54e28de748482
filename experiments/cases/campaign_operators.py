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
from workloads.operators import Operator


@dataclass(frozen=True)
class MeasuredOperator:
    """One row of a profile.

    Attributes:
        unit, model: Of the campaign.
        problem: With the profile.
        operator: The first that has the row's role (``Workload.profile_roles``).
        count: Operators that have it.
        row: What was measured, times what calibration plans took of it: kernels run on in an iteration, where the
            clock gets less rest (0.99 to 1.10 of their time one by one), and a host that is not held back is quicker.
        local: Its shapes on one device.
        forward, backward: Kernels of either pass.
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
        indices: dict[str, list[int]] = {}
        for index, role in enumerate(workload.profile_roles):
            indices.setdefault(role, []).append(index)
        for row in profile.rows:
            if row.tensor_size > 1:
                continue
            own = indices[row.role]
            op, shapes = workload.operators[own[0]], workload.input_shapes(own[0], row.samples)
            local = localize(op.definition, op.attributes, shapes, [], problem.runtime.implementation)
            forward, *backward = (
                tuple(op.definition.kernels(phase, local)) for phase in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
            )
            yield MeasuredOperator(unit, model, problem, op, len(own), row, local, forward, sum(backward, ()))
