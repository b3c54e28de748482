"""The one file format of everything measured: operators, collectives, constants, each part optional.

``load_calibration`` reads also the files that hold operators alone (``windtunnel-operator-profile-1``) and the
machine profiles of earlier versions (``windtunnel-machine-profile-1``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from datafiles.writer import write_mapping
from hardware_models.calibrated import Calibration, FitRecord, GpuConstants, PipelineConstants, Quantity
from hardware_models.collective_table import KINDS, CollectiveTable
from hardware_models.gpus import EfficiencyCurves, gpu_names
from hardware_models.group_shapes import GroupShape
from hardware_models.links import LinkType, NetworkType
from hardware_models.profile_file import profile_from_mapping, profile_mapping
from hardware_models.schema import Count, Factor, Positive, Seconds, Slowdown, Text

FORMAT = "windtunnel-calibration-1"
OPERATORS_FORMAT = "windtunnel-operator-profile-1"
OLD_FORMAT = "windtunnel-machine-profile-1"
UNITS = {
    "seconds": "s",
    "bytes": "B; a collective's as in the documentation of the command calibrate",
    "rates": "B/s",
    "residuals": "absolute relative, (predicted - measured) / measured",
}
COLUMNS = ("collective", "group_size", "num_nodes", "stride", "groups_per_node", "bytes", "seconds")

_Share = Annotated[float, Field(ge=0)]
_Overhead = Annotated[float, Field(ge=-60, le=60)]
_Row = tuple[Text, Count, Count, Count | None, Count, Positive, Positive]


class _Collectives(FileModel):
    source: Text
    of: Text | None = None
    columns: tuple[Text, ...]
    rows: tuple[_Row, ...]


class _Gpu(FileModel):
    curves: EfficiencyCurves | None = None
    kernel_floor_s: Seconds | None = None
    launch_s: Seconds | None = None
    host_factor: Factor | None = None
    optimizer_bandwidth_fraction: Factor | None = None
    overlap_slowdown_computation: Slowdown | None = None
    overlap_slowdown_communication: Slowdown | None = None


class _Pipeline(FileModel):
    operator_factor: Factor
    pass_overhead_s: _Overhead
    fitted_on: Text


class _Quantity(FileModel):
    name: Text
    value: float
    unit: Text
    repeats: Count = 1
    spread: _Share = 0.0


class _Fit(FileModel):
    what: Text
    how: Literal["fitted", "interpolated", "imported", "checked"]
    num_points: Annotated[int, Field(ge=0)]
    constants: Mapping[str, float] = {}
    median: _Share | None = None
    p90: _Share | None = None
    worst: _Share | None = None


class _File(FileModel):
    format: Literal["windtunnel-calibration-1"]
    source: Text
    machine: str = ""
    date: str = ""
    versions: Mapping[str, Text] = {}
    units: Mapping[str, Text] = {}
    fits: tuple[_Fit, ...] = ()
    fitted_on: tuple[Text, ...] = ()
    gpus: Mapping[str, _Gpu] = {}
    links: Mapping[str, LinkType] = {}
    networks: Mapping[str, NetworkType] = {}
    pipeline: _Pipeline | None = None
    measurements: tuple[_Quantity, ...] = ()
    collectives: _Collectives | None = None
    operators: dict[str, object] | None = None


class _OldFile(FileModel):
    format: Literal["windtunnel-machine-profile-1"]
    machine: Text
    date: Text
    versions: Mapping[str, Text]
    units: Mapping[str, Text]
    fitted_on: Text
    operator_factor: Factor
    pass_overhead_s: _Overhead
    optimizer_bandwidth_fraction: Factor
    communication: tuple[tuple[Text, Count, Positive, Positive], ...]
    operators: dict[str, object]


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration, an operator profile, or a machine profile of an earlier version.

    Raises:
        DataFileError: If the file breaks a rule.
    """
    mapping, source = load_mapping(path), str(path)
    word = mapping.get("format")
    if word == OPERATORS_FORMAT:
        operators = profile_from_mapping(mapping, source)
        return Calibration(source=operators.source, operators=operators)
    if word == OLD_FORMAT:
        return _from_old(validated(_OldFile, mapping, source), source)
    if word != FORMAT:
        known = f"{FORMAT}, {OPERATORS_FORMAT} or {OLD_FORMAT}"
        raise DataFileError(source, f"format must be {known}, got {word!r:.60}; make one with windtunnel calibrate")
    return _from_file(validated(_File, mapping, source), source)


