"""Turns executions of calibration plans into a machine profile, and fits what operator times leave out."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from datafiles.words import counted
from hardware_models.collective_table import CollectiveTable, Row
from hardware_models.profile_scaling import ProfileScaling
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from validation.execution.executor import Job
from validation.measurement import Measurement
from validation.profiling.jobs import plan_job
from validation.profiling.machine_profile import MachineProfile, machine_name, now, versions
from validation.profiling.profiler import (
    OperatorJob,
    make_profile,
    median_rows,
    operator_job,
    profile_rows,
    recomputing_host_s,
)
from validation.profiling.stage_times import stage_times

ENGINE = "compiled"
CALIBRATION_MICROBATCHES = 4
CALM = 1.33
"""Factor on operators in a pipeline from which on, or below its inverse, the machine was busy in one of the two runs:
company that operators keep each other, which it is for, is worth a few per cent."""

TOWARDS_ONE = 0.05
"""Weight of a factor's distance from 1 beside the misses of plans, all as logarithms."""
DIFFERENCE = 0.01
"""Share of a factor between two plans' simulations whose difference is the slope."""
MOST_APART = 3.0
"""Factors on kernels and host are at most this, and at least its inverse."""


class Calibrated(Protocol):
    """What predicts from measurements: a machine's profile, or a campaign's calibration."""

    def apply(self, problem: Problem, plan: Plan) -> Problem:
        """Return the problem with what was measured in the place of the model."""


