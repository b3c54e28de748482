"""Compiling before the clock runs: 15 s once per machine, then a few hundredths of a second per process."""

from __future__ import annotations

from functools import cache

import numpy as np

from searchers.aceso.arrays import NUM_COLUMNS, NUM_FIGURES, Arrays
from searchers.aceso.border_kernels import Stages, balanced_cuts, nothing_known
from searchers.aceso.stage_kernels import price_stops, stage_figures


@cache
def warm_up() -> None:
    """Load or compile the functions of the search by calling them on two operators."""
    arrays = Arrays(
        np.ones((1, NUM_COLUMNS, 2)),
        np.zeros(2, np.int32),
        np.zeros(2, np.int32),
        np.ones(2, np.uint8),
        np.arange(2, dtype=np.int32),
        np.array([[1.0, 2.0]] * 2),
        np.array([[[1.0, 2.0]]] * 2),
        np.zeros((1, 1, 2)),
        np.zeros((1, 2)),
        np.zeros((1, 3), np.int32),
        np.zeros(3, np.int64),
        np.full(2, -1, np.int32),
    )
    ones, cells = np.ones(2, np.int32), np.zeros(2, np.int32)
    figures, flags = np.zeros(NUM_FIGURES), np.zeros(2, np.uint8)
    stage_figures(arrays, cells, 0, 2, 1, 1, 0, 1e9, 3, flags, figures)
    stages = Stages(cells, ones, ones, ones, 1e9, 3)
    balanced_cuts(arrays, stages, nothing_known(), 1.0, np.array([0, 1, 2], np.int32), 1, np.array([2], np.int32))
    price_stops(arrays, cells, 0, np.array([1, 2], np.int32), 1, 1, 0, 1e9, 3, np.zeros(2), np.zeros(2))
