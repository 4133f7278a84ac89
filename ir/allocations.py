"""Device memory of a step: every block with its size, lifetime and purpose."""

from collections.abc import Sequence
from enum import IntEnum

import msgspec


class MemoryClass(IntEnum):
    """Purpose of a block of device memory."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    WORKSPACE = 4
    COMMUNICATION = 5
    OTHER = 6

    @property
    def label(self) -> str:
        """Name of the class in reports."""
        return "communication buffers" if self is MemoryClass.COMMUNICATION else self.name.lower()


class Blocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that the step allocated or freed, one entry each, as columns.

    Attributes:
        bytes: size, as the allocator rounds it.
        memory_class: a `MemoryClass`.
        allocated_at: index of the allocation among all allocations and frees of the step, from 0;
            -1 for a block allocated before the step.
        freed_at: index of the free; -1 for a block that outlives the step.
        node: id of the node whose operator allocated it (if allocated before the step: freed it);
            -1 if no node represents the operator.
        phase: `Phase` of the allocation; NONE for a block allocated before the step.
        pool: number of its allocator pool (of a stream, or of a CUDA graph on it); 0 is the default
            stream's pool. Empty if all blocks are in that pool, or if pools are not known.
        spare_bytes: block size minus requested size; empty if requests are not recorded.
        lingers: number of later allocations and frees during which its memory cannot be reused,
            because another stream uses it (`record_stream`); empty if there is no such block.
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
    """Settings of the caching allocator from PYTORCH_ALLOC_CONF, with PyTorch's defaults.

    Attributes:
        expandable_segments: whether a pool is one segment that grows.
        max_split_bytes: size from which a block is not split; 0 for no limit.
        roundup_divisions: parts into which the space between two powers of two is divided to round
            sizes up, for sizes below 2 MiB, 4 MiB and so on; 0 or 1 rounds to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_bytes: int = 0
    roundup_divisions: tuple[int, ...] = ()


class MemoryLog(msgspec.Struct, frozen=True, omit_defaults=True):
    """The allocations and frees of one profiled step.

    Attributes:
        blocks: the blocks that were allocated or freed.
        events: number of allocations and frees, which `blocks` indexes.
        reserved_bytes: peak that the caching allocator reserved, from steps without a profiler if
            the capture recorded them; 0 if not known.
        settings: allocator configuration; None if it is the default or not known.
    """

    blocks: Blocks
    events: int
    reserved_bytes: int = 0
    settings: AllocatorSettings | None = None

    def renumbered(self, ids: Sequence[int]) -> "MemoryLog":
        """Return the log for a graph whose nodes have other ids.

        Args:
            ids: new id by old id; -1 for a removed node.
        """
        node = tuple(int(ids[old]) if old >= 0 else old for old in self.blocks.node)
        return msgspec.structs.replace(self, blocks=msgspec.structs.replace(self.blocks, node=node))
