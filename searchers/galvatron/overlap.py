"""Two streams that slow each other while both run."""

from __future__ import annotations


def overlapped_s(computation_s: float, communication_s: float, factors: tuple[float, float]) -> float:
    """Return seconds of two streams that slow each other while both run.

    >>> overlapped_s(2.0, 1.0, (1.3, 1.3)), overlapped_s(1.0, 2.0, (1.0, 1.0))
    (2.3, 2.0)
    """
    slow_computation, slow_communication = computation_s * factors[0], communication_s * factors[1]
    if slow_computation >= slow_communication:
        return slow_communication + (computation_s - slow_communication / factors[0])
    return slow_computation + (communication_s - slow_computation / factors[1])


def stretch_s(computation_s: float, communication_s: float, factors: tuple[float, float]) -> float:
    """Return the seconds by which a computation ends later for the communication beside it.

    >>> stretch_s(2.0, 1.0, (1.5, 1.5)), stretch_s(2.0, 8.0, (1.5, 1.5))
    (0.5, 1.0)
    """
    return min(computation_s * (factors[0] - 1), communication_s * factors[1] * (1 - 1 / factors[0]))
