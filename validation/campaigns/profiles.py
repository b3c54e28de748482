"""A campaign's calibrations as files: per unit a machine profile, and beside it what the campaign fitted besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import dump_json, write_text_atomically
from hardware_models.schema import Text
from simulator.profile_check import check_profile
from validation.campaigns.definition import file_stem
from validation.campaigns.fit import Calibration
from validation.campaigns.work import UnitWork
from validation.profiling.machine_profile import MachineProfile, load_machine_profile, save_machine_profile


class _File(FileModel):
    format: Literal["windtunnel-campaign-calibration-1"]
    single_factor: Annotated[float, Field(gt=0, le=100)]
    host_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    company_cost: Annotated[float, Field(ge=0, lt=1)]
    num_profiled: Annotated[int, Field(ge=1, le=10_000)]
    overlap: tuple[Annotated[float, Field(ge=1, le=100)], Annotated[float, Field(ge=1, le=100)]] | None
    halves: Mapping[Text, Annotated[float, Field(ge=1, le=100)]]
    collective_overhead_s: Annotated[float, Field(ge=0, le=10)]
    raw_s: tuple[tuple[Text, int, int, float, float], ...]


def save_calibration(calibration: Calibration, folder: Path, unit: str) -> None:
    """Write ``UNIT.json``, the machine profile, and ``UNIT.calibration.json`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = file_stem(unit)
    save_machine_profile(calibration.profile, folder / f"{stem}.json")
    mapping: dict[str, Any] = {
        "format": "windtunnel-campaign-calibration-1",
        "single_factor": calibration.single_factor,
        "host_factor": calibration.host_factor,
        "company_cost": calibration.company_cost,
        "num_profiled": calibration.num_profiled,
        "overlap": list(calibration.overlap) if calibration.overlap is not None else None,
        "halves": dict(calibration.halves),
        "collective_overhead_s": calibration.collective_overhead_s,
        "raw_s": [[*key, *seconds] for key, seconds in calibration.raw_s.items()],
    }
    write_text_atomically(folder / f"{stem}.calibration.json", dump_json(mapping))


def load_calibrations(folder: Path, units: Sequence[UnitWork]) -> dict[str, Calibration]:
    """Return the calibrations that an earlier run of a campaign wrote on this machine.

    Args:
        folder: What ``save_calibration`` wrote; where there is one unit, a machine profile will do, which has not
            what a campaign fits besides.
        units: Whose calibrations.

    Raises:
        ValueError: If the folder lacks a unit, or a profile is of another machine, model or dtype, or of a model of
            that name with other sizes.
        DataFileError: If a file is damaged.
    """
    found = {}
    for unit in units:
        stem = file_stem(unit.name)
        path = folder if folder.is_file() and len(units) == 1 else folder / f"{stem}.json"
        if not path.is_file():
            got = f"{folder}, which lacks it" if folder.is_dir() else f"{folder}, which is none"
            raise ValueError(
                f"the profile must be a folder with {path.name}, such as profiles/ of an earlier campaign's output"
                f"{', or a file of windtunnel profile' if len(units) == 1 else ''}, got {got}"
            )
        profile = load_machine_profile(path)
        profile.check_machine()
        _check_unit(profile, unit, path)
        calibration = Calibration(profile)
        beside = path.with_name(f"{path.stem}.calibration.json")
        if beside.is_file():
            file = validated(_File, load_mapping(beside), str(beside))
            raw = {(role, samples, degree): (fwd, bwd) for role, samples, degree, fwd, bwd in file.raw_s}
            calibration = Calibration(
                profile,
                file.single_factor,
                file.host_factor,
                file.company_cost,
                file.num_profiled,
                file.overlap,
                file.halves,
                file.collective_overhead_s,
                raw,
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
            raise ValueError(f"{path}: the profile's {what} must be {own}, got {theirs}; measure anew")
    check_profile(profile.calibration(), rows, problem.workload, problem.runtime)  # Of a model that was edited.
    profile.calibration().hardware(problem.hardware.cluster)  # refuses collectives of a cluster file that was edited
