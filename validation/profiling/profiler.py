"""Operator times measured inside the executor, as an operator profile.

Every operator of the workload runs in its place in a training iteration of one stage. What a pass takes beyond
its operators (autograd hooks, accumulation of gradients, Python between operators) is shared out: in forward
evenly, in backward by parameter bytes where there are parameters, so that rows add up to the pass. On a GPU it counts
with the operator that it comes before, and rows have the seconds of kernels and those of the host apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import Any

from hardware_models.profile import OPTIONAL, OperatorProfile, ProfileRow
from simulator.costs import CostTables
from simulator.plan import resolve
from simulator.problem import Problem
from simulator.profiled_costs import modelled_row
from simulator.uniform import uniform_plan
from validation.execution.executor import Job
from validation.measurement import BACKWARD, RECOMPUTE, Measurement
from validation.profiling.jobs import plan_job
from workloads.kinds.base import FORWARD
from workloads.local import dtype_bytes

MICROBATCHES = {"cpu": 4, "cuda": 1}
"""Per iteration of a profiling run. On the CPU the first finds caches cold from the optimizer step, and medians leave
it out; on a GPU nothing is at work beside what is timed, and gradients of the first are added to none."""

HELD_BACK_ITERATIONS = 2
"""Of a profiling run on a GPU at most: its kernels repeat to 0.2 % on one H100, and it takes several times as long."""

PROFILING_SCHEDULE = {"cpu": "gpipe", "cuda": "1f1b"}
"""On a GPU one microbatch at a time, so that what fits once fits."""


@dataclass(frozen=True)
class OperatorJob:
    """A profiling run.

    Attributes:
        job: What is executed.
        samples, tensor_size: What its rows are about.
        copies: Replicas that run at once, so that cores and memory are as busy as in a parallel run.
    """

    job: Job
    samples: int
    tensor_size: int
    copies: int


def operator_job(
    problem: Problem,
    samples: int,
    tensor_size: int,
    *,
    copies: int = 1,
    schedule: str | None = None,
    recompute: str = "none",
    iterations: int = 4,
    device: str = "cpu",
    reported: Container[str] = (),
) -> OperatorJob:
    """Return one profiling run.

    Args:
        problem: Model, cluster and runtime.
        samples, tensor_size: Per rank and microbatch, and ranks that an operator is split over.
        copies: Replicas that run at once.
        schedule: Whose passes are timed; None for that of the device (``PROFILING_SCHEDULE``).
        recompute: As ``uniform_plan`` has it.
        iterations, device: As executed.
        reported: Hashes of plans that must not calibrate: a run that would be one of them has more microbatches.

    Raises:
        ValueError: If the executor cannot run it, or the cluster is too small for ``copies`` times ``tensor_size``.
    """
    schedule = schedule or PROFILING_SCHEDULE[device]
    if device == "cuda":
        iterations = min(iterations, HELD_BACK_ITERATIONS)
    for microbatches in count(MICROBATCHES[device]):
        own = replace(problem, global_batch=samples * copies * microbatches)
        plan = uniform_plan(
            own, tp=tensor_size, dp=copies, microbatch=samples, schedule=schedule, recompute=recompute
        )
        job = plan_job(plan, own, iterations=iterations, device=device, measure_operators=True)
        if job.plan.canonical_hash(problem.workload) not in reported:
            return OperatorJob(job, samples, tensor_size, copies)
    raise AssertionError("count has no end")


def profile_rows(
    run: OperatorJob, measured: Measurement, source: str, recomputed_host_s: Mapping[str, float] | None = None
) -> list[ProfileRow]:
    """Return the rows that one profiling run measured, the mean over operators of one role that do the same work.

    Args:
        run, measured: The run.
        source: Of the rows.
        recomputed_host_s: What recomputation adds to the host's seconds of an operator, by role
            (``recomputing_host_s``).
    """
    problem, plan = run.job.problem, run.job.plan
    costs, workload = CostTables(problem), problem.workload
    gpu_type = problem.gpu_types[plan.stages[0].devices[0]]
    words = plan.stages[0].sharding_per_operator()
    shardings = [resolve(word, op) for word, op in zip(words, workload.operators, strict=True)]
    forward, backward = _whole_pass(problem, measured, run_has_collectives=run.tensor_size > 1)
    host = _passes(measured.operator_host_s, len(workload)) if measured.operator_host_s else None
    taken = _passes(measured.operator_taken_bytes, len(workload)) if measured.operator_taken_bytes else None
    roles: dict[str, list[int]] = {}
    for index in range(len(workload)):
        has_axis = any(axis.split != "batch" for axis in shardings[index])
        if has_axis or run.tensor_size == 1:
            roles.setdefault(workload.profile_roles[index], []).append(index)
    rows = []
    for role, members in roles.items():
        first = members[0]
        cost = costs.operator(first, shardings[first], run.samples, gpu_type)
        rows.append(
            replace(
                modelled_row(problem, first, cost, run.samples, (run.tensor_size, "default"), source),
                forward_s=_mean(forward, members),
                backward_s=_mean(backward, members),
                includes_collectives=False,
                num_groups=run.copies,
                forward_host_s=_mean(host[0], members) if host else None,
                backward_host_s=_mean(host[1], members) if host else None,
                recomputed_host_s=(recomputed_host_s or {}).get(role),
                forward_taken_bytes=max(taken[0][index] for index in members) if taken else None,
                backward_taken_bytes=max(taken[1][index] for index in members) if taken else None,
            )
        )
    return rows


def recomputing_host_s(plain: Measurement, recomputed: Measurement, problem: Problem) -> dict[str, float]:
    """Return what the host takes longer for an operator that is recomputed, in seconds by role.

    Of those that run again: the second forward pass, what keeps its tensors back in the first, and what finds them.

    Args:
        plain, recomputed: Measured without recomputation, and with it.
        problem: Whose operators these are.
    """
    again = {index for phase, index in recomputed.operator_host_s if phase == RECOMPUTE}
    roles: dict[str, list[float]] = {}
    for index in again:
        more_s = sum(seconds for (_, at), seconds in recomputed.operator_host_s.items() if at == index)
        more_s -= sum(seconds for (_, at), seconds in plain.operator_host_s.items() if at == index)
        roles.setdefault(problem.workload.profile_roles[index], []).append(more_s)
    return {role: max(0.0, statistics.fmean(seconds)) for role, seconds in roles.items()}


def _mean(seconds: Sequence[float], members: Sequence[int]) -> float:
    return statistics.fmean(seconds[index] for index in members)


def _whole_pass(
    problem: Problem, measured: Measurement, *, run_has_collectives: bool
) -> tuple[list[float], list[float]]:
    """Return forward and backward seconds per operator that add up to the measured passes.

    Under tensor parallelism a pass holds collectives as well, which are predicted from their own table: operators
    alone count there. Kernels that were timed apart from the host add up to the pass as they are.
    """
    count = len(problem.workload)
    forward, backward = _passes(measured.operator_s, count)
    weights = [_parameter_bytes(problem, index) for index in range(count)]
    if run_has_collectives or measured.operator_host_s:
        return forward, backward
    return (
        _filled(forward, measured.stage_forward_s[0], [1.0] * count),
        _filled(backward, measured.stage_backward_s[0], weights if any(weights) else [1.0] * count),
    )


def _passes(seconds: Mapping[tuple[str, int], float], count: int) -> tuple[list[float], list[float]]:
    """Return what each operator took forward and backward: seconds, or bytes (one pass goes backward at once)."""
    backward = [0.0] * count
    for (phase, index), each in seconds.items():
        backward[index] += each if phase.startswith(BACKWARD) else 0.0
    return [seconds.get((FORWARD, index), 0.0) for index in range(count)], backward


def _parameter_bytes(problem: Problem, index: int) -> float:
    implementation = problem.runtime.implementation
    return float(
        sum(
            prod(parameter.shape) * dtype_bytes("activation", implementation)
            for parameter in problem.workload.parameters(index)
        )
    )


def _filled(seconds: Sequence[float], total_s: float, weights: Sequence[float]) -> list[float]:
    rest = max(0.0, total_s - sum(seconds))
    whole = sum(weights)
    return [each + rest * weight / whole for each, weight in zip(seconds, weights, strict=True)]


def median_rows(rounds: Sequence[Sequence[ProfileRow]]) -> tuple[ProfileRow, ...]:
    """Return the rows with the medians over rounds; all rounds have the same rows in the same order."""
    return tuple(
        replace(rows[0], **_medians(rows))
        for rows in zip(*rounds, strict=True)
    )


def _medians(rows: Sequence[ProfileRow]) -> dict[str, Any]:
    names = [name for name in ("forward_s", "backward_s", *OPTIONAL) if getattr(rows[0], name) is not None]
    return {name: statistics.median(getattr(row, name) for row in rows) for name in names}


def make_profile(problem: Problem, rows: Sequence[ProfileRow], source: str) -> OperatorProfile:
    """Return a profile of this problem's model and device type."""
    return OperatorProfile(
        model=problem.workload.name,
        gpu_type=problem.gpu_types[0],
        dtype=problem.runtime.implementation.dtype,
        rows=tuple(rows),
        source=source,
        kernels_only=any(row.forward_host_s is not None for row in rows),
    )
