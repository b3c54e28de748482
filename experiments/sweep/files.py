"""The output folder of a sweep.

spec.yaml              the spec of the last call
runs/HASH-CODE.json    one per finished run: inputs, row, counters, history, error; written whole, at once
plans/HASH-CODE.yaml   its plan, ready for ``windtunnel simulate``
table.csv, table.json  one row per finished run of the spec, in the spec's order
sweep.png              throughput along the axis that varies

HASH is that of a run's inputs and of the files they name, CODE the version of the code. So a changed spec
keeps what it shares with the old one, and results of other code stay on disk without being mixed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from datafiles.records import read_record, write_record
from datafiles.writer import write_text_atomically
from experiments.compare_files import has_content, json_of, refuse_foreign, versions
from experiments.console import writable_folder
from experiments.sweep.job import Job, Outcome, Run, plain

if TYPE_CHECKING:
    import pandas as pd

FILES = ("spec.yaml", "table.csv", "table.json", "sweep.png")

INPUTS = tuple(Run.__annotations__)

RESULTS = (
    "status",
    "iteration_time_s",
    "samples_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_reserved_bytes",
    "capacity_bytes",
    "objective_s",
    "evaluations",
    "budget_ended",
    "plan",
    "reason",
)
"""Results that are the same wherever and whenever a run with a budget in evaluations is made."""

TIMINGS = ("search_s", "simulate_s")
"""Results that depend on the machine and its load."""

COLUMNS = (*INPUTS, *RESULTS, *TIMINGS, "run")
"""Columns of the table; ``run`` names the files under ``runs`` and ``plans``."""

_INTEGERS = ("memory_limit_bytes", "budget_evaluations", "peak_reserved_bytes", "capacity_bytes", "evaluations")


class Kept(Protocol):
    """What the folder must know of what it keeps; a `Job` is one."""

    @property
    def key(self) -> str:
        """Name of the file."""

    @property
    def code(self) -> str:
        """Fingerprint of the code."""

    def inputs(self) -> dict[str, Any]:
        """Return what the result depends on, as plain data."""


class SweepFolder:
    """Reads and writes the folder. Every file appears whole or not at all.

    Args:
        path: The folder; made if it is not there.

    Raises:
        ValueError: If the path is a file, cannot be written, or holds files of these names that no sweep wrote.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        refuse_foreign(self.path, "runs", FILES)
        for folder in (self.path, self.path / "runs", self.path / "plans"):
            writable_folder(folder)
        self.damaged: list[Path] = []
        self._versions = versions()

    def finished(self, jobs: Iterable[Kept]) -> dict[str, dict[str, Any]]:
        """Return the rows of the jobs that finished in earlier calls, by key; failed ones included."""
        rows: dict[str, dict[str, Any]] = {}
        self.damaged = []
        there = {file.stem for file in (self.path / "runs").glob("*.json")}
        for job in jobs:
            if job.key not in there:
                continue
            file = self._record(job)
            saved = read_record(file)
            if saved is None or saved.get("inputs") != job.inputs():
                self.damaged.append(file)
            elif "plan_hash" in saved and not has_content(self._plan(job)):
                self.damaged.append(self._plan(job))
            else:
                rows[job.key] = saved["row"]
        return rows

    def num_other(self, jobs: Iterable[Kept]) -> int:
        """Return how many finished runs in the folder are of other code or no longer in the spec."""
        keys = {job.key for job in jobs}
        return sum(file.stem not in keys for file in (self.path / "runs").glob("*.json"))

    def add(self, job: Kept, outcome: Outcome) -> dict[str, Any]:
        """Write what a run left; its record last, since that marks it as finished. Returns its row."""
        row = plain(outcome.row)
        if outcome.plan is not None:
            write_text_atomically(self._plan(job), outcome.plan)
        saved = {
            "inputs": job.inputs(),
            "code": job.code,
            "versions": self._versions,
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "row": row,
            **outcome.details,
        }
        write_record(self._record(job), saved)
        return row

    def _record(self, job: Kept) -> Path:
        return self.path / "runs" / f"{job.key}.json"

    def _plan(self, job: Kept) -> Path:
        return self.path / "plans" / f"{job.key}.yaml"

    def write_spec(self, text: str) -> None:
        """Keep the spec beside its results."""
        write_text_atomically(self.path / "spec.yaml", text)

    def write_table(self, table: pd.DataFrame) -> None:
        """Write the table as CSV and JSON."""
        write_text_atomically(self.path / "table.csv", table.to_csv(index=False))
        write_text_atomically(self.path / "table.json", json_of(table) + "\n")


def table_of(jobs: Iterable[Job], rows: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Return one row per finished run, in the order of the jobs, with COLUMNS."""
    import pandas as pd

    listed = [
        {**asdict(job.run), **{name: rows[job.key].get(name) for name in (*RESULTS, *TIMINGS)}, "run": job.key}
        for job in jobs
        if job.key in rows
    ]
    return pd.DataFrame(listed, columns=list(COLUMNS)).astype(dict.fromkeys(_INTEGERS, "Int64"))
