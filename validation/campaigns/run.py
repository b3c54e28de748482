"""Runs a campaign in interleaved rounds; every model's share of a round is on disk as soon as it is finished.

The folder belongs to one campaign on one machine: ``campaign.json`` says which, and results of another are refused.
A round that was interrupted goes on with the models it lacks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.words import counted
from datafiles.writer import dump_json, write_bytes_atomically, write_text_atomically
from hardware_models.schema import Positive, Text
from validation.campaigns.definition import COMMUNICATION, Campaign, file_stem
from validation.campaigns.work import UnitWork
from validation.measurement import Measurement
from validation.measurement_file import measurement_from_mapping, measurement_mapping
from validation.profiling.communication_times import Row, measure_communication
from validation.profiling.jobs import execute_rounds
from validation.profiling.machine_profile import machine_name, now, versions
from validation.profiling.overlap import OverlapRow, measure_overlap

FORMAT = "windtunnel-campaign-round-1"
Listener = Callable[[int, str, int, int], None]
"""Told ``(round, part, parts done, parts of all rounds)`` before each part."""

TIMEOUT_S = 3600.0
MAX_ROUND_BYTES = 128 << 20
"""Of one unit's share of a round; that of the first holds traces."""


class _Identity(FileModel):
    format: Literal["windtunnel-campaign-results-1"]
    campaign: Text
    fingerprint: Text
    machine: Text
    date: Text
    versions: Mapping[Text, Text]
    with_profiling: bool


class _Unit(FileModel):
    jobs: tuple[dict[str, object], ...]


class _Communication(FileModel):
    rows: tuple[tuple[Text, int, float, Positive], ...]
    overlap: tuple[tuple[Text, float, float, float, float, float, float], ...]


@dataclass(frozen=True)
class RoundResult:
    """What one round measured.

    Attributes:
        communication: Transfers and collectives; empty where one device is used.
        overlap: Slowdown of computation and communication; empty on one process of the CPU.
        measured: By unit, in the order of its jobs.
    """

    communication: tuple[Row, ...]
    overlap: tuple[OverlapRow, ...]
    measured: Mapping[str, tuple[Measurement, ...]]


def fastest_round(rounds: Sequence[RoundResult]) -> RoundResult:
    """Return a round made of the quickest measurement of every run, and of the shortest times of communication.

    Of its measurements only one has a traced iteration, so the first round's is kept.
    """
    shortest: dict[tuple[str, int, float], float] = {}
    for turn in rounds:
        for kind, size, num_bytes, seconds in turn.communication:
            key = kind, size, num_bytes
            shortest[key] = min(seconds, shortest.get(key, seconds))
    measured = {}
    for unit in rounds[0].measured:
        found = []
        for turns in zip(*(turn.measured[unit] for turn in rounds), strict=True):
            best = min(turns, key=lambda each: each.iteration_time_s)
            found.append(replace(best, traced=turns[0].traced, actions=turns[0].actions))
        measured[unit] = tuple(found)
    overlap = tuple(row for turn in rounds for row in turn.overlap)
    return RoundResult(tuple((*key, seconds) for key, seconds in shortest.items()), overlap, measured)


def run_campaign(
    campaign: Campaign,
    work: Sequence[UnitWork],
    folder: Path,
    *,
    rounds: int,
    with_profiling: bool = True,
    listener: Listener | None = None,
) -> None:
    """Execute what the folder does not hold yet.

    Args:
        campaign: The campaign.
        work: From ``campaign_work``.
        folder: Where results go; made if it is not there.
        rounds: Interleaved rounds in all.
        with_profiling: As given to ``campaign_work``.
        listener: Told what comes next.

    Raises:
        ValueError: If the folder holds results of another campaign or machine, or a part that is damaged.
        launch.WorkerError: If a process fails; finished parts stay.
    """
    prepare_folder(campaign, folder, with_profiling=with_profiling)
    names = ([COMMUNICATION] if _communicates(campaign, with_profiling) else []) + [unit.name for unit in work]
    by_name = {unit.name: unit for unit in work}
    for number in range(1, rounds + 1):  # before hours of measuring: what is damaged would end them
        for name in names:
            if _path(folder, number, name).exists():
                _part(_path(folder, number, name), by_name.get(name))
    parts = [(number, name) for number in range(1, rounds + 1) for name in names]
    if not all(_path(folder, *part).exists() for part in parts):
        _check_versions(folder)
    done, total = 0, rounds * len(names)
    for number in range(1, rounds + 1):
        for name in names:
            if listener is not None:
                listener(number, name, done, total)
            path = _path(folder, number, name)
            if not path.exists():
                mapping = (
                    _measure_communication(campaign)
                    if name == COMMUNICATION
                    else _run_unit(campaign, by_name[name], folder, number)
                )
                write_text_atomically(path, json.dumps({"format": FORMAT, **mapping}, allow_nan=False) + "\n")
            done += 1


