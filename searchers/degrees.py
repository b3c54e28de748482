"""The whole numbers that searchers choose from."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.divisors import divisors
from workloads.operators import Workload

TEXT_FAMILIES = ("gpt", "bert", "llama", "t5", "gnmt", "xlnet")


def microbatch_sizes(
    global_batch: int, dp: int = 1, largest: int | None = None, *, powers_of_two: bool = False
) -> list[int]:
    """Return the sizes, in samples per replica, that cut the batch evenly; ascending.

    >>> microbatch_sizes(global_batch=48, dp=4, largest=8)
    [1, 2, 3, 4, 6]
    >>> microbatch_sizes(global_batch=48, dp=4, powers_of_two=True)
    [1, 2, 4]
    """
    if global_batch % dp:
        return []
    sizes = [size for size in divisors(global_batch // dp) if largest is None or size <= largest]
    return [size for size in sizes if size.bit_count() == 1 or not powers_of_two]


def largest_profiled(workload: Workload) -> int:
    """Return the largest microbatch that Aceso profiled: 8 samples a GPU of GPT and T5, 64 of Wide-ResNet."""
    return 8 if workload.family in TEXT_FAMILIES else 64


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
