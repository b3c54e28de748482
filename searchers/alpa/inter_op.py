"""Inter-operator dynamic programming: which layers on which submesh, for the shortest 1F1B pipeline.

Minimises ``sum_i t_i + (B - 1) max_i t_i`` (Alpa, OSDI 2022, Eq. 2-3) under the memory that a stage with s - 1
stages behind it needs. Instead of trying every value of the largest stage time, each solution says which is next:
the least sum with no stage above t has a longest stage a <= t, and every bound in [a, t] has the same solution. So
only the trade-offs between sum and maximum are visited, and the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

NO_LIMIT = 1 << 20


@dataclass(frozen=True)
class StageChoice:
    """One stage of a solution.

    Attributes:
        first, last: Layers, inclusive.
        submesh: Index of the submesh.
        config: Index of the logical mesh of that submesh.
    """

    first: int
    last: int
    submesh: int
    config: int


@dataclass(frozen=True)
class Pipeline:
    """A solution.

    Attributes:
        objective: Seconds.
        total_s, longest_s: Sum and maximum of stage times.
        stages: In order.
        solved: Dynamic programs solved on the way.
    """

    objective: float
    total_s: float
    longest_s: float
    stages: tuple[StageChoice, ...]
    solved: int


def best_pipeline(
    seconds: NDArray[np.float64],
    successors: NDArray[np.int64],
    sizes: NDArray[np.int64],
    num_devices: int,
    num_microbatches: int,
    weight: float | None = None,
) -> Pipeline | None:
    """Return the best pipeline that uses every device, None if none is allowed.

    Args:
        seconds: float64[layers, layers, submeshes, configs], infinite where a stage is not possible.
        successors: int64 of the same shape: how many stages may follow at most (memory), negative for never.
        sizes: int64[submeshes]: devices.
        num_devices: All of them must be used.
        num_microbatches: B.
        weight: Of the longest stage in the objective; B - 1 if None, 0 for MPE's printed sum.
    """
    heavier = float(num_microbatches - 1) if weight is None else weight
    bound = np.inf
    best: Pipeline | None = None
    solved = 0
    while True:
        total, firsts, lasts, meshes, configs = _least_sum(seconds, successors, sizes, num_devices, bound)
        solved += 1
        if not np.isfinite(total):
            break
        stages = tuple(
            StageChoice(int(a), int(b), int(m), int(c))
            for a, b, m, c in zip(firsts, lasts, meshes, configs, strict=True)
        )
        longest = max(float(seconds[s.first, s.last, s.submesh, s.config]) for s in stages)
        objective = float(total) + heavier * longest
        if best is None or objective < best.objective:
            best = Pipeline(objective, float(total), longest, stages, solved)
        if total >= best.objective or heavier == 0.0:
            break
        bound = longest
    return None if best is None else Pipeline(**{**best.__dict__, "solved": solved})


@compiled
def _least_sum(
    seconds: NDArray[np.float64],
    successors: NDArray[np.int64],
    sizes: NDArray[np.int64],
    num_devices: int,
    bound: float,
) -> tuple[float, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the least sum of stage times, every stage below ``bound``, and its stages in order."""
    layers, _, submeshes, configs = seconds.shape
    depth = min(layers, num_devices)
    # least[s, l, d]: layers l.. on exactly d devices in s stages.
    least = np.full((depth + 1, layers + 1, num_devices + 1), np.inf)
    chosen = np.full((depth + 1, layers + 1, num_devices + 1, 3), -1, dtype=np.int64)
    least[0, layers, 0] = 0.0
    for s in range(1, depth + 1):
        for first in range(layers - 1, -1, -1):
            for last in range(first, layers):
                for mesh in range(submeshes):
                    quickest = np.inf
                    config = -1
                    for c in range(configs):
                        t = seconds[first, last, mesh, c]
                        if t < quickest and t < bound and successors[first, last, mesh, c] >= s - 1:
                            quickest = t
                            config = c
                    if config < 0:
                        continue
                    size = sizes[mesh]
                    for d in range(size, num_devices + 1):
                        total = quickest + least[s - 1, last + 1, d - size]
                        if total < least[s, first, d]:
                            least[s, first, d] = total
                            chosen[s, first, d, 0] = last
                            chosen[s, first, d, 1] = mesh
                            chosen[s, first, d, 2] = config
    best = np.inf
    number = 0
    for s in range(1, depth + 1):
        if least[s, 0, num_devices] < best:
            best = least[s, 0, num_devices]
            number = s
    firsts = np.zeros(number, dtype=np.int64)
    lasts = np.zeros(number, dtype=np.int64)
    meshes = np.zeros(number, dtype=np.int64)
    picked = np.zeros(number, dtype=np.int64)
    layer, left = 0, num_devices
    for position in range(number):
        s = number - position
        firsts[position] = layer
        lasts[position] = chosen[s, layer, left, 0]
        meshes[position] = chosen[s, layer, left, 1]
        picked[position] = chosen[s, layer, left, 2]
        layer = lasts[position] + 1
        left -= sizes[meshes[position]]
    return best, firsts, lasts, meshes, picked
