"""Simulate the memory that the allocator reserves for a captured step."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from onerank.annotate.memory.allocator import Block, CachingAllocator
from onerank.ir import AllocatorSettings, Blocks, MemoryClass, MemoryLog, Phase

STEPS = 3
"""Simulated steps until reserved memory is that of a steady state.

The first step starts without gradients and optimizer state; the second reuses its cache.
"""


class Piece(NamedTuple):
    """A memory request: bytes, and the pool to take them from."""

    bytes: int
    pool: int = 0


class BlockEvent(Enum):
    """An event of a block: allocated, freed, or usable again after another stream's use."""

    ALLOCATED = auto()
    FREED = auto()
    USABLE = auto()


class Reserve(NamedTuple):
    """Outcome of a simulation, bytes."""

    allocated_bytes: int
    reserved_bytes: int
    segments: int
    returned: int


def reserve(
    log: MemoryLog,
    resident: Mapping[MemoryClass, Sequence[Piece]],
    capacity_bytes: int | None = None,
) -> Reserve:
    """Simulate the allocator from the model's creation over a few steps.

    Parameters and unclassified memory come first; the step's allocations and frees follow in order,
    repeatedly. The optimizer allocates its state when its first step begins. Each stream has its
    own pool if the log records streams (a Kineto trace alone does not).

    Raises:
        OutOfMemoryError: the step exceeds the capacity.
    """
    allocator = CachingAllocator(capacity_bytes, log.settings or AllocatorSettings())
    first = (MemoryClass.PARAMETERS, MemoryClass.OTHER, MemoryClass.WORKSPACE)
    for memory_class in (*first, MemoryClass.COMMUNICATION):
        for piece in resident.get(memory_class, ()):
            allocator.allocate(*piece)
    blocks = log.blocks
    pieces = [Piece(*row) for row in zip(_asked(blocks), _pools(blocks), strict=True)]
    lingers = blocks.lingers or (0,) * len(blocks)
    kept: dict[Piece, list[Block]] = {}
    gradients = MemoryClass.GRADIENTS in resident and not any(
        kind == MemoryClass.GRADIENTS and at < 0
        for kind, at in zip(blocks.memory_class, blocks.allocated_at, strict=True)
    )
    late = [*(resident.get(MemoryClass.GRADIENTS, ()) if gradients else ())]
    late += resident.get(MemoryClass.OPTIMIZER, ())
    events = _events(blocks, log.events)
    for _ in range(STEPS):
        live: dict[int, Block] = {}
        ended: dict[int, Block] = {}
        for row, what in events:
            if late and what is BlockEvent.ALLOCATED and blocks.phase[row] == Phase.OPTIMIZER:
                _allocate_all(allocator, late)
            if what is BlockEvent.ALLOCATED:
                live[row] = allocator.allocate(*pieces[row])
            elif what is BlockEvent.FREED:
                block = live.pop(row, None)
                if block is None and kept.get(pieces[row]):  # allocated by the previous step
                    block = kept[pieces[row]].pop(0)
                if block is not None:
                    allocator.free(block, lingers=lingers[row] > 0)
                    ended[row] = block
            elif row in ended:
                allocator.finish(ended[row])
        for row, block in live.items():
            kept.setdefault(pieces[row], []).append(block)
        _allocate_all(allocator, late)  # if the optimizer's step allocates nothing itself
    return Reserve(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.segments,
        allocator.returned,
    )


def _asked(blocks: Blocks) -> tuple[int, ...]:
    if not blocks.spare_bytes:
        return blocks.bytes
    return tuple(size - rest for size, rest in zip(blocks.bytes, blocks.spare_bytes, strict=True))


def _pools(blocks: Blocks) -> tuple[int, ...]:
    return blocks.pool or (0,) * len(blocks)


def _allocate_all(allocator: CachingAllocator, pieces: list[Piece]) -> None:
    """Allocate all pieces once: empty the list."""
    for piece in pieces:
        allocator.allocate(*piece)
    pieces.clear()


def _events(blocks: Blocks, count: int) -> list[tuple[int, BlockEvent]]:
    """Return (row, event) of all blocks, in order."""
    by_event: list[list[tuple[int, BlockEvent]]] = [[] for _ in range(count + 1)]
    for row, (allocated, freed) in enumerate(
        zip(blocks.allocated_at, blocks.freed_at, strict=True)
    ):
        if allocated >= 0:
            by_event[allocated].append((row, BlockEvent.ALLOCATED))
        if freed >= 0:
            by_event[freed].append((row, BlockEvent.FREED))
    for row, stays in enumerate(blocks.lingers):
        # The memory is usable before the event at this index, so this comes first there.
        if stays:
            place = min(count, blocks.freed_at[row] + 1 + stays)
            by_event[place].insert(0, (row, BlockEvent.USABLE))
    return [event for place in by_event for event in place]
