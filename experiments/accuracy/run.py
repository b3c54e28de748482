"""Simulate every measured run that has a plan, and report the errors group by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

from experiments.accuracy.calibration_rows import saw
from experiments.accuracy.errors import ErrorReport, RankReport, rank_report
from experiments.accuracy.groups import groups as known_groups
from experiments.cases.case import Case, Skipped
from simulator.fidelity import Fidelity
from simulator.simulate import ENGINES, simulate

ABSENT = "-"
"""The value of a feature that a case does not have."""
Listener = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Outcome:
    """One case, simulated.

    Attributes:
        case: What was asked.
        iteration_time_s: Predicted.
        out_of_memory: Predicted.
        peak_bytes: Predicted live or reserved bytes, as measured: fullest device, or the mean where that is measured.
        wall_s: Seconds the simulation took, problem and plan included.
        plan_hash: Of the plan, whatever its spelling.
        num_gpus: Of the problem.
        notes: What to know before the figures are read (``simulator.remarks``).
    """

    case: Case
    iteration_time_s: float
    out_of_memory: bool
    peak_bytes: float
    wall_s: float
    plan_hash: str
    num_gpus: int
    notes: tuple[str, ...] = ()

    @property
    def time_error(self) -> float | None:
        """Signed relative error of the iteration time."""
        measured = self.case.measured.iteration_time_s
        return None if measured is None else self.iteration_time_s / measured - 1

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the peak."""
        measured = self.case.measured.peak_bytes
        return None if measured is None else self.peak_bytes / measured - 1


@dataclass(frozen=True)
class GroupReport:
    """One group's figures.

    Attributes:
        name: Group.
        num_run, num_skipped: Cases.
        reasons: Why rows were skipped.
        time, memory: Errors of iteration time and of peak memory.
        num_fits_asked, num_fits_right: Cases with a known "out of memory or not", and those predicted right.
        num_wrong_fits: Of the others, predicted to fit although they did not.
        rank: How plans for one problem are ordered.
        error_by_feature: Mean absolute error, as `judged` has it, by values of `telling_features` that several cases
            share.
    """

    name: str
    num_run: int
    num_skipped: int
    reasons: tuple[str, ...]
    time: ErrorReport | None
    memory: ErrorReport | None
    num_fits_asked: int
    num_fits_right: int
    num_wrong_fits: int
    rank: RankReport | None
    error_by_feature: Mapping[str, Mapping[str, float]]

    @property
    def fits_agreement(self) -> float | None:
        """Share of cases whose "out of memory or not" is predicted right."""
        return self.num_fits_right / self.num_fits_asked if self.num_fits_asked else None


def fastest_engine() -> str:
    """Return the name of the quickest engine installed; engines agree to 1e-9."""
    return "compiled" if "compiled" in ENGINES else "simpy"


def run_case(case: Case, *, fidelity: Fidelity | None = None, engine: str | None = None) -> Outcome:
    """Simulate one case."""
    began = perf_counter()
    problem = case.problem()
    plan = case.plan(problem)
    result = simulate(plan, problem, fidelity=fidelity, engine=engine or fastest_engine())
    peak = float(result.peak_reserved_bytes if case.measured.peak_is_reserved else result.peak_allocated_bytes)
    if case.measured.peak_is_average:
        members = result.graph.device_members
        peak = fmean(float(memory.peak_allocated_bytes) for memory in result.memory for _ in members[memory.device])
    out_of_memory = not result.fits
    if case.measured.limits_live_bytes:
        out_of_memory = any(memory.peak_allocated_bytes > memory.capacity_bytes for memory in result.memory)
    return Outcome(
        case=case,
        iteration_time_s=result.iteration_time_s,
        out_of_memory=out_of_memory,
        peak_bytes=peak,
        wall_s=perf_counter() - began,
        plan_hash=plan.canonical_hash(problem.workload),
        num_gpus=problem.num_devices,
        notes=result.notes,
    )


def run_cases(
    entries: Iterable[Case | Skipped],
    *,
    only: Sequence[str] = (),
    fidelity: Fidelity | None = None,
    engine: str | None = None,
    listener: Listener | None = None,
) -> tuple[list[Outcome], list[Skipped]]:
    """Simulate the cases of some groups.

    Args:
        entries: From `experiments.cases.sources.all_cases`.
        only: Names of groups; none for all.
        fidelity: Effects to include; None for all.
        engine: None for the fastest.
        listener: Called before each case with its number, the number of all, and its id.

    Raises:
        ValueError: If a group is unknown, a row id occurs twice, or constants were fitted on a case's row.
    """
    check_groups(only)
    chosen = [entry for entry in entries if not only or set(entry.groups) & set(only)]
    cases = [entry for entry in chosen if isinstance(entry, Case)]
    check_cases(cases)
    outcomes = []
    for number, case in enumerate(cases):
        if listener is not None:
            listener(number, len(cases), case.row_id)
        try:
            outcomes.append(run_case(case, fidelity=fidelity, engine=engine))
        except Exception as error:
            error.add_note(f"while simulating accuracy case {case.row_id}")
            raise
    return outcomes, [entry for entry in chosen if isinstance(entry, Skipped)]


def check_groups(names: Iterable[str]) -> None:
    """Raise ValueError for a name that is no group."""
    from datafiles.names import nearest

    for name in names:
        if name not in known_groups():
            raise ValueError(f"group must be a known one, got {name!r}; {nearest(name, known_groups())}")


