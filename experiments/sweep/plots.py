"""The plot of a sweep: throughput along one axis, a line for each combination of the others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datafiles.writer import write_bytes_atomically
from experiments.compare_plots import GRID, INK, MUTED
from experiments.sweep.files import INPUTS
from simulator.reports.figures import CYCLE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LARGEST = 11.0
"""Of a marker, in points; of lines that meet, each is smaller than those below it, so that all are seen."""

_ALONG = (
    "global_batch",
    "memory_limit_bytes",
    "budget_evaluations",
    "budget_s",
    "cluster",
    "model",
    "without",
    "runtime",
    "searcher",
)
"""Which axis goes along the plot, if several vary; the seed only where nothing else does."""

_LOG_FROM = 8.0
"""A numeric axis is logarithmic where its largest value is this many times its smallest."""


def varying(table: pd.DataFrame) -> list[str]:
    """Return the inputs that differ between rows, in the order of the columns."""
    return [name for name in INPUTS if table[name].nunique(dropna=False) > 1]


def plot_sweep(table: pd.DataFrame, path: Path, *, title: str) -> str | None:
    """Draw samples per second along the axis that varies; other axes make lines, seeds make points.

    Args:
        table: From `experiments.sweep.files.table_of`.
        path: PNG to write.
        title: Above it.

    Returns:
        Why nothing was drawn, or None.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis, others = _axis(table)
    if axis is None:
        return "no plot: no axis varies"
    if not (table["status"] == "ok").any():
        return "no plot: no run gave a plan that fits"
    groups = list(table.groupby(others, sort=False, dropna=False)) if others else [((), table)]
    if len(groups) > len(CYCLE):
        return f"no plot: {len(groups)} lines along {axis} would hide each other; plot from table.csv"
    figure = Figure(figsize=(9.0, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = _places(table[axis])
    for number, (values, rows) in enumerate(groups):
        words = [_word(name, value) for name, value in zip(others, values, strict=True)]
        label = ", ".join(word for word in words if word)
        _draw_line(axes, rows, axis, places, label or "median", number)
    _finish(axes, axis, places, all_ran=bool((table["status"] == "ok").all()))
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    write_bytes_atomically(path, buffer.getvalue())
    return None


def _axis(table: pd.DataFrame) -> tuple[str | None, list[str]]:
    """Return what goes along the plot and what makes the lines.

    What varies with another input alone (the batch of each case, where cases differ in their models too) has one value
    on each line and goes along only where nothing else can.
    """
    names = varying(table)
    listed = [name for name in names if name != "seed"]
    if not listed:
        return ("seed" if "seed" in names else None), []
    candidates = [name for name in (*_ALONG, *listed) if name in listed]
    along = next((name for name in candidates if _varies_alone(table, name, listed)), candidates[0])
    return along, [name for name in listed if name != along]


def _varies_alone(table: pd.DataFrame, name: str, listed: Sequence[str]) -> bool:
    """Return whether rows that share all other inputs differ in this one."""
    others = [other for other in listed if other != name]
    return not others or bool((table.groupby(others, dropna=False)[name].nunique(dropna=False) > 1).any())


def _places(column: pd.Series[Any]) -> dict[Any, float]:
    """Return where each value of the axis stands: at its number, or one after the other."""
    values = list(dict.fromkeys(_key(value) for value in column))
    if all(isinstance(value, int | float) for value in values):
        return {value: float(value) for value in sorted(values)}
    return {value: float(place) for place, value in enumerate(values)}


def _key(value: Any) -> Any:
    """Return a value that equals itself (missing values do not), a number as Python's own."""
    if value is None or str(value) == "<NA>" or value != value:
        return "none"
    return value.item() if isinstance(value, np.generic) else value


def _draw_line(axes: Axes, rows: pd.DataFrame, axis: str, places: dict[Any, float], label: str, number: int) -> None:
    color, size = CYCLE[number], LARGEST - 0.9 * number
    at = rows[axis].map(lambda value: places[_key(value)])
    ran = rows["status"] == "ok"
    medians = rows["samples_per_s"][ran].groupby(at[ran]).median().sort_index()
    width = 2.2 if all(isinstance(value, int | float) for value in places) else 0.0  # names have no order
    marker = MARKERS[number]
    axes.plot(medians.index, medians, color=color, linewidth=width, marker=marker, markersize=size, label=label)
    if bool((at[ran].value_counts() > 1).any()):
        axes.plot(at[ran], rows["samples_per_s"][ran], "o", color=color, markersize=3.5, alpha=0.45)
    axes.plot(at[~ran], [0.0] * int((~ran).sum()), "x", color=color, markersize=size, clip_on=False)


def _finish(axes: Axes, axis: str, places: dict[Any, float], *, all_ran: bool) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("throughput, samples/s")
    note = "" if all_ran else "   (\u00d7 on the floor: no plan, out of memory or failed)"
    axes.set_xlabel(f"{_title(axis)}{note}", color=MUTED)
    ticks, numeric = list(places.values()), all(isinstance(value, int | float) for value in places)
    if numeric and ticks[0] > 0 and ticks[-1] / ticks[0] >= _LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(ticks) <= 12:
        names = [_text(axis, value) for value in places]
        axes.set_xticks(ticks, names, rotation=0 if sum(map(len, names)) < 80 else 20)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
    if len(axes.lines) > 2:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")


def _title(axis: str) -> str:
    titles = {
        "global_batch": "global batch, samples",
        "memory_limit_bytes": "memory limit",
        "budget_evaluations": "budget, evaluations",
        "budget_s": "budget",
    }
    return titles.get(axis, axis.replace("_", " "))


def _word(name: str, value: Any) -> str:
    """Return a value as the legend has it, which has no title that says what a number is."""
    text = _text(name, value)
    if name == "global_batch":
        return f"batch {text}"
    if name == "budget_evaluations":
        return "" if text == "none" else f"{text} evaluations"
    return "" if name == "budget_s" and text == "none" else text


def _text(name: str, value: Any) -> str:
    value = _key(value)
    if name == "options":
        return "" if value == "{}" else value.strip("{}").replace('"', "").replace(": ", " ")
    if name == "without":
        return f"without {value.replace(',', ', ')}" if value else "all effects"
    if name == "memory_limit_bytes":
        return "no limit" if value == "none" else f"{value / 2**30:.4g} GiB"
    if name == "budget_s" and value != "none":
        return f"{value:g} s"
    return str(value)
