"""The holistic MPE: the shortest path through the layers with at most so many devices (Eq. 3, as printed)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.inter_op import Pipeline, StageChoice


def shortest_path(
    seconds: NDArray[np.float64], fits: NDArray[np.bool_], sizes: NDArray[np.int64], num_devices: int
) -> Pipeline | None:
    """Return the stages with the least sum of latencies on at most ``num_devices`` devices, None if there are none.

    ``C(i, j, d) = min(G(i, j, d), min over a, d' of C(i, a, d') + C(a+1, j, d - d'))``: a chain over the last layer
    and the devices used is enough.

    Args:
        seconds: float64[layers, layers, submeshes, configs], infinite where a stage is not possible.
        fits: bool of the same shape: the stage alone fits in memory.
        sizes: int64[submeshes]: devices.
        num_devices: D.
    """
    layers = len(seconds)
    allowed = np.where(fits, seconds, np.inf)
    best = np.full((layers + 1, num_devices + 1), np.inf)
    best[0] = 0.0  # at most d devices
    chosen: dict[tuple[int, int], StageChoice] = {}
    for last in range(layers):
        for devices in range(1, num_devices + 1):
            for mesh in range(len(sizes)):
                size = int(sizes[mesh])
                if size > devices:
                    continue
                table = allowed[: last + 1, last, mesh, :] + best[: last + 1, devices - size, np.newaxis]
                first, config = np.unravel_index(int(np.argmin(table)), table.shape)
                if table[first, config] < best[last + 1, devices]:
                    best[last + 1, devices] = table[first, config]
                    chosen[last + 1, devices] = StageChoice(int(first), last, mesh, int(config))
    total = float(best[layers, num_devices])
    if not np.isfinite(total):
        return None
    stages: list[StageChoice] = []
    layer, left = layers, num_devices
    while layer > 0:
        stage = chosen[layer, left]
        stages.insert(0, stage)
        layer, left = stage.first, left - int(sizes[stage.submesh])
    longest = max(float(seconds[s.first, s.last, s.submesh, s.config]) for s in stages)
    return Pipeline(total, total, longest, tuple(stages), 1)
