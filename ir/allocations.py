"""Device memory of a step: every block with its size, lifetime and purpose."""

from collections.abc import Sequence
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


class Blocks(msgspec.Struct, frozen=True, omit_defaults=True):
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
        pool: number of the allocator's pool (of a stream, or of a CUDA graph on it) that it is of;
            0 is the default stream's. Empty if all blocks are in it, or if pools are not known.
        spare_bytes: block size minus requested size; empty if requests are not recorded.
        lingers: allocations and frees for which its memory is not used again after its free, since
            another stream was at it (`record_stream`); empty where none lingers.
    """

    bytes: tuple[int, ...] = ()
    memory_class: tuple[int, ...] = ()
    allocated_at: tuple[int, ...] = ()
    freed_at: tuple[int, ...] = ()
    node: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    pool: tuple[int, ...] = ()
    spare_bytes: tuple[int, ...] = ()
    lingers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.bytes)


class AllocatorSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """What PYTORCH_ALLOC_CONF made of the caching allocator; the defaults are its own.

    Attributes:
        expandable_segments: whether a pool is one segment that grows.
        max_split_bytes: size from which a block is not split; 0 for no such size.
        roundup_divisions: parts into which the space between two powers of two is divided to round
            sizes up, for sizes below 2 MiB, 4 MiB and so on; 0 or 1 rounds to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_bytes: int = 0
    roundup_divisions: tuple[int, ...] = ()


class MemoryLog(msgspec.Struct, frozen=True, omit_defaults=True):
    """The allocations and frees of one profiled step.

    Attributes:
        blocks: what was allocated or freed.
        events: allocations and frees, places that `blocks` counts in.
        reserved_bytes: peak that the caching allocator reserved, from steps without a profiler if
            the capture recorded them; 0 if not known.
        settings: allocator configuration; None if it is the default or not known.
    """

    blocks: Blocks
    events: int
    reserved_bytes: int = 0
    settings: AllocatorSettings | None = None

    def renumbered(self, ids: Sequence[int]) -> "MemoryLog":
        """Return the log of a graph whose nodes have other ids.

        Args:
            ids: of each node by its id here; -1 for a node that is gone.
        """
        node = tuple(int(ids[one]) if one >= 0 else one for one in self.blocks.node)
        return msgspec.structs.replace(self, blocks=msgspec.structs.replace(self.blocks, node=node))
