"""What the caching allocator reserves for a step that was captured, from an empty device on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onerank.annotate.memory.allocator import Block, CachingAllocator
from onerank.ir import Blocks, MemoryClass, MemoryLog, Phase

STEPS = 3
"""The first has no gradients and no optimizer state yet, the second takes what the first cached."""


class Reserve(NamedTuple):
    """Outcome of a simulation, bytes."""

    allocated_bytes: int
    reserved_bytes: int
    segments: int
    returned: int


def reserve(
    log: MemoryLog, held: Mapping[MemoryClass, Sequence[int]], capacity_bytes: int | None = None
) -> Reserve:
    """Simulate the allocator from the model's creation over a few steps.

    Parameters and what is of no class come first; the step's allocations and frees follow, in
    their order, again and again. The optimizer allocates its state as its first step begins. All is
    on one stream, as a Kineto trace does not tell the stream of an allocation.

    Raises:
        OutOfMemoryError: the capacity does not hold it.
    """
    allocator = CachingAllocator(capacity_bytes)
    first = (MemoryClass.PARAMETERS, MemoryClass.OTHER, MemoryClass.WORKSPACE)
    for one in (*first, MemoryClass.COMMUNICATION):
        for size in held.get(one, ()):
            allocator.allocate(size)
    blocks = log.blocks
    events = _events(blocks, log.events)
    kept: dict[int, list[Block]] = {}
    gradients = MemoryClass.GRADIENTS in held and not any(
        kind == MemoryClass.GRADIENTS and at < 0
        for kind, at in zip(blocks.memory_class, blocks.allocated_at, strict=True)
    )
    late = [*(held.get(MemoryClass.GRADIENTS, ()) if gradients else ())]
    late += held.get(MemoryClass.OPTIMIZER, ())
    for _ in range(STEPS):
        live: dict[int, Block] = {}
        for row, allocates in events:
            size = blocks.bytes[row]
            if late and allocates and blocks.phase[row] == Phase.OPTIMIZER:
                _allocate_all(allocator, late)
            if allocates:
                live[row] = allocator.allocate(size)
            elif row in live:
                allocator.free(live.pop(row))
            elif kept.get(size):  # held by the step before
                allocator.free(kept[size].pop(0))
        for row, block in live.items():
            kept.setdefault(blocks.bytes[row], []).append(block)
        _allocate_all(allocator, late)  # where the optimizer takes no memory
    return Reserve(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.segments,
        allocator.returned,
    )


def _allocate_all(allocator: CachingAllocator, sizes: list[int]) -> None:
    """Allocate, and leave nothing to allocate again."""
    for size in sizes:
        allocator.allocate(size)
    sizes.clear()


def _events(blocks: Blocks, count: int) -> list[tuple[int, bool]]:
    """Return (row, whether it is allocated) of each event, in order."""
    found: list[tuple[int, bool] | None] = [None] * count
    for row, (made, freed) in enumerate(zip(blocks.allocated_at, blocks.freed_at, strict=True)):
        if made >= 0:
            found[made] = (row, True)
        if freed >= 0:
            found[freed] = (row, False)
    return [event for event in found if event is not None]
