"""Turns executions of calibration plans into a machine profile, and fits what operator times leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hardware_models.collective_table import CollectiveTable, Row
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from validation.communication_times import measure_communication
from validation.executor import Job
from validation.jobs import execute_rounds, plan_job
from validation.machine_profile import MachineProfile, machine_name, now, versions
from validation.measurement import Measurement
from validation.profiler import OperatorJob, make_profile, median_rows, operator_jobs, profile_rows
from validation.stage_times import stage_times

CALIBRATION_MICROBATCHES = 4


@dataclass(frozen=True)
class CalibrationJobs:
    """What is executed to calibrate.

    Attributes:
        operators: Profiling runs.
        optimizer: One microbatch on one device, whose end is the optimizer step and nothing else.
        pipeline: A GPipe run of two stages, on which the overhead of a pass is fitted; None on one device.
    """

    operators: tuple[OperatorJob, ...]
    optimizer: Job
    pipeline: Job | None

    @property
    def jobs(self) -> list[Job]:
        """All of them, the pipeline last."""
        found = [run.job for run in self.operators] + [self.optimizer]
        return found + ([self.pipeline] if self.pipeline is not None else [])


def calibration_jobs(
    problem: Problem,
    microbatch_sizes: Sequence[int],
    tensor_sizes: Sequence[int] = (1,),
    *,
    iterations: int = 4,
    device: str = "cpu",
) -> CalibrationJobs:
    """Return the calibration of a problem: operators, and one GPipe plan where there are two devices.

    On the CPU as many replicas run at once as there are devices: cores share memory and caches, so an operator takes
    longer while the others work, as they do in the plans that are predicted.
    """
    operators = [
        run
        for size in tensor_sizes
        for run in operator_jobs(
            problem,
            microbatch_sizes,
            (size,),
            copies=max(1, problem.num_devices // size) if device == "cpu" else 1,
            iterations=iterations,
            device=device,
        )
    ]
    pipeline = None
    if problem.num_devices > 1:
        samples = max(microbatch_sizes)
        own = replace(problem, global_batch=samples * CALIBRATION_MICROBATCHES)
        plan = uniform_plan(own, pp=2, microbatch=samples, schedule="gpipe")
        pipeline = plan_job(plan, own, iterations=iterations, device=device)
    alone = replace(problem, global_batch=min(microbatch_sizes))
    step = plan_job(uniform_plan(alone, microbatch=alone.global_batch), alone, iterations=iterations, device=device)
    return CalibrationJobs(tuple(operators), step, pipeline)


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
        [row for run, each in zip(work.operators, turn, strict=False) for row in profile_rows(run, each, source)]
        for turn in measured
    ]
    operators = make_profile(problem, median_rows(rows), source)
    profile = MachineProfile(
        operators=operators,
        communication=tuple(CollectiveTable.from_rows(communication, source).rows()),
        operator_factor=1.0,
        pass_overhead_s=0.0,
        optimizer_bandwidth_fraction=problem.hardware.gpu(operators.gpu_type).optimizer_bandwidth_fraction,
        machine=machine_name(),
        date=now(),
        versions=versions(),
        fitted_on=_in_words(work),
        preset=problem.hardware.cluster.nodes[0].preset if communication else None,
    )
    step_s = float(np.median([turn[len(work.operators)].optimizer_s for turn in measured]))
    profile = replace(profile, optimizer_bandwidth_fraction=fit_optimizer_fraction(profile, work.optimizer, step_s))
    if work.pipeline is None:
        return profile
    profile = replace(profile, operator_factor=fit_factor(profile, work.pipeline, [turn[-1] for turn in measured]))
    measured_s = float(np.median([turn[-1].iteration_time_s for turn in measured]))
    return replace(profile, pass_overhead_s=fit_overhead_s(profile, work.pipeline, measured_s))


def fit_factor(profile: MachineProfile, job: Job, measured: Sequence[Measurement]) -> float:
    """Return measured over simulated time of one forward and one backward on every stage of a job."""
    result = simulate(job.plan, profile.apply(job.problem, job.plan))
    simulated_s = sum(map(sum, stage_times(result, len(job.plan.stages))))
    measured_s = np.median([sum(each.stage_forward_s) + sum(each.stage_backward_s) for each in measured])
    return float(measured_s) / simulated_s


def fit_overhead_s(profile: MachineProfile, job: Job, measured_s: float) -> float:
    """Return the overhead per pass with which the simulation of a job takes what was measured.

    It may be slightly negative, where noise in the operator times has to be made up for.
    """

    def simulated_s(overhead_s: float) -> float:
        problem = replace(profile, pass_overhead_s=overhead_s).apply(job.problem, job.plan)
        return simulate(job.plan, problem).iteration_time_s

    without, step = simulated_s(0.0), 0.01 * measured_s
    slope = (simulated_s(step) - without) / step
    return (measured_s - without) / slope if slope > 0 else 0.0


def fit_optimizer_fraction(profile: MachineProfile, job: Job, measured_s: float) -> float:
    """Return the bandwidth share at which the simulated optimizer step of a job on one device takes what it took."""
    graph = simulate(job.plan, profile.apply(job.problem, job.plan)).graph
    is_step = [graph.causes[cause] == "optimizer" for cause in graph.cause]
    simulated_s = float(graph.work_s[is_step].sum())
    old = profile.optimizer_bandwidth_fraction
    if not (simulated_s > 0 and measured_s > 0):
        return old
    return old * simulated_s / measured_s


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
