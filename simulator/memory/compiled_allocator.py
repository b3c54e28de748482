"""The replay of the caching allocator with default settings, compiled: the same peaks, a hundred times sooner.

``simulator.memory.caching_allocator`` says the rules readably; numbers in comments are its rules. Here a block knows
its neighbours in its segment, and unused blocks of a pool stand in one array sorted by size, then address.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Ints = NDArray[np.int64]

# As in ``caching_allocator``; numba looks only at a file's own date.
_MIB = 2**20
_SMALL_BYTES, _SMALL_SEGMENT_BYTES, _LARGE_SEGMENT_BYTES = _MIB, 2 * _MIB, 20 * _MIB
_MIN_LARGE_REQUEST_BYTES, _ROUND_LARGE_BYTES, _GUARD_BYTES = 10 * _MIB, 2 * _MIB, 512

# What is returned.
(
    RESERVED_PEAK,
    RESERVED_EVENT,
    ALLOCATED_PEAK,
    ALLOCATED_EVENT,
    REQUESTED_PEAK,
    REQUESTED_EVENT,
    ALLOCATED_AT_RESERVED_PEAK,
    ALLOCATIONS,
    RELEASES,
    RETRIES,
    FAILED_EVENT,
    ALLOCATED,
    RESERVED,
    LARGEST_FREE,
) = range(14)
FOUND = 14


@compiled
def _place(free: Ints, count: int, sizes: Ints, starts: Ints, size: int, start: int) -> int:
    """Return where a block of that size and start stands, or would stand, among the unused ones."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        block = free[middle]
        if sizes[block] < size or (sizes[block] == size and starts[block] < start):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def replay_events(sizes_bytes: Ints, tensor_ids: Ints, is_alloc: NDArray[np.bool_], capacity_bytes: int) -> Ints:
    """Return what a replay finds: int64[FOUND].

    Args:
        sizes_bytes, tensor_ids, is_alloc: [E]. As in ``allocator.replay``; ids from 0 on.
        capacity_bytes: Most bytes of segments.
    """
    found = np.zeros(FOUND, np.int64)
    found[RESERVED_EVENT] = found[ALLOCATED_EVENT] = found[REQUESTED_EVENT] = found[FAILED_EVENT] = -1
    num_events = len(is_alloc)
    most = 2 * num_events + 2
    starts, sizes = np.empty(most, np.int64), np.empty(most, np.int64)
    before, after = np.empty(most, np.int64), np.empty(most, np.int64)
    unused = np.empty(most, np.bool_)
    spare = np.empty(most, np.int64)
    num_spare, num_blocks = 0, 0
    free = np.empty((2, num_events + 1), np.int64)
    num_free = np.zeros(2, np.int64)
    most_tensors = 0
    for event in range(num_events):
        most_tensors = max(most_tensors, tensor_ids[event] + 1)
    block_of = np.full(most_tensors, -1, np.int64)
    asked = np.zeros(most_tensors, np.int64)
    requested, allocated, reserved, next_address = 0, 0, 0, 0
    for event in range(num_events):
        tensor = tensor_ids[event]
        if is_alloc[event]:
            wanted = sizes_bytes[event]
            asked[tensor] = wanted
            block = -1
            if wanted > 0:
                size = (wanted + 511) & -512  # (1)
                pool = 0 if size <= _SMALL_BYTES else 1  # (2)
                place = _place(free[pool], num_free[pool], sizes, starts, size, -1)  # (3)
                if place < num_free[pool]:
                    block = free[pool, place]
                    for at in range(place, num_free[pool] - 1):
                        free[pool, at] = free[pool, at + 1]
                    num_free[pool] -= 1
                else:  # (4)
                    segment = _SMALL_SEGMENT_BYTES
                    if pool == 1:
                        segment = _LARGE_SEGMENT_BYTES
                        if size >= _MIN_LARGE_REQUEST_BYTES:
                            segment = -(-size // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES
                    if reserved > capacity_bytes - segment:
                        found[RETRIES] += 1
                        for other in range(2):
                            left = 0
                            for at in range(num_free[other]):
                                candidate = free[other, at]
                                if before[candidate] < 0 and after[candidate] < 0:
                                    reserved -= sizes[candidate]
                                    found[RELEASES] += 1
                                    spare[num_spare] = candidate
                                    num_spare += 1
                                else:
                                    free[other, left] = candidate
                                    left += 1
                            num_free[other] = left
                        if reserved > capacity_bytes - segment:
                            found[FAILED_EVENT] = event
                            break
                    if num_spare > 0:
                        num_spare -= 1
                        block = spare[num_spare]
                    else:
                        block = num_blocks
                        num_blocks += 1
                    starts[block], sizes[block] = next_address, segment
                    before[block] = after[block] = -1
                    next_address += segment + _GUARD_BYTES
                    reserved += segment
                    found[ALLOCATIONS] += 1
                unused[block] = False
                remainder = sizes[block] - size
                if remainder > (_SMALL_BYTES if pool == 1 else 0):  # (5)
                    if num_spare > 0:
                        num_spare -= 1
                        rest = spare[num_spare]
                    else:
                        rest = num_blocks
                        num_blocks += 1
                    starts[rest], sizes[rest], unused[rest] = starts[block] + size, remainder, True
                    before[rest], after[rest] = block, after[block]
                    if after[block] >= 0:
                        before[after[block]] = rest
                    after[block] = rest
                    sizes[block] = size
                    place = _place(free[pool], num_free[pool], sizes, starts, remainder, starts[rest])
                    for at in range(num_free[pool], place, -1):
                        free[pool, at] = free[pool, at - 1]
                    free[pool, place] = rest
                    num_free[pool] += 1
                allocated += sizes[block]
            block_of[tensor] = block
            requested += wanted
            if requested > found[REQUESTED_PEAK]:
                found[REQUESTED_PEAK], found[REQUESTED_EVENT] = requested, event
            if allocated > found[ALLOCATED_PEAK]:
                found[ALLOCATED_PEAK], found[ALLOCATED_EVENT] = allocated, event
            if reserved > found[RESERVED_PEAK]:
                found[RESERVED_PEAK], found[RESERVED_EVENT] = reserved, event
                found[ALLOCATED_AT_RESERVED_PEAK] = allocated
        else:
            block = block_of[tensor]
            block_of[tensor] = -1
            requested -= asked[tensor]
            if block >= 0:  # (6)
                pool = 0 if sizes[block] <= _SMALL_BYTES else 1
                allocated -= sizes[block]
                for neighbour in (after[block], before[block]):
                    if neighbour < 0 or not unused[neighbour]:
                        continue
                    place = _place(free[pool], num_free[pool], sizes, starts, sizes[neighbour], starts[neighbour])
                    for at in range(place, num_free[pool] - 1):
                        free[pool, at] = free[pool, at + 1]
                    num_free[pool] -= 1
                    if neighbour == after[block]:
                        after[block] = after[neighbour]
                        if after[block] >= 0:
                            before[after[block]] = block
                    else:
                        starts[block] = starts[neighbour]
                        before[block] = before[neighbour]
                        if before[block] >= 0:
                            after[before[block]] = block
                    sizes[block] += sizes[neighbour]
                    spare[num_spare] = neighbour
                    num_spare += 1
                unused[block] = True
                place = _place(free[pool], num_free[pool], sizes, starts, sizes[block], starts[block])
                for at in range(num_free[pool], place, -1):
                    free[pool, at] = free[pool, at - 1]
                free[pool, place] = block
                num_free[pool] += 1
    found[ALLOCATED], found[RESERVED] = allocated, reserved
    for pool in range(2):
        if num_free[pool]:
            found[LARGEST_FREE] = max(found[LARGEST_FREE], sizes[free[pool, num_free[pool] - 1]])
    return found