def _from_file(file: _File, source: str) -> Calibration:
    for name in file.gpus:
        if name not in gpu_names():
            raise DataFileError(source, f"gpus.{name}: unknown GPU type, {nearest(name, gpu_names())}")
    return Calibration(
        source=file.source,
        operators=profile_from_mapping(file.operators, source) if file.operators is not None else None,
        collectives=_table(file.collectives, source) if file.collectives is not None else None,
        collectives_of=file.collectives.of if file.collectives is not None else None,
        gpus={name: GpuConstants(**_fields(part)) for name, part in file.gpus.items()},
        links=file.links,
        networks=file.networks,
        pipeline=_pipeline(**_fields(file.pipeline)) if file.pipeline is not None else None,
        measurements=tuple(Quantity(**_fields(each)) for each in file.measurements),
        fits=tuple(FitRecord(**_fields(each)) for each in file.fits),
        fitted_on=file.fitted_on,
        machine=file.machine,
        date=file.date,
        versions=file.versions,
    )


def _fields(part: FileModel) -> dict[str, Any]:
    return {name: getattr(part, name) for name in type(part).model_fields}


def _pipeline(operator_factor: float, pass_overhead_s: float, fitted_on: str) -> PipelineConstants:
    # A pass takes at least its operators: what earlier versions wrote below 0 is noise of the pipeline's run.
    return PipelineConstants(operator_factor, max(0.0, pass_overhead_s), fitted_on)


def _table(part: _Collectives, source: str) -> CollectiveTable:
    if part.columns != COLUMNS:
        raise DataFileError(source, f"collectives.columns must be {', '.join(COLUMNS)}, got {', '.join(part.columns)}")
    if not part.rows:
        raise DataFileError(source, "collectives.rows must hold at least one row, got none; leave collectives out")
    rows = []
    for number, (kind, size, num_nodes, stride, at_once, num_bytes, seconds) in enumerate(part.rows, start=1):
        if kind not in KINDS:
            known = ", ".join(KINDS)
            raise DataFileError(source, f"collectives row {number}: must be one of {known}, got {kind!r:.60}")
        try:
            rows.append((kind, GroupShape(size, num_nodes, stride, at_once), num_bytes, seconds))
        except ValueError as error:
            raise DataFileError(source, f"collectives row {number}: {error}") from None
    return CollectiveTable.from_rows(rows, part.source)


def _from_old(file: _OldFile, source: str) -> Calibration:
    operators = profile_from_mapping(file.operators, source)
    try:
        table = CollectiveTable.from_rows(file.communication, file.machine) if file.communication else None
    except ValueError as error:
        raise DataFileError(source, f"communication: {error}") from None
    return Calibration(
        source=operators.source,
        operators=operators,
        collectives=table,
        gpus={operators.gpu_type: GpuConstants(optimizer_bandwidth_fraction=file.optimizer_bandwidth_fraction)},
        pipeline=_pipeline(file.operator_factor, file.pass_overhead_s, file.fitted_on),
        machine=file.machine,
        date=file.date,
        versions=file.versions,
    )


def calibration_mapping(calibration: Calibration) -> dict[str, Any]:
    """Return what a calibration file holds, as plain data; missing parts are left out."""
    table, found = calibration.collectives, calibration
    mapping: dict[str, Any] = {"format": FORMAT, "source": found.source}
    mapping |= {name: value for name in ("machine", "date") if (value := getattr(found, name))}
    if found.versions:
        mapping["versions"] = dict(found.versions)
    mapping["units"] = UNITS
    parts: dict[str, Any] = {
        "fits": [_fit_mapping(each) for each in found.fits],
        "fitted_on": list(found.fitted_on),
        "gpus": {name: _gpu_mapping(part) for name, part in found.gpus.items()},
        "links": {name: part.model_dump(mode="json") for name, part in found.links.items()},
        "networks": {name: part.model_dump(mode="json") for name, part in found.networks.items()},
        "pipeline": dict(found.pipeline.__dict__) if found.pipeline is not None else None,
        "measurements": [dict(each.__dict__) for each in found.measurements],
    }
    mapping |= {name: part for name, part in parts.items() if part}
    if table is not None:
        of = {"of": found.collectives_of} if found.collectives_of is not None else {}
        rows = [
            [kind, shape.size, shape.num_nodes, shape.stride, shape.groups_per_node, size, seconds]
            for kind, shape, size, seconds in table.rows()
        ]
        mapping["collectives"] = {"source": table.source, **of, "columns": list(COLUMNS), "rows": rows}
    if found.operators is not None:
        mapping["operators"] = profile_mapping(found.operators)
    return mapping


def _fit_mapping(fit: FitRecord) -> dict[str, Any]:
    return {name: value for name, value in fit.__dict__.items() if value not in (None, {})} | (
        {"constants": dict(fit.constants)} if fit.constants else {}
    )


def _gpu_mapping(part: GpuConstants) -> dict[str, Any]:
    given = part.given()
    if part.curves is not None:
        given["curves"] = part.curves.model_dump(mode="json")
    return given


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration atomically: JSON if the name ends in ``.json``, YAML if in ``.yaml`` or ``.yml``."""
    mapping = calibration_mapping(calibration)
    # What was measured may be no hardware's: better said now than by --profile.
    validated(_File, mapping, f"what was measured, {calibration.source}")
    write_mapping(path, mapping)
