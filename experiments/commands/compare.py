"""``windtunnel compare``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.words import counted
from experiments.console import (
    DEFAULT_RUNTIME,
    AsJson,
    BudgetText,
    Cluster,
    Engine,
    GlobalBatch,
    MemoryLimit,
    Model,
    ObjectiveName,
    Profile,
    RuntimeName,
    Seed,
    Without,
    comma_separated,
    console,
    messages,
    print_lines,
    print_table,
    problem_spec,
    share_cell,
    short_number,
    whole_cell,
)
from experiments.interrupts import INTERRUPTED, one_interrupt, terminate_means_interrupt
from experiments.statuses import BUDGET_ENDED, SIMULATED

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_SEARCHERS = "megatron-grid,ddp,megatron-tp,gpipe,fsdp,deepspeed-3d"


def compare_searchers(
    model: Model,
    cluster: Cluster,
    global_batch: GlobalBatch,
    searchers: Annotated[
        str, typer.Option("--searchers", "-s", help="Comma-separated names or path.py:Class.")
    ] = DEFAULT_SEARCHERS,
    budget: BudgetText = "20s",
    seed: Seed = 0,
    objective: ObjectiveName = "paper",
    runtime: RuntimeName = DEFAULT_RUNTIME,
    memory_limit: MemoryLimit = None,
    profile: Profile = None,
    engine: Engine = "auto",
    without: Without = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for plans, table, plots; a second call continues where the first stopped.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let several searchers plan for one problem, and judge every plan by the same simulator.

    Example: windtunnel compare -m gpt3-1.3b -c v100-32g-dgx1:1x4 -b 1024 -o out
    """
    from experiments.compare import compare
    from experiments.compare_files import json_of
    from experiments.notes import left_out_of, show_notes
    from experiments.progress import searchers_progress
    from searchers.budget import Budget

    names = comma_separated(searchers)
    spec = problem_spec(
        model=model,
        cluster=cluster,
        runtime=runtime,
        global_batch=global_batch,
        memory_limit=memory_limit,
        profile=profile,
    )
    limit = Budget.parse(budget)
    try:
        with terminate_means_interrupt(), one_interrupt(), searchers_progress(names) as listener:
            found = compare(
                spec,
                names,
                budget=limit,
                seed=seed,
                engine=engine,
                without=comma_separated(without),
                objective=objective,
                output=output,
                listener=listener,
            )
    except KeyboardInterrupt:
        kept = f"; finished searchers are kept in {output}, the same command continues" if output else ""
        messages().print(f"interrupted{kept}", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    show_notes(left_out_of(cluster, profile))
    if as_json:
        print_lines(json_of(found))
        return
    _show(found, f"{model} on {cluster}, {counted(global_batch, 'sample')} per iteration")
    if output is not None:
        console().print(f"plots, plans and table: {output}", markup=False, soft_wrap=True)


def _show(found: pd.DataFrame, title: str) -> None:
    columns = [
        ("searcher", "left"),
        ("s/iteration", "right"),
        ("samples/s", "right"),
        ("tokens/s/GPU", "right"),
        ("MFU", "right"),
        ("GiB used/has", "right"),
        ("search s", "right"),
        ("plan", "left"),
    ]
    print_table(title, columns, [_cells(row) for row in found.to_dict("records")])


def _cells(row: dict[Any, Any]) -> tuple[str, ...]:
    search_s = f"{row['search_s']:.2f}"
    if row["status"] not in SIMULATED:
        return (row["searcher"], "-", "-", "-", "-", "-", search_s, f"{row['status']}: {row['reason']}")
    words = row["plan"]
    if row["status"] != "ok":
        words = f"OUT OF MEMORY: {words}"
    if row["reason"]:
        words = f"{words} ({row['reason']})"
    if row["budget_ended"]:
        words = f"{words} ({BUDGET_ENDED})"
    return (
        row["searcher"],
        short_number(row["iteration_time_s"]),
        short_number(row["samples_per_s"]),
        whole_cell(row["tokens_per_s_per_device"]),
        share_cell(row["mfu"]),
        f"{row['peak_reserved_bytes'] / 2**30:.1f}/{row['capacity_bytes'] / 2**30:.1f}",
        search_s,
        words,
    )
