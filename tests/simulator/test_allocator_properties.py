"""The allocator replay on any events: invariants, and agreement with a literal second implementation."""

from __future__ import annotations

import bisect
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.memory.allocator import AllocatorSettings, caching_allocator, replay
from simulator.memory.caching_allocator import CachingAllocator
from simulator.memory.expandable_allocator import ExpandableAllocator
from tests.simulator.literal_allocator import Block, LiteralAllocator

MIB, GIB = 2**20, 2**30

SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 2 * MIB),
    st.integers(MIB - 1024, 12 * MIB),
    st.integers(10 * MIB, 80 * MIB),
    st.sampled_from([MIB, 2 * MIB, 10 * MIB, 19 * MIB, 20 * MIB, 32 * MIB, 52 * MIB]),
)
PLACES = st.integers(0, 30)
# Each step allocates a size, or frees the tensor at that place among the living; frees are as frequent,
# so that there is something to reuse, release and collect.
STEPS = st.lists(
    st.sampled_from("af").flatmap(lambda action: st.tuples(st.just(action), SIZES if action == "a" else PLACES)),
    max_size=80,
)
OPTIONS = st.builds(
    AllocatorSettings,
    max_split_size_bytes=st.sampled_from([None, 22 * MIB, 32 * MIB]),
    roundup_power2_divisions=st.sampled_from([0, 0, 4]),
    expandable_segments=st.booleans(),
    garbage_collection_threshold=st.sampled_from([None, None, 0.3, 0.8]),
)
CAPACITIES = st.sampled_from([0, 30 * MIB, 60 * MIB, 100 * MIB, 101 * MIB, 160 * MIB, 256 * MIB, GIB])


def blocks(allocator: CachingAllocator) -> list[tuple[int, int]]:
    """All blocks, used, unused and unmapped, as (address, size) in order of address."""
    parts = {**allocator.live, **allocator._free_size_at}
    assert len(parts) == len(allocator.live) + len(allocator._free_size_at)
    if isinstance(allocator, ExpandableAllocator):
        parts.update(allocator._unmapped_size_at)
    return sorted(parts.items())


def check(allocator: CachingAllocator) -> None:
    unmapped = sum(allocator._unmapped_size_at.values()) if isinstance(allocator, ExpandableAllocator) else 0
    assert 0 <= allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.capacity_bytes
    assert allocator.allocated_bytes == sum(allocator.live.values())
    assert allocator.reserved_bytes + unmapped == sum(allocator.segments.values())
    # Blocks tile the segments: no overlap, no hole.
    starts = sorted(allocator.segments)
    filled = dict.fromkeys(starts, 0)
    for address, size in blocks(allocator):
        start = starts[bisect.bisect_right(starts, address) - 1]
        assert address == start + filled[start]
        filled[start] += size
    assert filled == allocator.segments
    # No two unused blocks touch, and the lists that are searched hold exactly the unused blocks.
    assert not set(allocator._free_size_at) & set(allocator._free_start_of)
    listed = [key for pool in (allocator._small, allocator._large) for key in pool.free]
    assert sorted(listed) == sorted(size << 64 | address for address, size in allocator._free_size_at.items())
    assert all(pool.free == sorted(pool.free) for pool in (allocator._small, allocator._large))


@settings(max_examples=150, deadline=None)
@given(STEPS, CAPACITIES, OPTIONS)
def test_blocks_tile_their_segments_and_emptying_gives_everything_back(
    steps: list[tuple[str, int]], capacity: int, options: AllocatorSettings
) -> None:
    allocator = caching_allocator(capacity, options)
    alive: list[int] = []
    for action, value in steps:
        if action == "f":
            if alive:
                allocator.free(alive.pop(value % len(alive)))
        elif (address := allocator.allocate(value)) is not None:
            alive.append(address)
        check(allocator)
    for address in alive:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    check(allocator)
    allocator.empty_cache()
    check(allocator)
    assert allocator.reserved_bytes == 0
    if isinstance(allocator, ExpandableAllocator):  # a range whose first page never fitted stays, empty
        assert blocks(allocator) == sorted(allocator._unmapped_size_at.items())
    else:
        assert not allocator.segments


def as_events(steps: list[tuple[str, int]]) -> tuple[Any, Any, Any]:
    sizes: list[int] = []
    ids: list[int] = []
    allocates: list[bool] = []
    alive: list[int] = []
    for action, value in steps:
        if action == "f" and not alive:
            continue
        tensor = alive.pop(value % len(alive)) if action == "f" else len(ids)
        if action == "a":
            alive.append(tensor)
        sizes.append(value if action == "a" else 0)
        ids.append(tensor)
        allocates.append(action == "a")
    return np.array(sizes, dtype=np.int64), np.array(ids, dtype=np.int32), np.array(allocates, dtype=np.bool_)


