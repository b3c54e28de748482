"""Progress on standard error: live on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datafiles.words import counted
from experiments.console import messages

LOG_EVERY_S = 30.0
"""Seconds between lines where standard error is no terminal."""


class LogLines:
    """Prints what it is told once LOG_EVERY_S have passed since it printed, or was made; the rest is left out."""

    def __init__(self) -> None:
        self._console = messages()
        self._next_s = time.perf_counter() + LOG_EVERY_S

    def __call__(self, words: str, *, always: bool = False) -> None:
        """Print one line, if it is time or ``always``."""
        now_s = time.perf_counter()
        if always or now_s >= self._next_s:
            self._next_s = now_s + LOG_EVERY_S
            self._console.print(words, markup=False, soft_wrap=True)


@contextmanager
def steps_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done while the block runs; yields a function that takes it in words."""
    if not messages().is_terminal:
        log = LogLines()
        yield lambda words: log(f"{title}: {words}")
        return
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=messages(), transient=True) as bar:
        task = bar.add_task(escape(title))
        yield lambda words: bar.update(task, description=f"{escape(title)}: {escape(words)}")


@contextmanager
def simulation_progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show the number of simulated tasks while the block runs; yields a function that takes it."""
    with steps_progress(title) as say:
        yield lambda num_tasks: say(f"{counted(num_tasks, 'task')} done")


@contextmanager
def counted_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show how many of several things are done; yields a function of that number, that of all, and what comes next."""
    if not messages().is_terminal:
        log = LogLines()
        yield lambda done, total, name: log(f"{title}: {done:,} of {total:,} done, next {name}")
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages(), transient=True) as bar:
        task = bar.add_task(escape(title))
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=escape(name[:48]))


@contextmanager
def searchers_progress(searchers: tuple[str, ...]) -> Iterator[Callable[[str, str, int | None], None]]:
    """Show one line per searcher while the block runs; yields a listener for `compare`."""
    if not messages().is_terminal:
        log = LogLines()
        yield lambda searcher, state, num_tasks: log(f"{searcher}: {_state(state, num_tasks)}", always=state == LATE)
        return
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="[green]\u2713[/]"),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages(), transient=True) as bars:
        tasks = {name: bars.add_task(escape(name), total=1, start=False, state="waits") for name in searchers}

        def listen(searcher: str, state: str, num_tasks: int | None) -> None:
            task = tasks[searcher]
            bars.start_task(task)
            bars.update(task, completed=int(state in ("done", "kept")), state=_state(state, num_tasks))

        yield listen


LATE = "late"
"""State of a searcher that goes on well past its time; see `told_when_late`."""
_STATES = {"kept": "kept from an earlier call", LATE: "still searches, past its budget; Ctrl-C ends the comparison"}


def _state(state: str, num_tasks: int | None) -> str:
    words = _STATES.get(state, state)
    return words if num_tasks is None else f"{words}, {counted(num_tasks, 'task')} done"
