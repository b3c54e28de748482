"""The plot of a sweep: throughput along one axis, a line for each combination of the others."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datafiles.words import counted
from datafiles.writer import write_bytes_atomically
from experiments.compare_plots import GRID, INK, MUTED
from experiments.sweep.files import INPUTS
from simulator.reports.figures import CYCLE, LINE_IN

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MARKER = 7.5
"""Size in points."""
WIDEST, NARROWER = 3.2, 0.3
"""Of lines, in points: each is narrower than those below it, so that all are seen where they run together."""
TOUCHING = 0.04
"""Points at one place that stand apart by less than this share of the axis hide each other."""
WIDE, LOG_ROOM = 30.0, 1.6
"""Times between throughputs from which on the axis is logarithmic, and the room below and above then."""

HEADROOM = 1.08
MARGIN = 0.1
"""Left and right of the outer places, as a share of what is between them."""
WIDTH_POINTS = 540.0
"""Of the axes, about."""
LEGEND_LETTERS = 110
"""Of a line of the legend."""

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

_SHAPE = re.compile(r"(?P<preset>.+):(?P<nodes>\d+)x(?P<devices>\d+)")


@dataclass(frozen=True)
class Along:
    """What goes along the plot.

    Attributes:
        name: The input.
        places: Where each of its values stands.
        numeric: Whether they stand at their numbers.
        ordered: Whether they have an order, so that lines may join them.
    """

    name: str
    places: Mapping[Any, float]
    numeric: bool
    ordered: bool

    @property
    def logarithmic(self) -> bool:
        """Whether the numbers are too far from each other to be drawn to scale."""
        return self.numeric and 0 < min(self.places.values()) * _LOG_FROM <= max(self.places.values())

    @property
    def nearest(self) -> float:
        """Share of the axis between the nearest of its places."""
        at = sorted(math.log(place) if self.logarithmic else place for place in self.places.values())
        return min((after - before for before, after in pairwise(at)), default=1.0) / ((at[-1] - at[0]) or 1.0)

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the axis."""
        low, high = min(self.places.values()), max(self.places.values())
        if self.logarithmic:
            return low * (low / high) ** MARGIN, high * (high / low) ** MARGIN
        margin = MARGIN * (high - low) or 1.0
        return low - margin, high + margin


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
    along = _along(axis, table[axis])
    limits = _limits(table["samples_per_s"][table["status"] == "ok"].dropna().tolist())
    shifts = _shifts([rows for _, rows in groups], along, limits)
    for number, (values, rows) in enumerate(groups):
        words = [_word(name, value) for name, value in zip(others, values, strict=True)]
        label = ", ".join(word for word in words if word)
        _draw_line(axes, rows, along, label, number, shifts[number])
    _finish(axes, along, limits, all_ran=bool((table["status"] == "ok").all()))
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


def _along(name: str, column: pd.Series[Any]) -> Along:
    """Return where each value stands: numbers at themselves, clusters of one preset by size, others as they come."""
    values = list(dict.fromkeys(_key(value) for value in column))
    if all(isinstance(value, int | float) for value in values):
        return Along(name, {value: float(value) for value in sorted(values)}, numeric=True, ordered=True)
    shapes = [_SHAPE.fullmatch(str(value)) for value in values]
    sizes = {shape[0]: int(shape["nodes"]) * int(shape["devices"]) for shape in shapes if shape}
    ordered = len(sizes) == len(values) and len({shape["preset"] for shape in shapes if shape}) == 1
    if ordered:
        values.sort(key=sizes.__getitem__)
    return Along(name, {value: float(place) for place, value in enumerate(values)}, numeric=False, ordered=ordered)


def _shifts(groups: Sequence[pd.DataFrame], along: Along, limits: tuple[float, float]) -> list[float]:
    """Return by how many points each line's markers stand beside their places: none where none hides another."""
    drawn: dict[float, list[float]] = {}
    for rows in groups:
        medians, failed = _points(rows, along)
        for place, value in [*medians.items(), *((place, 0.0) for place in failed)]:
            drawn.setdefault(place, []).append(value)
    heights = [_heights(np.array(sorted(values)), limits) for values in drawn.values()]
    meet = any((np.diff(each) < TOUCHING).any() for each in heights)
    step = min(MARKER + 1.0, 0.7 * WIDTH_POINTS * along.nearest / len(groups)) if meet else 0.0
    return [step * (number - (len(groups) - 1) / 2) for number in range(len(groups))]


