"""The divisor that a refused batch could have had."""

from __future__ import annotations

from math import isqrt


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most a limit.

    Args:
        number: At least 1.
        limit: At least 1.

    >>> largest_divisor(1024, 100), largest_divisor(1024, 10**18), largest_divisor(7, 6)
    (64, 1024, 1)
    """
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return max(each for each in (*small, *(number // each for each in small)) if each <= limit)
