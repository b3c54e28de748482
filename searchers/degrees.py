"""The whole numbers that searchers choose from."""

from __future__ import annotations

from collections.abc import Iterator


def microbatch_sizes(global_batch: int, dp: int, largest: int | None = None) -> list[int]:
    """Return the powers of two, in samples per replica, that cut the batch evenly; ascending.

    >>> microbatch_sizes(global_batch=48, dp=4, largest=8)
    [1, 2, 4]
    """
    sizes, size = [], 1
    while size * dp <= global_batch and (largest is None or size <= largest):
        if global_batch % (size * dp) == 0:
            sizes.append(size)
        size *= 2
    return sizes


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as an ordered sum of ``parts`` positive numbers.

    >>> list(compositions(4, 2))
    [(1, 3), (2, 2), (3, 1)]
    """
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)
