"""Rows of an experiment, kept as a sweep keeps its runs: one file each, made once for a version of the code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from experiments.compare_files import code_fingerprint
from experiments.reproduce.experiment import Context
from experiments.sweep.files import SweepFolder
from experiments.sweep.job import Outcome

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Row:
    """What a row depends on.

    Attributes:
        name: Which row.
        quick, seed: Of the context.
        workers: Of the context where the row's seconds depend on it, else None.
        files: Data file and SHA-256.
        code: Fingerprint of all code.
    """

    name: str
    quick: bool
    seed: int
    workers: int | None
    files: tuple[tuple[str, str], ...]
    code: str

    @cached_property
    def key(self) -> str:
        """Name of the row's file."""
        text = json.dumps(self.inputs(), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:20]}-{self.code[:12]}"

    def inputs(self) -> dict[str, Any]:
        """Return what the row depends on as plain data."""
        found = {"row": self.name, "quick": self.quick, "seed": self.seed, "files": dict(self.files)}
        return found if self.workers is None else {**found, "workers": self.workers}


def kept_rows(
    context: Context,
    items: Sequence[Item],
    rows_of: Callable[[Context, Sequence[Item]], Iterable[Mapping[str, Any]]],
    *,
    name: Callable[[Item], str] = str,
    files: Sequence[str] = (),
    timed: bool = False,
) -> list[dict[str, Any]]:
    """Return a row for each item; those in the scratch folder are taken over, each new one is written at once.

    Args:
        context: What the experiment was given.
        items: What the rows are about.
        rows_of: Yields a row per item that it is given: plain data, no number infinite.
        name: Names an item; all differ.
        files: Data files that the rows are computed from; a row of other content is made again.
        timed: The rows measure seconds in, or are given seconds for, ``context.workers`` processes; a row of another
            number is made again.

    Raises:
        ValueError: If a data file is not there.
    """
    digests = tuple((file, hashlib.sha256(context.data_file(file).read_bytes()).hexdigest()) for file in files)
    code = code_fingerprint("")
    workers = context.workers if timed else None
    jobs = [_Row(name(item), context.quick, context.seed, workers, digests, code) for item in items]
    assert len({job.name for job in jobs}) == len(jobs), "rows must have different names"
    folder = SweepFolder(context.scratch / "rows")
    rows = folder.finished(jobs)
    for number, (item, job) in enumerate(zip(items, jobs, strict=True), 1):
        if job.key not in rows:
            context.say(f"{job.name}, row {number} of {len(jobs)}")
            (row,) = rows_of(context, [item])
            rows[job.key] = json.loads(json.dumps(folder.add(job, Outcome(dict(row)))))
    return [rows[job.key] for job in jobs]
