"""When a measurement has been repeated often enough.

The rule: at least ``MIN_SAMPLES``, then until half the range of the middle half of the samples is within the wanted
share of their median, or the cap is reached. The range of the middle half does not mind a few disturbed samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MIN_SAMPLES = 3
SPREAD = 0.05
"""Wanted share; the median of n samples is then good to about SPREAD / sqrt(n)."""


def spread(samples: Sequence[float]) -> float:
    """Return half the range of the middle half of the samples over their median.

    >>> spread([1.0, 0.98, 1.0, 1.02, 9.0])
    0.01
    """
    ordered = sorted(samples)
    middle = statistics.median(ordered)
    if len(ordered) < 2 or middle <= 0:
        return 0.0
    quarter = len(ordered) // 4
    low, high = ordered[quarter], ordered[-1 - quarter]
    if len(ordered) < 5:
        low, high = ordered[0], ordered[-1]
    return round((high - low) / 2 / middle, 12)


def is_enough(samples: Sequence[float], *, cap: int, wanted: float = SPREAD) -> bool:
    """Return whether to stop.

    >>> is_enough([1.0, 1.0], cap=9), is_enough([1.0, 1.0, 1.0], cap=9), is_enough([1.0, 2.0], cap=2)
    (False, True, True)
    """
    if len(samples) >= cap:
        return True
    return len(samples) >= MIN_SAMPLES and spread(samples) <= wanted
