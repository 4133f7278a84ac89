"""Memory in use over time, and the contents of its peak."""

import re
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.annotate.memory.mitigations import STEP_ROW, WHOLE_ROW
from onerank.annotate.memory.reserved_memory import AllocationRequest
from onerank.ir import Graph, MemoryClass, MemoryLog, Phase
from onerank.ir.arrays import I64, Mask

Resident = dict[MemoryClass, tuple[int, ...]]
"""Sizes of the blocks allocated before the step, by class."""

_GRADIENTS = int(MemoryClass.GRADIENTS)


def resident_blocks(graph: Graph, log: MemoryLog) -> tuple[Resident, str]:
    """Return the sizes of the blocks allocated before the step by class, and their source.

    They sum to the memory allocated at that time. If the capture does not record them, they are
    inferred from the gradients that the step allocates: each parameter is as large as its gradient,
    and the optimizer's state is a whole number of copies.
    """
    measured = graph.job.measurement
    start = measured.start_memory_bytes
    if measured.resident_bytes:
        named = {memory_class.name.lower(): memory_class for memory_class in MemoryClass}
        rounded = log.is_rounded
        resident = {
            # Recorded sizes are those of tensors; the CUDA allocator
            # hands out multiples of 512 bytes, a CPU's none.
            named[name]: tuple(round_size(size) if rounded else size for size in sizes)
            for name, sizes in measured.resident_bytes.items()
            if name in named and sizes
        }
        rest = start - sum(map(sum, resident.values()))
        # Memory of no tensor: cuBLAS workspaces, buckets, and unused ends of larger blocks.
        if rest > 0:
            resident[MemoryClass.WORKSPACE] = (*resident.get(MemoryClass.WORKSPACE, ()), rest)
        return resident, "captured"
    blocks = log.blocks
    rows = list(
        zip(blocks.bytes, blocks.memory_class, blocks.allocated_at, blocks.freed_at, strict=True)
    )
    gradients = tuple(size for size, kind, _, freed in rows if kind == _GRADIENTS and freed < 0)
    held_gradients = tuple(size for size, kind, at, _ in rows if kind == _GRADIENTS and at < 0)
    rest = start - sum(gradients) - sum(held_gradients)
    if not gradients or rest < 0:
        return {MemoryClass.OTHER: (start,)} if start else {}, "not known"
    # AdamW keeps two moments of the parameters' dtype, SGD with
    # momentum one; a whole number leaves the rest as other memory.
    copies = rest // sum(gradients)
    resident = {
        MemoryClass.PARAMETERS: gradients,
        MemoryClass.GRADIENTS: held_gradients,
        MemoryClass.OPTIMIZER: gradients * copies,
        MemoryClass.OTHER: (rest - copies * sum(gradients),),
    }
    return {
        memory_class: sizes for memory_class, sizes in resident.items() if sum(sizes)
    }, "inferred from the gradients"


def resident_requests(
    graph: Graph, log: MemoryLog, resident: Resident
) -> dict[MemoryClass, tuple[AllocationRequest, ...]]:
    """Return the requests to an allocator for memory allocated before the step, by class.

    Each uses its recorded pool, else that of the default stream. If the log records requested
    sizes, resident memory that is in no logged block is skipped; otherwise it is allocated from the
    default stream's pool.
    """
    pools = graph.job.measurement.resident_pools
    has_requests = bool(log.blocks.spare_bytes)
    requests: dict[MemoryClass, tuple[AllocationRequest, ...]] = {}
    for memory_class, sizes in resident.items():
        name = memory_class.name.lower()
        known = (
            len(graph.job.measurement.resident_bytes.get(name, ())) if has_requests else len(sizes)
        )
        numbers = (*pools.get(name, ()), *(0 for _ in sizes))
        requests[memory_class] = tuple(map(AllocationRequest, sizes[:known], numbers[:known]))
    return requests


def levels_of(log: MemoryLog, resident: Resident) -> I64:
    """Return the bytes in use by class after every event, the start first.

    int64[10, events + 1]: a row per class, one for the workspace of the optimizer's step, and one
    for gradients that the backward frees.
    """
    size, _, allocated, freed = columns_of(log)
    kind = _resident_classes(log, resident)
    step = (kind == MemoryClass.WORKSPACE) & (np.array(log.blocks.phase) == Phase.OPTIMIZER)
    row = np.where(step, STEP_ROW, kind)
    row = np.where(_freed_by_backward(log), WHOLE_ROW, row)
    levels = np.zeros((WHOLE_ROW + 1, log.events + 1), dtype=np.int64)
    np.add.at(levels, (row[allocated >= 0], allocated[allocated >= 0] + 1), size[allocated >= 0])
    np.add.at(levels, (row[freed >= 0], freed[freed >= 0] + 1), -size[freed >= 0])
    levels[:, 0] += [sum(resident.get(memory_class, ())) for memory_class in MemoryClass] + [0, 0]
    levels = np.cumsum(levels, axis=1)
    # Negative where the step frees a resident block that has no size in common with its class.
    below = np.minimum(levels, 0)
    levels -= below
    levels[MemoryClass.OTHER] += below.sum(axis=0)
    return levels


