"""Plots of a comparison, made to be shown on a slide."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.words import counted
from datafiles.writer import write_bytes_atomically
from experiments.statuses import SIMULATED
from simulator.reports.figures import log_ticks
from simulator.result import format_s

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BEST, REST, TOO_MUCH = "#1565c0", "#90b8de", "#c62828"
CONVERGENCE_IN = 5.0
"""Length of the axis of search time, about, beside the words at the ends of lines."""
NARROW = 0.15
"""Bars below this share of the capacity have their number behind them."""
# Of lines and the words at their ends: darker than the cycle of other figures, whose yellow and sky cannot be read.
LINES = ("#1565c0", "#ef6c00", "#2e7d32", "#8e24aa", "#00838f", "#c62828", "#6d4c41", "#546e7a")


def plot_throughput(table: pd.DataFrame, path: Path, *, title: str) -> None:
    """Draw throughput and peak memory of every searcher's plan, side by side, fastest on top.

    Args:
        table: From `experiments.compare.compare`.
        path: PNG to write.
        title: The problem, in words.
    """
    from matplotlib.ticker import MaxNLocator

    num_rows = len(table)
    figure, (speed, memory) = _figure(1, 2, width=12.5, height=1.9 + 0.62 * num_rows, ratios=(1.5, 1.0))
    rows: list[dict[Any, Any]] = table.to_dict("records")
    fastest = max((row["samples_per_s"] for row in rows if row["status"] == "ok"), default=0.0)
    largest = max((row["samples_per_s"] for row in rows if row["status"] in SIMULATED), default=1.0)
    for place, row in enumerate(rows):
        if row["status"] not in SIMULATED:
            reason = _shorten(f"{row['status']}: {row['reason']}", 118)
            _write(speed, 0.01 * largest, place, reason, color=MUTED, style="italic", size=9)
            continue
        _draw_speed(speed, place, row, fastest, largest)
        _draw_memory(memory, place, row)
    speed.set_yticks(range(num_rows), [row["searcher"] for row in rows], fontsize=12)
    speed.set_ylim(num_rows - 0.4, -0.6)
    speed.set_xlim(0, 1.52 * largest)  # room for the fastest one's label, in bold
    speed.set_xlabel("throughput, samples/s")
    memory.set_yticks([])
    memory.patch.set_alpha(0.0)  # reasons may run over into the empty row beside them
    memory.set_ylim(num_rows - 0.4, -0.6)
    memory.set_xlabel("peak memory of the fullest GPU, GiB (line: capacity)")
    for axes in (speed, memory):
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    figure.suptitle(title, x=0.02, ha="left", fontsize=14, fontweight="bold", color=INK)
    _save(figure, path)


def _draw_speed(axes: Axes, place: int, row: Mapping[str, Any], fastest: float, largest: float) -> None:
    fits = row["status"] == "ok"
    value = row["samples_per_s"]
    color = (BEST if value == fastest else REST) if fits else "white"
    axes.barh(place, value, height=0.62, color=color, edgecolor=TOO_MUCH if not fits else color, hatch=None)
    label = f"{three_digits(value)}/s   {format_s(row['iteration_time_s'])}"
    if row["mfu"] is not None and not math.isnan(row["mfu"]):
        label += f"   MFU {row['mfu']:.0%}"
    if not fits:
        label = f"out of memory (else {three_digits(value)}/s)"
    bold = "bold" if fits and value == fastest else "normal"
    _write(axes, value + 0.012 * largest, place - 0.13, label, color=INK, size=10, fontweight=bold)
    on_bar = "white" if fits and value == fastest else INK
    _write(axes, 0.012 * largest, place + 0.13, _shorten(row["plan"], 70), color=on_bar, size=8.5)


def _draw_memory(axes: Axes, place: int, row: Mapping[str, Any]) -> None:
    peak, capacity = row["peak_reserved_bytes"] / GIB, row["capacity_bytes"] / GIB
    fits = row["status"] == "ok"
    axes.barh(place, peak, height=0.62, color=REST if fits else TOO_MUCH)
    axes.plot([capacity, capacity], [place - 0.38, place + 0.38], color=INK, linewidth=1.6)
    edge, gap = min(peak, capacity), 0.01 * capacity
    if edge < NARROW * capacity:
        _write(axes, edge + gap, place, f"{peak:.1f}", ha="left", color=INK, size=10)
    else:
        _write(axes, edge - gap, place, f"{peak:.1f}", ha="right", color=INK if fits else "white", size=10)


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a label beside a bar without making the layout give it room."""
    axes.text(x, y, text, va="center", **style).set_in_layout(False)