@dataclass(frozen=True)
class CalibrationJobs:
    """What is executed to calibrate.

    Attributes:
        operators: Profiling runs.
        recomputed: On a GPU the first of them with recomputation, which costs its host more than the passes do.
        optimizer: One microbatch on one device, whose end is the optimizer step and nothing else.
        pipeline: A GPipe run of two stages, on which the overhead of a pass is fitted; None on one device.
    """

    operators: tuple[OperatorJob, ...]
    recomputed: OperatorJob | None
    optimizer: Job
    pipeline: Job | None

    @property
    def profiling(self) -> list[OperatorJob]:
        """All profiling runs."""
        return [*self.operators, *([self.recomputed] if self.recomputed is not None else [])]

    @property
    def jobs(self) -> list[Job]:
        """Profiling runs, the optimizer step, the pipeline."""
        found = [run.job for run in self.profiling] + [self.optimizer]
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

    Raises:
        ValueError: If nothing is asked for, or the cluster is too small for a tensor-parallel degree.
    """
    if not microbatch_sizes or not tensor_sizes:
        raise ValueError("microbatch_sizes and tensor_sizes must each name at least one size")
    operators = [
        operator_job(
            problem,
            samples,
            size,
            copies=max(1, problem.num_devices // size) if device == "cpu" else 1,
            iterations=iterations,
            device=device,
        )
        for size in tensor_sizes
        for samples in microbatch_sizes
    ]
    pipeline = None
    if problem.num_devices > 1:
        samples = max(microbatch_sizes)
        own = replace(problem, global_batch=samples * CALIBRATION_MICROBATCHES)
        plan = uniform_plan(own, pp=2, microbatch=samples, schedule="gpipe")
        pipeline = plan_job(plan, own, iterations=iterations, device=device)
    alone = replace(problem, global_batch=min(microbatch_sizes))
    step = plan_job(uniform_plan(alone, microbatch=alone.global_batch), alone, iterations=iterations, device=device)
    again = recomputed_job(problem, operators, iterations=iterations, device=device)
    return CalibrationJobs(tuple(operators), again, step, pipeline)


def recomputed_job(
    problem: Problem,
    operators: Sequence[OperatorJob],
    *,
    iterations: int,
    device: str,
    reported: Container[str] = (),
) -> OperatorJob | None:
    """Return the profiling run with recomputation, of the fewest samples; None on the CPU, which is its own host.

    Args:
        problem, operators: What is profiled, and the runs.
        iterations, device, reported: As for ``operator_job``.
    """
    if device != "cuda" or not operators:
        return None
    first = min(operators, key=lambda run: (run.tensor_size, run.samples))
    return operator_job(
        problem, first.samples, first.tensor_size, recompute="full", iterations=iterations, device=device,
        reported=reported,
    )  # fmt: skip


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
            for row in profile_rows(run, each, source, recomputed_host_s)
        ]
        for turn in measured
        for recomputed_host_s in [_recomputing_host_s(problem, work, turn)]
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
    step_s = float(np.median([turn[len(work.profiling)].optimizer_s for turn in measured]))
    profile = replace(profile, optimizer_bandwidth_fraction=fit_optimizer_fraction(profile, work.optimizer, step_s))
    if work.pipeline is None:
        return profile
    measured_s = float(np.median([turn[-1].iteration_time_s for turn in measured]))
    if operators.kernels_only:

        def scaled(kernels: float, host: float) -> MachineProfile:
            scaling = ProfileScaling(host_factor=host)
            return replace(profile, operators=scaling.apply(operators), operator_factor=kernels)

        return scaled(*fit_kernels_and_host(scaled, [work.pipeline], [measured_s]))
    profile = replace(profile, operator_factor=fit_factor(profile, work.pipeline, [turn[-1] for turn in measured]))
    found_s = fit_overhead_s(lambda own: replace(profile, pass_overhead_s=own), work.pipeline, measured_s)
    overhead_s, words = never_negative(found_s)
    words = [*doubtful_factor(profile.operator_factor), *words]
    return replace(profile, pass_overhead_s=overhead_s, fitted_on="; ".join([profile.fitted_on, *words]))


def _recomputing_host_s(
    problem: Problem, work: CalibrationJobs, measured: Sequence[Measurement]
) -> dict[str, float]:
    run = work.recomputed
    if run is None:
        return {}
    sizes = [(each.samples, each.tensor_size) for each in work.operators]
    plain = measured[sizes.index((run.samples, run.tensor_size))]
    return recomputing_host_s(plain, measured[len(work.operators)], problem)


def fit_factor(calibrated: Calibrated, job: Job, measured: Sequence[Measurement]) -> float:
    """Return measured over simulated time of one forward and one backward on every stage of a job."""
    result = simulate(job.plan, calibrated.apply(job.problem, job.plan), engine=ENGINE)
    simulated_s = sum(map(sum, stage_times(result, len(job.plan.stages))))
    measured_s = np.median([sum(each.stage_forward_s) + sum(each.stage_backward_s) for each in measured])
    return float(measured_s) / simulated_s


def fit_kernels_and_host(
    scaled: Callable[[float, float], Calibrated], jobs: Sequence[Job], measured_s: Sequence[float]
) -> tuple[float, float]:
    """Return factors on kernels and on their host with which simulations come nearest to what was measured.

    Each job is ruled by one of the two and says little of the other: a factor that none speaks of stays at 1.

    Args:
        scaled: Returns the calibration with two factors.
        jobs, measured_s: What was executed, and its iteration times.
    """

    def misses(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        own = scaled(float(factors[0]), float(factors[1]))
        simulated_s = [
            simulate_time_s(job.plan, own.apply(job.problem, job.plan), engine=ENGINE) for job in jobs
        ]
        return np.concatenate([np.log(np.divide(simulated_s, measured_s)), TOWARDS_ONE * np.log(factors)])

    if not jobs:
        return 1.0, 1.0
    found = least_squares(misses, np.ones(2), diff_step=[DIFFERENCE] * 2, bounds=(1 / MOST_APART, MOST_APART))
    return float(found.x[0]), float(found.x[1])


def fit_overhead_s(with_overhead: Callable[[float], Calibrated], job: Job, measured_s: float) -> float:
    """Return the overhead per pass, in seconds, with which the simulation of a job takes what was measured.

    It is below 0 where the job took less than its operators and transfers say; see `never_negative`.

    Args:
        with_overhead: Returns the calibration with an overhead of so many seconds.
        job: What was executed.
        measured_s: Its iteration time.
    """

    def simulated_s(overhead_s: float) -> float:
        problem = with_overhead(overhead_s).apply(job.problem, job.plan)
        return simulate_time_s(job.plan, problem, engine=ENGINE)

    without, step = simulated_s(0.0), 0.01 * measured_s
    slope = (simulated_s(step) - without) / step
    return (measured_s - without) / slope if slope > 0 else 0.0


def never_negative(overhead_s: float) -> tuple[float, list[str]]:
    """Return the overhead of a pass to predict with, and what to say of it.

    A pass takes at least its operators. What they took less in a pipeline than when profiled is in the factor on
    operators, which is fitted first, on the passes; what is left below 0 is noise, or transfers that took longer when
    measured alone. Taken off each operator in seconds, it would grow with the depth of the pipeline and leave
    nothing of small operators, so it is 0 then.

    >>> never_negative(-0.000291)
    (0.0, ['overhead of a pass 0: the pipeline took 0.291 ms a pass less than its operators say, which is noise'])
    """
    if overhead_s >= 0:
        return overhead_s, []
    return 0.0, [
        f"overhead of a pass 0: the pipeline took {-1e3 * overhead_s:.3f} ms a pass less than its operators say, "
        "which is noise"
    ]


def doubtful_factor(factor: float) -> list[str]:
    """Return what to say of a factor on operators that is far from 1.

    >>> doubtful_factor(0.57)
    ['operators took 0.57 of their profiled times in the pipeline, which should be near 1: measure on a calm machine']
    """
    if 1 / CALM <= factor <= CALM:
        return []
    return [
        f"operators took {factor:.2f} of their profiled times in the pipeline, which should be near 1: measure on a "
        "calm machine"
    ]


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
    words = [f"operators at {counted(run.samples, 'sample')}, tp {run.tensor_size}" for run in work.operators]
    if work.pipeline is not None:
        plan = work.pipeline.plan
        words.append(
            f"gpipe of 2 stages, {counted(plan.num_microbatches, 'microbatch', 'microbatches')} of "
            f"{plan.microbatch_size}"
        )
    return "; ".join(words)
