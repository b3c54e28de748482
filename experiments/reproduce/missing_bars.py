"""Words in place of bars that are not there, so that nobody takes a gap for a zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def say_missing(axes: Axes, places: Sequence[float], values: Sequence[float | None]) -> None:
    """Write where bars without a value would stand that there is none; places and values are those of all bars."""
    for place, value in zip(places, values, strict=True):
        if value is None or math.isnan(value):
            at_bottom = axes.get_xaxis_transform()
            axes.text(
                place, 0.01, "none", rotation=90, ha="center", va="bottom", fontsize=7, color="0.4", transform=at_bottom
            )
