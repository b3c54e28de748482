"""What a user should know of a plan, or of its hardware, that is simulated all the same."""

from __future__ import annotations

from collections.abc import Iterator

from datafiles.names import nearest
from datafiles.words import counted
from simulator.plan import Plan
from simulator.problem import Problem

FEW = 3
"""Names in a sentence."""


def remarks(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """Return what there is to say, in sentences."""
    found = []
    runtime = problem.runtime
    if not runtime.has_sequence_parallelism and is_sequence_parallel(plan):
        found.append(
            f"{runtime.name} has no sequence parallelism, which the plan has: it is simulated as if it had, and no run "
            "is like that; take a runtime whose has_sequence_parallelism is true"
        )
    if not runtime.recomputes_flash_attention and recomputes_flash_attention(plan, problem):
        found.append(
            f"{runtime.name} never computes flash attention again by itself, as the plan does: it is simulated as if "
            "it did, and no run is like that; plan with --recompute none or full"
        )
    used = len({device for stage in plan.stages for device in stage.devices})
    if used < problem.num_devices:
        found.append(
            f"{counted(problem.num_devices - used, 'GPU')} of the cluster's {problem.num_devices} without anything to "
            f"do; throughput per GPU and MFU are of the {used} in use"
        )
    return (*found, *_rows_of_nothing(problem), *problem.hardware.left_out)


def _rows_of_nothing(problem: Problem) -> Iterator[str]:
    """Yield what is wrong with a profile that has rows of operators nothing here is, and none of some that are."""
    profile, workload = problem.hardware.operator_profile, problem.workload
    if profile is None or profile.dtype != problem.runtime.implementation.dtype:
        return
    measured = set(profile.roles)
    known = {op.role for op in workload.operators}.union(workload.profile_roles)
    lacking = [
        op.role
        for op, role in zip(workload.operators, workload.profile_roles, strict=True)
        if not {op.role, role} & measured
    ]
    strange = [role for role in dict.fromkeys(profile.roles) if role not in known]
    if strange and lacking:
        yield (
            f"the profile's rows of {', '.join(strange[:FEW])} are of no operator of {workload.name}; "
            f"{nearest(strange[0], lacking)}; what has no rows is modelled"
        )


def is_sequence_parallel(plan: Plan) -> bool:
    """Return whether some operator is split along the sequence."""
    axes = (axis for stage in plan.stages for _, sharding in stage.shardings for axis in sharding)
    return any(axis.size > 1 and "sequence" in axis.split for axis in axes)


def recomputes_flash_attention(plan: Plan, problem: Problem) -> bool:
    """Return whether flash attention is a recomputed segment by itself."""
    operators = problem.workload.operators
    return any(
        end == begin + 1 and operators[begin].definition.name == "flash_attention"
        for stage in plan.stages
        for begin, end in stage.recompute
    )
