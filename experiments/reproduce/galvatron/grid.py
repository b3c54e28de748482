"""Tables of cells: columns of one model and memory budget, computed side by side and kept between runs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from datafiles.loader import load_mapping
from datafiles.writer import dump_json, write_text_atomically
from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.experiment import Context
from experiments.reproduce.galvatron.cells import FIXED, TITLES, Cell, at_batch, fixed_cell, searched_cell

BASED = ("galvatron-bmw",)
"""Variants that explore around Base's best batch (Algorithm 2's B0)."""

FORMAT = 1


@dataclass(frozen=True)
class Printed:
    """What the paper prints in a cell; no throughput where it says OOM."""

    throughput: float | None
    batch: int | None
    partition: str = ""


Key = tuple[int, str, str]
"""Memory budget (GiB), model, strategy."""


@dataclass(frozen=True)
class Column:
    """One model and memory budget.

    Attributes:
        run: What it is about.
        strategies: Rows, in order.
        batches: Strategy to the paper's batch, where known: computed besides.
    """

    run: Run
    strategies: tuple[str, ...]
    batches: Mapping[str, int]

    @property
    def name(self) -> str:
        """For files and progress."""
        return f"{self.run.cluster.replace(':', '-')}-{self.run.model}-{self.run.memory_gb}"


def cells_of(column: Column) -> dict[str, Any]:
    """Return a column's cells as plain data: the best ones, and those at the paper's batches."""
    best: dict[str, Cell] = {}
    for strategy in column.strategies:
        if strategy in FIXED:
            best[strategy] = fixed_cell(column.run, strategy)
            continue
        base = best.get("galvatron-base")
        centre = base.batch if strategy in BASED and base is not None else None
        best[strategy], _ = searched_cell(column.run, strategy, centre)
    same = {strategy: at_batch(column.run, strategy, batch) for strategy, batch in column.batches.items()}
    return {
        "format": FORMAT,
        "best": {strategy: cell.to_mapping() for strategy, cell in best.items()},
        "at_printed_batch": {strategy: cell.to_mapping() for strategy, cell in same.items()},
    }


def compute(context: Context, columns: Sequence[Column]) -> dict[str, dict[str, Any]]:
    """Return the cells of every column by its name; those kept in the scratch folder are not computed again."""
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for column in columns:
        path = _path(context, column)
        kept = load_mapping(path) if path.exists() else {}
        complete = kept.get("format") == FORMAT and set(kept["best"]) == set(column.strategies)
        if complete and set(kept["at_printed_batch"]) >= set(column.batches):
            found[column.name] = kept
        else:
            missing.append(column)
    workers = max(1, min(context.workers, len(missing)))
    if workers == 1:
        for number, column in enumerate(missing):
            context.say(f"{column.name}, column {number + 1} of {len(missing)}")
            found[column.name] = _kept(context, column, cells_of(column))
        return found
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=spawn) as pool:
        waiting = {pool.submit(cells_of, column): column for column in missing}
        for number, done in enumerate(as_completed(waiting)):
            column = waiting[done]
            context.say(f"{column.name}, column {number + 1} of {len(missing)}")
            found[column.name] = _kept(context, column, done.result())
    return found


def _path(context: Context, column: Column) -> Path:
    return context.scratch / f"{column.name}.json"


def _kept(context: Context, column: Column, cells: dict[str, Any]) -> dict[str, Any]:
    write_text_atomically(_path(context, column), dump_json(cells))
    return cells


def frame_of(
    columns: Sequence[Column], cells: Mapping[str, Mapping[str, Any]], printed: Mapping[Key, Printed]
) -> pd.DataFrame:
    """Return one row per cell: ours, the paper's where known, and how they differ."""
    rows = []
    for column in columns:
        for strategy in column.strategies:
            cell = Cell(**cells[column.name]["best"][strategy])
            same = cells[column.name]["at_printed_batch"].get(strategy)
            paper = printed.get((column.run.memory_gb, column.run.model, strategy))
            row: dict[str, Any] = {
                "memory_gb": column.run.memory_gb,
                "strategy": TITLES[strategy],
                "model": column.run.model,
                "samples_per_s": cell.throughput,
                "batch": cell.batch,
                "microbatches": cell.microbatches,
                "partition": cell.partition,
                "estimated_samples_per_s": cell.estimated,
                "plan": cell.plan if cell.throughput else "OOM",
            }
            if printed:
                theirs = paper.throughput if paper else None
                own = Cell(**same) if same else None
                row |= {
                    "paper_samples_per_s": theirs,
                    "paper_batch": paper.batch if paper else None,
                    "paper_partition": paper.partition if paper else "",
                    "relative_difference": _ratio(cell.throughput, theirs),
                    "at_paper_batch_samples_per_s": own.throughput if own else None,
                    "at_paper_batch_difference": _ratio(own.throughput if own else None, theirs),
                    "oom_agrees": (cell.throughput is None) == (theirs is None) if paper else None,
                }
            rows.append(row)
    return pd.DataFrame(rows)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs - 1 if ours and theirs else None
