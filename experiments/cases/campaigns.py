"""Our own measurement campaigns: plans that the executor ran, predicted with the profile of the machine they ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from experiments.accuracy.groups import CAMPAIGN_GROUP, IMPORTED, MODELLED, RESERVED, groups
from experiments.cases.case import PRINTED, Case, Measured, Skipped
from hardware_models.cluster import Cluster, parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile
from hardware_models.profile_file import profile_from_mapping
from hardware_models.profile_scaling import ProfileScaling
from hardware_models.runtime_files import load_runtime
from simulator.plan import Plan
from simulator.plan_file import plan_from_mapping
from simulator.problem import Problem
from workloads.model_file import spec_from_mapping
from workloads.registry import build_from_spec

FOLDER = PRINTED / "campaigns"
CALIBRATED = {
    "single-gpu": ("gpt-350m", "gpt-2.6b", "llama-1b"),
    "single-gpu-families": ("gpt-dropout",),
    "single-gpu-convolutions": ("resnet-96", "resnet-160", "vgg-48"),
}
"""Models on whose operators the GPU's curves are fitted (``experiments.fit_h100`` on those of ``single-gpu``,
``experiments.fit_h100_convolutions``), or whose operators are of the same shapes, by campaign: their plans are in no
group that is predicted without a profile."""
Positive = Annotated[float, Field(gt=0, le=1e9)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]


class _Measured(FileModel):
    out_of_memory: bool
    spread: Annotated[float, Field(ge=0, le=1000)]
    iteration_time_s: Positive | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


class _Runtime(FileModel):
    base: Text
    attention: Literal["plain", "flash"] | None = None


class _Hardware(FileModel):
    gpu: Mapping[
        Literal["optimizer_bandwidth_fraction", "overlap_slowdown_computation", "overlap_slowdown_communication"],
        Positive,
    ]
    communication: tuple[tuple[Text, int, Positive, Positive], ...]
    operators: Mapping[str, Any]


class _Scaling(FileModel):
    factor: Positive
    extra_forward_s: Annotated[float, Field(ge=-10, le=10)]
    extra_backward_s: Annotated[float, Field(ge=-10, le=10)]
    backward_factors: Mapping[Text, Positive]
    host_factor: Positive = 1.0


class _Plan(FileModel):
    name: Text
    unit: Text
    model: Text
    runtime: Text
    global_batch: Annotated[int, Field(ge=1, le=10**9)]
    measured: _Measured
    scaling: _Scaling
    plan: Mapping[str, Any]


class CaseFile(FileModel):
    """What ``windtunnel validate CAMPAIGN --write-cases FILE`` writes; the file's name is that of its group."""

    format: Literal["windtunnel-campaign-cases-1"]
    campaign: Literal["cpu-gloo", "single-gpu", "single-gpu-families", "single-gpu-convolutions", "multi-gpu"]
    machine: Text
    date: Text
    versions: Mapping[str, Text]
    rounds: Annotated[int, Field(ge=1, le=1000)]
    cluster: Text
    models: Mapping[str, Mapping[str, Any]]
    runtimes: Mapping[str, _Runtime]
    hardware: Mapping[Text, _Hardware]
    plans: Annotated[tuple[_Plan, ...], Field(min_length=1)]


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield the plans of every committed campaign; one that was not measured has no group."""
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from cases_of(path)


def cases_of(path: Path) -> Iterator[Case]:
    """Yield the cases of one file.

    Raises:
        DataFileError: If the file breaks a rule.
    """
    file = validated(CaseFile, load_mapping(path), path.name)
    for number, row in enumerate(file.plans):
        for what, word, known in (
            ("model", row.model, file.models),
            ("runtime", row.runtime, file.runtimes),
            ("unit", row.unit, file.hardware),
        ):
            if word not in known:
                raise DataFileError(path.name, f"plans.{number}: {what} must be one of {', '.join(known)}, got {word}")
        measured = row.measured
        case = Case(
            row_id=f"{path.name}#{row.name}",
            groups=(CAMPAIGN_GROUP + path.stem,),
            problem=partial(_problem, path, number),
            plan=partial(_plan, path, number),
            measured=Measured(
                iteration_time_s=measured.iteration_time_s,
                out_of_memory=measured.out_of_memory if measured.peak_allocated_bytes is not None else None,
                peak_bytes=float(measured.peak_allocated_bytes) if measured.peak_allocated_bytes else None,
            ),
            source=f"windtunnel validate {file.campaign}, {file.machine}, {file.date}",
            rivals=f"{file.campaign} {row.unit}",
            rival_samples=row.global_batch,
            features={
                "model": row.model,
                "runtime": row.runtime,
                "stages": len(row.plan["stages"]) if "stages" in row.plan else 0,
                "schedule": str(row.plan.get("schedule", "1f1b")),
            },
        )
        yield case
        group = CAMPAIGN_GROUP + path.stem + MODELLED
        if group in groups() and row.model not in CALIBRATED.get(path.stem, ()):
            yield replace(
                case,
                row_id=f"{case.row_id} on our kernels",
                groups=(group,),
                problem=partial(_problem, path, number, profiled=False),
            )
        group = CAMPAIGN_GROUP + path.stem + IMPORTED
        if group in groups():
            lender = path.with_name(f"{groups()[group].lender}.yaml")
            yield replace(
                case,
                row_id=f"{case.row_id} with the profile of {lender.stem}",
                groups=(group,),
                problem=partial(_problem, lender, _row_of(lender, path, number)),
            )
        group = CAMPAIGN_GROUP + path.stem + RESERVED
        if group in groups() and measured.peak_reserved_bytes is not None:
            held = float(measured.peak_reserved_bytes)
            yield replace(
                case,
                row_id=f"{case.row_id} as held",
                groups=(group,),
                measured=Measured(peak_bytes=held, peak_is_reserved=True),
            )


def units_of(path: Path) -> Iterator[tuple[str, str, Problem]]:
    """Yield the units of a file, each with its model and a problem that has its profile.

    Raises:
        DataFileError: If the file breaks a rule.
    """
    seen = set()
    for number, row in enumerate(_file(path).plans):
        if row.unit not in seen:
            seen.add(row.unit)
            yield row.unit, row.model, _problem(path, number)


@lru_cache(maxsize=8)
def _file(path: Path) -> CaseFile:
    return validated(CaseFile, load_mapping(path), path.name)


def _row_of(lender: Path, path: Path, number: int) -> int:
    """Return the row of one file that is about the same plan of the same model as a row of another."""
    wanted = _file(path).plans[number]
    for place, row in enumerate(_file(lender).plans):
        if row.name == wanted.name and (row.global_batch, row.plan) == (wanted.global_batch, wanted.plan):
            return place
    raise DataFileError(lender.name, f"has no plan {wanted.name!r}, whose profile is asked for in {path.name}")


@lru_cache(maxsize=64)
def _unit(path: Path, unit: str) -> tuple[Cluster, OperatorProfile, CollectiveTable | None]:
    """Return what was measured of a unit: devices, operators, communication."""
    file = _file(path)
    own = file.hardware[unit]
    operators = profile_from_mapping(own.operators, path.name)
    cluster = parse_cluster(file.cluster)
    update = {str(word): value for word, value in own.gpu.items()}
    nodes = tuple(
        replace(node, gpu=node.gpu.model_copy(update=update)) if node.gpu.name == operators.gpu_type else node
        for node in cluster.nodes
    )
    table = CollectiveTable.from_rows(own.communication, path.name) if own.communication else None
    return replace(cluster, nodes=nodes), operators, table


def _problem(path: Path, number: int, *, profiled: bool = True) -> Problem:
    file = _file(path)
    row = file.plans[number]
    chosen = file.runtimes[row.runtime]
    runtime = load_runtime(chosen.base)
    if chosen.attention is not None:
        runtime = replace(runtime, attention=chosen.attention)
    spec = spec_from_mapping(file.models[row.model], f"{path.name}: {row.model}")
    workload = build_from_spec(spec, runtime.attention)
    if not profiled:
        return Problem(workload, HardwareModel(parse_cluster(file.cluster)), runtime, row.global_batch)
    cluster, operators, table = _unit(path, row.unit)
    scaling = ProfileScaling(**row.scaling.model_dump())
    hardware = HardwareModel(cluster=cluster, operator_profile=scaling.apply(operators), collective_table=table)
    return Problem(workload, hardware, runtime, row.global_batch)


def _plan(path: Path, number: int, problem: Problem) -> Plan:
    return plan_from_mapping(dict(_file(path).plans[number].plan), source=f"{path.name}: plans.{number}")
