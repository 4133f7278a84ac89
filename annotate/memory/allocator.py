"""Simulate PyTorch's caching allocator: its pools, blocks and segments.

Rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and, since torch 2.8,
c10/core/AllocatorConfig.h. Each stream has separate pools. Supported settings: those of
`AllocatorSettings`. Early garbage collection (`garbage_collection_threshold`) is not simulated.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from onerank.ir import AllocatorSettings


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment, in use or free.

    Attributes:
        size: bytes.
        address: its first address.
        pool: pool that it returns to.
        free: whether it is free.
        mapped: whether memory backs its addresses; false at the end of an expandable segment.
        before: adjacent block at lower addresses.
        after: adjacent block at higher addresses.
    """

    size: int
    address: int
    pool: "Pool"
    free: bool = True
    mapped: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.before is None and self.after is None

    def split(self, size: int) -> "Block":
        """Keep `size` bytes; return the remainder as a new block in no pool."""
        rest = Block(
            self.size - size,
            self.address + size,
            self.pool,
            mapped=self.mapped,
            before=self,
            after=self.after,
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Merge with free neighbours that are mapped like this block."""
        for other in (self.before, self.after):
            # A mapped and an unmapped block stay apart: only the first has memory to hand out.
            if other is None or not other.free or other.mapped != self.mapped:
                continue
            self.pool.remove(other)
            self.size += other.size
            if other is self.before:
                self.address, self.before = other.address, other.before
                if other.before is not None:
                    other.before.after = self
            else:
                self.after = other.after
                if other.after is not None:
                    other.after.before = self


@dataclass(slots=True)
class Pool:
    """Free blocks of one stream and one size class, by size, then address: best fit is the first.

    Attributes:
        small: whether it holds small blocks.
        page_bytes: size of the pages in which its expandable segments grow.
        unmapped: free addresses without memory, the lowest first.
    """

    small: bool
    page_bytes: int
    unmapped: list[Block] = field(default_factory=list[Block])
    _keys: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _blocks: dict[tuple[int, int], Block] = field(default_factory=dict[tuple[int, int], Block])

    def add(self, block: Block) -> None:
        """Add a free block."""
        if not block.mapped:
            insort(self.unmapped, block, key=lambda free_block: free_block.address)
            return
        insort(self._keys, (block.size, block.address))
        self._blocks[block.size, block.address] = block

    def remove(self, block: Block) -> None:
        """Remove a block. Its size and address are the keys, so change them only afterwards."""
        if not block.mapped:
            self.unmapped.remove(block)
            return
        del self._keys[bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.size, block.address]

    def fitting(self, size: int) -> list[Block]:
        """Return the free blocks of `size` or more, the best fit first."""
        return [self._blocks[key] for key in self._keys[bisect_left(self._keys, (size,)) :]]

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest free block of `size` or more, the lowest address among equals."""
        place = bisect_left(self._keys, (size,))
        return self._blocks[self._keys[place]] if place < len(self._keys) else None

    def free_blocks(self) -> list[Block]:
        """Return the free blocks with memory behind them."""
        return list(self._blocks.values())


# Address range of an expandable segment, in pages. torch reserves 1.125 times the device's memory;
# this is more than any device has, so that a segment never ends.
RANGE_PAGES = 1 << 20

TryReserve = Callable[[int], bool]
"""Takes bytes from the driver; returns False if the driver has no more."""


def best_fit(pool: Pool, size: int) -> Block | None:
    """Return the free block for `size`, with blocks before unmapped addresses last.

    Such a block counts with all the memory that it can grow to (`get_free_block`).
    """
    candidates = pool.fitting(size)
    best = candidates[0] if candidates else None
    for following in candidates[1:]:
        if best is None or _room(following) >= _room(best):
            break
        best = following
    return best


def grow(pool: Pool, size: int, reserve: TryReserve, below: Callable[[int], int]) -> Block | None:
    """Map a block of `size` or more and remove it from its pool; None without memory.

    Args:
        pool: pool of the block.
        size: bytes.
        reserve: takes bytes from the driver.
        below: returns the first address of a new range of some bytes.
    """
    block = _lowest(pool, size)
    if block is None:
        range_bytes = pool.page_bytes * RANGE_PAGES
        block = Block(range_bytes, below(range_bytes), pool, mapped=False)
        pool.add(block)
    if not block.mapped and not _map(block, size, reserve):
        return None
    # A run of free blocks may be mapped and unmapped in turn; each gap is
    # mapped from the lowest address upwards (`try_allocate_expandable_block`).
    while block.size < size:
        lacking = block.after
        if lacking is None or not _map(lacking, size - block.size, reserve):
            return None
        block = lacking
    pool.remove(block)
    return block


def give_back(pool: Pool) -> int:
    """Return all whole free pages of a pool to the driver; return their bytes."""
    return sum(_unmap(block) for block in pool.free_blocks())


def _unmap(block: Block) -> int:
    """Unmap the whole pages in a free block; return their bytes."""
    pool, page = block.pool, block.pool.page_bytes
    # The driver unmaps whole pages only, so the ends of the block stay mapped.
    begin = -(-block.address // page) * page
    end = (block.address + block.size) // page * page
    if begin >= end:
        return 0
    pool.remove(block)
    pages = block
    if block.address + block.size > end:
        pool.add(block.split(end - block.address))
    if block.address < begin:
        pages = block.split(begin - block.address)
        pool.add(block)
    given = pages.size
    pages.mapped = False
    pages.merge()
    pool.add(pages)
    return given


def _room(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _lowest(pool: Pool, size: int) -> Block | None:
    """Return the first block of the lowest run of free blocks with room for `size`."""
    for candidate in pool.unmapped:
        before = candidate.before
        # Free memory just below the unmapped addresses is used first, so less has to be mapped.
        first = before if before is not None and before.free else candidate
        room, block = 0, first
        while block is not None and block.free and room < size:
            room += block.size
            block = block.after
        if room >= size:
            return first
    return None


def _map(block: Block, size: int, reserve: TryReserve) -> bool:
    """Map the first `size` bytes of a block, and merge it with its neighbours."""
    pool, page = block.pool, block.pool.page_bytes
    wanted = min(block.size, -(-size // page) * page)
    if not reserve(wanted):
        return False
    pool.remove(block)
    if wanted < block.size:
        pool.add(block.split(wanted))
    block.mapped = True
    block.merge()
    pool.add(block)
    return True


# Names in comments are those of the allocator's source.
MIN_BLOCK_BYTES = 512  # kMinBlockSize

SMALL_BYTES = 1 << 20  # kSmallSize

SMALL_BUFFER_BYTES = 2 << 20  # kSmallBuffer

MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc

ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge

# Power of two from which `roundup_divisions` has separate sizes.
_FIRST_DIVIDED = 20


class OutOfMemoryError(Exception):
    """The simulated device has no memory left, even after it released cached segments."""


def round_size(size: int, divisions: tuple[int, ...] = ()) -> int:
    """Return the bytes of the block for a request (`round_size`)."""
    if divisions and size >= MIN_BLOCK_BYTES:
        power = size.bit_length() - 1
        parts = divisions[min(max(power - _FIRST_DIVIDED, 0), len(divisions) - 1)]
        # Below this, a part would be smaller than the least block.
        if parts > 1 and size > MIN_BLOCK_BYTES * parts:
            part = (1 << power) >> (parts.bit_length() - 1)
            return -(-size // part) * part
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int, large_segment_bytes: int) -> int:
    """Return the size requested from the driver for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_BUFFER_BYTES
    if size < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state; `allocate` returns a handle that `free` takes.

    Attributes:
        capacity_bytes: memory of the driver; None for no limit.
        settings: configuration.
        allocated_bytes: bytes of blocks in use.
        reserved_bytes: bytes of segments, including cached ones.
        peak_allocated_bytes: maximum of `allocated_bytes`.
        peak_reserved_bytes: maximum of `reserved_bytes`.
        segments: number of segments taken from the driver, or of growths of expandable ones.
        returned: number of segments released to make room, or of pools with expandable segments
            that released pages.
    """

    capacity_bytes: int | None = None
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    segments: int = 0
    returned: int = 0
    _pools: dict[tuple[int, bool], Pool] = field(default_factory=dict[tuple[int, bool], Pool])
    _lingering: dict[int, Block] = field(default_factory=dict[int, Block])
    _address: int = 0

    def allocate(self, request: int, stream: int = 0) -> Block:
        """Return a block of `request` bytes.

        Raises:
            OutOfMemoryError: the request exceeds the capacity.
        """
        size = round_size(request, self.settings.roundup_divisions)
        small = size <= SMALL_BYTES
        page = SMALL_BUFFER_BYTES if small else self.settings.large_segment_bytes
        pool = self._pools.setdefault((stream, small), Pool(small, page))
        block = self._free_block(pool, size)
        if block is None:
            block = self._new_block(pool, size)
        if self._splits(block.size - size, size, pool):
            pool.add(block.split(size))
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block, *, lingers: bool = False) -> None:
        """Return a block to its pool, merged with free neighbours of its segment.

        Args:
            block: the block.
            lingers: whether another stream still uses it (`record_stream`): its memory can be used
                again only after `finish`, or when memory runs out.
        """
        self.allocated_bytes -= block.size
        if lingers:
            self._lingering[id(block)] = block
        else:
            self._give_back(block)

    def finish(self, block: Block) -> None:
        """Make the memory of a block that lingers available again."""
        if self._lingering.pop(id(block), None) is not None:
            self._give_back(block)

    def release_cached(self) -> None:
        """Release all free segments to the driver (`release_cached_blocks`)."""
        for block in list(self._lingering.values()):
            self.finish(block)
        for each_pool in self._pools.values():
            if self.settings.expandable_segments:
                given = give_back(each_pool)
                self.reserved_bytes -= given
                self.returned += given > 0
                continue
            for block in each_pool.free_blocks():
                self._release(block)

    def reset_peaks(self) -> None:
        """Set the peaks to the present values."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _give_back(self, block: Block) -> None:
        block.free = True
        block.merge()
        block.pool.add(block)

    def _free_block(self, pool: Pool, size: int) -> Block | None:
        """Remove a free block from its pool and return it (`get_free_block`)."""
        # Without expandable segments the first block that
        # fits is the smallest one: pools are ordered by size.
        block = best_fit(pool, size) if self.settings.expandable_segments else pool.best_fit(size)
        if block is None:
            return None
        most = self.settings.max_split_bytes
        # A block that must not be split serves no smaller request, which would waste its rest.
        if most and size < most <= block.size:
            return None
        # A larger request takes such a block unless too much of it would be wasted.
        if most and size >= most and block.size >= size + self.settings.unsplit_excess_bytes:
            return None
        pool.remove(block)
        return block

    def _splits(self, rest: int, size: int, pool: Pool) -> bool:
        """Return whether the remainder of a block becomes a block (`should_split`)."""
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        most = self.settings.max_split_bytes
        # A remainder of up to 1 MiB would be a block of
        # the large pool that no large request fits into.
        return rest > SMALL_BYTES and not (most and size >= most)

    def _new_block(self, pool: Pool, size: int) -> Block:
        # The order of `malloc` in torch: the driver, then oversized blocks, then the whole cache.
        block = self._from_driver(pool, size)
        if block is None and self._release_oversized(pool, size):
            block = self._from_driver(pool, size)
        if block is None:
            self.release_cached()
            block = self._from_driver(pool, size)
        if block is None:
            raise OutOfMemoryError(
                f"{self._segment_size(size)} bytes wanted, {self.reserved_bytes} of "
                f"{self.capacity_bytes} reserved"
            )
        return block

    def _segment_size(self, size: int) -> int:
        return segment_size(size, self.settings.large_segment_bytes)

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return grow(pool, size, self._reserve, self._below)
        wanted = self._segment_size(size)
        return Block(wanted, self._below(wanted), pool) if self._reserve(wanted) else None

    def _below(self, size: int) -> int:
        # The driver maps the next segment below the last, as seen on an H200. The order matters:
        # among equal free blocks the allocator takes the lowest.
        self._address -= size
        return self._address

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.segments += 1
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Release blocks too large to be split; return whether they have enough room.

        Follows `release_available_cached_blocks`.
        """
        most = self.settings.max_split_bytes
        if not most:
            return False
        wanted = max(size, most)
        # One block that is large enough is released alone; only without one are several.
        larger = pool.fitting(wanted)
        if larger:
            self._release(larger[0])
            return True
        released = 0
        for block in reversed(pool.fitting(most)):
            if released >= wanted:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _release(self, block: Block) -> None:
        if block.whole:
            block.pool.remove(block)
            self.reserved_bytes -= block.size
            self.returned += 1