def _check_versions(folder: Path) -> None:
    """Refuse to add rounds to those of another torch or Python: their medians would be of neither."""
    theirs, here = _identity(folder).versions, versions()
    other = [f"{name} {own}, here {here[name]}" for name, own in theirs.items() if here.get(name, own) != own]
    if other:
        raise ValueError(
            f"rounds of one campaign must be measured with the same versions, but those in {folder} are of "
            f"{'; '.join(other)}; give another -o, or install those"
        )


def missing_devices(campaign: Campaign) -> str:
    """Return, in words, what this machine lacks to run a campaign; nothing if it can."""
    there = torch.cuda.device_count() if campaign.device == "cuda" else campaign.num_devices
    if there >= campaign.num_devices:
        return ""
    return f"{campaign.name} needs {counted(campaign.num_devices, 'CUDA GPU')}, this machine has {there}"


def prepare_folder(campaign: Campaign, folder: Path, *, with_profiling: bool) -> None:
    """Make the folder, or check that its results are of this campaign and machine."""
    path, rounds = folder / "campaign.json", folder / "rounds"
    rounds.mkdir(parents=True, exist_ok=True)
    if path.exists():
        theirs, _ = measured_on(campaign, folder, with_profiling=with_profiling)
        if machine_name() != theirs:
            raise _another("machine", folder, theirs, machine_name())
    if not path.exists() or not any(rounds.iterdir()):  # What is measured from now on is of today's versions.
        identity = {
            "format": "windtunnel-campaign-results-1",
            "campaign": campaign.name,
            "fingerprint": campaign.fingerprint,
            "machine": machine_name(),
            "date": now(),
            "versions": versions(),
            "with_profiling": with_profiling,
        }
        write_text_atomically(path, dump_json(identity))


def measured_on(campaign: Campaign, folder: Path, *, with_profiling: bool) -> tuple[str, str]:
    """Return the machine whose results a folder holds, and when it was begun.

    Raises:
        ValueError: If they are of another campaign, or of one that used a profile where this one does not.
    """
    found = _identity(folder)
    sources = {True: "profiles of its own", False: "a profile that was given"}
    for what, own, theirs in (
        ("campaign", f"{campaign.name} {campaign.fingerprint}", f"{found.campaign} {found.fingerprint}"),
        ("kind", f"with {sources[with_profiling]}", f"with {sources[found.with_profiling]}"),
    ):
        if own != theirs:
            raise _another(what, folder, theirs, own)
    return found.machine, found.date


def _identity(folder: Path) -> _Identity:
    path = folder / "campaign.json"
    try:
        return validated(_Identity, load_mapping(path), str(path))
    except DataFileError as error:
        words = "it says whose rounds lie beside it; bring it back, or give another -o"
        raise DataFileError(path, f"{error.message}; {words}", line=error.line) from None


def _another(what: str, folder: Path, theirs: object, own: object) -> ValueError:
    return ValueError(f"the folder {folder} has results of another {what} ({theirs}; this is {own}); give another -o")


def finished_rounds(campaign: Campaign, work: Sequence[UnitWork], folder: Path, *, with_profiling: bool = True) -> int:
    """Return how many rounds the folder holds in full."""
    names = ([COMMUNICATION] if _communicates(campaign, with_profiling) else []) + [unit.name for unit in work]
    number = 0
    while names and all(_path(folder, number + 1, name).exists() for name in names):
        number += 1
    return number


def finished_units(
    campaign: Campaign, work: Sequence[UnitWork], folder: Path, *, with_profiling: bool = True
) -> list[UnitWork]:
    """Return the models that can be reported: all if a round is finished, else those of the first that are."""
    if _communicates(campaign, with_profiling) and not _path(folder, 1, COMMUNICATION).exists():
        return []
    if finished_rounds(campaign, work, folder, with_profiling=with_profiling):
        return list(work)
    return [unit for unit in work if _path(folder, 1, unit.name).exists()]


