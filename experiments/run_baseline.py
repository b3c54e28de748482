"""Earlier predictions of a table of runs, and whether later ones are worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from datafiles.tables import load_table
from datafiles.words import counted

ERROR = "time_error"
TOLERANCE = 0.002
"""By how much a mean absolute error may grow, as in the accuracy gate's groups."""
SHOWN = 3

Cells = frozenset[tuple[str, str]]


def earlier_errors(baseline: Path, table: Path, written: Sequence[str]) -> dict[int, float]:
    """Return the earlier time errors of a table's rows, by number, of those that are as they were.

    Args:
        baseline: What ``windtunnel predict -o`` wrote before.
        table: Today's runs; rows may have come, gone or moved.
        written: Columns that were added to the table's own.

    Raises:
        ValueError: If the baseline is no such file, or has none of the rows.
    """
    if ERROR not in (load_table(baseline) or [{}])[0]:
        raise ValueError(f"a baseline must be what windtunnel predict -o wrote, with a column {ERROR}, got {baseline}")
    rows = load_table(baseline, floats=(ERROR,))
    before = {_cells(row, written): float(row[ERROR]) for row in rows if row[ERROR] is not None}
    numbered = enumerate(load_table(table), start=1)
    found = {number: before[own] for number, row in numbered if (own := _cells(row, written)) in before}
    if not found:
        raise ValueError(f"a baseline must have measured rows of {table} as they are now, got {baseline} with none")
    return found


def worse(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return what to say, in lines, where the mean absolute error of the same runs grew; empty where it did not.

    >>> print("\\n".join(worse({"a": 0.01, "b": 0.02}, {"a": -0.09, "b": 0.02})))
    mean absolute error of 2 runs 1.5% in the baseline, 5.5% now
    moved most: a +1.0% -> -9.0%
    """
    means = [fmean(abs(errors[run]) for run in before) for errors in (before, after)]
    if means[1] - means[0] <= TOLERANCE:
        return []
    grown = sorted(before, key=lambda run: abs(before[run]) - abs(after[run]))[:SHOWN]
    moved = [f"{run} {before[run]:+.1%} -> {after[run]:+.1%}" for run in grown if abs(after[run]) > abs(before[run])]
    return [
        f"mean absolute error of {counted(len(before), 'run')} {means[0]:.1%} in the baseline, {means[1]:.1%} now",
        f"moved most: {', '.join(moved)}",
    ]


def _cells(row: Mapping[str, object], written: Sequence[str]) -> Cells:
    texts = {name: str(text).strip() for name, text in row.items() if name not in written}
    return frozenset((name, text) for name, text in texts.items() if text)
