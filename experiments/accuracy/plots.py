"""Predicted against measured, one picture per group."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datafiles.words import counted
from datafiles.writer import write_bytes_atomically
from experiments.accuracy.errors import ErrorReport
from experiments.accuracy.groups import groups as known_groups
from experiments.accuracy.run import GroupReport, Outcome, feature_order, judged
from simulator.reports.figures import CYCLE, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BAND = 0.10
SIDE_IN = 5.0
"""Of the square that points are drawn in, about."""
COLOR_FEATURES = ("strategy", "tp", "tokens", "method", "system", "recompute", "model")
"""The first of these that takes between two and eight values colours the points."""


def plot_group(report: GroupReport, outcomes: Sequence[Outcome], path: Path) -> bool:
    """Draw a group's iteration times, or else its peaks; return whether there was anything to draw."""
    own = [each for each in outcomes if report.name in each.case.groups]
    return plot_outcomes(known_groups()[report.name].title.strip(), report.time or report.memory, own, path)


def scale_by_log(axes: Axes, low: float, high: float) -> None:
    """Give both axes one logarithmic scale, written in plain numbers."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, SIDE_IN)


def plot_outcomes(title: str, errors: ErrorReport | None, outcomes: Sequence[Outcome], path: Path) -> bool:
    """Draw iteration times, or else peaks, on log axes, with the diagonal and a band of ten percent.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    word, drawn = judged(outcomes)
    if not drawn or errors is None:
        return False
    shown = [outcome for outcome, _ in drawn]
    if word == "time":
        quantity = "iteration time, s"
        predicted = np.array([each.iteration_time_s for each in shown])
    else:
        quantity = "peak memory, GiB"
        predicted = np.array([each.peak_bytes for each in shown]) / 2**30
    measured = predicted / (1 + np.array([error for _, error in drawn]))
    figure = Figure(figsize=(6.4, 6.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    low = float(min(measured.min(), predicted.min())) / 1.3
    high = float(max(measured.max(), predicted.max())) * 1.3
    line = np.array([low, high])
    axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="#e3f0fb", linewidth=0)
    axes.plot(line, line, color=MUTED, linewidth=1.0)
    feature, labels = _colouring(shown)
    for number, label in enumerate(sorted(set(labels), key=feature_order)):
        chosen = np.array([own == label for own in labels])
        axes.plot(
            measured[chosen],
            predicted[chosen],
            "o",
            markersize=5 if len(drawn) < 150 else 3,
            alpha=0.75,
            color=CYCLE[number % len(CYCLE)],
            markeredgewidth=0,
            label=f"{feature} {label}" if feature else None,
        )
    scale_by_log(axes, low, high)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.set_xlabel(f"measured {quantity}", color=INK)
    axes.set_ylabel(f"predicted {quantity}", color=INK)
    if feature:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.set_title(
        f"{title}\n{counted(errors.num_cases, 'run')}, mean absolute error {100 * errors.mean_absolute:.1f} %, bias "
        f"{100 * errors.bias:+.1f} % (band: 10 %)",
        loc="left",
        fontsize=10.5,
        color=INK,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, buffer.getvalue())
    return True


def _colouring(outcomes: Sequence[Outcome]) -> tuple[str | None, list[str]]:
    for feature in COLOR_FEATURES:
        labels = [str(each.case.features.get(feature, "-")) for each in outcomes]
        if 1 < len(set(labels)) <= len(CYCLE):
            return feature, labels
    return None, ["-"] * len(outcomes)
