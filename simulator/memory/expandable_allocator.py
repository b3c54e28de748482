"""The caching allocator with ``expandable_segments:True``.

Source:
    PyTorch 2.x, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, restated in our
    own words.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from simulator.memory.caching_allocator import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    MIN_BLOCK_BYTES,
    NO_LIMIT,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    CachingAllocator,
    Pool,
)


class ExpandableAllocator(CachingAllocator):
    """The allocator with ``expandable_segments:True`` (rule 7).

    A segment is a range of addresses larger than the device, in which memory is mapped page by page
    where a request needs it; its unused end can grow, so few sizes leave gaps::

        | used | free | used |  free | not mapped ........................... |
                                     ^ a request larger than any free block maps pages here

    ``segments`` holds the address ranges, ``reserved_bytes`` only what is mapped.
    """

    def __init__(self, *, capacity_bytes: int, settings: AllocatorSettings) -> None:
        super().__init__(capacity_bytes=capacity_bytes, settings=settings)
        self._takes_best_fit = False
        self._min_remainder_large = MIN_BLOCK_BYTES
        self._split_limit = NO_LIMIT
        self._unmapped_size_at: dict[int, int] = {}
        self._unmapped_start_of: dict[int, int] = {}

    def empty_cache(self) -> None:
        """Unmap every page that holds no block in use."""
        for pool in (self._large, self._small):
            page = self._page(pool)
            for key in list(pool.free):
                address, size = key & ADDRESS_MASK, key >> ADDRESS_BITS
                end = address + size
                first_page, last_page = -(-address // page) * page, end // page * page
                if first_page < last_page:
                    self._remove(pool, address, size)
                    if address < first_page:
                        self._enter(pool, address, first_page - address)
                    if last_page < end:
                        self._enter(pool, last_page, end - last_page)
                    self._unmap(pool, first_page, last_page - first_page)

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes

    def _acceptable(self, pool: Pool, index: int, size: int) -> int:
        # A block that can grow counts with the size it can grow to, so larger blocks may go first.
        free = pool.free
        while index + 1 < len(free) and self._grown_size(free[index + 1]) < self._grown_size(free[index]):
            index += 1
        return super()._acceptable(pool, index, size)

    def _grown_size(self, key: int) -> int:
        size = key >> ADDRESS_BITS
        return size + self._unmapped_size_at.get((key & ADDRESS_MASK) + size, 0)

    def _grown(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Map pages behind an unused block; return its address and size, or None."""
        found = self._mapped(pool, size)
        if found is None:
            self.num_retries += 1
            self.empty_cache()
            found = self._mapped(pool, size)
        return found

    def _mapped(self, pool: Pool, size: int) -> tuple[int, int] | None:
        if size > self.capacity_bytes:
            return None
        start = self._start_of_room(pool, size)
        while (mapped := self._free_size_at.get(start, 0)) < size:
            if not self._map(pool, start + mapped, size - mapped):
                return None  # what was mapped stays as an unused block
        self._remove(pool, start, mapped)
        return start, mapped

    def _start_of_room(self, pool: Pool, size: int) -> int:
        """Return where ``size`` bytes of unused or unmapped addresses begin; open a range if nowhere."""
        for address in pool.unmapped:
            start = end = self._free_start_of.get(address, address)
            while end - start < size:
                step = self._free_size_at.get(end, 0) or self._unmapped_size_at.get(end, 0)
                if not step:
                    break
                end += step
            else:
                return start
        page = self._page(pool)
        # PyTorch opens ranges of 9/8 of the device's memory.
        length = -(-self.capacity_bytes * 9 // 8 // page) * page
        self._next_address = -(-self._next_address // page) * page
        start = self._new_range(length)
        self.segments[start] = length
        self._enter_unmapped(pool, start, length)
        return start

    def _map(self, pool: Pool, address: int, wanted: int) -> bool:
        page = self._page(pool)
        left = self._unmapped_size_at[address]
        length = min(left, -(-wanted // page) * page)
        if self.reserved_bytes + length > self.capacity_bytes:
            return False
        self._remove_unmapped(pool, address, left)
        if length < left:
            self._enter_unmapped(pool, address + length, left - length)
        self._enter_merged(pool, address, length)
        self.reserved_bytes += length
        self.num_segment_allocations += 1
        return True

    def _unmap(self, pool: Pool, address: int, size: int) -> None:
        self.reserved_bytes -= size
        self.num_segment_releases += 1
        following = self._unmapped_size_at.get(address + size)
        if following is not None:
            self._remove_unmapped(pool, address + size, following)
            size += following
        start = self._unmapped_start_of.get(address)
        if start is not None:
            self._remove_unmapped(pool, start, address - start)
            size += address - start
            address = start
        if self.segments.get(address) == size:
            del self.segments[address]
        else:
            self._enter_unmapped(pool, address, size)

    def _enter_unmapped(self, pool: Pool, address: int, size: int) -> None:
        insort(pool.unmapped, address)
        self._unmapped_size_at[address] = size
        self._unmapped_start_of[address + size] = address

    def _remove_unmapped(self, pool: Pool, address: int, size: int) -> None:
        del pool.unmapped[bisect_left(pool.unmapped, address)]
        del self._unmapped_size_at[address]
        del self._unmapped_start_of[address + size]
