"""Fits a campaign's machine profiles: operators on profiling runs, overheads on the calibration plans, nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import dump_json, write_text_atomically
from hardware_models.schema import Text
from simulator.breakdown import device_tasks
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.taskgraph import COMMUNICATION
from validation.calibration import fit, fit_factor, fit_overhead_s
from validation.campaign_run import RoundResult, fastest_round
from validation.campaign_work import SPLIT_SCHEDULES, UnitWork
from validation.machine_profile import MachineProfile, load_machine_profile, save_machine_profile
from validation.measurement import Measurement
from validation.profiler import OperatorJob

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
        profile: Operators, communication, and what was fitted on pipelines.
        single_factor: What operators take in a plan of one stage, as a multiple of the profiling run; fitted on
            the calibration plans of one stage, 1 without any.
        overlap: Slowdown of computation and of communication while both run; None keeps the device type's.
        halves: By role, how much longer the two halves of a split backward take than the whole.
        collective_overhead_s: What a collective between computations takes beyond one in a row of collectives:
            the other rank may be late, and a thread has to wake up. Fitted on runs with collectives in passes.
        raw_s: Forward and backward seconds of operators alone, without what profile rows add so that they make up
            a whole pass.
    """

    profile: MachineProfile
    single_factor: float
    overlap: tuple[float, float] | None
    halves: Mapping[str, float]
    collective_overhead_s: float
    raw_s: Mapping[RawKey, tuple[float, float]]

    def apply(self, problem: Problem, plan: Plan) -> Problem:
        """Return the problem with what was measured in the place of the model.

        A pass of weight gradients alone is a pass more, so a split backward has the overhead of a pass twice.
        """
        splits = plan.schedule in SPLIT_SCHEDULES
        factor = self.single_factor if len(plan.stages) == 1 else 1.0
        share_s = self.profile.pass_overhead_s * len(plan.stages) / len(problem.workload)
        again_s = max(0.0, share_s) if splits and len(plan.stages) > 1 else 0.0
        rows = tuple(
            replace(
                row,
                forward_s=row.forward_s * factor,
                backward_s=max(
                    0.0, row.backward_s * factor * (self.halves.get(row.role, 1.0) if splits else 1.0) + again_s
                ),
            )
            for row in self.profile.operators.rows
        )
        communication = tuple(
            (kind, size, num_bytes, alone_s + (0.0 if kind.startswith("transfer") else self.collective_overhead_s))
            for kind, size, num_bytes, alone_s in self.profile.communication
        )
        profile = replace(
            self.profile, operators=replace(self.profile.operators, rows=rows), communication=communication
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

    def factor(self, plan: Plan) -> float:
        """Return the factor on operators that holds for a plan."""
        return self.single_factor if len(plan.stages) == 1 else self.profile.operator_factor

    def raw(self, role: str, samples: int, degree: int) -> tuple[float, float] | None:
        """Return raw seconds of a role at the nearest number of samples, scaled to ``samples``; None if unknown."""
        sizes = [size for name, size, tensor in self.raw_s if (name, tensor) == (role, degree)]
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: abs(size - samples))
        forward_s, backward_s = self.raw_s[role, nearest, degree]
        return forward_s * samples / nearest, backward_s * samples / nearest


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
    base = fit(unit.problem, unit.profiling, [turn[: unit.first_half] for turn in measured], _medians(communication))
    pairs = [(row.computation_factor, row.communication_factor) for turn in rounds for row in turn.overlap]
    overlap = (statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)) if pairs else None
    raw = _raw(unit.problem, unit.profiling.operators, measured, 0)
    halves = _raw(unit.problem, unit.halves, measured, unit.first_half)
    calibration = Calibration(base, 1.0, overlap, _ratios(raw, halves), 0.0, raw)
    jobs = list(enumerate((job for _, job in unit.calibration), unit.first_calibration))
    alone = [
        fit_factor(base, job, [turn[position] for turn in measured if not turn[position].out_of_memory])
        for position, job in jobs
        if len(job.plan.devices) == 1 and not any(turn[position].out_of_memory for turn in measured)
    ]
    if alone:
        calibration = replace(calibration, single_factor=statistics.median(alone))
    pipelines = [(position, job) for position, job in jobs if len(job.plan.stages) > 1]
    if not pipelines:
        return calibration
    factors = [fit_factor(base, job, [turn[position] for turn in measured]) for position, job in pipelines]
    profile = replace(base, operator_factor=statistics.median(factors))
    overheads = [
        fit_overhead_s(profile, job, statistics.median(turn[position].iteration_time_s for turn in measured))
        for position, job in pipelines
    ]
    words = "; ".join([profile.fitted_on, *(each.name for each, _ in unit.calibration)])
    profile = replace(profile, pass_overhead_s=statistics.median(overheads), fitted_on=words)
    return replace(calibration, profile=profile)


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
    """Return the median over rounds of the mean over operators of equal role, of runs from position ``first`` on."""
    found: dict[RawKey, tuple[float, float]] = {}
    members: dict[str, list[int]] = {}
    for index, op in enumerate(problem.workload.operators):
        members.setdefault(op.role, []).append(index)
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


