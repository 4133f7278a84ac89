"""What a step did with device memory, block by block."""

from enum import IntEnum

import msgspec


class MemoryClass(IntEnum):
    """What a block of device memory is for."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    WORKSPACE = 4
    COMMUNICATION = 5
    OTHER = 6

    @property
    def label(self) -> str:
        """The words for a report."""
        return "communication buffers" if self is MemoryClass.COMMUNICATION else self.name.lower()


class Blocks(msgspec.Struct, frozen=True):
    """Blocks that the step allocated or freed, one entry each, as columns.

    Attributes:
        bytes: size, as the allocator rounds it.
        memory_class: a `MemoryClass`.
        allocated_at: place of the allocation among all allocations and frees of the step, from 0;
            -1 for a block held before the step.
        freed_at: place of the free; -1 for a block held after the step.
        node: id of the node whose operator allocated it (of one held before: freed it); -1 where
            no node stands for the operator.
        phase: `Phase` of the allocation; NONE for a block held before.
    """

    bytes: tuple[int, ...] = ()
    memory_class: tuple[int, ...] = ()
    allocated_at: tuple[int, ...] = ()
    freed_at: tuple[int, ...] = ()
    node: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.bytes)


class MemoryLog(msgspec.Struct, frozen=True):
    """The allocations and frees of one profiled step.

    Attributes:
        blocks: what was allocated or freed.
        events: allocations and frees, places that `blocks` counts in.
        reserved_bytes: most that the caching allocator had reserved; 0 where it does not tell.
    """

    blocks: Blocks
    events: int
    reserved_bytes: int = 0
