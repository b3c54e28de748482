"""What all figures share: colours, a canvas without a display, plain axes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 160

TITLE_SIZE = 13.0
TITLE_LETTER = 0.7
"""Width of a letter of a title over its size: the mean of bold ones in matplotlib's default font, and a little."""

BACKGROUND, TEXT, GRID = "#f4f4f2", "#222222", "#d9d9d6"

# Okabe & Ito, "Color Universal Design", 2008: told apart under every common colour blindness.
BLUE, SKY, ORANGE, YELLOW = "#0072B2", "#56B4E9", "#E69F00", "#F0E442"
VERMILION, PURPLE, GREEN, GREY = "#D55E00", "#CC79A7", "#009E73", "#8C8C8C"

LETTER_IN, LINE_IN = 0.087, 0.2
"""Width of a letter and height of a line of tick labels, in matplotlib's default size."""
MOST_TICKS = 10
EVEN_BELOW = 3.0
"""Below this ratio of its ends a logarithmic axis has ticks in even steps, as one to scale has."""

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


def log_ticks(axis: Axis, length_in: float) -> None:
    """Give a logarithmic axis, whose limits are set, as many labels as have room beside each other.

    They stand in even steps on a short axis, on a longer one at every digit, at 1, 2 and 5, or at powers of ten.

    Args:
        axis: Of which it is.
        length_in: Its length in inches, about.
    """
    from matplotlib.ticker import NullLocator

    low, high = sorted(axis.get_view_interval())
    for places in _log_places(low, high):
        labels = [tick_label(place) for place in places]
        if len(places) <= MOST_TICKS and _have_room(axis, places, labels, length_in / math.log(high / low)):
            break
    axis.set_ticks(places, labels)
    axis.set_minor_locator(NullLocator())


def _log_places(low: float, high: float) -> Iterator[list[float]]:
    """Yield ticks within a range, the most first."""
    from matplotlib.ticker import MaxNLocator

    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high < EVEN_BELOW * low:
        steps = [list(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)) for count in (7, 5, 3)]
    else:
        kinds = ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5), (1, 3), (1,))
        steps = [[digit * 10.0**power for power in range(first, last + 1) for digit in digits] for digits in kinds]
        steps += [[10.0**power for power in range(first, last + 1) if power % every == 0] for every in (2, 3, 5, 10)]
    for places in steps:
        yield [float(place) for place in places if low <= place <= high]


def _have_room(axis: Axis, places: list[float], labels: list[str], inches_per_fold: float) -> bool:
    lengths = [LETTER_IN * (len(label) + 1) if axis is axis.axes.xaxis else LINE_IN for label in labels]
    gaps = [inches_per_fold * math.log(after / before) for before, after in pairwise(places)]
    return all(gap >= (one + two) / 2 for gap, one, two in zip(gaps, lengths, lengths[1:], strict=False))


def tick_label(value: float) -> str:
    """Return a number as it stands at a tick.

    >>> [tick_label(value) for value in (0.00002, 0.05, 3.5, 12000.0, 2e6)]
    ['2e-5', '0.05', '3.5', '12000', '2e6']
    """
    digits, exponent, power = f"{value:g}".partition("e")
    return f"{digits}e{int(power)}" if exponent else digits


def png(figure: Figure) -> bytes:
    """Return the picture as a file's bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
