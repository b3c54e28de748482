"""The caching allocator with segments of fixed size: PyTorch's default.

Rules, as numbered in the comments: (1) round the request; (2) choose the small or the large pool;
(3) take the smallest unused block that holds it, the lowest address among equals; (4) without one,
take a new segment, if need be after giving unused segments back; (5) split off what the request
leaves; (6) on a free, merge with unused neighbours of the same segment. Rule 7, segments that
expand, is in `simulator.memory.expandable_allocator`.

Source:
    PyTorch 2.x, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, restated in our
    own words.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20

# Constants of c10/core/AllocatorConfig.h (before 2.8: CUDACachingAllocator.cpp), in bytes.
MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (kMinBlockSize)."""
SMALL_BYTES = 1 * _MIB
"""Requests up to this size live in the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * _MIB
"""Segment of the small pool, and its page when segments expand (kSmallBuffer)."""
LARGE_SEGMENT_BYTES = 20 * _MIB
"""Segment for large requests below 10 MiB, and the page when segments expand (kLargeBuffer)."""
MIN_LARGE_REQUEST_BYTES = 10 * _MIB
"""Requests from this size on get a segment of their own (kMinLargeAlloc)."""
ROUND_LARGE_BYTES = 2 * _MIB
"""Such a segment is rounded up to a multiple of this (kRoundLarge)."""

# A free block is one integer, size << 64 | address, so that the order of integers is the allocator's
# order (size, then address) and a sorted list of them is searched without calling Python code.
ADDRESS_BITS = 64
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
NO_LIMIT = 2**62
_GUARD_BYTES = MIN_BLOCK_BYTES  # left between segments, so that blocks of two segments never touch


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` sets, with PyTorch's defaults.

    Attributes:
        max_split_size_bytes: Blocks from this size on are never split; above 20 MiB. None: no limit.
        roundup_power2_divisions: Round requests up to this many steps between powers of two, itself a
            power of two. 0 or 1: off.
        garbage_collection_threshold: Share of the capacity above which unused segments are given back
            before new ones are taken, within (0, 1). None: off.
        expandable_segments: Map pages into growing segments instead of taking whole segments.
        max_non_split_rounding_bytes: How much larger than the request an unsplittable block may be.
        large_segment_bytes: Segment for large requests below 10 MiB, and the large page.
    """

    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float | None = None
    expandable_segments: bool = False
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES

    def __post_init__(self) -> None:
        if self.max_split_size_bytes is not None and self.max_split_size_bytes <= LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"max_split_size_bytes must be above {LARGE_SEGMENT_BYTES} (20 MiB), as PyTorch demands, "
                f"got {self.max_split_size_bytes}; try None for no limit"
            )
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions must be 0 or a power of two, got {divisions}; try 4 or 8")
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"garbage_collection_threshold must lie within (0, 1), got {threshold}; try 0.8")
        if self.max_non_split_rounding_bytes < LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"max_non_split_rounding_bytes must be at least {LARGE_SEGMENT_BYTES} (20 MiB), "
                f"got {self.max_non_split_rounding_bytes}"
            )
        if self.large_segment_bytes < LARGE_SEGMENT_BYTES or self.large_segment_bytes % ROUND_LARGE_BYTES:
            raise ValueError(
                f"large_segment_bytes must be a multiple of 2 MiB and at least 20 MiB, got {self.large_segment_bytes}"
            )


