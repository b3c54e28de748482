"""Fits a campaign's machine profiles: operators on profiling runs, overheads on the calibration plans, nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hardware_models.profile_scaling import ProfileScaling
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.reports.breakdown import coalesce, device_tasks
from simulator.simulate import simulate
from simulator.taskgraph import COMMUNICATION, COMPUTATION
from validation.campaigns.run import RoundResult, check_profiling, fastest_round
from validation.campaigns.work import SPLIT_SCHEDULES, UnitWork
from validation.execution.executor import Job
from validation.measurement import Measurement
from validation.profiling.calibration import (
    ENGINE,
    doubtful_factor,
    fit,
    fit_factor,
    fit_kernels_and_host,
    fit_optimizer_fraction,
    fit_overhead_s,
    never_negative,
)
from validation.profiling.machine_profile import MachineProfile
from validation.profiling.profiler import OperatorJob

MAX_COMPANY_COST = 0.9
EXPOSED_COLLECTIVES = (
    "exposed_tensor_parallel_s", "exposed_resharding_s", "exposed_parameter_gather_s", "exposed_embedding_sync_s",
    "exposed_gradient_sync_s", "exposed_other_s",
)  # fmt: skip
"""Columns of a simulation's breakdown."""

RawKey = tuple[str, int, int]
"""Role, samples, tensor-parallel degree."""


@dataclass(frozen=True)
class Calibration:
    """What a campaign knows of a machine for one unit.

    Attributes:
        profile: Operators and communication; what was fitted on pipelines: factor on operators, overhead of a pass.
        single_factor: What operators take in a plan of one device, as a multiple of the profiling run; fitted on
            the calibration plans of one device, 1 without any.
        host_factor: What the host takes for them in any plan, likewise, where it was profiled apart: on a GPU kernels
            and host each have one factor, fitted on calibration plans of one device and of several stages together.
        company_cost: Share of an operator's time that is gone when no other process computes: processes share
            memory, caches, perhaps a core. 0 on GPUs.
        num_profiled: Processes that ran while operators were profiled.
        overlap: Slowdown of computation and of communication while both run; None keeps the device type's.
        halves: By role, how much longer the two halves of a split backward take than the whole.
        collective_overhead_s: What a collective between computations takes beyond one in a row of collectives:
            the other rank may be late, and a thread has to wake up. Fitted on runs with collectives in passes.
        raw_s: Forward and backward seconds of operators alone, without what profile rows add so that they make up
            a whole pass.
    """

    profile: MachineProfile
    single_factor: float = 1.0
    host_factor: float = 1.0
    company_cost: float = 0.0
    num_profiled: int = 1
    overlap: tuple[float, float] | None = None
    halves: Mapping[str, float] = field(default_factory=dict)
    collective_overhead_s: float = 0.0
    raw_s: Mapping[RawKey, tuple[float, float]] = field(default_factory=dict)

    def scaling(self, problem: Problem, plan: Plan) -> ProfileScaling:
        """Return what a plan makes of the profiled times.

        A pass of weight gradients alone is a pass more, so a split backward has the overhead of a pass twice.
        """
        factor = self.single_factor if len(plan.devices) == 1 else 1.0
        halves = self.halves if plan.schedule in SPLIT_SCHEDULES else {}
        if self.company_cost:
            company = company_share(plan, self._on_hardware(problem, plan, ProfileScaling()), self.num_profiled)
            factor *= 1.0 - self.company_cost * (1.0 - company)
        if len(plan.stages) == 1:
            return ProfileScaling(factor, halves, host_factor=self.host_factor)
        share_s = self.profile.pass_overhead_s * len(plan.stages) / len(problem.workload)
        again_s = share_s if plan.schedule in SPLIT_SCHEDULES else 0.0
        factor *= self.profile.operator_factor
        return ProfileScaling(factor, halves, share_s, share_s + again_s, self.host_factor)

    def apply(self, problem: Problem, plan: Plan) -> Problem:
        """Return the problem with what was measured in the place of the model."""
        return self._on_hardware(problem, plan, self.scaling(problem, plan))

    def _on_hardware(self, problem: Problem, plan: Plan, scaling: ProfileScaling) -> Problem:
        communication = tuple(
            (kind, size, num_bytes, alone_s + (0.0 if kind.startswith("transfer") else self.collective_overhead_s))
            for kind, size, num_bytes, alone_s in self.profile.communication
        )
        profile = replace(
            self.profile,
            operators=scaling.apply(self.profile.operators),
            communication=communication,
            operator_factor=1.0,
            pass_overhead_s=0.0,
        )
        applied = profile.apply(problem, plan)
        if self.overlap is None:
            return applied
        update = {
            "overlap_slowdown_computation": self.overlap[0],
            "overlap_slowdown_communication": self.overlap[1],
        }
        cluster = applied.hardware.cluster
        nodes = tuple(replace(node, gpu=node.gpu.model_copy(update=update)) for node in cluster.nodes)
        return replace(applied, hardware=replace(applied.hardware, cluster=replace(cluster, nodes=nodes)))

    def raw(self, role: str, samples: int, degree: int) -> tuple[float, float] | None:
        """Return raw seconds of a role at the nearest number of samples, scaled to ``samples``; None if unknown."""
        sizes = [size for name, size, tensor in self.raw_s if (name, tensor) == (role, degree)]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: abs(size - samples))
        forward_s, backward_s = self.raw_s[role, nearest, degree]
        return forward_s * samples / nearest, backward_s * samples / nearest