def plot_convergence(
    histories: Mapping[str, Sequence[tuple[float, int, float]]],
    path: Path,
    *,
    title: str,
    objective: str = "paper",
    misfits: Collection[str] = (),
) -> None:
    """Draw the best objective that each searcher had found over time.

    Args:
        histories: Per searcher ``(wall_s, evaluations, best_objective_s)``.
        path: PNG to write.
        title: The problem, in words.
        objective: What searchers minimised: ``paper`` (each its own estimate) or ``simulator``.
        misfits: Searchers whose plans do not fit when simulated: dashed.
    """
    figure, (axes,) = _figure(1, 1, width=9.0, height=5.2)
    shown = {searcher: entries for searcher, entries in histories.items() if entries}
    end_s = max((entries[-1][0] for entries in shown.values()), default=1.0)
    labels = []
    for index, (searcher, entries) in enumerate(shown.items()):
        color = LINES[index % len(LINES)]
        times_s = [wall_s for wall_s, _, _ in entries]
        best = [objective for _, _, objective in entries]
        axes.step(
            [*times_s, 1.3 * end_s],
            [*best, best[-1]],
            where="post",
            color=color,
            linewidth=1.0,
            alpha=0.35,
        )
        style = "--" if searcher in misfits else "-"
        axes.step(times_s, best, where="post", color=color, linewidth=2.4, linestyle=style)
        axes.plot(times_s[-1], best[-1], "o", color=color, markersize=6)
        evaluations = counted(entries[-1][1], "evaluation")
        told = f"{searcher}  {three_digits(best[-1])} s, {evaluations}"
        labels.append((best[-1], f"{told}, does not fit" if searcher in misfits else told, color))
    axes.set_xscale("log")
    axes.set_xlabel("search time, s")
    judge = "simulated" if objective == "simulator" else "each searcher's own estimate"
    axes.set_ylabel(f"best objective so far, s per iteration\n({judge})")
    axes.grid(color=GRID, linewidth=0.8)
    if labels:
        axes.set_xlim(right=1.3 * end_s)
        _label_lines(axes, labels)
    else:
        axes.text(0.5, 0.5, "no searcher found a plan", transform=axes.transAxes, ha="center", color=MUTED)
    log_ticks(axes.xaxis, CONVERGENCE_IN)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    _save(figure, path)


def _label_lines(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Write each line's name at its right end, pushed apart where they would touch."""
    low, high = axes.get_ylim()
    step = 0.055 * (high - low)
    place = -float("inf")
    for value, text, color in sorted(labels):
        place = max(value, place + step)
        beside = axes.get_yaxis_transform()
        axes.text(1.01, place, text, transform=beside, color=color, va="center", size=10, clip_on=False)


def _figure(
    num_rows: int, num_columns: int, *, width: float, height: float, ratios: tuple[float, ...] | None = None
) -> tuple[Figure, tuple[Axes, ...]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(num_rows, num_columns, width_ratios=ratios)
    axes = tuple(
        figure.add_subplot(grid[row, column]) for row in range(num_rows) for column in range(num_columns)
    )
    for each in axes:
        each.spines[["top", "right", "left"]].set_visible(False)
        each.spines["bottom"].set_color(MUTED)
        each.tick_params(colors=INK, length=0)
        each.xaxis.label.set_color(MUTED)
        each.yaxis.label.set_color(MUTED)
        each.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    write_bytes_atomically(path, buffer.getvalue())


def three_digits(value: float) -> str:
    """Return a number to three significant digits, ending zeros with them.

    >>> three_digits(56.02), three_digits(55.5), three_digits(0.05123), three_digits(1234.6), three_digits(0.0)
    ('56.0', '55.5', '0.0512', '1,235', '0.00')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.2f}"
    decimals = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{max(0, decimals)}f}"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
