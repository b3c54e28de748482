"""Live progress of a sweep on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from experiments.console import messages
from experiments.sweep.run import Listener, Progress

if TYPE_CHECKING:
    from rich.console import Console

LOG_EVERY_S = 30.0
"""Seconds between lines where standard error is no terminal."""


@contextmanager
def sweep_progress() -> Iterator[Listener]:
    """Show progress while the block runs; yields a listener for `experiments.sweep.run.Sweep.run`."""
    console = messages()
    if not console.is_terminal:
        yield _Log(console)
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


class _Log:
    """Writes the first and last line, and one every LOG_EVERY_S in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        is_end = progress.done == progress.total
        if not progress.done or (progress.elapsed_s < self._next_s and not is_end):
            return
        self._next_s = progress.elapsed_s + LOG_EVERY_S
        self._console.print(f"{progress.done}/{progress.total} runs, {times_text(progress)}", markup=False)


def times_text(progress: Progress) -> str:
    """Return elapsed and remaining time, and failures if any.

    >>> times_text(Progress(done=1, total=4, failed=0, elapsed_s=20.0, remaining_s=60.0))
    '20 s, about 1:00 min left'
    """
    parts = [duration(progress.elapsed_s)]
    if progress.remaining_s is not None and progress.done < progress.total:
        parts.append(f"about {duration(progress.remaining_s)} left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
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