def company_share(plan: Plan, problem: Problem, num_processes: int) -> float:
    """Return which share of a device's computing time the other processes compute as well.

    Args:
        plan: Canonical plan.
        problem: What it is for.
        num_processes: Processes that would keep each other company all the time: 1 share.
    """
    if num_processes < 2:
        return 1.0
    result = simulate(plan, problem, engine=ENGINE)
    graph, schedule = result.graph, result.schedule
    busy = []
    for device in range(graph.num_devices):
        tasks = device_tasks(graph, device)
        tasks = tasks[graph.kind[tasks] == COMPUTATION]
        busy.append(coalesce(schedule.start_s[tasks], schedule.end_s[tasks]))
    lengths = [float((end - start).sum()) for start, end in busy]
    together = total = 0.0
    for own, members in enumerate(graph.device_members):
        weight = len(members)
        total += weight * lengths[own] * (num_processes - 1)
        together += weight * (weight - 1) * lengths[own]
        for other, others in enumerate(graph.device_members):
            if other != own:
                union = coalesce(*(np.concatenate(pair) for pair in zip(busy[own], busy[other], strict=True)))
                both_s = lengths[own] + lengths[other] - float((union[1] - union[0]).sum())
                together += weight * len(others) * both_s
    return min(1.0, together / total) if total > 0 else 1.0


def fit_campaign(
    work: Sequence[UnitWork], rounds: Sequence[RoundResult], *, statistic: str = "median"
) -> dict[str, Calibration]:
    """Return the calibration of every unit from some rounds; report plans are not looked at.

    A unit without a run that has collectives in its passes takes their overhead from the others.

    Args:
        work: All units.
        rounds: At least one.
        statistic: ``median`` or ``fastest``, of the rounds.
    """
    if not rounds:
        raise ValueError("a campaign must have at least one finished round to be fitted")
    for unit in work:
        for turn in rounds:
            check_profiling(unit, turn.measured[unit.name])
    if statistic == "fastest":
        rounds = [fastest_round(rounds)]
    found = {unit.name: _fit_unit(unit, rounds) for unit in work}
    sums = {unit.name: _collective_excess(unit, found[unit.name], rounds) for unit in work}
    pooled = (sum(excess for excess, _ in sums.values()), sum(count for _, count in sums.values()))
    for name, own in sums.items():
        excess_s, count = own if own[1] else pooled
        if count:
            found[name] = replace(found[name], collective_overhead_s=max(0.0, excess_s / count))
    return found


