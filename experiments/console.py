"""What all commands share: options, units, tables, JSON, and errors a user can act on."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from math import floor, isnan, log10
from os.path import realpath
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.values import MAX_INTEGER
from datafiles.writer import DATA_ENDINGS, check_ending, check_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from simulator.problem import ProblemSpec

DEFAULT_RUNTIME = "megatron-lm-2021"

WIDTH_IN_FILES = 150
"""Columns of tables when standard output is not a terminal."""

_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SMALLEST_LIMIT_BYTES = 2**20
"""No model trains in less: a smaller limit lacks its unit."""

PROBLEM = "Problem"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Name (windtunnel list models), YAML file or config.json.",
        rich_help_panel=PROBLEM,
    ),
]
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="PRESET:NODESxGPUS, such as v100-32g-dgx1:1x4; a YAML file in the place of the preset; + joins parts.",
        rich_help_panel=PROBLEM,
    ),
]
RuntimeName = Annotated[
    str,
    typer.Option("--runtime", "-r", help="Whose defaults: name or YAML file.", rich_help_panel=PROBLEM),
]
CommonCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", "-c", help="Of rows that name none; a preset alone is filled by gpus.", show_default=False
    ),
]
CommonRuntime = Annotated[
    str | None, typer.Option("--runtime", "-r", help="Of rows that name none.", show_default=False)
]
CommonModel = Annotated[str | None, typer.Option("--model", "-m", help="Of rows that name none.", show_default=False)]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", "-b", help="Samples per iteration.", rich_help_panel=PROBLEM)
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="Per GPU, such as 28GiB; at most, and by default, all the GPU has.",
        show_default=False,
        rich_help_panel=PROBLEM,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="What was measured: a file from windtunnel calibrate or profile.",
        show_default=False,
        rich_help_panel=PROBLEM,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Without = Annotated[
    str,
    typer.Option(
        "--without", help="Effects to leave out of the simulation, comma-separated (windtunnel list effects)."
    ),
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="simpy (readable), compiled (quicker on large plans) or auto; same results."),
]
BudgetText = Annotated[
    str, typer.Option("--budget", help="Per searcher: a time (20s, 5min) or a number of evaluations (500).")
]
Seed = Annotated[
    int, typer.Option("--seed", help="Same seed and budget in evaluations: same plan.", min=0, max=MAX_INTEGER)
]
ObjectiveName = Annotated[
    str, typer.Option("--objective", help="What searchers minimise: paper (their own) or simulator.")
]


def problem_spec(
    *,
    model: str,
    cluster: str,
    runtime: str,
    global_batch: int,
    memory_limit: str | None = None,
    profile: str | None = None,
) -> ProblemSpec:
    """Return the problem that the options name.

    Raises:
        ValueError: If the memory limit is no size, or so small that its unit was left out.
    """
    from simulator.problem import ProblemSpec

    return ProblemSpec(
        model=model,
        cluster=cluster,
        runtime=runtime,
        global_batch=global_batch,
        memory_limit_bytes=None if memory_limit is None else parse_limit(memory_limit),
        profile=profile,
    )


def parse_bytes(text: str) -> int:
    """Read a size in bytes.

    Raises:
        ValueError: If the text is no positive size.

    >>> parse_bytes("28GiB"), parse_bytes("28000 MiB"), parse_bytes("1e9")
    (30064771072, 29360128000, 1000000000)
    """
    found = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][0-9]{1,2})?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _BYTE_UNITS:
        raise ValueError(f"a size must be like 28GiB, 28000MiB or 30064771072, got {text!r:.60}")
    return int(float(found[1]) * _BYTE_UNITS[found[2].upper()])


def parse_limit(text: str) -> int:
    """Read a memory limit in bytes.

    Raises:
        ValueError: If the text is no size, or so small a one that its unit was left out.
    """
    limit_bytes = parse_bytes(text)
    if limit_bytes < SMALLEST_LIMIT_BYTES:
        raise ValueError(
            f"the memory limit must be at least 1 MiB, got {text!r}, which is {limit_bytes} bytes; "
            "give a unit, such as 16GiB"
        )
    return limit_bytes


def comma_separated(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated option.

    >>> comma_separated("contention, host")
    ('contention', 'host')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def writable(path: Path) -> Path:
    """Return the path after making its folder; a user's ``-o out/plan.yaml`` needs no mkdir.

    Raises:
        ValueError: If the path is a folder, a device or a pipe, or nothing can be written there.
    """
    check_file(path)
    writable_folder(path.parent)
    return path


def all_writable(
    *paths: Path | None,
    read: Sequence[Path] = (),
    data: Sequence[Path | None] = (),
    tables: Sequence[Path | None] = (),
    pictures: Sequence[Path | None] = (),
    traces: Sequence[Path | None] = (),
) -> None:
    """Check what a command is to write, before any work; None is nothing.

    Args:
        paths: What it is to write, under any name.
        read: What it reads, which it must not write over.
        data, tables, pictures, traces: What it is to write under names that say so: YAML or JSON, CSV, PNG, packed
            JSON. So a slip does not write a plan over somebody's notes.

    Raises:
        ValueError: If a path cannot be written, two are the same file, or a name says something else than is written.
    """
    # Not Path.resolve(), which ends in a RuntimeError where links go round in a circle.
    inputs, written = {realpath(path) for path in read}, set[str]()
    for path in (*paths, *data, *tables, *pictures, *traces):
        if path is None:
            continue
        place = realpath(writable(path))
        if place in inputs or place in written:
            other = "is an input too" if place in inputs else "is named twice"
            raise ValueError(f"outputs must be files of their own, got {path}, which {other}; name another file")
        written.add(place)
    kinds: tuple[tuple[str, str | tuple[str, ...], Sequence[Path | None]], ...] = (
        ("data file", DATA_ENDINGS, data),
        ("table", ".csv", tables),
        ("picture", ".png", pictures),
        ("trace", ".json.gz", traces),
    )
    for what, endings, files in kinds:
        for path in files:
            if path is not None:
                check_ending(path, endings, what)


def check_folder(path: Path) -> None:
    """Raise ValueError where a file stands in the place of a folder or of one above it."""
    for above in (path, *path.parents):
        if above.exists() and not above.is_dir():
            raise ValueError(f"output must be a folder, got the file {above}")


def writable_folder(path: Path) -> Path:
    """Return the folder after making it.

    Raises:
        ValueError: If it cannot be made, or no file can be written into it.
    """
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"output must be where files can be written, got {path} ({error.strerror})") from None
    return path


def console() -> Console:
    """Return the console for results (standard output)."""
    return _console(stderr=False, width=None if sys.stdout.isatty() else WIDTH_IN_FILES)


def messages() -> Console:
    """Return the console for progress and notes (standard error), so that output can be piped."""
    return _console(stderr=True, width=None if sys.stderr.isatty() else WIDTH_IN_FILES)


def _console(*, stderr: bool, width: int | None) -> Console:
    return _console_class()(stderr=stderr, highlight=False, emoji=False, width=width)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console

    class OwnConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leave what a reader's going means to the command line: rich ends with code 1, a limit that is not met."""
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return OwnConsole


