"""Runs of an experiment as a sweep: each result is on disk at once, and a second call makes only what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from datafiles.records import read_record
from datafiles.words import counted
from datafiles.writer import write_text_atomically
from experiments.reproduce.experiment import Context
from experiments.sweep.run import Progress, Sweep, load_sweep, open_workers


def swept(context: Context, name: str, text: str) -> Sweep:
    """Make the runs of a spec that are not finished yet, in the experiment's scratch folder.

    Args:
        context: Gives folder and number of processes.
        name: Of the spec's file.
        text: The spec; see ``docs/sweeps.md``.

    Returns:
        The sweep, nothing pending.
    """
    spec_file = context.scratch / f"{name}.yaml"
    write_text_atomically(spec_file, text)
    sweep = Sweep(load_sweep(spec_file), context.scratch / "sweep")
    if sweep.pending:
        with closing(open_workers(context.workers, None)) as workers:
            sweep.run(workers, lambda progress: context.say(_words(progress)))
    return sweep


def record_of(folder: Path, run: str) -> Mapping[str, Any]:
    """Return all that was kept of a finished run, among it ``counters`` and ``history`` (both may be empty).

    Args:
        folder: The sweep's.
        run: As the column ``run`` of its table names it.

    Raises:
        ValueError: If the file is no longer as it was.
    """
    file = folder / "runs" / f"{run}.json"
    found = read_record(file)
    if found is None:
        raise ValueError(f"{file} changed while this ran; call again to make the run again")
    return {**found, "counters": found.get("counters") or {}, "history": found.get("history") or []}


def _words(progress: Progress) -> str:
    left = "" if progress.remaining_s is None else f", about {progress.remaining_s / 60:.0f} min left"
    return f"{progress.done} of {counted(progress.total, 'run')}{left}"
