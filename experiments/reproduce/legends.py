"""Where legends stand in figures: beside the axes, so that they hide nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def legend_beside(axes: Axes, *, columns: int = 1, size: float = 8) -> None:
    """Add a legend right of the axes, if anything has a label; the page cuts figures to what is drawn."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(frameon=False, fontsize=size, ncols=columns, loc="upper left", bbox_to_anchor=(1.01, 1.0))
