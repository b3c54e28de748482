"""The law of one measured series: time by message size, as a latency and a bandwidth, once for small and once for
large messages.

A library has a quick way for small messages and a wide one for large; time is the smaller of two lines. One line
leaves 10 % and more between 64 KiB and 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

Vector = npt.NDArray[np.float64]
ENOUGH = 5
"""Points below which one line is fitted: two need four numbers."""


@dataclass(frozen=True)
class SeriesLaw:
    """``min(latency + size / rate)`` over small and large messages; equal lines where there is one.

    Attributes:
        latency_s, bytes_per_s: Of small messages.
        large_latency_s, large_bytes_per_s: Of large ones: the higher latency, the higher rate.
    """

    latency_s: float
    bytes_per_s: float
    large_latency_s: float
    large_bytes_per_s: float

    def seconds(self, num_bytes: Vector) -> Vector:
        """Return predicted seconds, elementwise."""
        small = self.latency_s + num_bytes / self.bytes_per_s
        return np.minimum(small, self.large_latency_s + num_bytes / self.large_bytes_per_s)

    def constants(self) -> dict[str, float]:
        """Return the numbers by name."""
        if (self.latency_s, self.bytes_per_s) == (self.large_latency_s, self.large_bytes_per_s):
            return {"latency_s": self.latency_s, "bytes_per_s": self.bytes_per_s}
        return dict(self.__dict__)


def fit_series(points: Sequence[tuple[float, float]]) -> SeriesLaw:
    """Return the law of ``(bytes, seconds)`` points, robustly fitted to their logarithms.

    Raises:
        ValueError: If there are fewer than two sizes.
    """
    sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(set(sizes)) < 2:
        raise ValueError(f"a latency and a bandwidth need at least 2 sizes, got {len(set(sizes))}")
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 1e-3 * seconds[-1] / sizes[-1])
    start = np.log([max(seconds.min() * 0.9, 1e-9), slope])

    def single(vector: Vector) -> Vector:
        return np.asarray(np.exp(vector[0]) + np.exp(vector[1]) * sizes)

    one = _solve(single, start, seconds)
    line = SeriesLaw(float(np.exp(one[0])), float(np.exp(-one[1])), float(np.exp(one[0])), float(np.exp(-one[1])))
    if len(set(sizes)) < ENOUGH:
        return line

    def two(vector: Vector) -> Vector:
        # The second line: a latency above, a slope below the first's.
        low, high = np.exp(vector[0]), np.exp(vector[0]) + np.exp(vector[2])
        steep, flat = np.exp(vector[1]) + np.exp(vector[3]), np.exp(vector[1])
        return np.asarray(np.minimum(low + steep * sizes, high + flat * sizes))

    begin = np.array([start[0], one[1], start[0], one[1]])
    found = _solve(two, begin, seconds)
    law = SeriesLaw(
        float(np.exp(found[0])),
        float(1 / (np.exp(found[1]) + np.exp(found[3]))),
        float(np.exp(found[0]) + np.exp(found[2])),
        float(np.exp(-found[1])),
    )
    better = np.abs(np.log(law.seconds(sizes) / seconds)).mean() < np.abs(np.log(line.seconds(sizes) / seconds)).mean()
    return law if better else line


def _solve(model: Callable[[Vector], Vector], start: Vector, seconds: Vector) -> Vector:
    def residuals(vector: Vector) -> Vector:
        return np.asarray(np.log(model(vector) / seconds), dtype=np.float64)

    # Parameters are logarithms of seconds and of seconds per byte.
    found = least_squares(residuals, start, bounds=(-50.0, 5.0), loss="soft_l1", f_scale=0.05, max_nfev=300)
    return np.asarray(found.x, dtype=np.float64)
