"""What a campaign executes: per model and runtime the profiling runs, the calibration plans and the report plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from simulator.plan import Plan, resolve
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from validation.campaigns.definition import Campaign, CampaignPlan
from validation.execution.executor import Job
from validation.profiling.calibration import CalibrationJobs, recomputed_job
from validation.profiling.jobs import plan_job
from validation.profiling.profiler import OperatorJob, operator_job

LAUNCH_S = {"cpu": 0.5, "cuda": 5.0}
"""Start of processes, and of what comes with it: an order of magnitude, for the estimate of minutes."""
BUILD_S = {"cpu": 0.5, "cuda": 2.0}
"""To make a plan's parameters and groups: likewise."""

SPLIT_SCHEDULES = ("zb-h1",)
"""Schedules that compute the gradients of inputs and of weights apart."""

SizeAndDegree = tuple[int, int]
"""Samples per rank and microbatch, and tensor-parallel degree."""


@dataclass(frozen=True)
class UnitWork:
    """One model under one runtime.

    Attributes:
        name: Of the unit.
        problem: Model, hardware and runtime; its batch does not matter.
        profiling: Profiling runs.
        alone: A profiling run of one process, where the others ran with several: on the CPU they share memory and
            caches, and perhaps a core.
        halves: Profiling runs whose backward is split in two, where a plan's schedule splits it: the halves take
            more than the whole.
        calibration, report: Plans with their jobs.
    """

    name: str
    problem: Problem
    profiling: CalibrationJobs
    alone: tuple[OperatorJob, ...]
    halves: tuple[OperatorJob, ...]
    calibration: tuple[tuple[CampaignPlan, Job], ...]
    report: tuple[tuple[CampaignPlan, Job], ...]

    @cached_property
    def jobs(self) -> list[Job]:
        """All of them: profiling, alone, in halves, calibration, report."""
        return [
            *self.profiling.jobs,
            *(run.job for run in self.alone),
            *(run.job for run in self.halves),
            *(job for _, job in self.calibration),
            *(job for _, job in self.report),
        ]

    @property
    def first_alone(self) -> int:
        """Position of the profiling run of one process."""
        return len(self.profiling.jobs)

    @property
    def first_half(self) -> int:
        """Position of the first profiling run in halves."""
        return self.first_alone + len(self.alone)

    @property
    def first_calibration(self) -> int:
        """Position of the first calibration plan."""
        return self.first_half + len(self.halves)

    @property
    def first_report(self) -> int:
        """Position of the first report plan."""
        return self.first_calibration + len(self.calibration)


def campaign_work(campaign: Campaign, *, with_profiling: bool = True) -> list[UnitWork]:
    """Return the work of a campaign, checked to be executable.

    Args:
        campaign: The campaign.
        with_profiling: Leave profiling runs and calibration plans out where profiles are there already.

    Raises:
        ValueError: If a plan cannot be executed.
    """
    return [_unit(campaign, name, with_profiling=with_profiling) for name in campaign.units]


def _unit(campaign: Campaign, name: str, *, with_profiling: bool) -> UnitWork:
    calibration = [each for each in campaign.calibration if each.unit == name]
    report = [each for each in campaign.report if each.unit == name]
    options, device = campaign.options, campaign.device
    problem = (calibration + report)[0].problem
    sizes = profiled_sizes(calibration, report)

    def copies(degree: int) -> int:
        return max(1, problem.num_devices // degree) if device == "cpu" else 1

    reported = {each.plan.canonical_hash(problem.workload) for each in report}

    def profiling_run(samples: int, degree: int, number: int, schedule: str | None = None) -> OperatorJob:
        return operator_job(
            problem, samples, degree, copies=number, schedule=schedule, iterations=options.iterations, device=device,
            reported=reported,
        )  # fmt: skip

    operators = [profiling_run(samples, degree, copies(degree)) for samples, degree in sizes]
    alone = [profiling_run(run.samples, run.tensor_size, 1) for run in operators if run.copies > 1][:1]
    split = {
        size
        for each in (*calibration, *report)
        if each.plan.schedule in SPLIT_SCHEDULES
        for size in sizes_of(each.plan, each.problem)
    }
    halves = [
        profiling_run(samples, degree, copies(degree), SPLIT_SCHEDULES[0])
        for samples, degree in sizes
        if (samples, degree) in split
    ]
    one = replace(problem, global_batch=sizes[0][0])
    step = plan_job(uniform_plan(one, microbatch=one.global_batch), one, iterations=options.iterations, device=device)
    again = recomputed_job(problem, operators, iterations=options.iterations, device=device, reported=reported)
    profiling = CalibrationJobs(*((tuple(operators), again) if with_profiling else ((), None)), step, None)

    def job(each: CampaignPlan, *, traced: int) -> Job:
        return plan_job(
            each.plan,
            each.problem,
            iterations=options.iterations,
            warmup=options.warmup,
            device=device,
            traced_iterations=traced,
            records_memory=options.records_memory and traced > 0,
        )

    return UnitWork(
        name,
        problem,
        profiling,
        tuple(alone) if with_profiling else (),
        tuple(halves) if with_profiling else (),
        tuple((each, job(each, traced=0)) for each in calibration) if with_profiling else (),
        tuple((each, job(each, traced=1)) for each in report),
    )


def profiled_sizes(calibration: Sequence[CampaignPlan], report: Sequence[CampaignPlan]) -> list[SizeAndDegree]:
    """Return the sizes at which operators are profiled: those of the calibration plans, and those of report plans
    that no two of them enclose (which are interpolated)."""
    found = {size for each in calibration for size in sizes_of(each.plan, each.problem)}
    known = sorted(found)
    for each in report:
        for samples, degree in sizes_of(each.plan, each.problem):
            own = [other for other, tensor in known if tensor == degree]
            if not own or not min(own) <= samples <= max(own):
                found.add((samples, degree))
    return sorted(found)


def sizes_of(plan: Plan, problem: Problem) -> set[SizeAndDegree]:
    """Return samples per rank and tensor-parallel degree of every operator of a plan.

    What can only be repeated by all ranks is measured beside what is cut in as many parts, if anything is: else whole,
    as what could be cut and is repeated (see `profiled_as`).
    """
    found, repeated = set[SizeAndDegree](), set[tuple[int, int, int]]()
    for stage in plan.stages:
        for index, word in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
            op = problem.workload.operators[index]
            axes = resolve(word, op)
            replicas = prod(axis.size for axis in axes if axis.split == "batch")
            parts = prod(axis.size for axis in axes if axis.split not in ("batch", "replicate"))
            ranks = prod(axis.size for axis in axes if axis.split != "batch")
            for size in {plan.microbatch_size, plan.last_microbatch_size or plan.microbatch_size}:
                samples = -(-size // replicas)
                if parts == ranks or op.tensor_split != "replicate":
                    found.add((samples, parts))
                else:
                    repeated.add((samples, parts, ranks))
    for samples, parts, ranks in repeated:
        if (samples, ranks) not in found:
            found.add((samples, parts))
    return found


def estimated_s(work: Sequence[UnitWork], device: str, rounds: int) -> float:
    """Return seconds that a campaign takes, from simulations on modelled hardware: an order of magnitude."""
    total = 0.0
    for unit in work:
        total += LAUNCH_S[device]
        for job in unit.jobs:
            iterations = job.warmup + job.iterations + job.traced_iterations
            total += BUILD_S[device] + iterations * simulate_time_s(job.plan, job.problem)
    return total * rounds
