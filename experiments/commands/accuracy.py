"""``windtunnel accuracy``: how far predictions are from what others measured, and the gate on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.words import counted
from experiments.console import (
    AsJson,
    Without,
    comma_separated,
    messages,
    print_json,
    print_table,
    table,
    writable,
    writable_folder,
)
from experiments.interrupts import INTERRUPTED, one_interrupt

if TYPE_CHECKING:
    from experiments.accuracy.baseline import Baseline
    from experiments.accuracy.run import GroupReport, Outcome
    from experiments.cases.case import Case, Skipped


WORST_SHOWN = 3
"""Cases that are named where a group fails the gate."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("accuracy")(accuracy)


def accuracy(
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a group is worse than its accepted figures.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with your copies of the public sets; default: $WINDTUNNEL_DATA, else a folder "
            "shared/data beside the repository.",
            show_default=False,
        ),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="REASON",
            help="Make this run's figures the accepted ones; shows before and after.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[list[str] | None, typer.Option(help="Only this group; may be given again.")] = None,
    by: Annotated[
        str, typer.Option(help="Also tabulate the error by these features of the runs (tp,microbatch).")
    ] = "",
    missed: Annotated[
        bool,
        typer.Option(
            "--missed", help="Tabulate the time error of groups above their target, by --by or by each feature in turn."
        ),
    ] = False,
    cases: Annotated[bool, typer.Option("--cases", help="Also list every case.")] = False,
    without: Without = "",
    plots: Annotated[Path | None, typer.Option(help="Folder for one picture per group.", show_default=False)] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write the accuracy page (docs/accuracy.md).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate runs that others measured, and report the errors group by group.

    Example: windtunnel accuracy --group vtrain-single-node --by tp,microbatch
    """  # fmt: skip
    from experiments.accuracy import baseline as gate
    from experiments.accuracy import docs as page
    from experiments.accuracy import plots as pictures
    from experiments.accuracy import run as core
    from experiments.cases.sources import all_cases, data_folder
    from experiments.progress import counted_progress
    from simulator.fidelity import Fidelity

    off = comma_separated(without)
    if off and (check or accept is not None or docs is not None):
        raise ValueError("--without is for looking: it cannot go with --check, --accept or --docs")
    if accept is not None:
        gate.check_reason(accept)
    if docs is not None and group:
        raise ValueError("--docs writes about all groups: leave --group out")
    if plots is not None:
        writable_folder(plots)
    if docs is not None:
        writable(docs)
    only = tuple(group or ())
    folder = data_folder(data)
    entries = list(all_cases(folder))
    _check_features(comma_separated(by), entries, only)
    try:
        with one_interrupt(), counted_progress("accuracy cases") as listener:
            outcomes, skipped = core.run_cases(
                entries, only=only, fidelity=Fidelity().without(*off), listener=listener
            )
    except KeyboardInterrupt:
        messages().print("interrupted; no case is kept, and the next call begins anew: --group takes fewer")
        raise typer.Exit(INTERRUPTED) from None
    reports = core.group_reports(outcomes, skipped, only=only)
    baseline = gate.load_baseline()
    found = gate.findings(reports, baseline, with_data=folder is not None, only=only) if check else []
    if as_json:
        print_json(
            {
                "groups": [_group_mapping(report) for report in reports],
                "cases": [_case_mapping(outcome) for outcome in outcomes],
                "findings": [{"group": each.group, "message": each.message} for each in found],
            }
        )
    else:
        _print(reports, outcomes, comma_separated(by), missed, cases)
    for report in reports if plots is not None else ():
        assert plots is not None
        pictures.plot_group(report, outcomes, plots / f"{report.name}.png")
    if docs is not None:
        page.write_docs(reports, outcomes, docs)
    if accept is not None:
        before, after = gate.accept(reports, accept)
        columns = [("group", "left"), ("figure", "left"), ("before", "right"), ("after", "right")]
        messages().print(table("accepted", columns, gate.changes(before, after)))
        return
    for each in found:
        messages().print(f"[bold red]{each.group}[/]: {each.message}", soft_wrap=True)
    for report in reports:
        if any(each.group == report.name for each in found):
            own = [each for each in outcomes if report.name in each.case.groups]
            if not as_json:
                _print_where(report.name, own, baseline)
            for line in _where_to_look(report, own, data):
                messages().print(f"  {line}", markup=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    if check:
        messages().print("no group is worse than accepted")


def _print_where(name: str, outcomes: Sequence[Outcome], baseline: Baseline) -> None:
    """Print a group's error by every feature that tells some cases from others, before and now."""
    from experiments.accuracy.run import telling_features

    accepted = baseline.groups.get(name)
    known = {} if accepted is None else accepted.error_by_feature
    if features := telling_features(outcomes):
        print_residuals(
            outcomes, features, f": {name}", one_by_one=True,
            before=lambda names: {(value,): error for value, error in known.get(names[0], {}).items()},
        )  # fmt: skip


