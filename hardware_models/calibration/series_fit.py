"""The law of one measured series: time by message size, as a latency and a bandwidth, once for small and once for
large messages.

A library has a quick way for small messages and a wide one for large; time is the smaller of two lines. One line
leaves 10 % and more between 64 KiB and 4 MiB.

Points that scatter, or that grow faster than their sizes, lead to constants that no link has: a latency of nothing, or
a rate that is drawn through one point. Such a law is fitted again within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

Vector = npt.NDArray[np.float64]
LOWEST, HIGHEST = -50.0, 5.0
"""Logarithms of seconds and of seconds per byte, where nothing else bounds them."""
ENOUGH = 5
"""Points below which one line is fitted: two need four numbers."""
LEAST_LATENCY = 0.01
"""Of the quickest message's time. Measured series have 0.012 and more, even all-reduces from 1 MiB on (Aceso)."""
HIGHEST_RATE = 100.0
"""Over the most that a message got. Measured series have 1.6 at most; a rate that adds less than a hundredth to the
longest time cannot be seen."""
SUPPORT, STEEPEST = 3, 100.0
"""Sizes from which on the line of small messages is more than drawn through its points; one of fewer sizes has no less
than this part of the large messages' rate (three in four measured series have 1/40 and more)."""


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

    def is_plausible(self, sizes: Vector, seconds: Vector) -> bool:
        """Return whether the points that it was fitted to can say what it says of latencies and rates."""
        large = self.large_latency_s + sizes / self.large_bytes_per_s
        num_small = int((self.latency_s + sizes / self.bytes_per_s < large).sum())
        return (
            self.latency_s >= LEAST_LATENCY * float(seconds.min())
            and self.large_bytes_per_s <= HIGHEST_RATE * float((sizes / seconds).max())
            and (not 0 < num_small < SUPPORT or self.bytes_per_s * STEEPEST >= self.large_bytes_per_s)
        )

    def knows_rate(self, sizes: Vector, seconds: Vector) -> bool:
        """Return whether times grow with sizes, so that the rate of large messages is more than its bound."""
        return self.large_bytes_per_s < 0.9 * HIGHEST_RATE * float((sizes / seconds).max())


def fit_series(points: Sequence[tuple[float, float]]) -> SeriesLaw:
    """Return the law of ``(bytes, seconds)`` points, robustly fitted to their logarithms.

    Bounds move the way of a fit and where it ends, so they are there only where it ends beyond them without.

    Raises:
        ValueError: If there are fewer than two sizes.
    """
    sizes, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    if len(set(sizes)) < 2:
        raise ValueError(f"a latency and a bandwidth need at least 2 sizes, got {len(set(sizes))}")
    law = _fitted(sizes, seconds)
    if law.is_plausible(sizes, seconds):
        return law
    least = np.log([LEAST_LATENCY * seconds.min(), (seconds / sizes).min() / HIGHEST_RATE])
    return _fitted(sizes, seconds, (float(least[0]), float(least[1])), STEEPEST)


def _fitted(
    sizes: Vector, seconds: Vector, least: tuple[float, float] = (LOWEST, LOWEST), steepest: float = np.inf
) -> SeriesLaw:
    """Return the law with bounds.

    Args:
        sizes, seconds: Points.
        least: Logarithms of the least latency and of the least slope.
        steepest: What the slope of small messages may be, over that of one line through all points.
    """
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 1e-3 * seconds[-1] / sizes[-1])
    start = np.log([max(seconds.min() * 0.9, 1e-9), slope])

    def single(vector: Vector) -> Vector:
        return np.asarray(np.exp(vector[0]) + np.exp(vector[1]) * sizes)

    one = _solve(single, start, seconds, least, HIGHEST)
    line = SeriesLaw(float(np.exp(one[0])), float(np.exp(-one[1])), float(np.exp(one[0])), float(np.exp(-one[1])))
    if len(set(sizes)) < ENOUGH:
        return line

    def two(vector: Vector) -> Vector:
        # The second line: a latency above, a slope below the first's.
        low, high = np.exp(vector[0]), np.exp(vector[0]) + np.exp(vector[2])
        steep, flat = np.exp(vector[1]) + np.exp(vector[3]), np.exp(vector[1])
        return np.asarray(np.minimum(low + steep * sizes, high + flat * sizes))

    begin = np.array([start[0], one[1], start[0], one[1]])
    highest = min(HIGHEST, float(one[1]) + np.log(steepest))
    found = _solve(two, begin, seconds, (*least, LOWEST, LOWEST), (HIGHEST, HIGHEST, HIGHEST, highest))
    law = SeriesLaw(
        float(np.exp(found[0])),
        float(1 / (np.exp(found[1]) + np.exp(found[3]))),
        float(np.exp(found[0]) + np.exp(found[2])),
        float(np.exp(-found[1])),
    )
    better = np.abs(np.log(law.seconds(sizes) / seconds)).mean() < np.abs(np.log(line.seconds(sizes) / seconds)).mean()
    return law if better else line


def _solve(
    model: Callable[[Vector], Vector],
    start: Vector,
    seconds: Vector,
    lowest: tuple[float, ...],
    highest: float | tuple[float, ...],
) -> Vector:
    def residuals(vector: Vector) -> Vector:
        return np.asarray(np.log(model(vector) / seconds), dtype=np.float64)

    # Parameters are logarithms of seconds and of seconds per byte.
    within = np.clip(start, np.array(lowest) + 1e-3, np.array(highest) - 1e-3)
    found = least_squares(residuals, within, bounds=(lowest, highest), loss="soft_l1", f_scale=0.05, max_nfev=300)
    return np.asarray(found.x, dtype=np.float64)
