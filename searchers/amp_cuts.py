"""Where AMP cuts layers into stages: least ``sum c + (B - 1) max stage``, exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled


def best_cuts(
    seconds: NDArray[np.float64], crossing: NDArray[np.float64], num_microbatches: int
) -> list[tuple[int, int]]:
    """Return the layers ``[first, stop)`` of each stage that minimise ``sum c + (B - 1) max stage``, exactly.

    Under a bound on the longest stage the cheapest cuts are a shortest path; the bound falls from one longest
    stage to the next below it until the even share of all layers says that nothing better can come.

    Args:
        seconds: float64[layers].
        crossing: float64[stages - 1, layers]: cost of the cut behind each layer, per pair of stages.
        num_microbatches: B.
    """
    count, stages = len(seconds), len(crossing) + 1
    prefix = np.concatenate([[0.0], np.cumsum(seconds)])
    best = np.zeros(stages + 1, dtype=np.int64)
    best_value, bound = np.inf, np.inf
    while True:
        cuts, cost = _cheapest_cuts(prefix, crossing, bound)
        if not np.isfinite(cost):
            break
        longest = float(np.diff(prefix[cuts]).max())
        value = cost + (num_microbatches - 1) * longest
        if value < best_value:
            best, best_value = cuts, value
        # No stage below the even share: nothing better can come.
        if cost + (num_microbatches - 1) * prefix[-1] / stages >= best_value:
            break
        bound = longest
    assert best[-1] == count, "without a bound there is always a cut"
    return list(pairwise(best.tolist()))


@compiled
def _cheapest_cuts(
    prefix: NDArray[np.float64], crossing: NDArray[np.float64], bound: float
) -> tuple[NDArray[np.int64], float]:
    """Return the borders of the cuts of least crossing cost with every stage shorter than ``bound``, and the cost.

    The layers where a stage may start form a window that only moves on as the stage's end does, so a queue of
    starts in order of cost gives each least in constant time. The cost is infinite if there are no such cuts.
    """
    count, stages = len(prefix) - 1, len(crossing) + 1
    least = np.full((stages + 1, count + 1), np.inf)
    chosen = np.zeros((stages + 1, count + 1), dtype=np.int64)
    least[0, 0] = 0.0
    queue = np.empty(count + 1, dtype=np.int64)
    costs = np.empty(count + 1)
    for stage in range(1, stages + 1):
        head, tail = 0, 0
        for stop in range(stage, count - (stages - stage) + 1):
            start = stop - 1
            cost = least[stage - 1, start]
            if stage > 1:
                cost += crossing[stage - 2, start - 1]
            # Of equals the first start stays.
            while tail > head and costs[queue[tail - 1]] > cost:
                tail -= 1
            costs[start] = cost
            queue[tail] = start
            tail += 1
            while head < tail and not prefix[stop] - prefix[queue[head]] < bound:
                head += 1
            if head < tail:
                least[stage, stop], chosen[stage, stop] = costs[queue[head]], queue[head]
    borders = np.zeros(stages + 1, dtype=np.int64)
    borders[stages] = count
    for stage in range(stages, 0, -1):
        borders[stage - 1] = chosen[stage, borders[stage]]
    return borders, least[stages, count]
