"""The time of zb-h1, exactly: its order pass by pass, without operators.

After its warm-up a stage's order consists of *turns*: turn k is I(k), W(k - stage) once there is one, and F(k + depth),
with depth = min(p - stage, m), while there is one. The input gradient of turn k is the stage before's in turn k, and
the forward that leaves in turn k the next stage's in turn k + 1: so turn by turn, from the last stage up, all that a
pass needs has been done.

Source: the order that ``simulator.schedules.zero_bubble`` makes; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR
2024, Section 2.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT, INPUT_LAG, LESS, ONCE, UP, WEIGHT


def zero_bubble_s(each_s: NDArray[np.float64], last_s: NDArray[np.float64], num_microbatches: int) -> float:
    """Return the seconds of zb-h1.

    With equal stages, free transfers and m >= p they are m (f + i + w) + (p - 1) max(f + i - w, f, i).

    Args:
        each_s, last_s: float64[stages, NUM_COLUMNS]. Rows (see ``stage_rows``) of a microbatch that is not the last,
            and of the last.
        num_microbatches: At least one.

    >>> equal = np.array([[1.0, 1.0, 1.0, *[0.0] * 6]] * 4)
    >>> zero_bubble_s(equal, equal, 6)  # As drawn in simulator.schedules.zero_bubble.
    21.0
    """
    p, m = len(each_s), num_microbatches
    # When a rank and its links are free, when its next forward has come, and those of its warm-up.
    free_s, down_free_s, up_free_s, came_s = np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(p + 1)
    warm_s = np.zeros(m)
    for stage in range(p):
        for i in range(min(p - stage, m)):
            own_s = last_s[stage] if i == m - 1 else each_s[stage]
            free_s[stage] = max(free_s[stage], warm_s[i] + own_s[FORWARD_LAG]) + own_s[FORWARD]
            down_free_s[stage] = max(free_s[stage], down_free_s[stage]) + own_s[DOWN]
            warm_s[i] = came_s[stage + 1] = down_free_s[stage]
    for k in range(m):
        returned_s = 0.0
        for stage in range(p - 1, -1, -1):
            own_s = last_s[stage] if k == m - 1 else each_s[stage]
            lag_s = own_s[INPUT_LAG] if stage < p - 1 else 0.0
            free_s[stage] = max(free_s[stage], returned_s + lag_s) + own_s[INPUT]
            up_free_s[stage] = returned_s = max(free_s[stage], up_free_s[stage]) + own_s[UP]
            if k >= stage:
                free_s[stage] += (last_s if k - stage == m - 1 else each_s)[stage, WEIGHT]
            if k == stage:
                free_s[stage] -= each_s[stage, LESS]
            i = k + min(p - stage, m)
            if i < m:
                own_s = last_s[stage] if i == m - 1 else each_s[stage]
                free_s[stage] = max(free_s[stage], came_s[stage] + own_s[FORWARD_LAG]) + own_s[FORWARD]
                down_free_s[stage] = came_s[stage + 1] = max(free_s[stage], down_free_s[stage]) + own_s[DOWN]
    for stage in range(1, p):  # The weight gradients that it has kept back.
        free_s[stage] += (min(stage, m) - 1) * each_s[stage, WEIGHT] + last_s[stage, WEIGHT]
        if stage >= m:
            free_s[stage] -= each_s[stage, LESS]
    return float((free_s + each_s[:, ONCE]).max())