def load_rounds(
    campaign: Campaign, work: Sequence[UnitWork], folder: Path, *, with_profiling: bool = True, limit: int | None = None
) -> Iterator[RoundResult]:
    """Yield the finished rounds of a folder.

    Raises:
        DataFileError: If a file is damaged, or does not hold what the campaign runs.
    """
    count = finished_rounds(campaign, work, folder, with_profiling=with_profiling)
    for number in range(1, min(count, limit or count) + 1):
        communication = _Communication(rows=(), overlap=())
        if _communicates(campaign, with_profiling):
            communication, _ = _part(_path(folder, number, COMMUNICATION), None)
        measured = {}
        for unit in work:
            _, measured[unit.name] = _part(_path(folder, number, unit.name), unit)
        yield RoundResult(communication.rows, tuple(OverlapRow(*row) for row in communication.overlap), measured)


def _communicates(campaign: Campaign, with_profiling: bool) -> bool:
    # On one GPU there is no communication, but copies and reductions slow its computation all the same.
    return with_profiling and (campaign.num_devices > 1 or campaign.device == "cuda")


def _path(folder: Path, number: int, name: str) -> Path:
    return folder / "rounds" / f"{number:03d}-{file_stem(name)}.json"


def _part(path: Path, unit: UnitWork | None) -> tuple[_Communication, tuple[Measurement, ...]]:
    """Return what a file holds: a unit's measurements, or those of communication where there is no unit."""
    try:
        mapping = load_mapping(path, max_bytes=MAX_ROUND_BYTES)
        if mapping.pop("format", None) != FORMAT:
            raise DataFileError(path, f"must be a round of a campaign ({FORMAT})")
        if unit is None:
            return validated(_Communication, mapping, str(path)), ()
        jobs = validated(_Unit, mapping, str(path)).jobs
        found = tuple(measurement_from_mapping(each, str(path)) for each in jobs)
        if [each.plan_hash for each in found] != [job.plan.canonical_hash(job.problem.workload) for job in unit.jobs]:
            raise DataFileError(path, "does not hold what the campaign runs")
    except DataFileError as error:
        raise DataFileError(path, f"{error.message}; remove it to measure again", line=error.line) from None
    return _Communication(rows=(), overlap=()), found


def _measure_communication(campaign: Campaign) -> dict[str, Any]:
    rows: list[Row] = []
    for size in sorted({2, campaign.num_devices} - {1}) if campaign.num_devices > 1 else ():
        rows += [row for row in measure_communication(size, device=campaign.device) if row not in rows]
    overlap = measure_overlap(device=campaign.device)
    return {"rows": [list(row) for row in rows], "overlap": [list(each.to_mapping().values()) for each in overlap]}


def check_profiling(unit: UnitWork, measured: Sequence[Measurement]) -> None:
    """Refuse a unit whose operators could not be profiled: nothing would be predicted of it.

    Raises:
        ValueError: Names the run that had no memory.
    """
    for job, each in zip(unit.jobs[: unit.first_calibration], measured, strict=False):
        if each.out_of_memory:
            raise ValueError(
                f"profiling runs must fit into memory, but {unit.name} at "
                f"{counted(job.plan.microbatch_size, 'sample')} did not; give the campaign smaller microbatches"
            )


def _run_unit(campaign: Campaign, unit: UnitWork, folder: Path, number: int) -> dict[str, Any]:
    jobs = [replace(job, records_memory=job.records_memory and number == 1) for job in unit.jobs]
    measured = execute_rounds(jobs, rounds=1, device=campaign.device, timeout_s=TIMEOUT_S)[0]
    check_profiling(unit, measured)
    first_report = unit.first_report
    if number == 1:
        for position, each in enumerate(measured[first_report:]):
            _save_history(folder, unit.report[position][0].name, each)
    return {
        "jobs": [
            measurement_mapping(each, with_trace=number == 1 and position >= first_report)
            for position, each in enumerate(measured)
        ]
    }


def _save_history(folder: Path, name: str, measured: Measurement) -> None:
    for device, history in measured.memory_history.items():
        (folder / "memory").mkdir(exist_ok=True)
        path = folder / "memory" / f"{file_stem(name)}-{device}.json.gz"
        write_bytes_atomically(path, gzip.compress(json.dumps(history, separators=(",", ":")).encode(), mtime=0))
