"""Blocks of the caching allocator's segments, and the pools of free ones."""

from bisect import bisect_left, insort
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
