"""Live progress of a sweep on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from datafiles.words import counted
from experiments.console import messages
from experiments.progress import LogLines
from experiments.sweep.run import Listener, Progress

LONG_S = 60.0
"""Seconds after which a run that goes on is named."""


@contextmanager
def sweep_progress() -> Iterator[Listener]:
    """Show progress while the block runs; yields a listener for `experiments.sweep.run.Sweep.run`."""
    console = messages()
    if not console.is_terminal:
        log = LogLines()
        yield lambda progress: log(
            f"{progress.done}/{counted(progress.total, 'run')}, {times_text(progress)}",
            always=progress.last is not None and progress.done in (1, progress.total),
        )
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[times]}"),
        TextColumn("{task.description}", style="dim"),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None, times="starting")

        def listen(progress: Progress) -> None:
            bars.update(task, completed=progress.done, total=progress.total, times=times_text(progress))
            if progress.last is not None:
                bars.update(task, description=escape(f"{progress.last.label}: {progress.status}"))

        yield listen


def times_text(progress: Progress) -> str:
    """Return elapsed and remaining time, failures if any, and a run that goes on for long.

    >>> times_text(Progress(done=1, total=4, failed=0, elapsed_s=20.0, remaining_s=60.0))
    '20 s, about 1:00 min left'
    """
    parts = [duration(progress.elapsed_s)]
    if progress.remaining_s is not None and progress.done < progress.total:
        parts.append(f"about {duration(progress.remaining_s)} left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.oldest is not None and progress.oldest[1] >= LONG_S:
        parts.append(f"{progress.oldest[0].label} runs for {duration(progress.oldest[1])}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> duration(9.4), duration(75), duration(7384)
    ('9 s', '1:15 min', '2:03 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
