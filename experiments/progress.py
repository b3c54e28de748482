"""Live progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from experiments.console import messages


@contextmanager
def steps_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done while the block runs; yields a function that takes it in words."""
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=messages(), transient=True, disable=not messages().is_terminal) as bar:
        task = bar.add_task(escape(title))
        yield lambda words: bar.update(task, description=f"{escape(title)}: {escape(words)}")


@contextmanager
def simulation_progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show the number of simulated tasks while the block runs; yields a function that takes it."""
    with steps_progress(title) as say:
        yield lambda num_tasks: say(f"{num_tasks:,} tasks done")


@contextmanager
def counted_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show how many of several things are done; yields a function of that number, that of all, and what comes next."""
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages(), transient=True, disable=not messages().is_terminal) as bar:
        task = bar.add_task(escape(title))
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=escape(name[:48]))


@contextmanager
def searchers_progress(searchers: tuple[str, ...]) -> Iterator[Callable[[str, str, int | None], None]]:
    """Show one line per searcher while the block runs; yields a listener for `compare`."""
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="[green]\u2713[/]"),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages(), transient=True, disable=not messages().is_terminal) as bars:
        tasks = {name: bars.add_task(escape(name), total=1, start=False, state="waits") for name in searchers}

        def listen(searcher: str, state: str, num_tasks: int | None) -> None:
            task = tasks[searcher]
            bars.start_task(task)
            if state in ("done", "kept"):
                bars.update(
                    task, completed=1, state="done" if state == "done" else "kept from an earlier call"
                )
            else:
                bars.update(task, state=state if num_tasks is None else f"{state}, {num_tasks:,} tasks done")

        yield listen
