"""PyTorch's caching allocator, simulated: what it reserves for a sequence of allocations.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp (and, since torch 2.8, of
c10/core/AllocatorConfig.h). Streams have pools of their own. Of what can be configured it knows
expandable segments, the size from which nothing is split, and rounding to parts of powers of two;
collecting garbage early (`garbage_collection_threshold`) it does not know.
"""

from dataclasses import dataclass, field

from onerank.annotate.memory import segments as expandable
from onerank.annotate.memory.segments import Block, Pool
from onerank.ir import AllocatorSettings

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_BUFFER_BYTES = 2 << 20
LARGE_BUFFER_BYTES = 20 << 20
MIN_LARGE_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20

_FIRST_DIVIDED = 20
"""Power of two from which on `roundup_divisions` tell the sizes of each apart."""


class OutOfMemoryError(Exception):
    """The simulated device has no room left, cached segments given back."""


def round_size(size: int, divisions: tuple[int, ...] = ()) -> int:
    """Return the bytes of the block for a request (`round_size`)."""
    if divisions and size >= MIN_BLOCK_BYTES:
        power = size.bit_length() - 1
        parts = divisions[min(max(power - _FIRST_DIVIDED, 0), len(divisions) - 1)]
        if parts > 1 and size > MIN_BLOCK_BYTES * parts:
            part = (1 << power) >> (parts.bit_length() - 1)
            return -(-size // part) * part
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_size(size: int) -> int:
    """Return what is asked of the driver for a block of `size` (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_BUFFER_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_BUFFER_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclass(slots=True)
class CachingAllocator:
    """The allocator's state; `allocate` returns a handle that `free` takes.

    Attributes:
        capacity_bytes: what the driver can give; None for no end.
        settings: how it is configured.
        allocated_bytes: in blocks in use.
        reserved_bytes: in segments, cached ones included.
        peak_allocated_bytes: highest `allocated_bytes`.
        peak_reserved_bytes: highest `reserved_bytes`.
        segments: segments taken from the driver so far; of expandable ones the times one grew.
        returned: segments given back to make room; of expandable ones the pools that gave.
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
        """Take a block of `request` bytes.

        Raises:
            OutOfMemoryError: the capacity does not hold it.
        """
        size = round_size(request, self.settings.roundup_divisions)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), Pool(small))
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
        """Give a block back to its pool, merged with free neighbours of its segment.

        Args:
            block: what to free.
            lingers: whether another stream uses it, until `finish` or until memory runs out.
        """
        self.allocated_bytes -= block.size
        if lingers:
            self._lingering[id(block)] = block
        else:
            self._give_back(block)

    def finish(self, block: Block) -> None:
        """Let the memory of a block that lingers be used again."""
        if self._lingering.pop(id(block), None) is not None:
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        block.free = True
        block.merge()
        block.pool.add(block)

    def _free_block(self, pool: Pool, size: int) -> Block | None:
        """Take a free block out of its pool (`get_free_block`)."""
        if self.settings.expandable_segments:
            block = expandable.best_fit(pool, size)
        else:
            block = pool.best_fit(size)
        if block is None:
            return None
        most = self.settings.max_split_bytes
        if most and size < most <= block.size:
            return None
        if most and size >= most and block.size >= size + LARGE_BUFFER_BYTES:
            return None
        pool.remove(block)
        return block

    def _splits(self, rest: int, size: int, pool: Pool) -> bool:
        """Return whether the rest of a block becomes one of its own (`should_split`)."""
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        most = self.settings.max_split_bytes
        return rest > SMALL_BYTES and not (most and size >= most)

    def _new_block(self, pool: Pool, size: int) -> Block:
        for make_room in (None, self._release_oversized, self._release_cached):
            if make_room is not None:
                make_room(pool, size)
            block = self._from_driver(pool, size)
            if block is not None:
                return block
        raise OutOfMemoryError(
            f"{segment_size(size)} bytes wanted, {self.reserved_bytes} of {self.capacity_bytes} "
            "reserved"
        )

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return expandable.grow(
                pool, size, self._reserve, lambda: self._below(expandable.RANGE_BYTES)
            )
        wanted = segment_size(size)
        return Block(wanted, self._below(wanted), pool) if self._reserve(wanted) else None

    def _below(self, size: int) -> int:
        self._address -= size  # the driver puts the next segment below, as seen on an H200
        return self._address

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.segments += 1
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release_oversized(self, pool: Pool, size: int) -> None:
        """Give back blocks too large to be split, as many as make room.

        (`release_available_cached_blocks`)
        """
        most = self.settings.max_split_bytes
        if not most:
            return
        wanted = max(size, most)
        larger = pool.fitting(wanted)
        if larger:
            self._release(larger[0])
            return
        released = 0
        for block in reversed(pool.fitting(most)):
            if released >= wanted:
                break
            released += block.size
            self._release(block)

    def _release_cached(self, pool: Pool, size: int) -> None:
        """Give all that is free back to the driver (`release_cached_blocks`)."""
        for block in list(self._lingering.values()):
            self.finish(block)
        for one in self._pools.values():
            if self.settings.expandable_segments:
                given = expandable.give_back(one)
                self.reserved_bytes -= given
                self.returned += given > 0
                continue
            for block in one.free_blocks():
                self._release(block)

    def _release(self, block: Block) -> None:
        if block.whole:
            block.pool.remove(block)
            self.reserved_bytes -= block.size
            self.returned += 1