def _where_to_look(report: GroupReport, outcomes: Sequence[Outcome], folder: Path | None) -> list[str]:
    """Return what shows where a group that fails the gate is off: its worst cases, and the command for more."""
    from experiments.accuracy.run import judged

    errors = report.time or report.memory
    if errors is None:
        return []
    worst = sorted(errors.errors.items(), key=lambda item: (-abs(item[1]), item[0]))[:WORST_SHOWN]
    features = dict.fromkeys(name for each in outcomes for name in each.case.features)
    data = f" --data {folder}" if folder is not None else ""
    by = f" --by {','.join(list(features)[:2])}" if features else ""
    return [
        f"furthest off in {judged(outcomes)[0]}: {', '.join(f'{row} {error:+.1%}' for row, error in worst)}",
        f"one by one: windtunnel accuracy --group {report.name}{by} --cases{data}",
    ]


def _check_features(wanted: Sequence[str], entries: Sequence[Case | Skipped], only: Sequence[str]) -> None:
    """Refuse a feature that no run has, before minutes of simulation."""
    from experiments.cases.case import Case

    cases = [entry for entry in entries if isinstance(entry, Case) and (not only or set(only) & set(entry.groups))]
    known = dict.fromkeys(name for case in cases for name in case.features)
    for name in wanted:
        if name not in known:
            words = ", ".join(known) or "which have none"
            raise ValueError(f"--by must name features of the runs, {words}; got {name!r}")


def _print(
    reports: Sequence[GroupReport], outcomes: Sequence[Outcome], features: Sequence[str], missed: bool, with_cases: bool
) -> None:
    from experiments.accuracy.docs import percent
    from experiments.accuracy.groups import groups as known_groups

    columns = [
        ("group", "left"), ("run", "right"), ("skipped", "right"), ("time error", "right"), ("target", "right"),
        ("median", "right"), ("bias", "right"), ("worst", "left"), ("memory", "right"), ("fits", "right"),
        ("rank", "right"), ("best peer", "right"),
    ]  # fmt: skip
    rows = []
    for report in reports:
        known, time = known_groups()[report.name], report.time
        best = min((peer.mean_absolute_error for peer in known.peers), default=None)
        rows.append(
            (
                report.name,
                str(report.num_run),
                str(report.num_skipped) if report.num_run else "all",
                percent(time.mean_absolute) if time else "",
                percent(known.target_time),
                percent(time.median_absolute) if time else "",
                f"{100 * time.bias:+.1f} %" if time else "",
                f"{100 * time.worst[1]:+.0f} % #{time.worst[0].split('#')[-1][:12]}"
                if time
                else "; ".join(report.reasons),
                f"{percent(report.memory.mean_absolute)}" if report.memory else "",
                f"{report.num_fits_right}/{report.num_fits_asked}" if report.num_fits_asked else "",
                f"{report.rank.correlation:.3f}" if report.rank else "",
                percent(best),
            )
        )
    print_table(None, columns, rows)
    if missed:
        for report in reports:
            known = known_groups()[report.name]
            errors, target = report.time, known.target_time
            if errors is None:
                errors, target = report.memory, known.target_memory
            if errors is not None and target is not None and errors.mean_absolute > target:
                own = [each for each in outcomes if report.name in each.case.groups]
                print_residuals(own, features, f": {report.name}", one_by_one=not features)
    elif features:
        print_residuals(outcomes, features)
    if with_cases:
        columns = [
            ("case", "left"), ("features", "left"), ("measured s", "right"), ("predicted s", "right"),
            ("error", "right"), ("memory", "right"), ("fits", "left"),
        ]  # fmt: skip
        print_table("cases", columns, [_case_row(outcome) for outcome in outcomes])
    run, skipped = len(outcomes), sum(report.num_skipped for report in reports)
    messages().print(f"{counted(run, 'case')} run, {counted(skipped, 'row')} skipped")


