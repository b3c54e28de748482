"""What all figures share: colours, a canvas without a display, plain axes."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160

TITLE_SIZE = 13.0
TITLE_LETTER = 0.7
"""Width of a letter of a title over its size: the mean of bold ones in matplotlib's default font, and a little."""

BACKGROUND, TEXT, GRID = "#f4f4f2", "#222222", "#d9d9d6"

# Okabe & Ito, "Color Universal Design", 2008: told apart under every common colour blindness.
BLUE, SKY, ORANGE, YELLOW = "#0072B2", "#56B4E9", "#E69F00", "#F0E442"
VERMILION, PURPLE, GREEN, GREY = "#D55E00", "#CC79A7", "#009E73", "#8C8C8C"

CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#444444", VERMILION, YELLOW)
"""Colours of what is drawn beside each other, in this order."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return a figure that draws without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def clean_axes(axes: Axes) -> None:
    """Remove the frame and soften ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=TEXT, labelsize=9, length=3, color=GRID)


def set_title(axes: Axes, title: str | None, line: str) -> None:
    """Put a bold title, if any, on as many lines as it needs, and a plain line above the axes, flush left."""
    axes.set_title(line, loc="left", fontsize=10.5, color=TEXT, pad=8)
    if title:
        figure = axes.get_figure(root=True)
        assert figure is not None, "axes of a figure"
        lines = textwrap.fill(title, int(72 * figure.get_figwidth() / (TITLE_SIZE * TITLE_LETTER)))
        figure.suptitle(lines, x=0.01, ha="left", fontsize=TITLE_SIZE, fontweight="bold", color=TEXT)


def png(figure: Figure) -> bytes:
    """Return the picture as a file's bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