def check_cases(cases: Sequence[Case]) -> None:
    """Refuse cases that share an id or whose row constants were fitted on."""
    counts = Counter(case.row_id for case in cases)
    twice = sorted(row_id for row_id, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"a row must be one case, got {twice[0]} twice")
    fitted = sorted(case.row_id for case in cases if saw(case.row_id, case.groups))
    if fitted:
        raise ValueError(
            f"constants were fitted on {len(fitted)} of the rows to report, the first is {fitted[0]}; "
            "leave them out of the cases or out of the fit"
        )
    for case in cases:
        check_groups(case.groups)


def group_reports(
    outcomes: Sequence[Outcome], skipped: Sequence[Skipped], *, only: Sequence[str] = ()
) -> list[GroupReport]:
    """Return one report per group, in the order of the groups' file."""
    return [
        report_of(name, [each for each in outcomes if name in each.case.groups], skipped)
        for name in known_groups()
        if not only or name in only
    ]


def _rivals(outcomes: Sequence[Outcome]) -> dict[str, list[tuple[float, float]]]:
    """Return predicted and measured seconds of a sample by set of rivals; runs of one plan are one, with their mean."""
    found: dict[str, dict[tuple[str, float], list[float]]] = {}
    for each in outcomes:
        measured, samples = each.case.measured.iteration_time_s, each.case.rival_samples
        if each.case.rivals is not None and measured is not None:
            plan = (each.plan_hash, each.iteration_time_s / samples)
            found.setdefault(each.case.rivals, {}).setdefault(plan, []).append(measured / samples)
    return {
        word: [(predicted_s, fmean(runs)) for (_, predicted_s), runs in plans.items()] for word, plans in found.items()
    }


def report_of(name: str, outcomes: Sequence[Outcome], skipped: Sequence[Skipped] = ()) -> GroupReport:
    """Return the figures of some outcomes together."""
    left_out = [entry for entry in skipped if name in entry.groups]
    asked = [each for each in outcomes if each.case.measured.out_of_memory is not None]
    wrong = [each for each in asked if each.out_of_memory != each.case.measured.out_of_memory]
    return GroupReport(
        name=name,
        num_run=len(outcomes),
        num_skipped=sum(entry.num_rows for entry in left_out),
        reasons=tuple(dict.fromkeys(entry.reason for entry in left_out if entry.num_rows or not outcomes)),
        time=ErrorReport.of(
            (each.case.row_id, each.iteration_time_s, each.case.measured.iteration_time_s)
            for each in outcomes
            if each.case.measured.iteration_time_s is not None
        ),
        memory=ErrorReport.of(
            (each.case.row_id, each.peak_bytes, each.case.measured.peak_bytes)
            for each in outcomes
            if each.case.measured.peak_bytes is not None
        ),
        num_fits_asked=len(asked),
        num_fits_right=len(asked) - len(wrong),
        num_wrong_fits=sum(not each.out_of_memory for each in wrong),
        rank=rank_report(_rivals(outcomes)),
        error_by_feature={name: _shared_values(outcomes, name) for name in telling_features(outcomes)},
    )


def _shared_values(outcomes: Sequence[Outcome], feature: str) -> dict[str, float]:
    found = residuals_by(outcomes, [feature]).items()
    return {value: mean for (value,), (count, mean, _) in found if count > 1}


def telling_features(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the features that tell some of the judged cases from others: several values, one of them shared."""
    features = [outcome.case.features for outcome, _ in judged(outcomes)[1]]
    values = {name: {str(each.get(name, ABSENT)) for each in features} for own in features for name in own}
    return [name for name, found in values.items() if 1 < len(found) < len(features)]


def judged(outcomes: Sequence[Outcome]) -> tuple[str, list[tuple[Outcome, float]]]:
    """Return by what cases are judged together, in words, and the signed error of those that have it.

    By iteration times, if any was measured; else by peaks.
    """
    timed = [(each, each.time_error) for each in outcomes if each.time_error is not None]
    if timed:
        return "time", timed
    return "peak memory", [(each, each.memory_error) for each in outcomes if each.memory_error is not None]


def residuals_by(
    outcomes: Sequence[Outcome], features: Sequence[str], errors: Mapping[str, float] | None = None
) -> Mapping[tuple[str, ...], tuple[int, float, float]]:
    """Return ``(cases, mean absolute, bias)`` of the error (`judged`) by values of features.

    Args:
        outcomes: Cases that were run; those without a measurement of that kind are left out.
        features: Names; a case without one has the value `ABSENT`.
        errors: Errors in place of the outcomes' own, by the case's row id; cases without one are left out.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    for each, error in judged(outcomes)[1] if errors is None else _given(outcomes, errors):
        key = tuple(str(each.case.features.get(name, ABSENT)) for name in features)
        found.setdefault(key, []).append(error)
    ordered = sorted(found.items(), key=lambda item: [feature_order(value) for value in item[0]])
    return {key: (len(own), fmean(map(abs, own)), fmean(own)) for key, own in ordered}


def feature_order(value: str) -> tuple[float, str]:
    """Return what sorts values of a feature, numbers by their size and before words.

    >>> sorted(["16", "2", "gpt"], key=feature_order)
    ['2', '16', 'gpt']
    """
    return (float(value), "") if value.isdigit() else (float("inf"), value)


def _given(outcomes: Sequence[Outcome], errors: Mapping[str, float]) -> list[tuple[Outcome, float]]:
    return [(each, errors[each.case.row_id]) for each in outcomes if each.case.row_id in errors]