def _fit_unit(unit: UnitWork, rounds: Sequence[RoundResult]) -> Calibration:
    measured = [turn.measured[unit.name] for turn in rounds]
    communication = [row for turn in rounds for row in turn.communication]
    base = fit(unit.problem, unit.profiling, [turn[: unit.first_alone] for turn in measured], _medians(communication))
    pairs = [(row.computation_factor, row.communication_factor) for turn in rounds for row in turn.overlap]
    raw = _raw(unit.problem, unit.profiling.operators, measured, 0)
    calibration = Calibration(
        base,
        company_cost=_company_cost(unit, measured),
        num_profiled=max((run.copies * run.tensor_size for run in unit.profiling.operators), default=1),
        overlap=(statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)) if pairs else None,
        halves=_ratios(raw, _raw(unit.problem, unit.halves, measured, unit.first_half)),
        raw_s=raw,
    )
    found = [(position, job) for position, (_, job) in enumerate(unit.calibration, unit.first_calibration)]
    jobs = [(position, job) for position, job in found if not any(turn[position].out_of_memory for turn in measured)]
    singles = [
        (job, [turn[position] for turn in measured]) for position, job in jobs if len(job.plan.devices) == 1
    ]
    pipelines = [(job, [turn[position] for turn in measured]) for position, job in jobs if len(job.plan.stages) > 1]
    if base.operators.kernels_only:
        return _with_host(_with_step(calibration, unit, measured, singles), [*singles, *pipelines])
    if singles:
        factor = statistics.median(fit_factor(calibration, job, turns) for job, turns in singles)
        calibration = replace(calibration, single_factor=factor)
    if not pipelines:
        return calibration
    factors = [fit_factor(calibration, job, turns) for job, turns in pipelines]
    calibration = replace(calibration, profile=replace(base, operator_factor=statistics.median(factors)))
    overheads = [
        fit_overhead_s(
            partial(_with_overhead, calibration), job, statistics.median(each.iteration_time_s for each in turns)
        )
        for job, turns in pipelines
    ]
    overhead_s, notes = never_negative(statistics.median(overheads))
    notes = [*doubtful_factor(calibration.profile.operator_factor), *notes]
    words = "; ".join([base.fitted_on, *(each.name for each, _ in unit.calibration), *notes])
    profile = replace(calibration.profile, pass_overhead_s=overhead_s, fitted_on=words)
    return replace(calibration, profile=profile)


def _with_step(
    calibration: Calibration,
    unit: UnitWork,
    measured: Sequence[Sequence[Measurement]],
    jobs: Sequence[tuple[Job, Sequence[Measurement]]],
) -> Calibration:
    """Return the calibration with the shortest optimizer step of any run on one device: where no launch was late."""
    runs = [[turn[len(unit.profiling.profiling)] for turn in measured], *(turns for _, turns in jobs)]
    step_s = min(statistics.median(turn.optimizer_s for turn in turns) for turns in runs)
    fraction = fit_optimizer_fraction(calibration.profile, unit.profiling.optimizer, step_s)
    return replace(calibration, profile=replace(calibration.profile, optimizer_bandwidth_fraction=fraction))


def _with_host(calibration: Calibration, jobs: Sequence[tuple[Job, Sequence[Measurement]]]) -> Calibration:
    """Return the calibration with factors on kernels, in pipelines and outside, and on their host, fitted on plans."""

    def scaled(kernels: float, host: float) -> Calibration:
        profile = replace(calibration.profile, operator_factor=kernels)
        return replace(calibration, profile=profile, single_factor=kernels, host_factor=host)

    measured_s = [statistics.median(turn.iteration_time_s for turn in turns) for _, turns in jobs]
    return scaled(*fit_kernels_and_host(scaled, [job for job, _ in jobs], measured_s))


