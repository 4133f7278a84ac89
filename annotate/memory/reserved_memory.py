"""Simulate what the caching allocator reserves over a few steps, from the log of one step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from onerank.annotate.memory.allocator import Block, CachingAllocator
from onerank.ir import AllocatorSettings, Blocks, MemoryClass, MemoryLog, Phase

STEPS = 3
"""Simulated steps until reserved memory is that of a steady state.

The first step starts without gradients and optimizer state; the second reuses its cache.
"""


class AllocationRequest(NamedTuple):
    """A request to the allocator: bytes, and the pool to take them from."""

    bytes: int
    pool: int = 0


class BlockEvent(Enum):
    """An event of a block: allocated, freed, or usable again after another stream's use."""

    ALLOCATED = auto()
    FREED = auto()
    USABLE = auto()


class ReservedMemory(NamedTuple):
    """Outcome of a simulation, bytes."""

    allocated_bytes: int
    reserved_bytes: int
    segments: int
    returned: int


def simulate_reserved(
    log: MemoryLog,
    resident: Mapping[MemoryClass, Sequence[AllocationRequest]],
    capacity_bytes: int | None = None,
) -> ReservedMemory:
    """Simulate the allocator from the model's creation over a few steps.

    Parameters and unclassified memory come first; the step's allocations and frees follow in order,
    repeatedly. The optimizer allocates its state when its first step begins. Each stream has a
    separate pool if the log records streams (a Kineto trace does not).

    Raises:
        OutOfMemoryError: the step exceeds the capacity.
    """
    allocator = CachingAllocator(capacity_bytes, log.settings or AllocatorSettings())
    resident = _without_renewed(log.blocks, resident)
    # The order is that of a script: the model, then what `cuBLAS` and NCCL
    # take at first use. It decides which segments fragments end up in.
    first = (MemoryClass.PARAMETERS, MemoryClass.OTHER, MemoryClass.WORKSPACE)
    for memory_class in (*first, MemoryClass.COMMUNICATION, MemoryClass.KV_CACHE):
        for request in resident.get(memory_class, ()):
            allocator.allocate(*request)
    steps = _SimulatedSteps(allocator, log, _allocated_in_first_step(log.blocks, resident))
    for _ in range(STEPS):
        steps.run()
    return ReservedMemory(
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.segments,
        allocator.returned,
    )


# Memory before a step that the step may free and allocate again. Parameters and optimizer states
# have the sizes of gradients, and stay.
_RENEWED = (MemoryClass.GRADIENTS, MemoryClass.OTHER)


def _without_renewed(
    blocks: Blocks, resident: Mapping[MemoryClass, Sequence[AllocationRequest]]
) -> dict[MemoryClass, list[AllocationRequest]]:
    """Return the resident memory without blocks that each step frees and allocates again.

    Examples are gradients, and the outputs of a pipeline's micro-batches until the next step. The
    first step has none of them. A log may give them another class than the list of resident memory.
    """
    sizes = zip(blocks.bytes, blocks.allocated_at, blocks.freed_at, strict=True)
    crossing = [(size, at < 0) for size, at, freed in sizes if (at < 0) != (freed < 0)]
    freed = Counter(size for size, before in crossing if before)
    renewed = freed & Counter(size for size, before in crossing if not before)
    kept = {kind: list(requests) for kind, requests in resident.items()}
    for kind in _RENEWED:
        stays = list[AllocationRequest]()
        for request in kept.get(kind, ()):
            if renewed[request.bytes] > 0:
                renewed[request.bytes] -= 1
            else:
                stays.append(request)
        if kind in kept:
            kept[kind] = stays
    return kept


def _allocated_in_first_step(
    blocks: Blocks, resident: Mapping[MemoryClass, Sequence[AllocationRequest]]
) -> list[AllocationRequest]:
    """Return the gradients and optimizer states that stay from the first step on."""
    # Resident gradients that no block stands for are allocated in the
    # first backward; blocks that stand for them come with the events.
    gradients = MemoryClass.GRADIENTS in resident and not any(
        kind == MemoryClass.GRADIENTS and at < 0
        for kind, at in zip(blocks.memory_class, blocks.allocated_at, strict=True)
    )
    return [
        *(resident.get(MemoryClass.GRADIENTS, ()) if gradients else ()),
        *resident.get(MemoryClass.OPTIMIZER, ()),
    ]


class _SimulatedSteps:
    """Runs the events of a logged step again and again; blocks of a step may outlive it."""

    def __init__(
        self, allocator: CachingAllocator, log: MemoryLog, late: list[AllocationRequest]
    ) -> None:
        """Prepare the steps.

        Args:
            allocator: takes the events.
            log: the step.
            late: allocated when the optimizer's first step begins; emptied then.
        """
        blocks = log.blocks
        self._allocator = allocator
        self._late = late
        self._phases = blocks.phase
        self._requests = [
            AllocationRequest(*row)
            for row in zip(_requested_bytes(blocks), _pools(blocks), strict=True)
        ]
        self._lingers = blocks.lingers or (0,) * len(blocks)
        self._events = _events(blocks, log.events)
        # Blocks of earlier steps that were not freed, by their request.
        self._kept: dict[AllocationRequest, list[Block]] = {}

    def run(self) -> None:
        """Run the events of one step.

        Raises:
            OutOfMemoryError: the step exceeds the capacity.
        """
        allocator, requests = self._allocator, self._requests
        live: dict[int, Block] = {}
        ended: dict[int, Block] = {}
        for row, what in self._events:
            if what is BlockEvent.ALLOCATED:
                if self._late and self._phases[row] == Phase.OPTIMIZER:
                    self._allocate_late()
                live[row] = allocator.allocate(*requests[row])
            elif what is BlockEvent.FREED:
                block = live.pop(row, None)
                # A block that this step frees and did not allocate is one of the previous step.
                if block is None and self._kept.get(requests[row]):
                    block = self._kept[requests[row]].pop(0)
                if block is not None:
                    allocator.free(block, lingers=self._lingers[row] > 0)
                    ended[row] = block
            elif row in ended:
                allocator.finish(ended[row])
        for row, block in live.items():
            self._kept.setdefault(requests[row], []).append(block)
        # For an optimizer whose step allocates nothing itself.
        self._allocate_late()

    def _allocate_late(self) -> None:
        for request in self._late:
            self._allocator.allocate(*request)
        self._late.clear()


def _requested_bytes(blocks: Blocks) -> tuple[int, ...]:
    if not blocks.spare_bytes:
        return blocks.bytes
    return tuple(size - rest for size, rest in zip(blocks.bytes, blocks.spare_bytes, strict=True))


def _pools(blocks: Blocks) -> tuple[int, ...]:
    return blocks.pool or (0,) * len(blocks)


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
