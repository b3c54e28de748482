"""The leaderboard's pictures: a heat map, mean times with intervals, and convergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from experiments.reproduce.leaderboard.table import per_problem
from experiments.reproduce.legends import legend_beside
from simulator.reports.figures import CYCLE

WORST_SHOWN = 2.0
CURVES_UP_TO = 6.0
History = list[tuple[float, float]]
"""Improvements of one run in order: evaluations or seconds, and the value."""


def heat_map(frame: pd.DataFrame, order: Sequence[str]) -> Figure:
    """Draw relative time per searcher and problem; a word where there is no plan."""
    wide = per_problem(frame).reindex(list(order))
    figure = Figure(figsize=(1.8 + 0.72 * len(wide.columns), 1.8 + 0.36 * len(wide)))
    axes = figure.subplots()
    cells = wide.to_numpy(dtype=float)
    values = np.log(cells)
    # viridis reversed: dark is slow; readable without colour by the numbers in the cells.
    axes.imshow(np.ma.masked_invalid(values), cmap="viridis_r", vmin=0, vmax=np.log(WORST_SHOWN), aspect="auto")
    statuses = frame.groupby(["searcher", "problem"])["status"].first()
    for row, searcher in enumerate(wide.index):
        for column, problem in enumerate(wide.columns):
            value = float(cells[row, column])
            if np.isfinite(value):
                dark = value > 1.5
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7,
                          color="white" if dark else "black")  # fmt: skip
            else:
                word = _SHORT.get(str(statuses.get((searcher, problem), "")), "")
                axes.text(column, row, word, ha="center", va="center", fontsize=6, color="0.35")
    axes.set_xticks(range(len(wide.columns)), wide.columns, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(wide)), wide.index, fontsize=8)
    axes.set_title("iteration time / that of the best plan known (1.00 is best)", fontsize=9)
    return figure


_SHORT = {"out of memory": "OOM", "no plan": "no plan", "not applicable": "n/a", "failed": "failed"}


def mean_times(ranking: pd.DataFrame) -> Figure:
    """Draw each searcher's geometric mean with its interval, and how many problems it is over."""
    shown = ranking.dropna(subset=["relative_time"]).iloc[::-1]
    figure = Figure(figsize=(7, 1.2 + 0.32 * len(shown)))
    axes = figure.subplots()
    centre = shown["relative_time"].to_numpy(dtype=float)
    low, high = shown["low"].to_numpy(dtype=float), shown["high"].to_numpy(dtype=float)
    axes.errorbar(centre, range(len(shown)), xerr=[centre - low, high - centre], fmt="o", color="#0072B2", capsize=3)
    for position, (solved, problems) in enumerate(zip(shown["solved"], shown["problems"], strict=True)):
        axes.annotate(f"  {solved}/{problems}", (high[position], position), fontsize=7, va="center")
    axes.set_yticks(range(len(shown)), shown["searcher"], fontsize=8)
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.margins(x=0.12)  # room for the counts
    axes.set_xscale("log")
    axes.set_xticks([1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.95, 1.25 * float(high.max()))
    axes.set_xlabel("iteration time / best known, geometric mean over problems solved, 95 % interval")
    figure.tight_layout()
    return figure


def convergence(histories: Mapping[str, Sequence[History]], unit: str) -> Figure:
    """Draw how good the best plan so far is over evaluations or seconds: the median over runs.

    Args:
        histories: By searcher, of every run.
        unit: Of the steps, for the axis.
    """
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    moments = [moment for runs in histories.values() for run in runs for moment, _ in run if moment > 0]
    grid = np.geomspace(min(moments), 1.1 * max(moments), 80)
    styles = ["-", "--", ":", "-."]
    for number, (searcher, runs) in enumerate(histories.items()):
        curve = np.median([best_so_far(run, grid) for run in runs], axis=0)
        axes.step(grid, np.where(np.isfinite(curve), curve, np.nan), styles[number // len(CYCLE) % 4], where="post",
                  label=searcher, linewidth=1.2)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.set_yscale("log")
    axes.set_yticks([1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("best plan so far / best plan known\n(median over problems solved)")
    axes.set_ylim(0.97, CURVES_UP_TO)
    legend_beside(axes, columns=2, size=6)
    figure.tight_layout()
    return figure


def best_so_far(run: History, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the best value of a run at each moment of a grid; infinite before the first."""
    moments = np.array([moment for moment, _ in run])
    values = np.minimum.accumulate([value for _, value in run])
    seen = np.searchsorted(moments, grid, side="right")
    return np.concatenate([[np.inf], values])[seen]