def _resident_classes(log: MemoryLog, resident: Resident) -> I64:
    """Return the class of each block, int64[n], of those allocated before the step by `resident`.

    The log knows a block that the step frees but did not allocate by its size alone. If its logged
    class has no resident block of this size, the block belongs to a class that has one. Gradients
    come first: a step frees them far more often than parameters, which have the same sizes.
    """
    size, kind, allocated, freed = columns_of(log)
    remaining = {memory_class: Counter(sizes) for memory_class, sizes in resident.items()}
    kind = kind.copy()
    for row in np.flatnonzero((allocated < 0) & (freed >= 0)).tolist():
        block = int(size[row])
        classes = (MemoryClass(kind[row]), MemoryClass.GRADIENTS, *remaining)
        owner = next((c for c in classes if c in remaining and remaining[c][block]), None)
        if owner is not None:
            remaining[owner][block] -= 1
            kind[row] = owner
    return kind


def levels_by_class(levels: I64) -> I64:
    """Return `levels` with one row per class, int64[8, moments]."""
    rows = levels[: len(MemoryClass)].copy()
    rows[MemoryClass.WORKSPACE] += levels[STEP_ROW]
    rows[MemoryClass.GRADIENTS] += levels[WHOLE_ROW]
    return rows


def _freed_by_backward(log: MemoryLog) -> Mask:
    """Return which blocks are gradients that the backward frees itself, bool[n]."""
    _, kind, allocated, freed = columns_of(log)
    phase = np.array(log.blocks.phase, dtype=np.int64)
    backward = allocated[(phase == Phase.BACKWARD) & (allocated >= 0)]
    # Forward allocations before each event: a gradient that outlives one is a sum of micro-batches.
    forward = np.zeros(log.events + 1, dtype=np.int64)
    forward[allocated[(phase == Phase.FORWARD) & (allocated >= 0)]] = 1
    forward = np.cumsum(forward)
    gradients = (kind == _GRADIENTS) & (allocated >= 0) & (freed >= 0)
    gradients &= freed < backward.max(initial=-1)
    return gradients & (forward[freed] == forward[allocated])


def columns_of(log: MemoryLog) -> tuple[I64, I64, I64, I64]:
    """Return bytes, class, event of allocation and of freeing (-1: none) of each block."""
    blocks = log.blocks
    columns = (blocks.bytes, blocks.memory_class, blocks.allocated_at, blocks.freed_at)
    size, kind, allocated, freed = (np.array(column, dtype=np.int64) for column in columns)
    return size, kind, allocated, freed


# A module's path up to its first number, the index of a layer in a list of modules.
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory in use.

    Attributes:
        at: index of its event; -1: before all events.
        bytes: bytes in use.
        classes: class -> bytes in use; they sum to `bytes`.
    """

    at: int
    bytes: int
    classes: dict[MemoryClass, int]


class ModuleMemory(msgspec.Struct, frozen=True):
    """Live blocks of the step of one module and class: bytes and number."""

    module: str
    memory_class: str
    bytes: int
    blocks: int


def peak_of(levels: I64) -> Peak:
    """Return the peak of `levels`, int64[10, moments], see `levels_of`."""
    total = levels.sum(axis=0)
    moment = int(total.argmax())
    at_peak = levels_by_class(levels)[:, moment]
    classes = {memory_class: int(at_peak[memory_class]) for memory_class in MemoryClass}
    shown = {memory_class: size for memory_class, size in classes.items() if size}
    return Peak(moment - 1, int(total[moment]), shown)


def node_at(log: MemoryLog, at: int) -> int | None:
    """Return the id of the node that allocated at event `at`; None if not known."""
    places = dict(zip(log.blocks.allocated_at, log.blocks.node, strict=True))
    node = places.get(at, -1) if at >= 0 else -1
    return node if node >= 0 else None


def modules_at(graph: Graph, log: MemoryLog, at: int) -> tuple[ModuleMemory, ...]:
    """Return the blocks of the step that are live after event `at`, the largest sum first."""
    module = _module_of(graph)
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for row in _live(log, at):
        kind = MemoryClass(log.blocks.memory_class[row]).label
        key = (module.get(log.blocks.node[row], ""), kind)
        size, count = sums.get(key, (0, 0))
        sums[key] = (size + log.blocks.bytes[row], count + 1)
    rows = [ModuleMemory(*key, *value) for key, value in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def recomputable(graph: Graph, log: MemoryLog, at: int) -> tuple[int, int]:
    """Return (activations at the peak that full recomputation does not keep, number of layers).

    Recomputation keeps every layer's input, and all activations of one layer. A layer's input is as
    large as the last block that the forward allocated in the layer before.
    """
    module = _module_of(graph)
    activations, last = dict[str, int](), dict[str, int]()
    for row in _live(log, at):
        blocks = log.blocks
        if blocks.memory_class[row] != MemoryClass.ACTIVATIONS:
            continue
        layer_match = _LAYER.match(module.get(blocks.node[row], ""))
        if layer_match is None:
            continue
        layer = layer_match.group()
        activations[layer] = activations.get(layer, 0) + blocks.bytes[row]
        # Rows are in order of allocation, so the last one of
        # a layer stays: its output, the next layer's input.
        if blocks.phase[row] == Phase.FORWARD:
            last[layer] = blocks.bytes[row]
    most = max(activations.values(), default=0)
    inputs = sum(last.values())
    return max(0, sum(activations.values()) - inputs - most), len(activations)


def _live(log: MemoryLog, at: int) -> list[int]:
    """Return the rows of the step's blocks that are live after event `at`."""
    _, _, allocated, freed = columns_of(log)
    live = np.flatnonzero((allocated >= 0) & (allocated <= at) & ((freed < 0) | (freed > at)))
    return live.tolist()


def _module_of(graph: Graph) -> dict[int, str]:
    ids: list[int] = graph.nodes.id.tolist()
    return dict(zip(ids, graph.text("module"), strict=True))
