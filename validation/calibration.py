"""Turns executions of calibration plans into a machine profile, and fits what operator times leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hardware_models.profile import OperatorProfile
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from validation.communication_times import Row, measure_communication
from validation.executor import Job
from validation.jobs import execute_rounds, plan_job
from validation.machine_profile import MachineProfile, machine_name, now, versions
from validation.measurement import Measurement
from validation.profiler import OperatorJob, make_profile, median_rows, operator_jobs, profile_rows

CALIBRATION_MICROBATCHES = 4
MIN_FRACTION, MAX_FRACTION = 1e-4, 1.0


@dataclass(frozen=True)
class CalibrationJobs:
    """What is executed to calibrate.

    Attributes:
        operators: Profiling runs.
        pipeline: A GPipe run of two stages, on which the overhead of a pass is fitted; None on one device.
    """

    operators: tuple[OperatorJob, ...]
    pipeline: Job | None

    @property
    def jobs(self) -> list[Job]:
        """All of them, the pipeline last."""
        found = [run.job for run in self.operators]
        return found + ([self.pipeline] if self.pipeline is not None else [])


def calibration_jobs(
    problem: Problem,
    microbatch_sizes: Sequence[int],
    tensor_sizes: Sequence[int] = (1,),
    *,
    iterations: int = 4,
    device: str = "cpu",
) -> CalibrationJobs:
    """Return the calibration of a problem: operators alone, and one GPipe plan where there are two devices."""
    operators = operator_jobs(problem, microbatch_sizes, tensor_sizes, iterations=iterations, device=device)
    pipeline = None
    if problem.num_devices > 1:
        samples = max(microbatch_sizes)
        own = replace(problem, global_batch=samples * CALIBRATION_MICROBATCHES)
        plan = uniform_plan(own, pp=2, microbatch=samples, schedule="gpipe")
        pipeline = plan_job(plan, own, iterations=iterations, device=device)
    return CalibrationJobs(tuple(operators), pipeline)


def fit(
    problem: Problem, work: CalibrationJobs, measured: Sequence[Sequence[Measurement]], communication: Sequence[Row]
) -> MachineProfile:
    """Return the profile that rounds of measured calibration jobs make up.

    Args:
        problem: What was calibrated.
        work: The jobs.
        measured: By round, in the order of ``work.jobs``.
        communication: Measured transfers and collectives.
    """
    source = f"windtunnel profile, {machine_name()}, {now()}"
    rows = [
        [
            row
            for run, each in zip(work.operators, turn, strict=False)
            for row in profile_rows(run, each, source)
        ]
        for turn in measured
    ]
    operators = make_profile(problem, median_rows(rows), source)
    profile = MachineProfile(
        operators=operators,
        communication=tuple(communication),
        pass_overhead_s=0.0,
        optimizer_bandwidth_fraction=_optimizer_fraction(problem, work, measured, operators),
        machine=machine_name(),
        date=now(),
        versions=versions(),
        fitted_on=_in_words(work),
    )
    if work.pipeline is None:
        return profile
    measured_s = float(np.median([turn[-1].iteration_time_s for turn in measured]))
    return replace(profile, pass_overhead_s=fit_overhead_s(profile, work.pipeline, measured_s))


def fit_overhead_s(profile: MachineProfile, job: Job, measured_s: float) -> float:
    """Return the overhead per pass with which the simulation of a job takes what was measured; at least 0."""

    def simulated_s(overhead_s: float) -> float:
        problem = replace(profile, pass_overhead_s=overhead_s).apply(job.problem, job.plan)
        return simulate(job.plan, problem).iteration_time_s

    without, step = simulated_s(0.0), 0.01 * measured_s
    slope = (simulated_s(step) - without) / step
    return max(0.0, (measured_s - without) / slope) if slope > 0 else 0.0


def _optimizer_fraction(
    problem: Problem,
    work: CalibrationJobs,
    measured: Sequence[Sequence[Measurement]],
    operators: OperatorProfile,
) -> float:
    """Return the bandwidth share at which the simulated optimizer step takes what was measured."""
    run = work.operators[0]
    result = simulate(run.job.plan, run.job.problem)
    graph = result.graph
    is_step = graph.cause == graph.causes.index("optimizer") if "optimizer" in graph.causes else None
    old = problem.hardware.gpu(operators.gpu_type).optimizer_bandwidth_fraction
    if is_step is None:
        return old
    simulated_s = float(graph.work_s[is_step].sum())
    measured_s = float(np.median([turn[0].optimizer_s for turn in measured]))
    if not (simulated_s > 0 and measured_s > 0):
        return old
    return min(MAX_FRACTION, max(MIN_FRACTION, old * simulated_s / measured_s))


def _in_words(work: CalibrationJobs) -> str:
    words = [f"operators at {run.samples} samples, tp {run.tensor_size}" for run in work.operators]
    if work.pipeline is not None:
        plan = work.pipeline.plan
        words.append(f"gpipe of 2 stages, {plan.num_microbatches} microbatches of {plan.microbatch_size}")
    return "; ".join(words)


def profile_machine(
    problem: Problem,
    microbatch_sizes: Sequence[int],
    tensor_sizes: Sequence[int] = (1,),
    *,
    rounds: int = 5,
    device: str = "cpu",
) -> MachineProfile:
    """Measure operators, communication, optimizer and the overhead of a pass on this machine.

    Args:
        problem: Model, cluster and runtime.
        microbatch_sizes: Samples per rank and microbatch.
        tensor_sizes: Tensor-parallel degrees.
        rounds: Interleaved rounds of all calibration plans; medians count.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: If the executor cannot run the problem.
        launch.WorkerError: If a process fails.
    """
    work = calibration_jobs(problem, microbatch_sizes, tensor_sizes, device=device)
    measured = execute_rounds(work.jobs, rounds=rounds, device=device)
    communication = measure_communication(problem.num_devices, device=device) if problem.num_devices > 1 else []
    return fit(problem, work, measured, communication)
