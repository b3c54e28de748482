"""Compiled: range maxima of a table where operators differ from it, as their neighbours have another strategy."""

from __future__ import annotations

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Floats, Ints
from simulator.fast.memory import longest


@inlined
def differ(changes_at: Ints, changes: Floats, count: int, index: int, num_bytes: float) -> int:
    """Note, in order, that a table has so much too little from an operator on; return how many changes there are."""
    if num_bytes == 0.0:
        return count
    at = count
    while at > 0 and changes_at[at - 1] > index:
        changes_at[at], changes[at] = changes_at[at - 1], changes[at - 1]
        at -= 1
    changes_at[at], changes[at] = index, num_bytes
    return count + 1


@inlined
def peak_between(
    maxima: Floats, table: int, kind: int, start: int, ends: int, changes_at: Ints, changes: Floats, count: int
) -> float:
    """Return the largest of ``[start, ends)`` from range maxima and what changes from some operators on."""
    highest, more, place = -np.inf, 0.0, start
    for change in range(count):
        if changes_at[change] > place:
            highest = max(highest, more + longest(maxima, table, kind, place, min(ends, changes_at[change])))
            place = changes_at[change]
        if place >= ends:
            break
        more += changes[change]
    return max(highest, more + longest(maxima, table, kind, place, ends)) if place < ends else highest
