"""Closed form of memory under the interleaved schedule: what each stage of a rank holds at each of its backward passes.

A rank runs its stages in runs of as many microbatches as there are ranks, forward from its first stage, backward from
its last. So what it holds changes from one backward pass to the next by what the forward pass between them brings and
what the first of them frees, the same until one of the two comes to its next stage: a line, whose ends are looked at.

A group of backward passes, one run of each stage, meets no more than the one before it did, but for the gradients that
the first group makes; so two groups stand for all.

Source: the order that ``simulator.schedules.interleaved`` makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Columns of what a stage holds, in bytes: a microbatch between its passes, and the last one; what a backward pass needs
# besides, and what its end needs without that microbatch; gradients that the first one makes. See ``HeldBytes``.
KEPT, LAST_KEPT, WORKING, LAST, ANEW = range(5)
FLIGHT = 5


def interleaved_peak_bytes(held: NDArray[np.float64], rank: int, num_ranks: int, num_microbatches: int) -> float:
    """Return the most that a rank holds beyond the states of its stages, less gradients that no pass has begun to make.

    Args:
        held: float64[chunks, FLIGHT]. The rank's stages.
        rank, num_ranks: Its number, and of how many.
        num_microbatches: A multiple of ``num_ranks``.

    >>> both = np.array([[1.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    >>> [interleaved_peak_bytes(both, rank, 4, 8) for rank in range(4)]
    [11.0, 9.0, 7.0, 5.0]
    """
    num_chunks = len(held)
    group, total = num_ranks * num_chunks, num_microbatches * num_chunks
    warmup = 2 * (num_ranks - rank - 1) + group - num_ranks
    if num_chunks == 1:
        warmup = num_ranks - rank - 1
    elif num_microbatches <= num_ranks:  # All forwards come first.
        warmup = total
    last_group = total - group
    pending = 0.0
    for chunk in range(num_chunks):
        pending += held[chunk, ANEW]
    end = min(total, 2 * group if pending > 0.0 else group)

    # Runs of forward passes before the first backward pass: ``left`` are those of a run that are to come.
    forward, backward = min(warmup + 1, total), 0
    kept, chunk, left, before = 0.0, 0, num_ranks, forward
    while before > 0:
        taken = min(left, before)
        kept += taken * held[chunk, KEPT]
        before -= taken
        left -= taken
        if left == 0:
            if forward - before > last_group:
                kept += held[chunk, LAST_KEPT] - held[chunk, KEPT]
            chunk, left = chunk + 1 if chunk + 1 < num_chunks else 0, num_ranks

    most, own, own_left = 0.0, num_chunks - 1, num_ranks
    while backward < end:
        if own_left == num_ranks and backward < group:
            pending -= held[own, ANEW]
        steps, change = own_left, -held[own, KEPT]
        if forward < total:
            steps = min(steps, left)
            change += held[chunk, KEPT]
        highest = kept + max(0.0, (steps - 1) * change)
        most = max(most, highest - pending + max(held[own, WORKING], held[own, LAST] - held[own, KEPT]))
        kept += steps * change
        if forward < total:
            forward += steps
            left -= steps
            if left == 0:
                if forward > last_group:
                    kept += held[chunk, LAST_KEPT] - held[chunk, KEPT]
                chunk, left = chunk + 1 if chunk + 1 < num_chunks else 0, num_ranks
        backward += steps
        own_left -= steps
        if own_left == 0:
            if backward > last_group:
                kept -= held[own, LAST_KEPT] - held[own, KEPT]
            own, own_left = own - 1 if own > 0 else num_chunks - 1, num_ranks
    return float(most)
