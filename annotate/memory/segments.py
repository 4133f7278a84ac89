"""Segments of the caching allocator: blocks and pools, fixed or expandable page by page.

Segments that grow: addresses of a pool get memory page by page (`expandable_segments:True`).

As in c10/cuda/CUDACachingAllocator.cpp: a pool has one range of addresses, more than the device has
memory; a request without a free block takes the lowest addresses that have room, and only as many
pages as they lack.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment, in use or free, between its neighbours there.

    Attributes:
        size: bytes.
        address: where it begins.
        pool: what it goes back to.
        free: whether it can be used.
        mapped: whether memory is behind its addresses; not so at the end of a segment that grows.
        before: neighbour below.
        after: neighbour above.
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
        """Keep `size` bytes; return the rest, a block of its own in no pool."""
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
        """Take free neighbours in, as far as memory is behind all of them or none."""
        for other in (self.before, self.after):
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
    """Free blocks of one stream and one sort, by size, then address: best fit is the first.

    Attributes:
        small: whether it is that of small blocks.
        unmapped: free addresses without memory, the lowest first.
    """

    small: bool
    unmapped: list[Block] = field(default_factory=list[Block])
    _keys: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _blocks: dict[tuple[int, int], Block] = field(default_factory=dict[tuple[int, int], Block])

    def add(self, block: Block) -> None:
        """Take a free block in."""
        if not block.mapped:
            insort(self.unmapped, block, key=lambda one: one.address)
            return
        insort(self._keys, (block.size, block.address))
        self._blocks[block.size, block.address] = block

    def remove(self, block: Block) -> None:
        """Take a block out, before its size or address changes."""
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


SMALL_PAGE_BYTES = 2 << 20

LARGE_PAGE_BYTES = 20 << 20

RANGE_BYTES = LARGE_PAGE_BYTES << 20
"""More than any device has."""

Reserve = Callable[[int], bool]
"""Takes bytes from the driver; False where it has no more."""


def page_bytes(pool: Pool) -> int:
    """Return the bytes that a pool takes from the driver at once."""
    return SMALL_PAGE_BYTES if pool.small else LARGE_PAGE_BYTES


def best_fit(pool: Pool, size: int) -> Block | None:
    """Return the free block for `size`: one that can grow counts with all it can grow to."""
    found = pool.fitting(size)
    best = found[0] if found else None
    for following in found[1:]:
        if best is None or _room(following) >= _room(best):
            break
        best = following
    return best


def grow(pool: Pool, size: int, reserve: Reserve, address: Callable[[], int]) -> Block | None:
    """Return a block of `size` or more, out of its pool; None where the driver has no more.

    Args:
        pool: what it is for.
        size: bytes.
        reserve: what gives memory.
        address: gives the begin of a new range.
    """
    block = _lowest(pool, size)
    if block is None:
        block = Block(RANGE_BYTES, address(), pool, mapped=False)
        pool.add(block)
    if not block.mapped and not _map(block, size, reserve):
        return None
    while block.size < size:
        lacking = block.after
        if lacking is None or not _map(lacking, size - block.size, reserve):
            return None
        block = lacking
    pool.remove(block)
    return block


def give_back(pool: Pool) -> int:
    """Return how many bytes of whole free pages went back to the driver."""
    return sum(_unmap(block) for block in pool.free_blocks())


def _unmap(block: Block) -> int:
    """Take the memory of a free block's whole pages away; return their bytes."""
    pool, page = block.pool, page_bytes(block.pool)
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
    """Return the first of the lowest free addresses with room for `size`."""
    for candidate in pool.unmapped:
        before = candidate.before
        first = before if before is not None and before.free else candidate
        room, block = 0, first
        while block is not None and block.free and room < size:
            room += block.size
            block = block.after
        if room >= size:
            return first
    return None


def _map(block: Block, size: int, reserve: Reserve) -> bool:
    """Put memory behind the first `size` bytes of a block, and merge it with its neighbours."""
    page, pool = page_bytes(block.pool), block.pool
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
