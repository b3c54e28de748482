"""What a calibration shows: a table of fits and residuals, JSON, and measured against model as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datafiles.words import counted
from datafiles.writer import write_bytes_atomically
from experiments.console import console, messages, table
from hardware_models.calibrated import FitRecord
from hardware_models.calibration.outcome import Outcome, Point
from simulator.reports.figures import log_ticks, tick_label

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = (
    "#1565c0", "#ef6c00", "#2e7d32", "#8e24aa", "#00a5b5", "#c62828", "#6d4c41",
    "#111111", "#e0a800", "#ec407a", "#7cb342", "#283593", "#90a4ae", "#00574b",
)  # fmt: skip
MARKERS = ("o", "^", "s", "D")
"""Of series beside each other; one that shares its colour with another has another marker."""
SIDE_IN = 5.0
"""Of either half of the picture, about."""
LINEAR_PERCENT = 10
"""Errors up to here are drawn to scale."""
MAX_ROWS = 60
"""Lines of the printed table; all are in the file and in the JSON."""
DOUBTED = 0.3
"""Residual of a fit from which on it is said."""


def show(outcome: Outcome) -> None:
    """Print the summary."""
    found = outcome.calibration
    columns = [("", "left"), ("", "left"), ("points", "right"), ("median", "right"), ("90 %", "right"),
               ("worst", "right"), ("constants", "left")]  # fmt: skip
    rows = [
        (
            each.what, each.how, str(each.num_points), *map(_percent, (each.median, each.p90, each.worst)),
            _words(each.constants),
        )
        for each in _shortened(found.fits)
    ]  # fmt: skip
    console().print(table(found.source, columns, rows))
    parts = {
        "operators": f"{counted(len(found.operators.rows), 'row')} of {found.operators.model}"
        if found.operators
        else "",
        "collectives": f"{counted(len(found.collectives.rows()), 'point')} in {len(found.collectives.series)} series"
        if found.collectives
        else "",
        "GPU constants": ", ".join(found.gpus),
        "links": ", ".join(found.links),
        "networks": ", ".join(found.networks),
    }
    for name, text in parts.items():
        if text:
            console().print(f"{name:<14}{text}", markup=False)
    left_out = len(found.fits) - len(rows)
    notes = all_notes(outcome)
    if left_out:
        notes.append(f"{counted(left_out, 'more line is', 'more lines are')} in the file")
    for note in notes:
        messages().print(f"note: {note}", markup=False)


def all_notes(outcome: Outcome) -> list[str]:
    """Return the remarks, and which fits some measured point is far from."""
    notes = list(outcome.notes)
    fitted = [fit for fit in outcome.calibration.fits if fit.how == "fitted"]
    if lone := [fit.what for fit in fitted if fit.num_points == 1 and fit.constants]:
        notes.append(f"a single point says nothing about other sizes: {', '.join(lone)} should have more")
    far = [fit for fit in fitted if (fit.worst or 0.0) > DOUBTED]
    if not far:
        return notes
    worst = max(far, key=lambda fit: fit.worst or 0.0)
    words = f"{worst.what} ({_percent(worst.worst)})" + (f" and {len(far) - 1} more" if len(far) > 1 else "")
    return [
        *notes,
        f"a fit's worst residual should be below {DOUBTED:.0%}, got {words}: --plot shows where; measure again what "
        "scatters, and do not rely on these constants there",
    ]


def _shortened(fits: tuple[FitRecord, ...]) -> list[FitRecord]:
    """Return the lines to print: where there are too many, those of single series are left out first."""
    if len(fits) <= MAX_ROWS:
        return list(fits)
    return [fit for fit in fits if " ranks" not in fit.what][:MAX_ROWS]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _words(constants: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in constants.items())


def outcome_mapping(outcome: Outcome, output: Path | None) -> dict[str, Any]:
    """Return the summary as plain data; residuals are absolute relative."""
    found = outcome.calibration
    return {
        "source": found.source,
        "output": str(output) if output is not None else None,
        "fits": [dict(fit.__dict__) for fit in found.fits],
        "operators": len(found.operators.rows) if found.operators is not None else 0,
        "collective_points": len(found.collectives.rows()) if found.collectives is not None else 0,
        "gpus": {name: list(part.given()) for name, part in found.gpus.items()},
        "links": list(found.links),
        "networks": list(found.networks),
        "notes": all_notes(outcome),
    }


def plot(outcome: Outcome, path: Path) -> None:
    """Draw every measured point against what the model says, and the residuals beside it.

    Raises:
        ValueError: If the calibration has no point to compare.
    """
    if not outcome.points:
        raise ValueError("a plot needs measured points that the model says something about, got none; leave --plot out")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    units = list(dict.fromkeys(point.unit for point in outcome.points))
    figure = Figure(figsize=(12.5, 0.6 + 5.2 * len(units)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(units), 2, squeeze=False, width_ratios=(1.0, 1.0))
    for row, unit in enumerate(units):
        _draw(axes[row][0], axes[row][1], [point for point in outcome.points if point.unit == unit], unit)
    figure.suptitle(_title(outcome), x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes_atomically(path, buffer.getvalue())


def _title(outcome: Outcome) -> str:
    text = outcome.calibration.source
    return text if len(text) < 110 else f"{text[:107]}..."


def _draw(left: Any, right: Any, points: list[Point], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

    groups = list(dict.fromkeys(point.group for point in points))
    low = min(min(point.measured, point.predicted) for point in points)
    high = max(max(point.measured, point.predicted) for point in points)
    low = max(low, 1e-12 * high)
    left.plot([low, high], [low, high], color=MUTED, linewidth=1)
    left.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GRID, zorder=0)
    for number, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        measured = np.array([point.measured for point in own])
        predicted = np.array([point.predicted for point in own])
        colour = COLOURS[number % len(COLOURS)]
        name = f"{group} ({len(own)})"
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
        left.scatter(measured, predicted, s=14, color=colour, marker=marker, alpha=0.6, linewidths=0, label=name)
        errors = 100 * (predicted / measured - 1)
        right.scatter(measured, errors, s=14, color=colour, marker=marker, alpha=0.6, linewidths=0)
    words = {"s": "seconds", "B": "bytes", "x": "factor"}
    for axes in (left, right):
        axes.set_xscale("log")
        log_ticks(axes.xaxis, SIDE_IN)
        axes.set_xlabel(f"measured, {words.get(unit, unit)}")
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    log_ticks(left.yaxis, SIDE_IN)
    left.set_ylabel(f"model, {words.get(unit, unit)}; band: 10 %")
    right.axhline(0, color=MUTED, linewidth=1)
    if max(map(abs, right.get_ylim())) > LINEAR_PERCENT:  # a few far points must not flatten the others
        right.set_yscale("symlog", linthresh=LINEAR_PERCENT, subs=[2, 5])
        right.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=LINEAR_PERCENT, subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, place: tick_label(value)))
    right.set_ylabel("error of the model, %")
    left.legend(frameon=False, fontsize=9, loc="upper left")
