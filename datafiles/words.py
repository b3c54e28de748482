"""Counts in words."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number of things in words.

    Args:
        number: How many.
        one: What one of them is called, with its verb where there is one.
        several: The same of several; that of one and an s if left out.

    >>> counted(1, "run"), counted(1200, "run"), counted(0, "process", "processes")
    ('1 run', '1,200 runs', '0 processes')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"
