"""Segments that grow: addresses of a pool get memory page by page (`expandable_segments:True`).

As in c10/cuda/CUDACachingAllocator.cpp: a pool has one range of addresses, more than the device has
memory; a request without a free block takes the lowest addresses that have room, and only as many
pages as they lack.
"""

from collections.abc import Callable

from onerank.annotate.memory.blocks import Block, Pool

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