def print_residuals(
    outcomes: Sequence[Outcome],
    features: Sequence[str],
    where: str = "",
    *,
    one_by_one: bool = False,
    before: Callable[[Sequence[str]], Mapping[tuple[str, ...], float]] | None = None,
) -> None:
    """Print the error of iteration times by values of features together, or of each in turn; else that of peaks.

    Args:
        outcomes: Cases that were run.
        features: Names; in turn without any: all that the cases have.
        where: What the table's title ends in.
        one_by_one: Whether in turn.
        before: Gives for names of features the earlier error by their values; another column.
    """
    from experiments.accuracy.docs import percent
    from experiments.accuracy.run import judged, residuals_by

    if one_by_one:
        heads = ["feature", "value"]
        every = dict.fromkeys(name for each in outcomes for name in each.case.features)
        chosen = [[name] for name in features or every]
    else:
        heads, chosen = list(features), [list(features)]
    was = [] if before is None else [("before", "right")]
    columns = [*((name, "left") for name in heads), ("cases", "right"), *was, ("error", "right"), ("bias", "right")]
    lines = []
    for names in chosen:
        earlier = {} if before is None else before(names)
        for key, (count, mean, bias) in residuals_by(outcomes, names).items():
            first = [*(names if one_by_one else []), *key, str(count)]
            lines.append([*first, *(percent(earlier.get(key)) for _ in was), percent(mean), f"{100 * bias:+.1f} %"])
    print_table(f"{judged(outcomes)[0]} error by feature{where}", columns, lines)


def _case_row(outcome: Outcome) -> tuple[str, ...]:
    case, error = outcome.case, outcome.time_error
    seconds = case.measured.iteration_time_s
    asked = case.measured.out_of_memory
    wrong = asked is not None and asked != outcome.out_of_memory
    return (
        case.row_id,
        ", ".join(f"{name} {value}" for name, value in case.features.items()),
        f"{seconds:.4g}" if seconds is not None else "",
        f"{outcome.iteration_time_s:.4g}",
        f"{100 * error:+.1f} %" if error is not None else "",
        f"{100 * outcome.memory_error:+.1f} %" if outcome.memory_error is not None else "",
        ("no" if outcome.out_of_memory else "yes") + (" (wrong)" if wrong else ""),
    )


def _group_mapping(report: GroupReport) -> dict[str, Any]:
    time, memory, rank = report.time, report.memory, report.rank
    return {
        "group": report.name,
        "num_run": report.num_run,
        "num_skipped": report.num_skipped,
        "skipped_because": list(report.reasons),
        "time_mean_absolute_error": time.mean_absolute if time else None,
        "time_median_absolute_error": time.median_absolute if time else None,
        "time_bias": time.bias if time else None,
        "time_worst": {"case": time.worst[0], "error": time.worst[1]} if time else None,
        "memory_mean_absolute_error": memory.mean_absolute if memory else None,
        "memory_bias": memory.bias if memory else None,
        "num_fits_right": report.num_fits_right,
        "num_fits_asked": report.num_fits_asked,
        "num_wrong_fits": report.num_wrong_fits,
        "rank_correlation": rank.correlation if rank else None,
        "rank_spearman": rank.spearman if rank else None,
        "rank_pairs": rank.num_pairs if rank else 0,
    }


def _case_mapping(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "case": case.row_id,
        "groups": list(case.groups),
        "features": dict(case.features),
        "source": case.source,
        "measured_iteration_time_s": case.measured.iteration_time_s,
        "predicted_iteration_time_s": outcome.iteration_time_s,
        "time_error": outcome.time_error,
        "measured_peak_bytes": case.measured.peak_bytes,
        "predicted_peak_bytes": outcome.peak_bytes,
        "memory_error": outcome.memory_error,
        "measured_out_of_memory": case.measured.out_of_memory,
        "predicted_out_of_memory": outcome.out_of_memory,
        "wall_s": outcome.wall_s,
    }
