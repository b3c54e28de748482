"""Tables of cells: columns of one model and memory budget, computed side by side and kept between runs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from datafiles.records import read_record, write_record
from experiments.cases.galvatron_table2 import Run
from experiments.compare_files import code_fingerprint
from experiments.reproduce.experiment import Context
from experiments.reproduce.galvatron.alpa import ALPA, alpa_cell
from experiments.reproduce.galvatron.cells import FIXED, TITLES, Cell, at_batch, fixed_cell, searched_cell
from experiments.sweep.workers import follow


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
        run = self.run
        overlap = "" if run.overlap is None else f"-overlap-{run.overlap:.6f}"
        factors = "".join(f"-{name}-{factor:.6f}" for name, factor in run.factors)
        return f"{run.cluster.replace(':', '-')}-{run.model}-{run.memory_gb}{overlap}{factors}"


def cell_of(run: Run, strategy: str) -> Cell:
    """Return the best cell of a strategy."""
    if strategy == ALPA:
        return alpa_cell(run)
    return fixed_cell(run, strategy) if strategy in FIXED else searched_cell(run, strategy)[0]


def cells_of(column: Column, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a column's cells as plain data: the best ones, and those at the paper's batches.

    Algorithm 2's range of batches around Base's best one is not printed, so every variant explores all batches.

    Args:
        column: The column.
        kept: Cells of an earlier run, which are taken over.
    """
    best: dict[str, Any] = dict(kept["best"]) if kept else {}
    same: dict[str, Any] = dict(kept["at_printed_batch"]) if kept else {}
    for strategy in column.strategies:
        if strategy not in best:
            cell = cell_of(column.run, strategy)
            best[strategy] = cell.to_mapping()
    for strategy, batch in column.batches.items():
        if strategy not in same:
            same[strategy] = at_batch(column.run, strategy, batch).to_mapping()
    return {"code": code_fingerprint(""), "best": best, "at_printed_batch": same}


def compute(context: Context, columns: Sequence[Column]) -> dict[str, dict[str, Any]]:
    """Return the cells of every column by its name; those kept in the scratch folder are not computed again."""
    found: dict[str, dict[str, Any]] = {}
    missing: dict[str, Mapping[str, Any] | None] = {}
    by_name = {column.name: column for column in columns}
    for column in columns:
        kept: Mapping[str, Any] | None = read_record(_path(context, column))
        kept = kept if kept and kept.get("code") == code_fingerprint("") else None
        complete = kept and set(kept["best"]) >= set(column.strategies)
        if kept and complete and set(kept["at_printed_batch"]) >= set(column.batches):
            found[column.name] = dict(kept)
        else:
            missing[column.name] = kept
    workers = max(1, min(context.workers, len(missing)))
    if workers == 1:
        for number, (name, kept) in enumerate(missing.items()):
            context.say(f"{name}, column {number + 1} of {len(missing)}")
            found[name] = _kept(context, by_name[name], cells_of(by_name[name], kept))
        return found
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=follow, initargs=(os.getpid(),)) as pool:
        waiting = {pool.submit(cells_of, by_name[name], kept): name for name, kept in missing.items()}
        for number, done in enumerate(as_completed(waiting)):
            name = waiting[done]
            context.say(f"{name}, column {number + 1} of {len(missing)}")
            found[name] = _kept(context, by_name[name], done.result())
    return found


def _path(context: Context, column: Column) -> Path:
    return context.scratch / f"{column.name}.json"


def _kept(context: Context, column: Column, cells: dict[str, Any]) -> dict[str, Any]:
    return write_record(_path(context, column), cells)


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
                "simulator_fits": cell.fits,
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