def _company_cost(unit: UnitWork, measured: Sequence[Sequence[Measurement]]) -> float:
    """Return by which share a pass is shorter when the process has no company; 0 where noise says longer."""
    shares = []
    for position, run in enumerate(unit.alone, unit.first_alone):
        for number, other in enumerate(unit.profiling.operators):
            if (other.samples, other.tensor_size) == (run.samples, run.tensor_size):
                alone_s, together_s = (
                    statistics.median(
                        turn[place].stage_forward_s[0] + turn[place].stage_backward_s[0] for turn in measured
                    )
                    for place in (position, number)
                )
                shares.append(1.0 - alone_s / together_s)
    return min(MAX_COMPANY_COST, max(0.0, statistics.median(shares))) if shares else 0.0


def _with_overhead(calibration: Calibration, overhead_s: float) -> Calibration:
    return replace(calibration, profile=replace(calibration.profile, pass_overhead_s=overhead_s))


def _ratios(
    whole: Mapping[RawKey, tuple[float, float]], halves: Mapping[RawKey, tuple[float, float]]
) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for key, (_, seconds) in halves.items():
        if key in whole and whole[key][1] > 0:
            found.setdefault(key[0], []).append(max(1.0, seconds / whole[key][1]))
    return {role: statistics.median(ratios) for role, ratios in found.items()}


def _collective_excess(unit: UnitWork, calibration: Calibration, rounds: Sequence[RoundResult]) -> tuple[float, int]:
    """Return measured less predicted seconds of exposed collectives, and how many there are.

    Looked at are profiling runs under tensor parallelism and calibration plans of one stage.
    """
    jobs = [(position, run.job) for position, run in enumerate(unit.profiling.operators) if run.tensor_size > 1]
    jobs += [
        (position, job)
        for position, (_, job) in enumerate(unit.calibration, unit.first_calibration)
        if len(job.plan.stages) == 1 and len(job.plan.devices) > 1
    ]
    excess, count = 0.0, 0
    for position, job in jobs:
        result = simulate(job.plan, calibration.apply(job.problem, job.plan))
        row = result.breakdown().iloc[0]
        graph = result.graph
        own = device_tasks(graph, 0)
        measured_s = statistics.median(
            statistics.fmean(
                each.collectives_s + each.collectives_after_s for each in turn.measured[unit.name][position].devices
            )
            for turn in rounds
        )
        excess += measured_s - float(sum(row[name] for name in EXPOSED_COLLECTIVES))
        count += int((graph.kind[own] == COMMUNICATION).sum())
    return excess, count


def _medians(
    rows: Sequence[tuple[str, int, float, float]],
) -> list[tuple[str, int, float, float]]:
    found: dict[tuple[str, int, float], list[float]] = {}
    for kind, size, num_bytes, seconds in rows:
        found.setdefault((kind, size, num_bytes), []).append(seconds)
    return [(*key, statistics.median(samples)) for key, samples in found.items()]


def _raw(
    problem: Problem, runs: Sequence[OperatorJob], measured: Sequence[Sequence[Measurement]], first: int
) -> dict[RawKey, tuple[float, float]]:
    """Return the median over rounds of the mean over operators of a profile role, of runs from ``first`` on."""
    found: dict[RawKey, tuple[float, float]] = {}
    members: dict[str, list[int]] = {}
    for index, role in enumerate(problem.workload.profile_roles):
        members.setdefault(role, []).append(index)
    for position, run in enumerate(runs, first):
        for role, own in members.items():
            forward, backward = [], []
            for turn in measured:
                seconds = turn[position].operator_s
                phases = {phase for phase, _ in seconds if phase.startswith("backward")}
                forward.append(statistics.fmean(seconds.get(("forward", index), 0.0) for index in own))
                backward.append(
                    statistics.fmean(sum(seconds.get((phase, index), 0.0) for phase in phases) for index in own)
                )
            found[role, run.samples, run.tensor_size] = statistics.median(forward), statistics.median(backward)
    return found
