"""Divisors of batches and of numbers of devices, at once however large they are."""

from __future__ import annotations

from math import isqrt


def divisors(number: int) -> list[int]:
    """Return all divisors of a number of at least 1, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most a limit.

    Args:
        number: At least 1.
        limit: At least 1.

    >>> largest_divisor(1024, 100), largest_divisor(1024, 10**18), largest_divisor(7, 6)
    (64, 1024, 1)
    """
    return max(each for each in divisors(number) if each <= limit)
