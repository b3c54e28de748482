"""Calibration and validation in one sitting: both in turn, round after round, so that a drifting machine is fair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.problem import Problem
from validation.calibration import calibration_jobs, fit
from validation.communication_times import measure_communication
from validation.compare import ValidationReport, compare
from validation.jobs import execute_rounds, plan_job
from validation.machine_profile import MachineProfile


@dataclass(frozen=True)
class InterleavedReport:
    """One plan, validated over several rounds.

    Attributes:
        rounds: One report per round, each with the calibration of its own round.
        pooled: Medians of all rounds on both sides.
    """

    rounds: tuple[ValidationReport, ...]
    pooled: ValidationReport

    @property
    def median_abs_error(self) -> float:
        """Median over rounds of the absolute error of the iteration time."""
        return statistics.median(abs(report.iteration.error) for report in self.rounds)


def validate_interleaved(
    plans: Sequence[tuple[Plan, Problem]],
    problem: Problem,
    microbatch_sizes: Sequence[int],
    tensor_sizes: Sequence[int] = (1,),
    *,
    rounds: int = 5,
    iterations: int = 3,
    device: str = "cpu",
) -> tuple[MachineProfile, list[InterleavedReport]]:
    """Calibrate and validate plans in turn.

    Args:
        plans: Each with its problem (batches may differ); none may be the calibration's own plan.
        problem: What is calibrated: the same model, cluster and runtime.
        microbatch_sizes, tensor_sizes: Of the profile.
        rounds: Of everything.
        iterations: Per plan and round, after one that does not count.
        device: ``cpu`` or ``cuda``.

    Returns:
        The profile of all rounds together, and one report per plan.

    Raises:
        ValueError: If a plan cannot be executed or is the one that calibrates.
        launch.WorkerError: If a process fails.
    """
    work = calibration_jobs(problem, microbatch_sizes, tensor_sizes, iterations=iterations, device=device)
    jobs = [plan_job(plan, own, iterations=iterations, device=device) for plan, own in plans]
    calibrating = {job.plan.canonical_hash(problem.workload) for job in work.jobs}
    for job in jobs:
        if job.plan.canonical_hash(problem.workload) in calibrating:
            raise ValueError("a plan that calibrates must not be validated; take another schedule or batch")
    communication = measure_communication(problem.num_devices, device=device) if problem.num_devices > 1 else []
    measured = execute_rounds(work.jobs + jobs, rounds=rounds, device=device)
    first = len(work.jobs)
    whole = fit(problem, work, [turn[:first] for turn in measured], communication)
    reports: list[list[ValidationReport]] = [[] for _ in jobs]
    for turn in measured:
        own_profile = fit(problem, work, [turn[:first]], communication)
        for number, job in enumerate(jobs):
            reports[number].append(compare(job.plan, job.problem, own_profile, [turn[first + number]]))
    return whole, [
        InterleavedReport(
            tuple(reports[number]),
            compare(job.plan, job.problem, whole, [turn[first + number] for turn in measured]),
        )
        for number, job in enumerate(jobs)
    ]
