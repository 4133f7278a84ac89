"""PyTorch's caching allocator, simulated: what it reserves for a sequence of allocations.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (and, since torch 2.8, of
c10/core/AllocatorConfig.h) with default settings: no expandable segments, no max_split_size, no
rounding to powers of two. Streams have pools of their own.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_BUFFER_BYTES = 2 << 20
LARGE_BUFFER_BYTES = 20 << 20
MIN_LARGE_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20


class OutOfMemoryError(Exception):
    """The simulated device has no room left, cached segments given back."""


def round_size(size: int) -> int:
    """Return the bytes of the block for a request (`round_size`)."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """Return what is asked of the driver for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_BUFFER_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_BUFFER_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment, in use or free, between its neighbours there."""

    size: int
    address: int
    pool: "_Pool"
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.before is None and self.after is None


@dataclass(slots=True)
class _Pool:
    """Free blocks of one stream and one sort, by size, then address: best fit is the first."""

    small: bool
    keys: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict[tuple[int, int], Block])

    def add(self, block: Block) -> None:
        insort(self.keys, (block.size, block.address))
        self.blocks[block.size, block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.size, block.address]

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest free block of `size` or more, the lowest address among equals."""
        place = bisect_left(self.keys, (size,))
        return self.blocks[self.keys[place]] if place < len(self.keys) else None


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state; `allocate` returns a handle that `free` takes.

    Attributes:
        capacity_bytes: what the driver can give; None for no end.
        allocated_bytes: in blocks in use.
        reserved_bytes: in segments, cached ones included.
        peak_allocated_bytes: highest `allocated_bytes`.
        peak_reserved_bytes: highest `reserved_bytes`.
        segments: segments taken from the driver so far.
        returned: segments given back to make room.
    """

    capacity_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    segments: int = 0
    returned: int = 0
    _pools: dict[tuple[int, bool], _Pool] = field(default_factory=dict[tuple[int, bool], _Pool])
    _address: int = 0

    def allocate(self, request: int, stream: int = 0) -> Block:
        """Take a block of `request` bytes.

        Raises:
            OutOfMemoryError: the capacity does not hold it.
        """
        size = round_size(request)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best_fit(size)
        if block is None:
            block = self._new_segment(size, pool)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:  # should_split
            remainder = Block(rest, block.address + size, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            pool.add(remainder)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, merged with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                block.pool.remove(other)
                block.size += other.size
                if other is block.before:
                    block.address, block.before = other.address, other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        block.pool.add(block)

    def _new_segment(self, size: int, pool: _Pool) -> Block:
        wanted = segment_size(size)
        if not self._fits(wanted):
            self._release_cached()
        if not self._fits(wanted):
            raise OutOfMemoryError(
                f"{wanted} bytes wanted, {self.reserved_bytes} of {self.capacity_bytes} reserved"
            )
        self._address -= wanted  # the driver puts the next segment below, as seen on an H200
        block = Block(wanted, self._address, pool)
        self.segments += 1
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _fits(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def _release_cached(self) -> None:
        """Give segments that are one free block back to the driver (`release_cached_blocks`)."""
        for pool in self._pools.values():
            for block in [one for one in pool.blocks.values() if one.whole]:
                pool.remove(block)
                self.reserved_bytes -= block.size
                self.returned += 1
