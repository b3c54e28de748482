"""The heap of the compiled engine: smallest time first.

What ties is settled in any order, as everything of one instant is.
"""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.engines.compiled_prepare import Floats, Int32s


@inlined
def rise(heap_s: Floats, heap_id: Int32s, heap_place: Int32s, place: int, time_s: float, identity: int) -> None:
    """Put an entry into the hole at ``place``, or above it."""
    while place > 0:
        above = (place - 1) >> 1
        if heap_s[above] <= time_s:
            break
        heap_s[place] = heap_s[above]
        moved = heap_id[above]
        heap_id[place] = moved
        if moved >= 0:
            heap_place[moved] = place
        place = above
    heap_s[place] = time_s
    heap_id[place] = identity
    if identity >= 0:
        heap_place[identity] = place


@inlined
def sink(
    heap_s: Floats, heap_id: Int32s, heap_place: Int32s, size: int, place: int, time_s: float, identity: int
) -> None:
    """Put an entry into the hole at ``place``, or below it."""
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and heap_s[below + 1] < heap_s[below]:
            below += 1
        if heap_s[below] >= time_s:
            break
        heap_s[place] = heap_s[below]
        moved = heap_id[below]
        heap_id[place] = moved
        if moved >= 0:
            heap_place[moved] = place
        place = below
    heap_s[place] = time_s
    heap_id[place] = identity
    if identity >= 0:
        heap_place[identity] = place
