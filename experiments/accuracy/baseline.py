"""The accepted errors of every group, and the gate that compares a run with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.words import counted
from datafiles.writer import dump_json, write_text_atomically
from experiments.accuracy.groups import Group
from experiments.accuracy.groups import groups as known_groups
from experiments.accuracy.run import GroupReport

FILE = Path(__file__).parent.parent / "accuracy_data" / "baseline.json"
DIGITS = 5
FEW = 3
"""Of fewer cases than this an error that shrinks says nothing: a mean that moved by `MOVED` must be accepted."""
MOVED = 0.01

Number = Annotated[float, Field(ge=-1e6, le=1e6)]


class GroupBaseline(FileModel):
    """A group's accepted figures; errors are shares."""

    num_run: Annotated[int, Field(ge=1)]
    time_mean_absolute: Number | None = None
    time_median_absolute: Number | None = None
    time_bias: Number | None = None
    memory_mean_absolute: Number | None = None
    memory_bias: Number | None = None
    memory_agreement: Number | None = None
    num_wrong_fits: Annotated[int, Field(ge=0)] = 0
    rank_correlation: Number | None = None
    error_by_feature: Mapping[str, Mapping[str, Number]] = {}


class Acceptance(FileModel):
    """One move of the baseline."""

    on: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    reason: Annotated[str, Field(min_length=1, max_length=2000)]
    groups: tuple[str, ...]