class _File(FileModel):
    format: Literal["windtunnel-campaign-calibration-1"]
    single_factor: Annotated[float, Field(gt=0, le=100)]
    overlap: tuple[Annotated[float, Field(ge=1, le=100)], Annotated[float, Field(ge=1, le=100)]] | None
    halves: Mapping[Text, Annotated[float, Field(ge=1, le=100)]]
    collective_overhead_s: Annotated[float, Field(ge=0, le=10)]
    raw_s: tuple[tuple[Text, int, int, float, float], ...]


def save_calibration(calibration: Calibration, folder: Path, unit: str) -> None:
    """Write ``UNIT.json``, the machine profile, and ``UNIT.calibration.json`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = unit.replace(" ", "_")
    save_machine_profile(calibration.profile, folder / f"{stem}.json")
    mapping: dict[str, Any] = {
        "format": "windtunnel-campaign-calibration-1",
        "single_factor": calibration.single_factor,
        "overlap": list(calibration.overlap) if calibration.overlap is not None else None,
        "halves": dict(calibration.halves),
        "collective_overhead_s": calibration.collective_overhead_s,
        "raw_s": [[*key, *seconds] for key, seconds in calibration.raw_s.items()],
    }
    write_text_atomically(folder / f"{stem}.calibration.json", dump_json(mapping))


def load_calibrations(folder: Path, units: Sequence[UnitWork]) -> dict[str, Calibration]:
    """Return the calibrations that an earlier run of a campaign wrote on this machine.

    Raises:
        ValueError: If the folder lacks a unit, or a profile is of another machine, model or dtype.
        DataFileError: If a file is damaged.
    """
    found = {}
    for unit in units:
        stem = unit.name.replace(" ", "_")
        path = folder / f"{stem}.json"
        if not path.is_file():
            raise ValueError(
                f"the profile must be a folder with {path.name}, such as profiles/ of an earlier campaign's output, "
                f"got {folder}"
            )
        profile = load_machine_profile(path)
        profile.check_machine()
        _check_unit(profile, unit, path)
        calibration = Calibration(profile, 1.0, None, {}, 0.0, {})
        beside = folder / f"{stem}.calibration.json"
        if beside.is_file():
            file = validated(_File, load_mapping(beside), str(beside))
            raw = {(role, samples, degree): (fwd, bwd) for role, samples, degree, fwd, bwd in file.raw_s}
            calibration = Calibration(
                profile, file.single_factor, file.overlap, file.halves, file.collective_overhead_s, raw
            )
        found[unit.name] = calibration
    return found


def _check_unit(profile: MachineProfile, unit: UnitWork, path: Path) -> None:
    problem, rows = unit.problem, profile.operators
    for what, own, theirs in (
        ("model", problem.workload.name, rows.model),
        ("device type", problem.gpu_types[0], rows.gpu_type),
        ("dtype", problem.runtime.implementation.dtype, rows.dtype),
    ):
        if own != theirs:
            raise ValueError(f"{path}: the profile's {what} must be {own}, got {theirs}; profile this campaign anew")
