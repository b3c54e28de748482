"""Compiled: range maxima of a table where operators differ from it, as their neighbours have another strategy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.compiled_cache import inlined
from simulator.fast.arrays import Floats, Ints
from simulator.fast.memory import longest


class Changes(NamedTuple):
    """Room for what a table has too little, ascending by operator.

    Attributes:
        at: int64[.]. From which operator on.
        num_bytes: float64[.].
    """

    at: Ints
    num_bytes: Floats


@inlined
def differ(changes: Changes, count: int, index: int, num_bytes: float) -> int:
    """Note, in order, that a table has so much too little from an operator on; return how many changes there are."""
    if num_bytes == 0.0:
        return count
    at = count
    while at > 0 and changes.at[at - 1] > index:
        changes.at[at], changes.num_bytes[at] = changes.at[at - 1], changes.num_bytes[at - 1]
        at -= 1
    changes.at[at], changes.num_bytes[at] = index, num_bytes
    return count + 1


@inlined
def peak_between(maxima: Floats, table: int, kind: int, start: int, ends: int, changes: Changes, count: int) -> float:
    """Return the largest of ``[start, ends)`` from range maxima and what changes from some operators on."""
    highest, more, place = -np.inf, 0.0, start
    for change in range(count):
        if changes.at[change] > place:
            highest = max(highest, more + longest(maxima, table, kind, place, min(ends, changes.at[change])))
            place = changes.at[change]
        if place >= ends:
            break
        more += changes.num_bytes[change]
    return max(highest, more + longest(maxima, table, kind, place, ends)) if place < ends else highest
