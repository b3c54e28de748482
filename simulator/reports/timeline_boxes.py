"""The boxes of a timeline: what is drawn of tasks that are narrower than a pixel, or too many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.taskgraph import Floats, Ints

if TYPE_CHECKING:
    from simulator.result import SimulationResult

NUM_COLUMNS = 2_400
"""About the picture's width in pixels: what is narrower than a column cannot be seen."""

STRIP_COLUMNS = 1_200
"""Of a lane of communication: one is wide enough to be seen by itself."""
FAINTEST = 0.4
"""How much of its colour communication has that takes next to nothing of a column: less cannot be seen."""


@dataclass(frozen=True)
class Boxes:
    """Boxes of one row and lane, with an index into the styles in use."""

    start: Floats
    end: Floats
    style: Ints

    def __len__(self) -> int:
        return len(self.start)


def task_boxes(result: SimulationResult, tasks: Ints, style: Ints, column_s: float) -> Boxes:
    """Return boxes in order of start; neighbours of one style and microbatch closer than a column join."""
    start, end = result.schedule.start_s[tasks], result.schedule.end_s[tasks]
    if len(tasks) == 0:
        return Boxes(start, end, style)
    key = np.column_stack((style, result.graph.microbatch[tasks], result.graph.stage[tasks]))
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], (key[1:] != key[:-1]).any(axis=1) | (start[1:] > reach[:-1] + column_s)))
    begins = np.flatnonzero(first)
    return Boxes(start[begins], np.maximum.reduceat(end, begins), style[begins])


def thinned(boxes: Boxes, span: tuple[float, float], limit: int) -> Boxes:
    """Return the boxes, or if too many, runs of columns with what takes most of each."""
    if len(boxes) <= limit:
        return boxes
    edges, present, share = _shares(boxes, span, NUM_COLUMNS)
    share = np.vstack((share, 1.0 - share.sum(axis=0)))
    winner = share.argmax(axis=0)
    first = np.flatnonzero(np.concatenate(([True], winner[1:] != winner[:-1])))
    last = np.append(first[1:], NUM_COLUMNS)
    filled = winner[first] < len(present)
    return Boxes(edges[first[filled]], edges[last[filled]], present[winner[first[filled]]])


def strip_colors(boxes: Boxes, span: tuple[float, float], table: Floats) -> Floats:
    """Return each column's colour: those of what takes it, mixed with white the more the less of it that is."""
    _, present, share = _shares(boxes, span, STRIP_COLUMNS)
    taken = share.sum(axis=0)
    strength = np.where(taken > 0, FAINTEST + (1 - FAINTEST) * np.minimum(1.0, taken), 0.0)
    share *= strength / np.where(taken > 0, taken, 1.0)
    colors: Floats = 1.0 - share.T @ (1.0 - table[present])
    return colors


def _shares(boxes: Boxes, span: tuple[float, float], num_columns: int) -> tuple[Floats, Ints, Floats]:
    """Return the edges of columns, the styles in use, and the share of each column that each style takes."""
    edges = np.linspace(*span, num_columns + 1)
    width = edges[1] - edges[0]
    present = np.unique(boxes.style)
    share = np.empty((len(present), num_columns))
    for row, style in enumerate(present):
        chosen = boxes.style == style
        end = np.maximum.accumulate(boxes.end[chosen])
        start = np.maximum(boxes.start[chosen], np.concatenate(([-np.inf], end[:-1])))  # what overlaps counts once
        times = np.column_stack((start, end)).ravel()
        done = np.cumsum(np.column_stack((np.zeros(len(start)), end - start)).ravel())
        share[row] = np.diff(np.interp(edges, times, done, left=0.0)) / width
    return edges, present, share
