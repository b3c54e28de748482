"""Many runs: every combination of a spec is searched for a plan, simulated, and kept.

    spec -> runs -> workers (this machine, or Dask) -> one file per finished run -> one table

A run is finished once its file is there. Whatever ends a sweep (Ctrl-C, a lost machine), the next call reads
the files and makes only what is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.statuses import STATUSES
from experiments.sweep.files import SweepFolder, table_of
from experiments.sweep.job import Run
from experiments.sweep.spec import SweepSpec, load_sweep
from experiments.sweep.workers import DaskWorkers, LocalWorkers, Waiting, Workers, outcomes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Progress:
    """How far a sweep has come.

    Attributes:
        done: Runs that ended in this call.
        total: Runs that this call has to make.
        failed: How many of those that ended failed.
        elapsed_s: Seconds since the call began to run.
        remaining_s: Estimate of the seconds left, should the runs to come end as fast as those before. None
            before the first end, and while runs take longer than that.
        last: The run that ended just now; None when this is only a sign of life.
        status: Its status.
        oldest: The run that has gone on for longest, where that is known, and for how long.
    """

    done: int
    total: int
    failed: int
    elapsed_s: float
    remaining_s: float | None
    last: Run | None = None
    status: str = ""
    oldest: tuple[Run, float] | None = None


Listener = Callable[[Progress], None]


class Sweep:
    """A spec and the folder with its finished runs.

    Args:
        spec: What to run.
        output: Folder for the results; finished runs in it are kept.
        retry_failed: Make runs again that failed in an earlier call.

    Attributes:
        pending: Runs to make, in the spec's order.
        num_failed_kept: Runs that failed in an earlier call and are not made again.
        num_other: Finished runs in the folder that are of other code or no longer in the spec.
        no_plot: Why the last writing made no plot; None if it did.
    """

    def __init__(self, spec: SweepSpec, output: str | Path, *, retry_failed: bool = False) -> None:
        self.spec = spec
        self.folder = SweepFolder(output)
        self._rows = self.folder.finished(spec.jobs)
        self.num_other = self.folder.num_other(spec.jobs)
        self.no_plot: str | None = None
        failed = {key for key, row in self._rows.items() if row["status"] == "failed"}
        again = failed if retry_failed else set()
        self.num_failed_kept = len(failed - again)
        self.pending = [job for job in spec.jobs if job.key not in self._rows or job.key in again]

    def counts(self) -> dict[str, int]:
        """Return how many finished runs have each status."""
        found = Counter(row["status"] for row in self._rows.values())
        return {status: found[status] for status in STATUSES if found[status]}

    def table(self) -> pd.DataFrame:
        """Return one row per finished run, in the spec's order; `experiments.sweep.files.COLUMNS`."""
        return table_of(self.spec.jobs, self._rows)

    def run(self, workers: Workers, listener: Listener | None = None) -> None:
        """Make the pending runs; each is on disk before the next is looked at.

        Whatever ends this early, the table of what there is gets written.

        Args:
            workers: Where to run; stays open.
            listener: Told of every end, and now and then in between.

        Raises:
            OtherCodeError: If a worker runs other code than this process.
            ConnectionError: If the Dask cluster went away.
        """
        self.folder.write_spec(self.spec.text)
        tell: Listener = listener or (lambda progress: None)
        total, began_s = len(self.pending), time.perf_counter()
        done = failed = 0
        expected_s: float | None = None
        left = {job.key: job for job in self.pending}
        try:
            tell(Progress(0, total, 0, 0.0, None))
            for ended in outcomes(self.pending, workers):
                run, status, oldest = None, "", None
                if isinstance(ended, Waiting):
                    oldest = (ended.oldest.run, ended.oldest_s) if ended.oldest else None
                else:
                    job, outcome = ended
                    row = self._rows[job.key] = self.folder.add(job, outcome)
                    del left[job.key]
                    run, status = job.run, str(row["status"])
                    done += 1
                    failed += status == "failed"
                    expected_s = (time.perf_counter() - began_s) / done * total
                elapsed_s = time.perf_counter() - began_s
                remaining_s = None
                if expected_s is not None and (expected_s > elapsed_s or done == total):
                    remaining_s = max(0.0, expected_s - elapsed_s)
                tell(Progress(done, total, failed, elapsed_s, remaining_s, run, status, oldest))
        finally:
            self.pending = list(left.values())
            self.write()

    def write(self) -> None:
        """Write table and plot of what is finished."""
        from experiments.sweep.plots import plot_sweep

        table, plot = self.table(), self.folder.path / "sweep.png"
        self.folder.write_table(table)
        self.no_plot = plot_sweep(table, plot, title=self.spec.title)
        if self.no_plot:
            plot.unlink(missing_ok=True)  # an earlier spec's


def sweep(
    spec: str | Path,
    output: str | Path,
    *,
    num_processes: int | None = None,
    scheduler: str | None = None,
    retry_failed: bool = False,
    listener: Listener | None = None,
) -> pd.DataFrame:
    """Make all runs of a spec that are not finished yet, and return the table of all.

    Args:
        spec: The spec's file; see ``docs/sweeps.md``.
        output: Folder for the results; a second call makes only what is missing.
        num_processes: On this machine; None for one per core.
        scheduler: Address of a Dask scheduler, to run there instead.
        retry_failed: Make runs again that failed in an earlier call.
        listener: Told of progress.

    Returns:
        One row per run, in the spec's order; `experiments.sweep.files.COLUMNS`.

    Raises:
        ValueError: If the spec breaks a rule, or the cluster cannot be used.
    """
    found = Sweep(load_sweep(spec), output, retry_failed=retry_failed)
    if not found.pending:
        found.write()
        return found.table()
    with closing(open_workers(num_processes, scheduler)) as workers:
        found.run(workers, listener)
    return found.table()


def open_workers(num_processes: int | None, scheduler: str | None) -> LocalWorkers | DaskWorkers:
    """Return where to run; the caller closes it.

    Raises:
        ValueError: If both are given, or the cluster cannot be used.
    """
    if scheduler is None:
        return LocalWorkers(num_processes)
    if num_processes is not None:
        raise ValueError("give a scheduler or a number of processes, not both: a Dask cluster has its own workers")
    return DaskWorkers(scheduler)


__all__ = ["Progress", "Sweep", "SweepSpec", "load_sweep", "open_workers", "sweep"]
