"""``windtunnel predict``: every run of a table simulated, and compared with what was measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.words import counted
from experiments.console import (
    AsJson,
    CommonCluster,
    CommonModel,
    CommonRuntime,
    Profile,
    Without,
    all_writable,
    comma_separated,
    messages,
    print_json,
    print_lines,
    print_table,
)
from experiments.interrupts import INTERRUPTED, one_interrupt, terminate_means_interrupt

if TYPE_CHECKING:
    from experiments.accuracy.run import GroupReport, Outcome

MOST_ROWS = 40
"""A longer table is shown by its runs that are furthest off (all go into ``--output``)."""
FURTHEST = 10
FEW = 3
"""Runs that are named where a limit is not met."""
COLUMNS = (
    "predicted_iteration_time_s",
    "measured_iteration_time_s",
    "time_error",
    "predicted_out_of_memory",
    "predicted_peak_gib",
    "memory_error",
)
"""What ``--output`` has beside the table's own columns."""


def predict(
    runs: Annotated[Path, typer.Argument(help="CSV of runs; docs/your-own-runs.md has its columns.")],
    cluster: CommonCluster = None,
    runtime: CommonRuntime = None,
    model: CommonModel = None,
    profile: Profile = None,
    without: Without = "",
    by: Annotated[str, typer.Option(help="Tabulate the error by these columns of the table (tp,microbatch).")] = "",
    limit: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if the mean absolute error is more than this, such as 10%.", show_default=False),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="CSV of an earlier --output: exit with 1 if the mean absolute error of its runs has grown.",
            show_default=False,
        ),
    ] = None,
    skip_refused: Annotated[
        bool, typer.Option("--skip-refused", help="Leave out, and list, rows that cannot be run.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="CSV: the table with predictions.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture (.png): predicted against measured.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate every run of a table; where it says what was measured, show the errors.

    A row has a plan file, or model, degrees, microbatch and global_batch; iteration_time_s (or metric, value and unit)
    where it was measured, peak_allocated_gib or peak_reserved_gib, out_of_memory where it failed.

    Example: windtunnel predict runs.csv -c a100-80g-dgx -r megatron-lm-2021 --by tp,pp -o predicted.csv
    """
    from experiments.accuracy.plots import plot_outcomes
    from experiments.accuracy.run import report_of, telling_features
    from experiments.calibrate.measured_run import doubt
    from experiments.commands.validate import parse_share
    from experiments.fitted_runs import fitted_rows
    from experiments.notes import show_notes_of_runs
    from experiments.run_baseline import earlier_errors, worse
    from experiments.run_files import files_of_runs
    from experiments.run_remarks import other_dtypes, rows_twice, unknown_gpus
    from experiments.run_table import ALIASES, Common, columns_not_read, load_runs, row_id
    from simulator.fidelity import Fidelity

    largest = parse_share(limit) if limit is not None else None
    fidelity = Fidelity().without(*comma_separated(without))
    refused: list[str] = []
    common = Common(cluster=cluster, runtime=runtime, model=model, profile=profile)
    cases = load_runs(runs, common, refused if skip_refused else None)
    known = list(dict.fromkeys(name for case in cases for name in case.features))
    features = [ALIASES.get(name, name) for name in comma_separated(by)]
    for name in features:
        if name not in known:
            raise ValueError(f"--by must name columns of {runs} that say what ran, {', '.join(known)}; got {name!r}")
    timed = any(case.measured.iteration_time_s is not None for case in cases)
    peaks = timed or any(case.measured.peak_bytes is not None for case in cases)
    for option, given, is_there, needed in (
        ("--limit", largest, timed, "measured times"),
        ("--baseline", baseline, timed, "measured times"),
        ("--plot", plot, peaks, "measured times or peaks"),
        ("--by", features, peaks, "measured times or peaks"),
    ):
        if given and not is_there:
            raise ValueError(f"{option} needs {needed}, and no row of {runs} has one")
    inputs = [*files_of_runs(runs, common), *([baseline] if baseline is not None else [])]
    all_writable(read=inputs, tables=[output], pictures=[plot])
    earlier = earlier_errors(baseline, runs, COLUMNS) if baseline is not None else {}
    fitted = fitted_rows(cases, profile)
    reported = [case for case in cases if case.row_id not in fitted]
    if fitted and not any(case.measured.iteration_time_s is not None for case in reported):
        for option, given in (("--limit", largest), ("--baseline", baseline)):
            if given is not None:
                raise ValueError(
                    f"{option} needs measured runs that the profile was not fitted to, and {profile} was to all of "
                    f"{runs}: fit on some, and predict others"
                )
        reported = cases
    told = _told_of_fitted(len(fitted), all_of_them=reported is cases, profile=profile)
    every = _simulated(cases, fidelity, runs, output)
    judged = {case.row_id for case in reported}
    outcomes = [each for each in every if each.case.row_id in judged]
    report = report_of(runs.stem, outcomes)
    if plot is not None:
        plot_outcomes(runs.stem, report.time or report.memory, outcomes, plot)
    measured = [
        each.case.measured.iteration_time_s / each.iteration_time_s
        for each in outcomes
        if each.case.measured.iteration_time_s is not None
    ]
    if measured and (words := doubt(measured)) is not None:
        messages().print(f"[bold red]{words}[/]")
    else:
        for line in _doubts(outcomes):
            messages().print(line, style="bold red", markup=False, soft_wrap=True)
    for line in (*unknown_gpus(cases), *other_dtypes(cases)):
        messages().print(line, markup=False, soft_wrap=True)
    show_notes_of_runs(each.notes for each in outcomes)
    for line in rows_twice(runs):
        messages().print(line, markup=False, soft_wrap=True)
    errors = {each.case.row_id: each.time_error for each in outcomes if each.time_error is not None}
    before = {row_id(runs, number): error for number, error in earlier.items() if row_id(runs, number) in errors}
    ignored = columns_not_read(runs)
    if as_json:
        found = [_run_mapping(each) | {"profile_fitted_to_it": each.case.row_id in fitted} for each in every]
        others = {"refused": refused, "columns_not_read": list(ignored)}
        print_json({"report": _report_mapping(report), "runs": found, **others})
    else:
        _print(report, every, outcomes, features, before)
    if told:
        messages().print(told, markup=False, soft_wrap=True)
    if ignored:
        names = [f"{name} (did you mean {alike}?)" if alike else name for name, alike in ignored.items()]
        messages().print(f"columns that say nothing about a run: {', '.join(names)}", markup=False)
    for line in refused:
        messages().print(f"left out: {line}", soft_wrap=True, markup=False)
    for path in (output, plot):
        if path is not None and not as_json:
            messages().print(f"written: {path}", markup=False)
    failed = worse(before, errors) if before else []
    if baseline is not None and not failed:
        num_new = len(errors) - len(before)
        one, several = "measured run is not in it as it is now", "measured runs are not in it as they are now"
        new = f"; {counted(num_new, one, several)}" if num_new else ""
        messages().print(f"not worse than {baseline}{new}", markup=False, soft_wrap=True)
    if largest is not None and report.time is not None and report.time.mean_absolute > largest:
        furthest = sorted(errors.items(), key=lambda item: -abs(item[1]))[:FEW]
        failed.append(f"mean absolute error {report.time.mean_absolute:.1%}, allowed {largest:.1%}")
        failed.append(f"furthest off: {', '.join(f'{run} {error:+.1%}' for run, error in furthest)}")
    if failed:
        if not features and not as_json and (telling := telling_features(outcomes)):
            _print_errors(outcomes, telling, before, one_by_one=True)
        for line in failed:
            messages().print(f"[bold red]{line}[/]", soft_wrap=True)
        raise typer.Exit(1)


def _told_of_fitted(count: int, *, all_of_them: bool, profile: str | None) -> str:
    """Return, in words, how many runs the profile was fitted to, and what follows; nothing for none."""
    if not count:
        return ""
    if all_of_them:
        return f"{profile} was fitted to these runs: their errors say how well, not how well it predicts others"
    one, several = "run that it was fitted to is", "runs that it was fitted to are"
    return f"{profile}: {counted(count, one, several)} left out of the errors"


def _doubts(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what measured times of single runs look like that are far off, and of which runs."""
    from experiments.calibrate.measured_run import doubt_of_one

    found: dict[str, list[str]] = {}
    for each in outcomes:
        measured = each.case.measured.iteration_time_s
        if measured is not None:
            words = doubt_of_one(measured / each.iteration_time_s, each.num_gpus)
            if words is not None:
                found.setdefault(words, []).append(each.case.row_id)
    return [
        f"{', '.join(runs[:FEW])}{' and others' if len(runs) > FEW else ''} {words}" for words, runs in found.items()
    ]


def _simulated(cases: Sequence[Any], fidelity: Any, runs: Path, output: Path | None) -> list[Outcome]:
    """Simulate the runs; what was simulated is written whatever ends it."""
    from experiments.accuracy.run import run_case
    from experiments.progress import counted_progress

    outcomes: list[Outcome] = []
    try:
        with terminate_means_interrupt(), one_interrupt(), counted_progress("runs") as advance:
            for number, case in enumerate(cases):
                advance(number, len(cases), case.row_id)
                try:
                    outcomes.append(run_case(case, fidelity=fidelity))
                except ValueError as error:  # too large to simulate
                    raise ValueError(f"{case.row_id}: {error}") from error
    except KeyboardInterrupt:
        done = f"{len(outcomes)} of {counted(len(cases), 'run')} were simulated and"
        if not outcomes:
            words = "interrupted before the first run was through; nothing is written"
        elif output is not None:
            words = f"interrupted; {done} are in {output}"
        else:
            words = f"interrupted; {done} are lost (-o keeps them)"
        messages().print(words, markup=False)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if output is not None and outcomes:
            _write(runs, outcomes, output)
    return outcomes


def _write(runs: Path, outcomes: Sequence[Outcome], path: Path) -> None:
    from datafiles.tables import load_table
    from datafiles.writer import write_text_atomically
    from experiments.run_table import row_id

    text = io.StringIO()
    rows = load_table(runs)
    found = {each.case.row_id: _run_mapping(each) for each in outcomes}
    writer = csv.writer(text, lineterminator="\n")
    names = [name for name in rows[0] if name not in COLUMNS]
    writer.writerow([*names, *COLUMNS])
    for number, row in enumerate(rows, start=1):
        own = found.get(row_id(runs, number), {})
        predicted = ["" if own.get(name) is None else own[name] for name in COLUMNS]
        writer.writerow([*(row[name] for name in names), *predicted])
    write_text_atomically(path, text.getvalue())


def _run_mapping(outcome: Outcome) -> dict[str, Any]:
    return {
        "run": outcome.case.row_id,
        "predicted_iteration_time_s": outcome.iteration_time_s,
        "measured_iteration_time_s": outcome.case.measured.iteration_time_s,
        "time_error": outcome.time_error,
        "predicted_out_of_memory": outcome.out_of_memory,
        "measured_out_of_memory": outcome.case.measured.out_of_memory,
        "predicted_peak_gib": outcome.peak_bytes / 2**30,
        "measured_peak_gib": _gib(outcome.case.measured.peak_bytes),
        "memory_error": outcome.memory_error,
    }


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def _report_mapping(report: GroupReport) -> dict[str, Any]:
    time, memory, rank = report.time, report.memory, report.rank
    return {
        "num_runs": report.num_run,
        "num_timed": time.num_cases if time else 0,
        "mean_absolute_error": time.mean_absolute if time else None,
        "median_absolute_error": time.median_absolute if time else None,
        "bias": time.bias if time else None,
        "worst": {"run": time.worst[0], "error": time.worst[1]} if time else None,
        "num_peaks": memory.num_cases if memory else 0,
        "memory_mean_absolute_error": memory.mean_absolute if memory else None,
        "memory_bias": memory.bias if memory else None,
        "memory_worst": {"run": memory.worst[0], "error": memory.worst[1]} if memory else None,
        "num_fits_right": report.num_fits_right,
        "num_fits_asked": report.num_fits_asked,
        "rank_correlation": rank.correlation if rank else None,
        "rank_pairs": rank.num_pairs if rank else 0,
    }


def _print_errors(
    outcomes: Sequence[Outcome], features: Sequence[str], before: Mapping[str, float], *, one_by_one: bool = False
) -> None:
    """Print the error by features (``run.judged``); where there is a baseline, that of its runs, before and now."""
    from experiments.accuracy.run import residuals_by
    from experiments.commands.accuracy import print_residuals

    if not before:
        print_residuals(outcomes, features, one_by_one=one_by_one)
        return
    known = [each for each in outcomes if each.case.row_id in before]

    def earlier(names: Sequence[str]) -> Mapping[tuple[str, ...], float]:
        return {key: mean for key, (_, mean, _) in residuals_by(known, names, before).items()}

    print_residuals(known, features, " of the runs in the baseline", one_by_one=one_by_one, before=earlier)


def _print(
    report: GroupReport,
    every: Sequence[Outcome],
    outcomes: Sequence[Outcome],
    features: Sequence[str],
    before: Mapping[str, float],
) -> None:
    """Print predictions of every run, and the errors of those that are reported."""
    reported = {each.case.row_id for each in outcomes}
    shown = list(every)
    if len(shown) > MOST_ROWS:
        off = [each.memory_error if report.time is None else each.time_error for each in every]
        order = sorted(range(len(every)), key=lambda place: -abs(off[place] or 0.0))
        shown = [every[place] for place in order[:FURTHEST]]
        measured = report.time is not None or report.memory is not None
        which = "that are furthest off" if measured else "at the top; --output has all"
        messages().print(f"the {len(shown)} of {counted(len(every), 'run')} {which}")
    columns = [("run", "left"), ("predicted s", "right"), ("peak GiB", "right"), ("fits", "left")]
    if report.time is not None:
        columns += [("measured s", "right"), ("error", "right")]
    if report.memory is not None:
        columns += [("measured GiB", "right"), ("error", "right")]
    rows = []
    for each in shown:
        asked = each.case.measured.out_of_memory
        wrong = asked is not None and asked != each.out_of_memory
        fits = ("no" if each.out_of_memory else "yes") + (" (wrong)" if wrong else "")
        name = each.case.row_id if each.case.row_id in reported else f"{each.case.row_id} (fitted to)"
        row = [name, f"{each.iteration_time_s:.4g}", f"{each.peak_bytes / 2**30:.1f}", fits]
        if report.time is not None:
            seconds, error = each.case.measured.iteration_time_s, each.time_error
            row += [f"{seconds:.4g}" if seconds else "", f"{100 * error:+.1f} %" if error is not None else ""]
        if report.memory is not None:
            gib, error = _gib(each.case.measured.peak_bytes), each.memory_error
            row += [f"{gib:.1f}" if gib else "", f"{100 * error:+.1f} %" if error is not None else ""]
        rows.append(row)
    print_table(None, columns, rows)
    if features:
        _print_errors(outcomes, features, before)
    words = []
    for noun, found in (("run", report.time), ("peak", report.memory)):
        if found is not None:
            words.append(
                f"{counted(found.num_cases, f'measured {noun}')}: mean absolute error {found.mean_absolute:.1%}, "
                f"median {found.median_absolute:.1%}, bias {found.bias:+.1%}, worst {found.worst[1]:+.1%} "
                f"({found.worst[0]})"
            )
    if report.num_fits_asked:
        words.append(f"out of memory or not: {report.num_fits_right} of {report.num_fits_asked} right")
    if report.rank is not None:
        words.append(
            f"rank correlation {report.rank.correlation:.3f} of {counted(report.rank.num_pairs, 'pair')} of plans for "
            "one problem"
        )
    for line in words:
        print_lines(line)
