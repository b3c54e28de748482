"""Replay of PyTorch's CUDA caching allocator: from requests to reserved bytes.

PyTorch never asks the device for what a tensor needs. It rounds requests up, takes them from
*segments* it holds and gives segments back only when it must. A plan fits a GPU when the segments
do, so the replay, not the sum of tensors, decides `fits`::

    segment (reserved)  |<------------------------- 20 MiB ------------------------->|
    blocks              | used 4 MiB | free 3 MiB | used 6 MiB |     free 7 MiB      |
    allocated 10 MiB, reserved 20 MiB: a request for 8 MiB needs a new segment

The allocators themselves are in `simulator.memory.caching_allocator` and `simulator.memory.expandable_allocator`.
One stream: blocks that several streams use (``record_stream``), private pools of CUDA graphs and
out-of-memory observers are left out.

Source:
    PyTorch 2.x, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, restated in our
    own words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.memory.caching_allocator import AllocatorSettings, CachingAllocator
from simulator.memory.expandable_allocator import ExpandableAllocator

__all__ = ["AllocationFailure", "AllocatorResult", "AllocatorSettings", "caching_allocator", "replay"]

UNLIMITED_BYTES = 1 << 60
"""Capacity of a device on which everything fits."""


@dataclass(frozen=True, kw_only=True)
class AllocationFailure:
    """An allocation that did not fit, after every unused segment was given back.

    Attributes:
        event: Index of the event.
        tensor_id: The tensor that was to be allocated.
        requested_bytes: What it asked for.
        allocated_bytes: Blocks in use at that moment.
        reserved_bytes: Segments held at that moment.
        unreserved_bytes: Capacity less segments held.
        largest_free_bytes: Largest unused block within the segments held.
    """

    event: int
    tensor_id: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    unreserved_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True, kw_only=True)
class AllocatorResult:
    """What a replay found. Peaks name the first event after which they held; -1 if no event did.

    Attributes:
        reserved_peak_bytes, reserved_peak_event: Most bytes of segments held.
        allocated_peak_bytes, allocated_peak_event: Most bytes of blocks in use.
        requested_peak_bytes, requested_peak_event: Most bytes that tensors asked for.
        allocated_at_reserved_peak_bytes: Blocks in use at the first moment of the reserved peak.
        num_segment_allocations: Segments taken; with expandable segments, mappings of pages.
        num_segment_releases: Segments given back; with expandable segments, unmappings.
        num_retries: Times that all unused segments were given back to make room.
        failure: The allocation that did not fit, which ends the replay, or None.
        allocated_after_bytes: int64[E] blocks in use after each event, if asked for; what follows a
            failure stays at its level.
        reserved_after_bytes: int64[E] segments held after each event, likewise.
    """

    reserved_peak_bytes: int
    reserved_peak_event: int
    allocated_peak_bytes: int
    allocated_peak_event: int
    requested_peak_bytes: int
    requested_peak_event: int
    allocated_at_reserved_peak_bytes: int
    num_segment_allocations: int
    num_segment_releases: int
    num_retries: int
    failure: AllocationFailure | None
    allocated_after_bytes: NDArray[np.int64] | None = None
    reserved_after_bytes: NDArray[np.int64] | None = None

    @property
    def fragmentation(self) -> float:
        """(reserved - allocated) / reserved at the peak of reserved; 0 if nothing was reserved."""
        if self.reserved_peak_bytes == 0:
            return 0.0
        return (self.reserved_peak_bytes - self.allocated_at_reserved_peak_bytes) / self.reserved_peak_bytes


def replay(
    sizes_bytes: NDArray[np.int64],
    tensor_ids: NDArray[np.int32],
    is_alloc: NDArray[np.bool_],
    capacity_bytes: int,
    settings: AllocatorSettings | None = None,
    *,
    record_timeline: bool = False,
) -> AllocatorResult:
    """Replay allocations and frees in the order the host issued them.

    Args:
        sizes_bytes: int64[E] requested bytes; ignored where the event is a free.
        tensor_ids: int32[E] which tensor; an id may be used again after its free.
        is_alloc: bool[E] allocation (True) or free (False).
        capacity_bytes: Most bytes of segments the device can hold, >= 0.
        settings: Allocator options; None for PyTorch's defaults.
        record_timeline: Return allocated and reserved bytes after each event.

    Returns:
        Peaks and when they were reached; an allocation that does not fit ends the replay and is a
        result, not an error. Memory grows with the tensors alive at once.

    >>> events = dict(sizes_bytes=np.array([4, 3 * 2**20, 0]), tensor_ids=np.array([0, 1, 0]))
    >>> result = replay(**events, is_alloc=np.array([True, True, False]), capacity_bytes=2**30)
    >>> result.reserved_peak_bytes / 2**20, result.allocated_peak_bytes - 3 * 2**20
    (22.0, 512)
    """
    assert sizes_bytes.shape == tensor_ids.shape == is_alloc.shape == (len(is_alloc),), "one entry per event"
    allocator = caching_allocator(capacity_bytes, settings)
    allocate, free = allocator.allocate, allocator.free
    alive: dict[int, tuple[int, int]] = {}  # tensor id -> address, requested bytes
    requested = 0
    reserved_peak = allocated_peak = requested_peak = allocated_at_reserved_peak = 0
    reserved_event = allocated_event = requested_event = -1
    failure: AllocationFailure | None = None
    allocated_after: list[int] = []
    reserved_after: list[int] = []
    events = zip(sizes_bytes.tolist(), tensor_ids.tolist(), is_alloc.tolist(), strict=True)
    for event, (size, tensor, allocates) in enumerate(events):
        if allocates:
            assert tensor not in alive, f"event {event} allocates tensor {tensor}, which is alive"
            address = allocate(size)
            if address is None:
                failure = AllocationFailure(
                    event=event,
                    tensor_id=tensor,
                    requested_bytes=size,
                    allocated_bytes=allocator.allocated_bytes,
                    reserved_bytes=allocator.reserved_bytes,
                    unreserved_bytes=capacity_bytes - allocator.reserved_bytes,
                    largest_free_bytes=allocator.largest_free_bytes(),
                )
                break
            alive[tensor] = (address, size)
            requested += size
            if requested > requested_peak:
                requested_peak, requested_event = requested, event
            if allocator.allocated_bytes > allocated_peak:
                allocated_peak, allocated_event = allocator.allocated_bytes, event
            if allocator.reserved_bytes > reserved_peak:
                reserved_peak, reserved_event = allocator.reserved_bytes, event
                allocated_at_reserved_peak = allocator.allocated_bytes
        else:
            assert tensor in alive, f"event {event} frees tensor {tensor}, which is not alive"
            address, size = alive.pop(tensor)
            free(address)
            requested -= size
        if record_timeline:
            allocated_after.append(allocator.allocated_bytes)
            reserved_after.append(allocator.reserved_bytes)
    if record_timeline:
        num_missing = len(is_alloc) - len(allocated_after)
        allocated_after += [allocator.allocated_bytes] * num_missing
        reserved_after += [allocator.reserved_bytes] * num_missing
    return AllocatorResult(
        reserved_peak_bytes=reserved_peak,
        reserved_peak_event=reserved_event,
        allocated_peak_bytes=allocated_peak,
        allocated_peak_event=allocated_event,
        requested_peak_bytes=requested_peak,
        requested_peak_event=requested_event,
        allocated_at_reserved_peak_bytes=allocated_at_reserved_peak,
        num_segment_allocations=allocator.num_segment_allocations,
        num_segment_releases=allocator.num_segment_releases,
        num_retries=allocator.num_retries,
        failure=failure,
        allocated_after_bytes=np.array(allocated_after, dtype=np.int64) if record_timeline else None,
        reserved_after_bytes=np.array(reserved_after, dtype=np.int64) if record_timeline else None,
    )


def replay_compiled(
    sizes_bytes: NDArray[np.int64], tensor_ids: NDArray[np.int32], is_alloc: NDArray[np.bool_], capacity_bytes: int
) -> AllocatorResult:
    """Return what ``replay`` does with default settings; compiled, for long lists of events."""
    from simulator.memory import compiled_allocator as words

    found = words.replay_events(
        np.ascontiguousarray(sizes_bytes, dtype=np.int64),
        np.ascontiguousarray(tensor_ids, dtype=np.int64),
        np.ascontiguousarray(is_alloc, dtype=np.bool_),
        capacity_bytes,
    ).tolist()
    failed = found[words.FAILED_EVENT]
    failure = None
    if failed >= 0:
        failure = AllocationFailure(
            event=failed,
            tensor_id=int(tensor_ids[failed]),
            requested_bytes=int(sizes_bytes[failed]),
            allocated_bytes=found[words.ALLOCATED],
            reserved_bytes=found[words.RESERVED],
            unreserved_bytes=capacity_bytes - found[words.RESERVED],
            largest_free_bytes=found[words.LARGEST_FREE],
        )
    return AllocatorResult(
        reserved_peak_bytes=found[words.RESERVED_PEAK],
        reserved_peak_event=found[words.RESERVED_EVENT],
        allocated_peak_bytes=found[words.ALLOCATED_PEAK],
        allocated_peak_event=found[words.ALLOCATED_EVENT],
        requested_peak_bytes=found[words.REQUESTED_PEAK],
        requested_peak_event=found[words.REQUESTED_EVENT],
        allocated_at_reserved_peak_bytes=found[words.ALLOCATED_AT_RESERVED_PEAK],
        num_segment_allocations=found[words.ALLOCATIONS],
        num_segment_releases=found[words.RELEASES],
        num_retries=found[words.RETRIES],
        failure=failure,
    )


def caching_allocator(capacity_bytes: int, settings: AllocatorSettings | None = None) -> CachingAllocator:
    """Return the allocator that the settings ask for, empty."""
    settings = settings or AllocatorSettings()
    if settings.expandable_segments:
        return ExpandableAllocator(capacity_bytes=capacity_bytes, settings=settings)
    return CachingAllocator(capacity_bytes=capacity_bytes, settings=settings)