def print_json(value: Any) -> None:
    """Print JSON."""
    print(json.dumps(value, indent=2, default=str, allow_nan=False))


def short_number(value: float) -> str:
    """Return a number with two decimals, or with three digits where these would be fewer.

    >>> short_number(11409.37), short_number(6.178), short_number(0.005609)
    ('11,409.37', '6.18', '0.00561')
    """
    return f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{value:.{2 - floor(log10(abs(value)))}f}"


def whole_cell(number: float | None) -> str:
    """Return a number without decimals as a cell of a table, a dash where it is missing.

    >>> whole_cell(12345.6), whole_cell(None), whole_cell(float("nan"))
    ('12,346', '-', '-')
    """
    return "-" if number is None or isnan(number) else f"{number:,.0f}"


def share_cell(share: float | None) -> str:
    """Return a share as a cell of a table, a dash where it is missing.

    >>> share_cell(0.2931), share_cell(None), share_cell(float("nan"))
    ('29.3%', '-', '-')
    """
    return "-" if share is None or isnan(share) else f"{share:.1%}"


def print_lines(text: str) -> None:
    """Print plain text as it is: no markup, no wrapping."""
    print(text)


def table(title: str | None, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table. Where it is wider than the console, heads of numbers wrap between words.

    Args:
        title: Above it.
        columns: ``(header, justify)``.
        rows: Cells as text.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    built = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    rows = list(rows)
    natural = [max(len(header), *(len(row[number]) for row in rows), 0) for number, (header, _) in enumerate(columns)]
    is_wide = sum(natural) + BETWEEN * len(columns) > console().width
    for (header, justify), words in zip(columns, _longest_words(columns, rows), strict=True):
        is_number = justify == "right"
        head = Text(header, no_wrap=False)
        width = words if is_number and is_wide else None
        built.add_column(
            head, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold", width=width
        )
    for row in rows:
        built.add_row(*(escape(cell) for cell in row))
    return built


def print_table(title: str | None, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; on a narrow console as several, one below the other, which all begin with the first column."""
    rows, out = list(rows), console()
    for positions in _side_by_side(columns, rows, out.width):
        out.print(table(title, [columns[i] for i in positions], [[row[i] for i in positions] for row in rows]))
        title = None


def _side_by_side(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], width: int
) -> Iterator[tuple[int, ...]]:
    """Yield the positions of columns that stand side by side.

    >>> list(_side_by_side([("plan", "left"), ("mean seconds", "right"), ("GiB", "right")], [("dp 8", "1.5", "9")], 18))
    [(0, 1), (0, 2)]
    """
    widths = [
        BETWEEN + (min(words, LEAST_TEXT) if position and justify != "right" else words)
        for position, ((_, justify), words) in enumerate(zip(columns, _longest_words(columns, rows), strict=True))
    ]
    shown: tuple[int, ...] = (0,)
    for position in range(1, len(columns)):
        if len(shown) > 1 and sum(widths[i] for i in (*shown, position)) > width:
            yield shown
            shown = (0,)
        shown += (position,)
    yield shown


LEAST_TEXT, WIDEST_CELL, BETWEEN = 24, 40, 3
"""A column of text is folded to no less than the first; of those beyond the second as many stand side by side as if
they were folded to it; the third lies between columns."""


def num_that_fit(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], width: int) -> int:
    """Return how many of a table's first columns fit side by side, heads wrapped between words; at least one.

    >>> num_that_fit([("plan", "left"), ("mean seconds", "right")], [("dp 8", "1.5")], 14)
    1
    """
    used = 0
    for position, words in enumerate(_longest_words(columns, rows)):
        used += min(words, WIDEST_CELL) + BETWEEN
        if used > width and position:
            return position
    return len(columns)


def _longest_words(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the least width of each column whose head wraps between words and whose cells do not."""
    return [
        max(map(len, [*header.split(), *(row[position] for row in rows)]), default=0)
        for position, (header, _) in enumerate(columns)
    ]


def fail(error: BaseException) -> int:
    """Print one clear message and return the exit code for it."""
    from rich.markup import escape

    words = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        words = f"{error.filename}: {error.strerror}"
    messages().print(f"[bold red]error:[/] {escape(words)}", soft_wrap=True)
    return 2
