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
from simulator.plan import Plan
from simulator.problem import Problem
from validation.calibration import fit, fit_factor, fit_overhead_s
from validation.campaign_run import RoundResult
from validation.campaign_work import UnitWork
from validation.machine_profile import MachineProfile, load_machine_profile, save_machine_profile
from validation.measurement import Measurement

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
        raw_s: Forward and backward seconds of operators alone, without what profile rows add so that they make up
            a whole pass.
    """

    profile: MachineProfile
    single_factor: float
    overlap: tuple[float, float] | None
    raw_s: Mapping[RawKey, tuple[float, float]]

    def apply(self, problem: Problem, plan: Plan) -> Problem:
        """Return the problem with what was measured in the place of the model."""
        profile = self.profile
        if len(plan.stages) == 1:
            rows = tuple(
                replace(
                    row, forward_s=row.forward_s * self.single_factor, backward_s=row.backward_s * self.single_factor
                )
                for row in profile.operators.rows
            )
            profile = replace(profile, operators=replace(profile.operators, rows=rows))
        applied = profile.apply(problem, plan)
        if self.overlap is None:
            return applied
        computation, communication = self.overlap
        update = {"overlap_slowdown_computation": computation, "overlap_slowdown_communication": communication}
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


def fit_unit(unit: UnitWork, rounds: Sequence[RoundResult]) -> Calibration:
    """Return the calibration of a unit from its share of some rounds.

    Args:
        unit: The unit.
        rounds: At least one.
    """
    if not rounds:
        raise ValueError("a campaign must have at least one finished round to be fitted")
    measured = [turn.measured[unit.name] for turn in rounds]
    communication = [row for turn in rounds for row in turn.communication]
    base = fit(unit.problem, unit.profiling, [turn[: unit.num_profiling] for turn in measured], _medians(communication))
    pairs = [(row.computation_factor, row.communication_factor) for turn in rounds for row in turn.overlap]
    overlap = (statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)) if pairs else None
    calibration = Calibration(base, 1.0, overlap, _raw(unit, measured))
    factors: dict[bool, list[float]] = {True: [], False: []}
    start = unit.num_profiling
    for position, (_, job) in enumerate(unit.calibration, start):
        factors[len(job.plan.stages) > 1].append(
            fit_factor(base, job, [turn[position] for turn in measured if not turn[position].out_of_memory])
        )
    if factors[False]:
        calibration = replace(calibration, single_factor=statistics.median(factors[False]))
    if not factors[True]:
        return calibration
    profile = replace(base, operator_factor=statistics.median(factors[True]))
    overheads = [
        fit_overhead_s(profile, job, statistics.median(turn[position].iteration_time_s for turn in measured))
        for position, (_, job) in enumerate(unit.calibration, start)
        if len(job.plan.stages) > 1
    ]
    words = "; ".join([profile.fitted_on, *(each.name for each, _ in unit.calibration)])
    profile = replace(profile, pass_overhead_s=statistics.median(overheads), fitted_on=words)
    return replace(calibration, profile=profile)


def _medians(
    rows: Sequence[tuple[str, int, float, float]],
) -> list[tuple[str, int, float, float]]:
    found: dict[tuple[str, int, float], list[float]] = {}
    for kind, size, num_bytes, seconds in rows:
        found.setdefault((kind, size, num_bytes), []).append(seconds)
    return [(*key, statistics.median(samples)) for key, samples in found.items()]


def _raw(unit: UnitWork, measured: Sequence[Sequence[Measurement]]) -> dict[RawKey, tuple[float, float]]:
    """Return the median over rounds of the mean over operators of equal role."""
    found: dict[RawKey, tuple[float, float]] = {}
    operators = unit.problem.workload.operators
    for position, run in enumerate(unit.profiling.operators):
        members: dict[str, list[int]] = {}
        for index, op in enumerate(operators):
            members.setdefault(op.role, []).append(index)
        for role, own in members.items():
            forward, backward = [], []
            for turn in measured:
                seconds = turn[position].operator_s
                forward.append(sum(seconds.get(("forward", index), 0.0) for index in own) / len(own))
                backward.append(sum(seconds.get(("backward", index), 0.0) for index in own) / len(own))
            found[role, run.samples, run.tensor_size] = statistics.median(forward), statistics.median(backward)
    return found


class _File(FileModel):
    format: Literal["windtunnel-campaign-calibration-1"]
    single_factor: Annotated[float, Field(gt=0, le=100)]
    overlap: tuple[Annotated[float, Field(ge=1, le=100)], Annotated[float, Field(ge=1, le=100)]] | None
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
        single, overlap, raw = 1.0, None, {}
        beside = folder / f"{stem}.calibration.json"
        if beside.is_file():
            file = validated(_File, load_mapping(beside), str(beside))
            single, overlap = file.single_factor, file.overlap
            raw = {(role, samples, degree): (fwd, bwd) for role, samples, degree, fwd, bwd in file.raw_s}
        found[unit.name] = Calibration(profile, single, overlap, raw)
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
