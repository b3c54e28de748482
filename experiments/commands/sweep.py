"""``windtunnel sweep``: many runs, resumable."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.words import counted
from experiments.console import AsJson, console, messages, print_lines, print_table, share_cell, short_number
from experiments.interrupts import INTERRUPTED, terminate_means_interrupt
from experiments.statuses import BUDGET_ENDED, SIMULATED

if TYPE_CHECKING:
    import pandas as pd

    from experiments.sweep.run import Sweep

ASK_ABOVE = 1_000
"""Runs that one call starts without ``--yes``."""

MAX_SHOWN = 40
"""Rows on the terminal; the files have all."""

MAX_FAILURES_SHOWN = 5


def sweep_spec(
    spec: Annotated[Path, typer.Argument(help="YAML or JSON file: base, grid, cases, runs.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for results; a second call makes only what is missing. Default: out/NAME-OF-SPEC.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Processes; default: one per core.", show_default=False),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler", help="Run on a Dask cluster instead: tcp://host:port of its scheduler.", show_default=False
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Make runs again that failed in an earlier call.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help=f"Start even more than {ASK_ABOVE:,} runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of models, clusters, batches, searchers, seeds and effects; keep every finished run.

    Example: windtunnel sweep spec.yaml -o out/sweep
    """
    from experiments.compare_files import json_of
    from experiments.sweep.progress import sweep_progress
    from experiments.sweep.run import Sweep, load_sweep, open_workers

    loaded = load_sweep(spec)
    found = Sweep(loaded, output or Path("out") / spec.name.split(".")[0], retry_failed=retry_failed)
    folder = found.folder.path
    if len(found.pending) > ASK_ABOVE and not yes:
        raise ValueError(
            f"{spec} has {counted(len(found.pending), 'run')} to make, more than {ASK_ABOVE:,}; add --yes if that is "
            "meant"
        )
    if found.pending:
        try:
            with terminate_means_interrupt(), closing(open_workers(jobs, scheduler)) as workers:
                _announce(found, f"on {workers.name}", workers.crowded)
                with sweep_progress() as listener:
                    found.run(workers, listener)
        except KeyboardInterrupt:
            messages().print(
                f"interrupted; finished runs are kept in {folder}, the same command makes the other "
                f"{len(found.pending)}",
                markup=False,
            )
            raise typer.Exit(INTERRUPTED) from None
    else:
        _announce(found, "nothing to do", 0)
        found.write()
    results = found.table()
    if as_json:
        print_lines(json_of(results))
        return
    _show(found, results)


def _announce(found: Sweep, where: str, crowded: int) -> None:
    """Say what will run before it does."""
    from experiments.notes import left_out_of, show_notes

    spec = found.spec
    to_make, kept = len(found.pending), len(spec.jobs) - len(found.pending)
    parts = [counted(len(spec.jobs), "run"), f"{kept:,} finished earlier", f"{to_make:,} to make {where}"]
    say = messages()
    say.print(f"{spec.title}: {', '.join(part for part in parts if not part.startswith('0 '))}", markup=False)
    if failed := found.num_failed_kept:
        say.print(f"{failed:,} of the finished runs failed; --retry-failed makes them again")
    if spec.num_repeated:
        say.print(f"{counted(spec.num_repeated, 'run is', 'runs are')} named more than once in the spec and made once")
    if found.num_other:
        say.print(
            f"not in the table: {counted(found.num_other, 'run')} in {found.folder.path} of other code or another spec",
            markup=False,
        )
    calibrated = {(run.cluster, run.profile) for job in spec.jobs if (run := job.resolved()).profile}
    show_notes(words for cluster, profile in sorted(calibrated) for words in left_out_of(cluster, profile))
    for file in found.folder.damaged:
        say.print(f"{file} is damaged or missing; the run is made again", markup=False)
    if spec.plugins:
        say.print(f"code of your own that will be executed: {', '.join(spec.plugins)}", markup=False)
    if crowded:
        say.print(
            f"[yellow]note:[/] Dask workers with several threads ({crowded}) make runs at once that slow each other; "
            "start them with --nthreads 1"
        )


def _show(found: Sweep, results: pd.DataFrame) -> None:
    from experiments.sweep.plots import varying

    folder = found.folder.path
    inputs = varying(results)
    columns = [("#", "right"), *((name.replace("_", " "), "left") for name in inputs)]
    columns += [(name, "right") for name in ("s/iteration", "samples/s", "MFU", "GiB used/has")] + [("result", "left")]
    rows: list[dict[Any, Any]] = results.head(MAX_SHOWN).to_dict("records")
    cells = [(str(number), *_cells(row, inputs)) for number, row in enumerate(rows, start=1)]
    print_table(found.spec.title, columns, cells)
    if len(results) > MAX_SHOWN:
        console().print(f"... and {len(results) - MAX_SHOWN:,} more in {folder / 'table.csv'}", markup=False)
    failures = results[results["status"] == "failed"]
    for row in failures.head(MAX_FAILURES_SHOWN).to_dict("records"):
        console().print(f"failed: {row['reason']} ({folder / 'runs' / row['run']}.json)", markup=False, soft_wrap=True)
    if len(failures) > MAX_FAILURES_SHOWN:
        console().print(f"... and {counted(len(failures) - MAX_FAILURES_SHOWN, 'more failure')}")
    console().print(", ".join(f"{count:,} {status}" for status, count in found.counts().items()))
    console().print(f"table.csv, table.json, plans, {found.no_plot or 'sweep.png'}: {folder}", markup=False)


def _cells(row: dict[Any, Any], inputs: list[str]) -> tuple[str, ...]:
    shown = ["-" if row[name] is None or str(row[name]) in ("", "nan", "<NA>") else str(row[name]) for name in inputs]
    if row["status"] not in SIMULATED:
        return (*shown, "-", "-", "-", "-", f"{row['status']}: {row['reason']}")
    words = f"{row['plan']} ({row['reason']})" if row["reason"] else row["plan"]
    if row["budget_ended"] is True:
        words = f"{words} ({BUDGET_ENDED})"
    return (
        *shown,
        short_number(row["iteration_time_s"]),
        short_number(row["samples_per_s"]),
        share_cell(row["mfu"]),
        f"{row['peak_reserved_bytes'] / 2**30:.1f}/{row['capacity_bytes'] / 2**30:.1f}",
        words if row["status"] == "ok" else f"OUT OF MEMORY: {words}",
    )
