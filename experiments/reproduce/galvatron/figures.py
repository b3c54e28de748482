"""Figures that several of Galvatron's experiments share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PAPER = "#2b6cb0", "#a0aec0"


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 5.0, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """Return a figure without a window, and its axes in reading order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [axes[row][column] for row in range(rows) for column in range(columns)]


def throughput_bars(frame: pd.DataFrame) -> Figure:
    """Return bars of every strategy, one panel per model; the paper's beside ours where there are any.

    Hatched: what fits by the searcher's estimate, but not in the simulator.
    """
    models = list(dict.fromkeys(frame["model"]))
    columns = min(2, len(models))
    figure, axes = new_figure(-(-len(models) // columns), columns, width=7.0)
    for place, model in zip(axes, models, strict=False):
        own = frame[frame["model"] == model]
        positions = np.arange(len(own))
        printed = "paper_samples_per_s" in own
        shift, height = (0.2, 0.4) if printed else (0.0, 0.8)
        ours = own["samples_per_s"].fillna(0.0)
        place.barh(positions + shift, ours, height, color=OURS, label="ours (simulated)")
        misfits = own["simulator_fits"].eq(False).to_numpy()
        if misfits.any():
            label = "ours, fits by its estimate alone, not when simulated"
            bars = place.barh((positions + shift)[misfits], ours[misfits], height, color=OURS, label=label)
            for bar in bars:
                bar.set(edgecolor="white", hatch="///")
        if printed:
            place.barh(positions - shift, own["paper_samples_per_s"].fillna(0.0), height, color=PAPER, label="paper")
        place.set_yticks(positions, list(own["strategy"]), fontsize=7)
        place.invert_yaxis()
        place.set_title(f"{model}, {own['memory_gb'].iloc[0]} GB", fontsize=9)
        place.set_xlabel("samples/s (nothing: out of memory)", fontsize=8)
    for place in axes[len(models) :]:
        place.set_visible(False)
    shown = {
        label: handle
        for place in axes
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown, loc="outside upper right", ncols=3, fontsize=7, frameon=False)
    return figure
