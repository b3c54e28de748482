"""Galvatron's decision trees as a picture: a tree per strategy, its leaves are the devices of a stage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from datafiles.words import counted
from datafiles.writer import write_bytes_atomically
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Strategy, decision_trees

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {DATA: "#2b6cb0", SHARDED: "#2f855a", TENSOR: "#c05621", "pp": "#718096"}
MOST_LEAVES = 16
"""Of a drawn tree; larger ones are cut to their first leaves."""


def draw_trees(num_devices: int) -> Figure:
    """Return a row of trees per pipeline degree; checkpointing, which doubles each, is not drawn."""
    from matplotlib.figure import Figure

    rows = {
        degree: [strategy for strategy in found if not strategy.checkpoint]
        for degree, found in decision_trees(num_devices).items()
    }
    width = max(map(len, rows.values()))
    figure = Figure(figsize=(1.6 * width, 1.9 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False)
    for row, (degree, found) in enumerate(rows.items()):
        for column in range(width):
            place = axes[row][column]
            place.set_axis_off()
            if column < len(found):
                draw_tree(place, found[column])
        axes[row][0].set_title(counted(degree, "stage"), loc="left", fontsize=9)
    total = 2 * sum(map(len, rows.values()))
    words = f"{num_devices} devices: {total} strategies, half of them with activation checkpointing"
    figure.suptitle(words, fontsize=10)
    return figure


def draw_tree(place: Axes, strategy: Strategy) -> None:
    """Draw one tree: levels from the top, coloured by kind."""
    leaves = min(strategy.num_devices, MOST_LEAVES)
    depth = len(strategy.levels)
    width = strategy.num_devices
    for level, (kind, degree) in enumerate(strategy.levels):
        parts = width // degree
        for group in range(0, strategy.num_devices, width):
            for branch in range(degree):
                first = group + branch * parts
                if first >= leaves:
                    continue
                top, bottom = group + (width - 1) / 2, first + (parts - 1) / 2
                place.plot([top, bottom], [-level, -level - 1], color=COLOURS[kind], linewidth=1.1)
        width = parts
    place.plot(range(leaves), [-depth] * leaves, "o", color="black", markersize=2.5)
    place.text(0.5, -0.02, str(strategy), transform=place.transAxes, ha="center", va="top", fontsize=6)
    place.set_xlim(-0.7, max(leaves, 2) - 0.3)
    place.set_ylim(-max(depth, 1) - 0.3, 0.3)


def save_trees(path: Path, num_devices: int) -> None:
    """Write the picture as PNG."""
    buffer = io.BytesIO()
    draw_trees(num_devices).savefig(buffer, format="png", dpi=110)
    write_bytes_atomically(path, buffer.getvalue())