class Baseline(FileModel):
    """The file's top level: accepted figures, and why they moved (latest last)."""

    groups: Mapping[str, GroupBaseline]
    accepted: tuple[Acceptance, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One way in which a run falls short of the baseline."""

    group: str
    message: str


def load_baseline(path: Path = FILE) -> Baseline:
    """Return the accepted figures; none if there is no file yet."""
    if not path.exists():
        return Baseline(groups={})
    return validated(Baseline, load_mapping(path), str(path))


def figures_of(report: GroupReport) -> GroupBaseline | None:
    """Return the figures of a report as a baseline keeps them, None if nothing ran."""
    if report.num_run == 0:
        return None
    return GroupBaseline(
        num_run=report.num_run,
        time_mean_absolute=_rounded(report.time.mean_absolute) if report.time else None,
        time_median_absolute=_rounded(report.time.median_absolute) if report.time else None,
        time_bias=_rounded(report.time.bias) if report.time else None,
        memory_mean_absolute=_rounded(report.memory.mean_absolute) if report.memory else None,
        memory_bias=_rounded(report.memory.bias) if report.memory else None,
        memory_agreement=_rounded(report.fits_agreement) if report.fits_agreement is not None else None,
        num_wrong_fits=report.num_wrong_fits,
        rank_correlation=_rounded(report.rank.correlation) if report.rank else None,
        error_by_feature={
            feature: {value: _rounded(error) for value, error in errors.items()}
            for feature, errors in report.error_by_feature.items()
        },
    )


def findings(
    reports: Sequence[GroupReport], baseline: Baseline, *, with_data: bool, only: Sequence[str] = ()
) -> list[Finding]:
    """Return what is worse than accepted; empty if the gate is open.

    A group with a baseline must have as many cases as then; groups that need data are asked for only where
    there is a data folder. No case at all is a finding.

    Args:
        reports: Of this run.
        baseline: Accepted figures.
        with_data: Whether a data folder was at hand.
        only: Groups asked for; none for all.
    """
    found = []
    if sum(report.num_run for report in reports) == 0:
        found.append(Finding("all", "no case ran; there must be at least one"))
    by_name = {report.name: report for report in reports}
    for name, accepted in baseline.groups.items():
        group = known_groups().get(name)
        if only and name not in only:
            continue
        if group is None:
            found.append(Finding(name, "has a baseline, but groups.yaml no longer has the group; --accept its removal"))
            continue
        report = by_name.get(name)
        current = figures_of(report) if report is not None else None
        if current is None:
            if with_data or not group.needs_data:
                found.append(Finding(name, f"no case ran, {accepted.num_run} did when the baseline was accepted"))
            continue
        found += [Finding(name, message) for message in _worsened(group, accepted, current)]
    for report in reports:
        if report.num_run and report.name not in baseline.groups:
            found.append(Finding(report.name, "has cases but no baseline; --accept it"))
    return found


def _worsened(group: Group, accepted: GroupBaseline, current: GroupBaseline) -> list[str]:
    messages = []
    if current.num_run < accepted.num_run:
        messages.append(
            f"{counted(current.num_run, 'case')} ran, {accepted.num_run} did when the baseline was accepted"
        )
    for word, before, now in (
        ("time", accepted.time_mean_absolute, current.time_mean_absolute),
        ("memory", accepted.memory_mean_absolute, current.memory_mean_absolute),
    ):
        if before is not None and (now is None or now > before + group.tolerance + 10.0**-DIGITS):
            messages.append(
                f"mean absolute error of {word} {_percent(now)}, accepted {_percent(before)} "
                f"with a tolerance of {_percent(group.tolerance)}"
            )
    for word, before, now in (
        ("time", accepted.time_bias, current.time_bias),
        ("memory", accepted.memory_bias, current.memory_bias),
    ):
        if accepted.num_run < FEW and before is not None and now is not None and abs(now - before) > MOVED:
            messages.append(
                f"{word} moved from {_percent(before)} to {_percent(now)} off, and of so few cases none says which is "
                "better; --accept it if it is meant"
            )
    for word, before, now in (
        ("agreement on out of memory", accepted.memory_agreement, current.memory_agreement),
        ("rank correlation", accepted.rank_correlation, current.rank_correlation),
    ):
        if before is not None and (now is None or now < before - group.tolerance - 10.0**-DIGITS):
            messages.append(f"{word} {_percent(now)}, accepted {_percent(before)}")
    if current.num_wrong_fits > accepted.num_wrong_fits:
        messages.append(
            f"{counted(current.num_wrong_fits, 'case')} predicted to fit that did not, accepted "
            f"{accepted.num_wrong_fits}"
        )
    return messages


def check_reason(reason: str) -> None:
    """Raise ValueError unless there is something to read in it."""
    if not "".join(filter(str.isprintable, reason)).strip():
        raise ValueError("a baseline moves for a reason: --accept must have a text that says which")


def accept(
    reports: Sequence[GroupReport], reason: str, *, path: Path = FILE, today: date | None = None
) -> tuple[Baseline, Baseline]:
    """Make the figures of this run the baseline of the groups that ran; others keep theirs.

    Baselines of groups that groups.yaml no longer has are dropped.

    Returns:
        The baseline before and after.

    Raises:
        ValueError: If the reason is empty or nothing ran.
    """
    check_reason(reason)
    new = {report.name: figures for report in reports if (figures := figures_of(report)) is not None}
    if not new:
        raise ValueError("no case ran, so there is nothing to accept")
    before = load_baseline(path)
    kept = {name: figures for name, figures in before.groups.items() if name in known_groups()}
    merged = {**kept, **new}
    entry = Acceptance(on=str(today or date.today()), reason=reason.strip(), groups=tuple(sorted(new)))
    after = Baseline(
        groups={name: merged[name] for name in known_groups() if name in merged},
        accepted=(*before.accepted, entry),
    )
    write_text_atomically(path, dump_json(after.model_dump(mode="json", exclude_none=True)))
    return before, after


def changes(before: Baseline, after: Baseline) -> list[tuple[str, str, str, str]]:
    """Return ``(group, figure, before, after)`` of everything that moved, but for errors by feature."""
    rows = []
    for name in dict.fromkeys([*before.groups, *after.groups]):
        old, new = before.groups.get(name), after.groups.get(name)
        for field in GroupBaseline.model_fields:
            if field == "error_by_feature":
                continue
            first = getattr(old, field) if old is not None else None
            second = getattr(new, field) if new is not None else None
            if first != second:
                rows.append((name, field.replace("_", " "), _shown(field, first), _shown(field, second)))
    return rows


def _shown(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if field.startswith("num") else f"{100 * value:.2f} %"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.2f} %"


def _rounded(value: float) -> float:
    return round(value, DIGITS)
