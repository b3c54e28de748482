"""The allocator replay: each documented rule, with figures worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.memory.allocator import AllocatorResult, AllocatorSettings, caching_allocator, replay
from simulator.memory.caching_allocator import rounded_bytes

MIB, GIB = 2**20, 2**30


def run(*steps: int | str, capacity: int = 64 * GIB, **options: Any) -> AllocatorResult:
    """Replay steps: a number allocates that many bytes as tensor 0, 1, ...; ``"-2"`` frees tensor 2."""
    sizes: list[int] = []
    ids: list[int] = []
    allocates: list[bool] = []
    for step in steps:
        is_alloc = isinstance(step, int)
        sizes.append(step if isinstance(step, int) else 0)
        ids.append(sum(allocates) if is_alloc else int(str(step)[1:]))
        allocates.append(is_alloc)
    return replay(
        np.array(sizes, dtype=np.int64),
        np.array(ids, dtype=np.int32),
        np.array(allocates, dtype=np.bool_),
        capacity,
        AllocatorSettings(**options),
        record_timeline=True,
    )


def reserved_mib(result: AllocatorResult) -> list[float]:
    assert result.reserved_after_bytes is not None
    return [float(value) / MIB for value in result.reserved_after_bytes]


# Rule 1: rounding


@pytest.mark.parametrize(
    ("requested", "divisions", "rounded"),
    [
        (1, 0, 512), (512, 0, 512), (513, 0, 1024), (3 * MIB + 1, 0, 3 * MIB + 512),
        (1200, 1, 1536),  # one division is none
        (1200, 4, 1536),  # not above 512 * 4: multiples of 512
        (2049, 4, 2560),  # 2048 in quarters: steps of 512
        (9 * MIB, 2, 12 * MIB), (9 * MIB, 4, 10 * MIB), (9 * MIB, 8, 9 * MIB), (8 * MIB, 2, 8 * MIB),
        (15 * MIB, 2, 16 * MIB),
    ],
)  # fmt: skip
def test_requests_are_rounded_to_512_bytes_or_power_of_two_divisions(
    requested: int, divisions: int, rounded: int
) -> None:
    assert rounded_bytes(requested, divisions) == rounded
    assert run(requested, roundup_power2_divisions=divisions).allocated_peak_bytes == rounded


def test_a_request_of_zero_bytes_takes_nothing() -> None:
    result = run(0, "-0")
    assert (result.reserved_peak_bytes, result.allocated_peak_bytes, result.reserved_peak_event) == (0, 0, -1)
    assert result.fragmentation == 0.0


# Rule 2: pools


def test_small_requests_share_a_2_mib_segment_and_large_ones_do_not_use_it() -> None:
    assert reserved_mib(run(MIB, MIB, 512)) == [2, 2, 4]
    assert reserved_mib(run(512, MIB + 1)) == [2, 22]


def test_small_requests_never_take_large_blocks() -> None:
    assert reserved_mib(run(2 * MIB, "-0", 512)) == [20, 20, 22]


# Rule 3: best fit


def test_the_smallest_sufficient_block_is_taken() -> None:
    # 20 MiB in blocks of 6, 2, 4, 2, 6; the 6 and the 4 are freed; 4 fits exactly, so a 6 remains for 6.
    steps = (6 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 6 * MIB, "-0", "-2", 4 * MIB, 6 * MIB)
    assert reserved_mib(run(*steps)) == [20] * 9
    # Had the 6 MiB been split for the 4, this would have needed a second segment, as here:
    assert reserved_mib(run(6 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 6 * MIB, "-0", 4 * MIB, 6 * MIB))[-1] == 40


def test_the_lowest_address_wins_among_equal_blocks() -> None:
    allocator = caching_allocator(GIB)
    first, gap, second = (allocator.allocate(2 * MIB) for _ in range(3))
    assert first is not None and gap is not None and second is not None
    allocator.allocate(14 * MIB - 512)  # no unused tail that the third block could merge with
    allocator.allocate(2 * MIB)
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(2 * MIB) == first


def test_oversize_blocks_are_kept_for_oversize_requests() -> None:
    limit = {"max_split_size_bytes": 32 * MIB}
    assert reserved_mib(run(40 * MIB, "-0", 8 * MIB)) == [40, 40, 40]
    assert reserved_mib(run(40 * MIB, "-0", 8 * MIB, **limit)) == [40, 40, 60]
    # A request of 32 MiB may use a block below 32 + 20 MiB, unsplit; not one of 52.
    reused = run(50 * MIB, "-0", 32 * MIB, **limit)
    assert reserved_mib(reused) == [50, 50, 50]
    assert reused.allocated_after_bytes is not None
    assert reused.allocated_after_bytes[-1] == 50 * MIB
    assert reserved_mib(run(52 * MIB, "-0", 32 * MIB, **limit)) == [52, 52, 84]
    assert reserved_mib(run(52 * MIB, "-0", 32 * MIB, max_non_split_rounding_bytes=21 * MIB, **limit))[-1] == 52


# Rule 4: new segments


@pytest.mark.parametrize(
    ("requested", "segment_mib"),
    [
        (1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB - 511, 10), (10 * MIB, 10),
        (10 * MIB + 1, 12), (11 * MIB, 12), (12 * MIB, 12), (100 * MIB + 1, 102),
    ],
)  # fmt: skip
def test_a_segment_has_the_documented_size(requested: int, segment_mib: int) -> None:
    assert reserved_mib(run(requested)) == [segment_mib]


def test_the_large_segment_is_configurable() -> None:
    assert reserved_mib(run(3 * MIB, 12 * MIB, large_segment_bytes=64 * MIB)) == [64, 64]


def test_unused_segments_are_released_when_a_new_one_does_not_fit() -> None:
    # 40 + 20 held; the 40 is unused, but 42 does not fit into it nor beside it in 64.
    result = run(40 * MIB, 16 * MIB, "-0", 42 * MIB, capacity=64 * MIB)
    assert reserved_mib(result) == [40, 56, 56, 58]
    assert (result.num_segment_allocations, result.num_segment_releases, result.num_retries) == (3, 1, 1)
    assert result.failure is None
    assert (result.reserved_peak_bytes, result.reserved_peak_event) == (58 * MIB, 3)


def test_segments_in_use_are_not_released_and_the_replay_ends_at_the_failure() -> None:
    result = run(6 * MIB, 6 * MIB, 2 * MIB, "-0", 30 * MIB, 512, capacity=48 * MIB)
    failure = result.failure
    assert failure is not None
    assert failure.event == 4
    assert failure.tensor_id == 3
    assert failure.requested_bytes == 30 * MIB
    assert failure.allocated_bytes == 8 * MIB
    assert failure.reserved_bytes == 20 * MIB
    assert failure.unreserved_bytes == 28 * MIB
    assert failure.largest_free_bytes == 6 * MIB
    assert reserved_mib(result) == [20] * 6
    assert result.requested_peak_bytes == 14 * MIB


def test_capacity_counts_whole_segments() -> None:
    assert run(512, capacity=2 * MIB).failure is None
    assert run(512, capacity=2 * MIB - 1).failure.event == 0
    assert run(10 * MIB - 512, capacity=20 * MIB - 1).failure.event == 0
    assert run(10 * MIB, capacity=10 * MIB).failure is None


def test_oversize_blocks_are_released_before_everything_else() -> None:
    limit = {"max_split_size_bytes": 32 * MIB}
    # Unused: 60 and 36 (oversize), 20 (not). A request of 36 in a capacity of 116 + 16: the 36 is reused;
    # the next finds only the 60, which is too large to be taken whole, releases it and keeps the 20.
    result = run(60 * MIB, 36 * MIB, 4 * MIB, "-0", "-1", "-2", 36 * MIB, 38 * MIB, capacity=132 * MIB, **limit)
    assert reserved_mib(result) == [60, 96, 116, 116, 116, 116, 116, 94]
    assert result.num_retries == 0
    # No single block is large enough: the largest ones go until they suffice together.
    result = run(40 * MIB, 36 * MIB, 32 * MIB, 4 * MIB, "-0", "-1", "-2", "-3", 70 * MIB, capacity=130 * MIB, **limit)
    assert reserved_mib(result)[-1] == 32 + 20 + 70
    assert (result.num_segment_releases, result.num_retries) == (2, 0)
    # They do not suffice: everything unused goes.
    result = run(40 * MIB, 4 * MIB, "-0", "-1", 70 * MIB, capacity=75 * MIB, **limit)
    assert reserved_mib(result)[-1] == 70
    assert result.num_retries == 1


# Rule 5: splitting


def test_a_small_block_is_split_if_512_bytes_remain() -> None:
    result = run(MIB, MIB - 512, 512)
    assert reserved_mib(result) == [2, 2, 2]
    assert result.allocated_peak_bytes == 2 * MIB


def test_a_large_block_is_split_only_if_more_than_1_mib_remains() -> None:
    whole = run(11 * MIB)  # 12 MiB segment, exactly 1 MiB over: not split
    assert whole.allocated_peak_bytes == 12 * MIB
    split = run(11 * MIB - 512)
    assert split.allocated_peak_bytes == 11 * MIB - 512
    assert (split.requested_peak_bytes, split.reserved_peak_bytes) == (11 * MIB - 512, 12 * MIB)


def test_the_rest_of_a_split_is_the_upper_part() -> None:
    allocator = caching_allocator(GIB)
    first = allocator.allocate(4 * MIB)
    second = allocator.allocate(4 * MIB)
    assert first is not None
    assert second == first + 4 * MIB


def test_requests_from_max_split_size_on_are_not_split() -> None:
    limit = {"max_split_size_bytes": 32 * MIB}
    assert run(100 * MIB, "-0", 90 * MIB).allocated_after_bytes.tolist()[-1] == 90 * MIB  # type: ignore[union-attr]
    assert run(100 * MIB, "-0", 90 * MIB, **limit).allocated_after_bytes.tolist()[-1] == 100 * MIB  # type: ignore[union-attr]


# Rule 6: merging


def test_freed_blocks_merge_with_both_neighbours() -> None:
    for order in (("-0", "-1", "-2"), ("-0", "-2", "-1"), ("-2", "-1", "-0"), ("-1", "-0", "-2")):
        result = run(6 * MIB, 6 * MIB, 6 * MIB, *order, 18 * MIB)
        assert reserved_mib(result)[-1] == 20, order


def test_blocks_of_different_segments_do_not_merge() -> None:
    assert reserved_mib(run(10 * MIB, 10 * MIB, "-0", "-1", 20 * MIB)) == [10, 20, 20, 20, 40]


# Rule 7: expandable segments

EXPANDABLE = {"expandable_segments": True}


def test_expandable_segments_grow_by_2_and_20_mib_pages() -> None:
    assert reserved_mib(run(MIB, MIB, 512, **EXPANDABLE)) == [2, 2, 4]
    assert reserved_mib(run(3 * MIB, 18 * MIB, 100 * MIB, **EXPANDABLE)) == [20, 40, 140]


def test_an_expandable_segment_serves_growing_requests_without_gaps() -> None:
    growing: list[int | str] = [10 * MIB, "-0", 12 * MIB, "-1", 14 * MIB, "-2", 60 * MIB]
    assert reserved_mib(run(*growing)) == [10, 10, 22, 22, 36, 36, 96]
    assert reserved_mib(run(*growing, **EXPANDABLE)) == [20, 20, 20, 20, 20, 20, 60]


def test_the_unused_end_of_an_expandable_segment_counts_towards_the_request() -> None:
    # 30 used, 10 unused at the end: 25 needs one page more, not two.
    result = run(30 * MIB, 25 * MIB, **EXPANDABLE)
    assert reserved_mib(result) == [40, 60]
    assert result.allocated_peak_bytes == 55 * MIB


def test_expandable_blocks_are_split_to_512_bytes() -> None:
    assert run(20 * MIB - 512, **EXPANDABLE).allocated_peak_bytes == 20 * MIB - 512


def test_a_block_that_cannot_grow_goes_before_one_that_can() -> None:
    allocator = caching_allocator(GIB, AllocatorSettings(expandable_segments=True))
    low, _, high = (allocator.allocate(size * MIB) for size in (12, 18, 10))
    assert low is not None and high is not None
    allocator.free(low)
    allocator.free(high)  # 10 unused at the end, which can grow; the best fit for 9 by size alone
    assert allocator.allocate(9 * MIB) == low


def test_fully_unused_pages_are_unmapped_when_memory_is_short() -> None:
    # The small pool has 4; the large one 60: 30 in use, 30 not, with one whole page among the latter.
    result = run(512, 30 * MIB, 30 * MIB, "-2", MIB, MIB, MIB, capacity=64 * MIB, **EXPANDABLE)
    assert reserved_mib(result) == [2, 42, 62, 62, 62, 64, 64]
    # The small pool needs a third page: 66 is too much, so that page of 20 goes.
    result = run(30 * MIB, 30 * MIB, "-1", *[MIB] * 5, capacity=64 * MIB, **EXPANDABLE)
    assert reserved_mib(result) == [40, 60, 60, 62, 62, 64, 64, 46]
    assert (result.num_retries, result.num_segment_releases) == (1, 1)


def test_an_expandable_segment_fails_when_its_pages_do_not_fit() -> None:
    result = run(30 * MIB, 25 * MIB, capacity=59 * MIB, **EXPANDABLE)
    assert result.failure is not None
    assert result.failure.event == 1
    assert result.failure.largest_free_bytes == 10 * MIB
    assert run(61 * MIB, capacity=60 * MIB, **EXPANDABLE).failure.event == 0


# Garbage collection


def test_garbage_collection_releases_the_oldest_unused_segments_above_the_threshold() -> None:
    # 30 (age 3 at the end), 40 (age 2), both unused, 70 of 100 held: above half, so the older one goes.
    steps = (30 * MIB, 40 * MIB, "-0", 12 * MIB, 4 * MIB, "-1", 50 * MIB)
    kept = run(*steps, capacity=200 * MIB)
    collected = run(*steps, capacity=200 * MIB, garbage_collection_threshold=0.1)
    assert reserved_mib(kept) == [30, 70, 70, 70, 70, 70, 120]
    assert reserved_mib(collected) == [30, 70, 70, 70, 70, 70, 80]
    assert (collected.num_segment_releases, collected.num_retries) == (1, 0)
    assert reserved_mib(run(*steps, capacity=200 * MIB, garbage_collection_threshold=0.5)) == reserved_mib(kept)


def test_garbage_collection_spares_younger_segments_when_the_oldest_suffice() -> None:
    # Unused whole segments when 60 is asked for: 30 (freed first) and 20 (freed last).
    steps = (30 * MIB, 20 * MIB, "-0", 512, 40 * MIB, 40 * MIB, "-1", 60 * MIB)
    result = run(*steps, capacity=400 * MIB, garbage_collection_threshold=0.3)
    # Held before: 30 + 20 + 2 + 40 + 40 = 132, 12 above 120: the 30 goes, the 20 stays.
    assert reserved_mib(result) == [30, 50, 50, 52, 92, 132, 132, 162]


# Reporting


def test_peaks_name_their_first_event_and_fragmentation_is_taken_at_the_reserved_peak() -> None:
    result = run(4 * MIB, 4 * MIB, "-0", 10 * MIB, 4 * MIB)
    assert reserved_mib(result) == [20, 20, 20, 20, 20]
    assert (result.reserved_peak_event, result.allocated_at_reserved_peak_bytes) == (0, 4 * MIB)
    assert result.fragmentation == 16 / 20
    assert (result.allocated_peak_bytes, result.allocated_peak_event) == (18 * MIB, 4)
    assert (result.requested_peak_bytes, result.requested_peak_event) == (18 * MIB, 4)


def test_misuse_is_an_assertion() -> None:
    for steps in (("-0",), (512, "-0", "-0"), (512, "-1"), (-1,)):
        with pytest.raises(AssertionError):
            run(*steps)
    with pytest.raises(AssertionError, match="alive"):
        replay(np.array([1, 1]), np.array([0, 0], dtype=np.int32), np.array([True, True]), GIB)


@pytest.mark.parametrize(
    "options",
    [
        {"max_split_size_bytes": 20 * MIB}, {"roundup_power2_divisions": 3}, {"roundup_power2_divisions": -1},
        {"garbage_collection_threshold": 1.0}, {"max_non_split_rounding_bytes": MIB},
        {"large_segment_bytes": 21 * MIB},
    ],
)  # fmt: skip
def test_settings_pytorch_refuses_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must"):
        AllocatorSettings(**options)
