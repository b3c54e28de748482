"""What a user should know of a plan, or of its hardware, that is simulated all the same."""

from __future__ import annotations

from simulator.plan import Plan
from simulator.problem import Problem


def remarks(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """Return what there is to say, in sentences."""
    found = []
    runtime = problem.runtime
    if not runtime.has_sequence_parallelism and is_sequence_parallel(plan):
        found.append(
            f"{runtime.name} has no sequence parallelism, which the plan has: it is simulated as if it had, and no run "
            "is like that; take a runtime whose has_sequence_parallelism is true"
        )
    return (*found, *problem.hardware.left_out)


def is_sequence_parallel(plan: Plan) -> bool:
    """Return whether some operator is split along the sequence."""
    axes = (axis for stage in plan.stages for _, sharding in stage.shardings for axis in sharding)
    return any(axis.size > 1 and "sequence" in axis.split for axis in axes)
