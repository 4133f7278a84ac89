"""Blocks of device memory in a trace: when each was held, and what for."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.columns import MemoryRows, pick
from onerank.converters.kineto.history import Told
from onerank.converters.kineto.host import NONE, HostTimeline
from onerank.ir import AllocatorSettings, Blocks, MemoryClass, MemoryLog, Phase

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_COMMUNICATES = ("c10d::", "_c10d_functional::", "fsdp::", "FSDP::", "onerank::comm")


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Blocks that a step allocated or freed, n of them; NONE where there is no such event.

    Attributes:
        bytes: size as the allocator rounds it.
        memory_class: a `MemoryClass`.
        made: place of the allocation among all events; NONE for a block held before.
        freed: place of the free; NONE for a block held after.
        operator: host event that answers for the allocation, or for the free of one held before.
        phase: of the allocation, a `Phase`.
        pool: as in `Blocks`; zeros where nobody tells.
        spare: bytes beyond what was asked for, likewise.
        lingers: as in `Blocks`, likewise.
        settings: how the allocator was configured.
    """

    bytes: I64
    memory_class: I64
    made: I64
    freed: I64
    operator: I64
    phase: I64
    pool: I64
    spare: I64
    lingers: I64
    settings: AllocatorSettings | None

    def log(self, events: int, reserved_bytes: int, node_of: Mapping[int, int]) -> MemoryLog:
        """Return what the graph keeps; `node_of` gives the node of a host event."""
        operators: list[int] = self.operator.tolist()
        blocks = Blocks(
            bytes=tuple(self.bytes.tolist()),
            memory_class=tuple(self.memory_class.tolist()),
            allocated_at=tuple(self.made.tolist()),
            freed_at=tuple(self.freed.tolist()),
            node=tuple(node_of.get(index, -1) for index in operators),
            phase=tuple(self.phase.tolist()),
            pool=_unless_zero(self.pool),
            spare_bytes=_unless_zero(self.spare),
            lingers=_unless_zero(self.lingers),
        )
        return MemoryLog(blocks, events, reserved_bytes, self.settings)


def _unless_zero(column: I64) -> tuple[int, ...]:
    return tuple(column.tolist()) if column.any() else ()


def blocks(
    rows: MemoryRows, timeline: HostTimeline, around: I64, op: I64, told: Told | None = None
) -> BlockRows:
    """Join allocations with frees by address, and tell what each block is for.

    Args:
        rows: allocations and frees on one device, in order.
        timeline: the host events.
        around: innermost host event at each, NONE for none.
        op: host event that answers for each, NONE for none.
        told: what the allocator's own history says of each.
    """
    made, freed = _pairs(rows)
    event = np.where(made >= 0, made, freed)
    scope = np.where(around >= 0, around, op)  # Python between operators goes on with its phase
    phase = pick(timeline.phase, scope, int(Phase.NONE))
    root, communicates = _above(timeline, around)
    own = (made >= 0) & (freed >= 0) & (root[made] >= 0) & (root[made] == root[freed])
    size = np.abs(rows.bytes[event])
    began, ended = pick(phase, made, int(Phase.NONE)), pick(phase, freed, int(Phase.NONE))
    gradient = (made >= 0) & (began == Phase.BACKWARD) & (ended != Phase.BACKWARD)
    optimizer = began == Phase.OPTIMIZER
    kind = np.select(
        [
            made < 0,
            communicates[made],
            gradient,
            own | (optimizer & (freed >= 0)),
            optimizer,
            began == Phase.NONE,
        ],
        [
            np.where(_gradients_before(made, gradient, size), GRADIENTS, OTHER),
            int(MemoryClass.COMMUNICATION),
            GRADIENTS,
            int(MemoryClass.WORKSPACE),
            int(MemoryClass.OPTIMIZER),
            OTHER,
        ],
        int(MemoryClass.ACTIVATIONS),
    )
    pool, spare, lingers = (np.zeros(len(size), dtype=np.int64) for _ in range(3))
    if told is not None:
        pool, spare = told.pool[event], size - told.asked[event]
        lingers = np.where(freed >= 0, told.lingers[freed], 0)
    settings = told.settings if told is not None else None
    return BlockRows(size, kind, made, freed, op[event], began, pool, spare, lingers, settings)


GRADIENTS, OTHER = int(MemoryClass.GRADIENTS), int(MemoryClass.OTHER)


def _pairs(rows: MemoryRows) -> tuple[I64, I64]:
    """Return the places of each block's allocation and free, in order of the first of them."""
    order = np.lexsort((np.arange(len(rows)), rows.address))
    address, allocates = rows.address[order], rows.bytes[order] > 0
    same = np.append(address[1:] == address[:-1], False)
    freed_next = np.append(~allocates[1:], False) & same
    held_before = ~allocates & ~np.append(False, allocates[:-1] & same[:-1])
    following = np.append(order[1:], NONE)
    made = np.where(allocates, order, NONE)
    freed = np.where(allocates, np.where(freed_next, following, NONE), order)
    first = allocates | held_before
    made, freed = made[first], freed[first]
    by_time = np.argsort(np.where(made >= 0, made, freed), kind="stable")
    return made[by_time], freed[by_time]


def _above(timeline: HostTimeline, around: I64) -> tuple[I64, Mask]:
    """Return the outermost operator at each event, and whether one on the way communicates."""
    marks = timeline.named(lambda name: name.startswith(_COMMUNICATES)) | (timeline.in_mark >= 0)
    root, communicates = np.full(len(around), NONE), np.zeros(len(around), dtype=bool)
    index, at = around[around >= 0], np.flatnonzero(around >= 0)
    while len(at):
        operators = timeline.rows.is_operator[index]
        root[at[operators]] = index[operators]
        communicates[at] |= marks[index]
        index = timeline.parent[index]
        at, index = at[index >= 0], index[index >= 0]
    return root, communicates


def _gradients_before(made: I64, gradient: Mask, size: I64) -> Mask:
    """Return which blocks held before are gradients of the step before.

    Each is as large as the one that takes its place; so many of a size as the step makes.
    """
    found = np.zeros(len(made), dtype=bool)
    sizes, counts = np.unique(size[gradient], return_counts=True)
    before = np.flatnonzero(made < 0)
    place = np.searchsorted(sizes, size[before])
    known = place < len(sizes)
    known[known] = sizes[place[known]] == size[before[known]]
    before, place = before[known], place[known]
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(len(sizes)))
    rank = np.arange(len(order)) - starts[place[order]]
    found[before[order][rank < counts[place[order]]]] = True
    return found