def rounded_bytes(requested_bytes: int, roundup_power2_divisions: int = 0) -> int:
    """Return the block size that a request is rounded up to (rule 1).

    >>> rounded_bytes(1), rounded_bytes(1200), rounded_bytes(1200, roundup_power2_divisions=2)
    (512, 1536, 1536)
    >>> rounded_bytes(9 * 2**20, roundup_power2_divisions=2) // 2**20
    12
    """
    size = max(MIN_BLOCK_BYTES, requested_bytes)
    if roundup_power2_divisions > 1 and size > MIN_BLOCK_BYTES * roundup_power2_divisions:
        step = (1 << (size.bit_length() - 1)) // roundup_power2_divisions
        return -(-size // step) * step
    return (size + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


class Pool:
    """Unused blocks of one pool.

    Attributes:
        is_small: The pool of requests up to 1 MiB.
        free: Sorted ``size << 64 | address`` of unused blocks.
        unmapped: Sorted addresses of address ranges without memory (expandable segments only).
        num_searches: How often a block was looked for: the clock of garbage collection.
    """

    __slots__ = ("free", "is_small", "num_searches", "unmapped")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[int] = []
        self.unmapped: list[int] = []
        self.num_searches = 0


class CachingAllocator:
    """One device's allocator on one stream, with segments of fixed size.

    Neighbours are found by address: an unused block is entered under its start and under its end,
    and segments do not touch, so that a freed block sees at once what it merges with.

    Attributes:
        allocated_bytes: Blocks in use.
        reserved_bytes: Segments held.
        live: Address to size of the blocks in use.
        segments: Address to size of the segments held.
        num_segment_allocations, num_segment_releases, num_retries: As in `AllocatorResult`.
    """

    def __init__(self, *, capacity_bytes: int, settings: AllocatorSettings) -> None:
        self.capacity_bytes = capacity_bytes
        self.settings = settings
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.num_segment_allocations = 0
        self.num_segment_releases = 0
        self.num_retries = 0
        self.live: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self._small = Pool(is_small=True)
        self._large = Pool(is_small=False)
        self._next_address = 0
        self._divisions = settings.roundup_power2_divisions
        self._max_split = settings.max_split_size_bytes or NO_LIMIT
        self._split_limit = self._max_split  # larger requests of the large pool get unsplit blocks
        # Whether the best fit is always taken, as with default settings.
        self._takes_best_fit = settings.max_split_size_bytes is None
        self._min_remainder_large = SMALL_BYTES + 1
        self._free_size_at: dict[int, int] = {}
        self._free_start_of: dict[int, int] = {}
        # Search count of the pool when an unused block was entered; kept only for garbage collection.
        self._entered_at: dict[int, int] | None = None
        if settings.garbage_collection_threshold is not None:
            self._entered_at = {}

    def allocate(self, requested_bytes: int) -> int | None:
        """Return the address of a new block, or None if it does not fit (rules 1 to 5)."""
        if requested_bytes <= 0:
            assert requested_bytes == 0, f"a size must be >= 0, got {requested_bytes}"
            return -1  # PyTorch hands out a null pointer
        if self._divisions > 1:
            size = rounded_bytes(requested_bytes, self._divisions)
        else:
            size = (requested_bytes + 511) & -512
        pool = self._small if size <= SMALL_BYTES else self._large
        free = pool.free
        index = bisect_left(free, size << ADDRESS_BITS)
        if not self._takes_best_fit:
            index = self._acceptable(pool, index, size)
        if self._entered_at is not None:
            pool.num_searches += 1
        if index < len(free):
            key = free.pop(index)
            address = key & ADDRESS_MASK
            block = key >> ADDRESS_BITS
            del self._free_size_at[address]
            del self._free_start_of[address + block]
        else:
            found = self._grown(pool, size)
            if found is None:
                return None
            address, block = found
        remainder = block - size
        if remainder and (
            remainder >= MIN_BLOCK_BYTES
            if pool.is_small
            else remainder >= self._min_remainder_large and size < self._split_limit
        ):
            self._enter(pool, address + size, remainder)
            block = size
        self.live[address] = block
        self.allocated_bytes += block
        return address

    def free(self, address: int) -> None:
        """Free a block: merge it with unused neighbours in its segment (rule 6)."""
        if address < 0:
            return
        size = self.live.pop(address)
        self.allocated_bytes -= size
        # Small blocks are always split to the request, large ones never below it: the size tells the pool.
        pool = self._small if size <= SMALL_BYTES else self._large
        self._enter_merged(pool, address, size)

    def empty_cache(self) -> None:
        """Give every unused segment back to the device."""
        for pool in (self._large, self._small):
            for key in list(pool.free):
                address, size = key & ADDRESS_MASK, key >> ADDRESS_BITS
                if self.segments.get(address) == size:
                    self._release(pool, address, size)

    def largest_free_bytes(self) -> int:
        """Return the size of the largest unused block within the segments held."""
        return max((pool.free[-1] >> ADDRESS_BITS for pool in (self._small, self._large) if pool.free), default=0)

    def _enter(self, pool: Pool, address: int, size: int) -> None:
        insort(pool.free, size << ADDRESS_BITS | address)
        self._free_size_at[address] = size
        self._free_start_of[address + size] = address
        if self._entered_at is not None:
            self._entered_at[address] = pool.num_searches

    def _enter_merged(self, pool: Pool, address: int, size: int) -> None:
        following = self._free_size_at.get(address + size)
        if following is not None:
            self._remove(pool, address + size, following)
            size += following
        start = self._free_start_of.get(address)
        if start is not None:
            self._remove(pool, start, address - start)
            size += address - start
            address = start
        self._enter(pool, address, size)

    def _remove(self, pool: Pool, address: int, size: int) -> None:
        del pool.free[bisect_left(pool.free, size << ADDRESS_BITS | address)]
        del self._free_size_at[address]
        del self._free_start_of[address + size]

    def _acceptable(self, pool: Pool, index: int, size: int) -> int:
        """Return the index of the best fit, or past the end if it may not be used (rule 3)."""
        if index < len(pool.free):
            block = pool.free[index] >> ADDRESS_BITS
            too_large = block >= size + self.settings.max_non_split_rounding_bytes
            if block >= self._max_split if size < self._max_split else too_large:
                return len(pool.free)
        return index

    def _grown(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Take a segment and return its address and size, or None (rule 4)."""
        if pool.is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIN_LARGE_REQUEST_BYTES:
            segment = self.settings.large_segment_bytes
        else:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        self._collect_garbage()
        room = self.capacity_bytes - segment
        if self.reserved_bytes > room:
            released = self._release_oversize(pool, size)
            if not released or self.reserved_bytes > room:
                self.num_retries += 1
                self.empty_cache()
                if self.reserved_bytes > room:
                    return None
        address = self._new_range(segment)
        self.segments[address] = segment
        self.reserved_bytes += segment
        self.num_segment_allocations += 1
        return address, segment

    def _new_range(self, size: int) -> int:
        address = self._next_address
        self._next_address += size + _GUARD_BYTES
        assert self._next_address <= ADDRESS_MASK, "addresses must fit into 64 bits"
        return address

    def _release(self, pool: Pool, address: int, size: int) -> None:
        self._remove(pool, address, size)
        del self.segments[address]
        self.reserved_bytes -= size
        self.num_segment_releases += 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back unsplittable blocks that make room for the request; say whether they do."""
        if self.settings.max_split_size_bytes is None:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.free, wanted << ADDRESS_BITS)
        if index < len(pool.free):
            key = pool.free[index]
            self._release(pool, key & ADDRESS_MASK, key >> ADDRESS_BITS)
            return True
        released = 0
        while released < wanted and pool.free and (largest := pool.free[-1] >> ADDRESS_BITS) >= self._max_split:
            self._release(pool, pool.free[-1] & ADDRESS_MASK, largest)
            released += largest
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back unused large segments of at least average age until below the threshold."""
        threshold = self.settings.garbage_collection_threshold
        if threshold is None or self._entered_at is None:
            return
        target = self.reserved_bytes - int(threshold * self.capacity_bytes)
        if target <= 0:
            return
        pool = self._large
        ages = {
            key: pool.num_searches - self._entered_at[key & ADDRESS_MASK]
            for key in pool.free
            if self.segments.get(key & ADDRESS_MASK) == key >> ADDRESS_BITS
        }
        reclaimed = 0
        while reclaimed < target and ages:
            # All blocks of the round are compared with the mean before it, however much they yield.
            mean = sum(ages.values()) / len(ages)
            for key in [key for key, age in ages.items() if age >= mean]:
                self._release(pool, key & ADDRESS_MASK, key >> ADDRESS_BITS)
                reclaimed += key >> ADDRESS_BITS
                del ages[key]
