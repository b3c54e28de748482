"""The time of GPipe where stages share devices, exactly: its order pass by pass, without operators.

Source: the order that ``simulator.schedules.gpipe`` makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT, INPUT_LAG, LESS, ONCE, UP, WEIGHT


def breadth_first_s(
    each_s: NDArray[np.float64], last_s: NDArray[np.float64], ranks: NDArray[np.int64], num_microbatches: int
) -> float:
    """Return the seconds of the passes of all microbatches: each rank runs all through one stage, then the next.

    Args:
        each_s, last_s: float64[stages, NUM_COLUMNS]. Rows (see ``stage_rows``) of a microbatch that is not the last,
            and of the last; INPUT the whole backward pass.
        ranks: int64[stages]. Where each stage is: numbers below that of stages.
        num_microbatches: At least one.

    As drawn in ``simulator.schedules.gpipe``; and two ranks, two stages each, two microbatches (small letters: a rank's
    second stage)::

        rank 0  F0 F1 f0 f1 .  .  .  b0 -- b1 -- B0 -- B1 --
        rank 1  .  F0 F1 f0 f1 b0 -- b1 -- B0 -- B1 --

    >>> drawn = np.array([[1.0, 2.0, *[0.0] * 7]] * 4)
    >>> breadth_first_s(drawn, drawn, np.arange(4), 4), breadth_first_s(drawn, drawn, np.array([0, 1, 0, 1]), 2)
    (21.0, 15.0)
    """
    num_stages, m = len(each_s), num_microbatches
    came_s, free_s, link_s = np.zeros(m), np.zeros(num_stages), np.zeros(num_stages)
    for step in range(2 * num_stages):
        is_forward = step < num_stages
        stage = step if is_forward else 2 * num_stages - 1 - step
        rank = ranks[stage]
        for i in range(m):
            own_s = last_s[stage] if i == m - 1 else each_s[stage]
            lag_s = own_s[FORWARD_LAG] if is_forward else own_s[INPUT_LAG] if stage < num_stages - 1 else 0.0
            taken_s = own_s[FORWARD] if is_forward else own_s[INPUT] - (own_s[LESS] if i == 0 else 0.0)
            free_s[rank] = max(free_s[rank], came_s[i] + lag_s) + taken_s
            came_s[i] = free_s[rank]
            sent_s = own_s[DOWN] if is_forward else own_s[UP]
            if sent_s > 0:
                link_s[rank] = came_s[i] = max(came_s[i], link_s[rank]) + sent_s
            free_s[rank] += 0.0 if is_forward else own_s[WEIGHT]
    for stage in range(num_stages):
        free_s[ranks[stage]] += each_s[stage, ONCE]
    return float(free_s.max())
