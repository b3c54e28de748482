"""``windtunnel reproduce``: a paper's figure or table, ours beside theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from datafiles.words import counted
from experiments.console import (
    AsJson,
    Seed,
    comma_separated,
    console,
    messages,
    num_that_fit,
    print_json,
    print_table,
    writable_folder,
)

ROWS_SHOWN = 60
"""Rows of a table on the terminal; its file has all."""
LEADERBOARD = "leaderboard"
"""What these experiments are called, alone or in the first place; they take searchers of a user's own."""


def reproduce(
    name: Annotated[
        str, typer.Argument(help="Experiment (windtunnel list experiments), a paper such as aceso, or all.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; each experiment gets one in it.")] = Path(
        "out/reproduce"
    ),
    data: Annotated[
        Path | None, typer.Option(help="Your copies of public measurement sets.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A subset: seconds to two minutes.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; 0 for all cores.", min=0)] = 0,
    seed: Seed = 0,
    searchers: Annotated[
        str, typer.Option("--searcher", help="Your own on the leaderboard: path.py:Class, comma-separated.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Reproduce a figure or table of a paper: tables, figures, and a verdict on each claim.

    Verdicts are computed by the criterion that stands beside them; a claim may turn out not to hold.

    Example: windtunnel reproduce mpe-counts -o out/reproduce
    """
    from experiments.cases.sources import data_folder
    from experiments.interrupts import terminate_means_interrupt
    from experiments.progress import steps_progress
    from experiments.reproduce.experiment import Context
    from experiments.reproduce.registry import experiments_named
    from experiments.reproduce.report import PARTIAL, refuse_other_files, text_cell, to_mapping, write_report

    chosen = experiments_named(name)
    if searchers and not any(experiment.name.startswith(LEADERBOARD) for experiment in chosen):
        raise ValueError(f"--searcher is for the leaderboard, got {name}; leave it out, or reproduce {LEADERBOARD}")
    writable_folder(output)
    for name in dict.fromkeys(name for each in chosen for name in (each.name, each.shares) if name):
        refuse_other_files(output / name)
    folder_of_data = data_folder(data)
    found, failures = [], []
    for experiment in chosen:
        folder = output / experiment.name
        scratch = output / (experiment.shares or experiment.name) / PARTIAL
        for kept in (folder / PARTIAL, scratch):
            writable_folder(kept)
        with terminate_means_interrupt(), steps_progress(experiment.name) as say:
            context = Context(
                data=folder_of_data,
                scratch=scratch,
                quick=quick,
                workers=workers or os.cpu_count() or 1,
                seed=seed,
                searchers=comma_separated(searchers),
                say=say,
            )
            try:
                report = experiment(context)
            except ValueError as error:
                if len(chosen) == 1:
                    raise
                failures.append((experiment.name, str(error)))
                continue
        files = write_report(folder, experiment, report)
        if as_json:
            found.append(to_mapping(experiment, report))
            continue
        for title, frame in report.tables.items():
            columns = [
                (str(column), "right" if frame[column].dtype.kind in "fiu" else "left") for column in frame.columns
            ]
            shown = frame.head(ROWS_SHOWN)
            rows = [[text_cell(value) for value in row] for row in shown.itertuples(index=False, name=None)]
            shown_columns = num_that_fit(columns, rows, console().width)
            left_out = ", ".join(header for header, _ in columns[shown_columns:])
            visible = [row[:shown_columns] for row in rows]
            print_table(f"{experiment.name}: {title}", columns[:shown_columns], visible)
            if left_out:
                console().print(f"... more columns in {folder / title}.csv: {left_out}", markup=False, soft_wrap=True)
            if len(frame) > ROWS_SHOWN:
                console().print(
                    f"... {counted(len(frame) - ROWS_SHOWN, 'more row')} in {folder / title}.csv",
                    markup=False,
                )
        for verdict in report.verdicts:
            console().print(
                f"{verdict.word}: {verdict.claim} ({verdict.criterion}); {verdict.found}", markup=False, soft_wrap=True
            )
        for note in report.notes:
            console().print(f"note: {note}", markup=False, soft_wrap=True)
        console().print(f"written: {files[0]} and {len(files) - 1} more", markup=False)
    if as_json:
        print_json(found)
    for title, reason in failures:
        messages().print(f"{title} did not run: {reason}", markup=False)
