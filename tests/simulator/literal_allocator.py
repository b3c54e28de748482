"""PyTorch's caching allocator once more: slow, with linked blocks, statement by statement.

It follows c10/cuda/CUDACachingAllocator.cpp where `simulator.memory.caching_allocator` uses tricks, so that
the two can be compared on any events.
"""

from __future__ import annotations

from simulator.memory.caching_allocator import AllocatorSettings, rounded_bytes

MIB = 2**20


class Block:
    """A block as PyTorch keeps it: linked with its neighbours in the segment."""

    def __init__(self, address: int, size: int, small: bool, mapped: bool = True) -> None:
        self.address, self.size, self.small, self.mapped = address, size, small, mapped
        self.used = False
        self.prev: Block | None = None
        self.next: Block | None = None
        self.base = 0  # search count when it became unused


class LiteralAllocator:
    """A slow second implementation that follows CUDACachingAllocator.cpp statement by statement."""

    def __init__(self, capacity: int, options: AllocatorSettings) -> None:
        self.capacity, self.o = capacity, options
        self.reserved = self.allocated = self.top = 0
        self.unused: list[Block] = []
        self.unmapped: list[Block] = []
        self.searches = {True: 0, False: 0}
        self.limit = options.max_split_size_bytes or 2**60

    def pool(self, small: bool) -> list[Block]:
        return sorted((b for b in self.unused if b.small == small), key=lambda b: (b.size, b.address))

    def insert(self, block: Block) -> None:
        block.base = self.searches[block.small]
        self.unused.append(block)

    def malloc(self, requested: int) -> Block | None:
        if self.o.expandable_segments:  # so that ranges start on a page, as the driver's do
            self.top = -(-self.top // (20 * MIB)) * 20 * MIB
        size = rounded_bytes(requested, self.o.roundup_power2_divisions)
        small = size <= MIB
        block = self.get_free_block(size, small)
        if block is None:
            self.collect()
            block = self.alloc_block(size, small)
        if block is None and self.release_available(size, small):
            block = self.alloc_block(size, small)
        if block is None:
            self.release_cached()
            block = self.alloc_block(size, small)
        if block is None:
            return None
        rest = block.size - size
        exact = small or self.o.expandable_segments
        if rest >= 512 if exact else size < self.limit and rest > MIB:
            self.insert(self.cut(block, size))
        block.used = True
        self.allocated += block.size
        return block

    def cut(self, block: Block, size: int) -> Block:
        """Shorten a block and return the upper part."""
        rest = Block(block.address + size, block.size - size, block.small, block.mapped)
        rest.prev, rest.next = block, block.next
        if rest.next:
            rest.next.prev = rest
        block.next, block.size = rest, size
        return rest

    def get_free_block(self, size: int, small: bool) -> Block | None:
        self.searches[small] += 1
        fits = [b for b in self.pool(small) if b.size >= size]
        if not fits:
            return None
        best = fits[0]
        if self.o.expandable_segments:
            for candidate in fits[1:]:
                if self.expandable_size(candidate) >= self.expandable_size(best):
                    break
                best = candidate
        if size < self.limit <= best.size:
            return None
        if size >= self.limit and best.size >= size + self.o.max_non_split_rounding_bytes:
            return None
        self.unused.remove(best)
        return best

    @staticmethod
    def expandable_size(block: Block) -> int:
        return block.size + (block.next.size if block.next and not block.next.mapped else 0)

    def alloc_block(self, size: int, small: bool) -> Block | None:
        if self.o.expandable_segments:
            return self.alloc_expandable(size, small)
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.reserved + total > self.capacity:
            return None
        block = Block(self.top, total, small)
        self.top += total
        self.reserved += total
        return block

    def alloc_expandable(self, size: int, small: bool) -> Block | None:
        if size > self.capacity:
            return None
        block = self.find_expandable(size, small)
        if not block.mapped:
            merged = self.map(block, min(block.size, size))
            if merged is None:
                return None
            block = merged
        while block.size < size:
            assert block.next is not None
            merged = self.map(block.next, min(size - block.size, block.next.size))
            if merged is None:
                return None
            block = merged
        self.unused.remove(block)
        return block

    def find_expandable(self, size: int, small: bool) -> Block:
        for block in sorted((b for b in self.unmapped if b.small == small), key=lambda b: b.address):
            start = block.prev if block.prev and not block.prev.used else block
            room, at = 0, start
            while room < size and at is not None and not at.used:
                room += at.size
                at = at.next  # type: ignore[assignment]
            if room >= size:
                return start
        page = 2 * MIB if small else 20 * MIB
        block = Block(self.top, -(-(self.capacity * 9 // 8) // page) * page, small, mapped=False)
        self.top += block.size
        self.unmapped.append(block)
        return block

    def map(self, block: Block, size: int) -> Block | None:
        page = 2 * MIB if block.small else 20 * MIB
        size = -(-size // page) * page
        if self.reserved + size > self.capacity:
            return None
        self.unmapped.remove(block)
        if size < block.size:
            self.unmapped.append(self.cut(block, size))
        block.mapped = True
        self.reserved += size
        block = self.merge(block)
        self.insert(block)
        return block

    def merge(self, block: Block) -> Block:
        """Merge a block that is in no list with unused neighbours of its kind."""
        for other in (block.prev, block.next):
            if other is None or other.used or other.mapped != block.mapped:
                continue
            (self.unused if other.mapped else self.unmapped).remove(other)
            low, high = (other, block) if other is block.prev else (block, other)
            low.size += high.size
            low.next = high.next
            if low.next:
                low.next.prev = low
            block = low
        return block

    def release(self, block: Block) -> None:
        assert block.prev is None and block.next is None
        self.unused.remove(block)
        self.reserved -= block.size

    def release_available(self, size: int, small: bool) -> bool:
        if self.o.max_split_size_bytes is None or self.o.expandable_segments:
            return False
        wanted = max(size, self.limit)
        pool = self.pool(small)
        fits = [b for b in pool if b.size >= wanted]
        if fits:
            self.release(fits[0])
            return True
        total = 0
        for block in reversed(pool):
            if total >= wanted or block.size < self.limit:
                break
            total += block.size
            self.release(block)
        return total >= wanted

    def release_cached(self) -> None:
        for small in (False, True):
            for block in self.pool(small):
                if self.o.expandable_segments:
                    self.unmap(block)
                elif block.prev is None and block.next is None:
                    self.release(block)

    def unmap(self, block: Block) -> None:
        page = 2 * MIB if block.small else 20 * MIB
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        self.unused.remove(block)
        if start > block.address:
            middle = self.cut(block, start - block.address)
            self.insert(block)
            block = middle
        if block.address + block.size > end:
            self.insert(self.cut(block, end - block.address))
        block.mapped = False
        self.reserved -= block.size
        block = self.merge(block)
        if block.prev or block.next:
            self.unmapped.append(block)

    def collect(self) -> None:
        if self.o.garbage_collection_threshold is None:
            return
        threshold = int(self.o.garbage_collection_threshold * self.capacity)
        if self.reserved <= threshold:
            return
        target, reclaimed, freed = self.reserved - threshold, 0, True
        whole = [b for b in self.pool(False) if not b.prev and not b.next and not self.o.expandable_segments]
        age = {id(b): self.searches[False] - b.base for b in whole}
        while reclaimed < target and freed and whole:
            mean, freed = sum(age[id(b)] for b in whole) / len(whole), False
            for block in list(whole):
                if age[id(block)] >= mean:
                    freed = True
                    reclaimed += block.size
                    whole.remove(block)
                    self.release(block)

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.used = False
        self.insert(self.merge(block))
