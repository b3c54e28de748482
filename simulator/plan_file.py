"""Plan files: a versioned envelope of problem and plan. Exact round trip in YAML and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.words import counted
from datafiles.writer import write_mapping
from simulator.plan import Axis, Plan, Sharding, Stage, plan_to_mapping
from simulator.problem import MAX_BATCH, Problem, ProblemSpec
from simulator.problem_files import with_files
from simulator.validate import validate

VERSION = 1
MAX_OPERATORS = 10_000_000
MAX_DEVICES = 1_000_000
MAX_MICROBATCHES = 1_000_000

OTHER_FILES = {
    "family": "a model file",
    "model_type": "a model's config.json",
    "gpus_per_node": "a cluster file",
    "implementation": "a runtime file",
    "grid": "the spec of a sweep",
    "format": "a file of measurements",
}
"""A key that tells what a file is that was taken for a plan."""


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _axis(value: Any) -> Any:
    """Return an axis with its ZeRO stage, which a file may leave out."""
    if not isinstance(value, list):
        return value
    if not 2 <= len(value) <= 3:
        raise ValueError(f"an axis must be [split, size] or [split, size, zero], got {value!r:.60}")
    return (*value, 0)[:3]


Index = Annotated[int, Field(ge=0, le=MAX_OPERATORS)]
Range = Annotated[tuple[Index, Index], BeforeValidator(_listed)]
AxisEntry = Annotated[
    tuple[
        Annotated[str, Field(max_length=64)],
        Annotated[int, Field(ge=1, le=MAX_DEVICES)],
        Annotated[int, Field(ge=0, le=3)],
    ],
    BeforeValidator(_axis),
]


class _Run(FileModel):
    count: Annotated[int, Field(ge=1, le=MAX_OPERATORS)]
    axes: Annotated[tuple[AxisEntry, ...], BeforeValidator(_listed)]


class _Stage(FileModel):
    operators: Annotated[tuple[Range, ...], BeforeValidator(_listed)]
    devices: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_DEVICES)], ...], BeforeValidator(_listed)]
    shardings: Annotated[tuple[_Run, ...], BeforeValidator(_listed)]
    recompute: Annotated[tuple[Range, ...], BeforeValidator(_listed)] = ()


class _Plan(FileModel):
    microbatch_size: Annotated[int, Field(ge=1, le=MAX_OPERATORS)]
    num_microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    last_microbatch_size: Annotated[int, Field(ge=1, le=MAX_OPERATORS)] | None = None
    schedule: str = "1f1b"
    warmup: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)], ...] | None, BeforeValidator(_listed)] = (
        None
    )
    gradient_reduction: str = "last"
    overlap_gradient_sync: bool = True
    reshard_after_forward: bool = True
    replica_assignment: str = "slice"
    stages: Annotated[tuple[_Stage, ...], BeforeValidator(_listed)]


class _Problem(FileModel):
    model: str
    cluster: str
    runtime: str
    global_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)]
    memory_limit_bytes: Annotated[int, Field(ge=1, le=1 << 60)] | None = None
    profile: str | None = None


class _Envelope(FileModel):
    windtunnel_plan: Literal[1]
    workload_fingerprint: str | None = None
    problem: _Problem
    plan: _Plan


def plan_from_mapping(mapping: dict[str, Any], *, source: str = "plan") -> Plan:
    """Return a plan from plain data.

    Raises:
        DataFileError: Everything that does not fit the schema, with its place.
    """
    return _to_plan(validated(_Plan, mapping, source), source)


def _to_plan(model: _Plan, source: str) -> Plan:
    stages = []
    for position, stage in enumerate(model.stages):
        backwards = [list(bounds) for bounds in stage.operators if bounds[0] >= bounds[1]]
        if backwards:
            raise DataFileError(
                source,
                f"stages.{position}.operators: a range must be [first, one after the last], got {backwards[0]}",
            )
        declared = sum(stop - start for start, stop in stage.operators)
        coded = sum(run.count for run in stage.shardings)
        if declared != coded:
            raise DataFileError(
                source,
                f"stages.{position}.shardings: counts must add up to the stage's {counted(declared, 'operator')} "
                f"(operators: {[list(bounds) for bounds in stage.operators]}), got {coded}",
            )
        stages.append(
            Stage(
                operators=tuple(stage.operators),
                devices=tuple(stage.devices),
                shardings=tuple((run.count, _sharding(run.axes)) for run in stage.shardings),
                recompute=tuple(stage.recompute),
            )
        )
    return Plan(
        stages=tuple(stages),
        microbatch_size=model.microbatch_size,
        num_microbatches=model.num_microbatches,
        schedule=model.schedule,
        warmup=model.warmup,
        gradient_reduction=model.gradient_reduction,
        overlap_gradient_sync=model.overlap_gradient_sync,
        reshard_after_forward=model.reshard_after_forward,
        replica_assignment=model.replica_assignment,
        last_microbatch_size=model.last_microbatch_size,
    )


def _sharding(axes: tuple[Any, ...]) -> Sharding:
    return tuple(Axis(*axis) for axis in axes)


def load_plan(path: str | Path) -> tuple[ProblemSpec, Plan]:
    """Read a plan file. Model, cluster, runtime and profile that it names as files may lie beside it.

    Raises:
        DataFileError: If the file is malformed, of another version, names a file that is not there, or was made
            for a model that has changed since (its operator indices would mean something else).
    """
    mapping = load_mapping(path)
    if "windtunnel_plan" not in mapping:
        found = next((words for key, words in OTHER_FILES.items() if key in mapping), "a file without windtunnel_plan")
        raise DataFileError(str(path), f"this is {found}, not a plan; windtunnel plan or search writes one with -o")
    envelope = validated(_Envelope, mapping, str(path))
    spec = ProblemSpec(**envelope.problem.model_dump())
    try:
        spec = with_files(spec, folder=Path(path).parent)
    except ValueError as error:
        raise DataFileError(str(path), f"problem.{error}") from None
    if envelope.workload_fingerprint is not None:
        workload = problem_of_file(path, spec).workload
        if workload.fingerprint != envelope.workload_fingerprint:
            raise DataFileError(
                str(path),
                f"the plan was made for another version of model {spec.model} (graph "
                f"{envelope.workload_fingerprint}, now {workload.fingerprint}); make the plan again",
            )
    return spec, _to_plan(envelope.plan, str(path))


def problem_of_file(path: str | Path, spec: ProblemSpec, plan: Plan | None = None) -> Problem:
    """Return the problem of a plan file; what is wrong with it, or the plan, is said of the file.

    Raises:
        ValueError: As ``ProblemSpec.load`` and ``validate``. What is said of a file that the plan names, stays so.
    """
    try:
        problem = spec.load()
        if plan is not None:
            validate(plan, problem)
    except DataFileError:
        raise
    except ValueError as error:
        raise DataFileError(str(path), str(error)) from error
    return problem


def plan_document(spec: ProblemSpec, plan: Plan, *, fingerprint: str | None = None) -> dict[str, Any]:
    """Return the envelope as plain data."""
    document: dict[str, Any] = {"windtunnel_plan": VERSION, "problem": spec.to_mapping()}
    if fingerprint is not None:
        document["workload_fingerprint"] = fingerprint
    mapping = plan_to_mapping(plan)
    if mapping["warmup"] is None:
        del mapping["warmup"]
    document["plan"] = mapping
    return document


def save_plan(path: str | Path, spec: ProblemSpec, plan: Plan, *, fingerprint: str | None = None) -> None:
    """Write a plan file atomically: JSON if the name ends in ``.json``, YAML if in ``.yaml`` or ``.yml``.

    Args:
        path: Where.
        spec: The problem in names.
        plan: The plan.
        fingerprint: ``Workload.fingerprint``, so that the plan is refused should the model's graph change.
    """
    write_mapping(path, plan_document(spec, plan, fingerprint=fingerprint))