def compare(steps: list[tuple[str, int]], capacity: int, options: AllocatorSettings) -> CachingAllocator:
    """Drive both implementations, past failures, and compare them after each step."""
    allocator, slow = caching_allocator(capacity, options), LiteralAllocator(capacity, options)
    alive: list[tuple[int, Block]] = []
    for action, value in steps:
        if action == "a" and value > 0:
            address, block = allocator.allocate(value), slow.malloc(value)
            assert (address is None) == (block is None)
            if address is not None and block is not None:
                alive.append((address, block))
        elif action == "f" and alive:
            address, block = alive.pop(value % len(alive))
            allocator.free(address)
            slow.free(block)
        assert allocator.allocated_bytes == slow.allocated
        assert allocator.reserved_bytes == slow.reserved
        assert allocator.largest_free_bytes() == max((block.size for block in slow.unused), default=0)
    return allocator


@settings(max_examples=200, deadline=None)
@given(STEPS, CAPACITIES, OPTIONS)
def test_allocators_agree_with_a_literal_second_implementation(
    steps: list[tuple[str, int]], capacity: int, options: AllocatorSettings
) -> None:
    compare(steps, capacity, options)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("max_split_mib", [None, 24])
def test_allocators_agree_when_memory_is_short(
    expandable: bool, threshold: float | None, max_split_mib: int | None
) -> None:
    options = AllocatorSettings(
        expandable_segments=expandable,
        garbage_collection_threshold=threshold,
        max_split_size_bytes=None if max_split_mib is None else max_split_mib * MIB,
    )
    num_retries = num_releases = 0
    for seed in range(12):
        source = random.Random(seed)
        steps = []
        for _ in range(250):  # sizes spread evenly over their logarithm, from 512 bytes to 64 MiB
            action = source.choice("aaff")
            steps.append((action, int(512 * 2 ** source.uniform(0, 17)) if action == "a" else source.randrange(100)))
        allocator = compare(steps, source.randint(50, 200) * MIB, options)
        num_retries += allocator.num_retries
        num_releases += allocator.num_segment_releases
    assert num_retries > 0 and num_releases > 0, "the steps must reach the paths they are meant for"


@settings(max_examples=100, deadline=None)
@given(STEPS, CAPACITIES, OPTIONS)
def test_a_replay_reports_what_the_allocator_does(
    steps: list[tuple[str, int]], capacity: int, options: AllocatorSettings
) -> None:
    sizes, ids, allocates = as_events(steps)
    result = replay(sizes, ids, allocates, capacity, options, record_timeline=True)
    allocator = caching_allocator(capacity, options)
    addresses: dict[int, int] = {}
    allocated, reserved = [0], [0]
    failed_at = None
    for event, (size, tensor) in enumerate(zip(sizes.tolist(), ids.tolist(), strict=True)):
        if allocates[event]:
            address = allocator.allocate(size)
            if address is None:
                failed_at = event
                break
            addresses[tensor] = address
        else:
            allocator.free(addresses.pop(tensor))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    assert (None if result.failure is None else result.failure.event) == failed_at
    assert result.allocated_after_bytes is not None and result.reserved_after_bytes is not None
    assert result.allocated_after_bytes.tolist()[:failed_at] == allocated[1:]
    assert result.reserved_after_bytes.tolist()[:failed_at] == reserved[1:]
    assert result.reserved_peak_bytes == max(reserved)
    assert result.reserved_peak_event == reserved.index(max(reserved)) - 1
    assert result.allocated_peak_bytes == max(allocated)
    assert result.allocated_peak_event == allocated.index(max(allocated)) - 1
    assert result.allocated_at_reserved_peak_bytes == allocated[result.reserved_peak_event + 1]


@settings(max_examples=50, deadline=None)
@given(STEPS, OPTIONS)
def test_the_replay_is_deterministic_and_knows_live_bytes(
    steps: list[tuple[str, int]], options: AllocatorSettings
) -> None:
    events = as_events(steps)
    result = replay(*events, 2**50, options)
    assert result == replay(*events, 2**50, options)
    _, ids, allocates = events
    size_of = {int(tensor): int(size) for size, tensor, allocs in zip(*events, strict=True) if allocs}
    signed = [size_of[int(t)] if allocs else -size_of[int(t)] for t, allocs in zip(ids, allocates, strict=True)]
    assert result.requested_peak_bytes == max([0, *np.cumsum(signed).tolist()])
    assert result.requested_peak_bytes <= result.allocated_peak_bytes <= result.reserved_peak_bytes