def _limits(throughputs: Iterable[float]) -> tuple[float, float]:
    """Return the ends of the axis of throughput: the lower is 0, or above it on a logarithmic one.

    Unlike models have that: the slow ones would all lie on the floor.
    """
    ran = [value for value in throughputs if value > 0.0]
    if ran and max(ran) > WIDE * min(ran):
        return min(ran) / LOG_ROOM, LOG_ROOM * max(ran)
    return 0.0, HEADROOM * max(ran, default=1.0)


def _heights(throughputs: NDArray[np.float64], limits: tuple[float, float]) -> NDArray[np.float64]:
    """Return where on the axis throughputs stand, as shares of it; on the floor what gave no plan."""
    low, high = limits
    if low == 0.0:
        return throughputs / high
    found: NDArray[np.float64] = np.log(np.maximum(throughputs, low) / low) / math.log(high / low)
    return found


def _points(rows: pd.DataFrame, along: Along) -> tuple[dict[float, float], list[float]]:
    """Return the median at each place that runs gave plans at, and the places of those that gave none."""
    at = rows[along.name].map(lambda value: along.places[_key(value)])
    ran = rows["status"] == "ok"
    medians = rows["samples_per_s"][ran].groupby(at[ran]).median().sort_index()
    places = medians.index.to_numpy(dtype=float).tolist()
    return dict(zip(places, medians.tolist(), strict=True)), sorted(set(at[~ran]))


def _key(value: Any) -> Any:
    """Return a value that equals itself (missing values do not), a number as Python's own."""
    if value is None or str(value) == "<NA>" or value != value:
        return "none"
    return value.item() if isinstance(value, np.generic) else value


def _draw_line(axes: Axes, rows: pd.DataFrame, along: Along, label: str, number: int, shift: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a figure"
    beside = axes.transData + ScaledTranslation(shift / 72, 0.0, figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": CYCLE[number], "transform": beside, "markersize": MARKER}
    medians, failed = _points(rows, along)
    axes.plot(
        list(medians), list(medians.values()), marker=MARKERS[number], label=label or "median",
        linewidth=WIDEST - NARROWER * number if along.ordered else 0.0, **style,
    )  # fmt: skip
    ran = rows[rows["status"] == "ok"]
    at = ran[along.name].map(lambda value: along.places[_key(value)])
    if at.duplicated().any():
        dots = {**style, "markersize": 3.5, "label": None if label else "each seed"}
        axes.plot(at, ran["samples_per_s"], "o", alpha=0.45, **dots)
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", clip_on=False, **style)


def _finish(axes: Axes, along: Along, limits: tuple[float, float], *, all_ran: bool) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    low, high = limits
    if low > 0.0:
        axes.set_yscale("log")
        for line in axes.lines:
            line.set_ydata(np.maximum(np.asarray(line.get_ydata(), dtype=float), low))
    axes.set_ylim(low, high)
    axes.set_ylabel("throughput, samples/s", color=MUTED)
    note = "" if all_ran else "   (\u00d7 on the floor: no plan, out of memory or failed)"
    axes.set_xlabel(f"{_title(along.name)}{note}", color=MUTED)
    if along.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(along.places) <= 12:
        names = [_text(along.name, value) for value in along.places]
        axes.set_xticks(list(along.places.values()), names, rotation=0 if sum(map(len, names)) < 80 else 20)
    axes.set_xlim(*along.limits)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure = axes.get_figure(root=True)
        assert figure is not None, "axes of a figure"
        columns = max(1, min(len(labels), LEGEND_LETTERS // (max(map(len, labels)) + 6)))
        figure.set_figheight(figure.get_figheight() + LINE_IN * math.ceil(len(labels) / columns))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK
        )


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
        return "" if text == "none" else counted(int(value), "evaluation")
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
