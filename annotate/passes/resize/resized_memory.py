"""Allocations and peak memory of a resized step."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.memory.allocator import SMALL_BYTES, round_size
from onerank.annotate.memory.peak import most_in_use
from onerank.annotate.passes.resize.size_change import Sizing, numel
from onerank.annotate.passes.resize.tensor_growth import Growths, Operands
from onerank.ir import Graph, Measurement, MemoryClass, MemoryLog, Phase

I64 = npt.NDArray[np.int64]


class ResizedMemory(NamedTuple):
    """Columns of the nodes, the measurement without what no longer holds, and notes."""

    columns: dict[str, I64]
    measurement: Measurement
    notes: tuple[str, ...]


def resized_memory(graph: Graph, found: Growths, sizing: Sizing) -> ResizedMemory:
    """Return the memory of the step with resized operands.

    A block belongs to an operand of the node that allocated it if that operand's rounded bytes are
    its size, or it is a workspace for it (see `_grown`). Otherwise it grows like most blocks of its
    size. Other blocks stay; a note counts those over 1024 bytes. Memory allocated before the step
    and freed in it, such as the last step's logits, grows like what this step leaves in its place.
    Without a record of blocks, a node's allocations grow with its results.
    """
    log = graph.job.measurement.memory
    measured = graph.job.measurement.untimed()
    if log is None:
        columns = _by_results(graph, found, sizing)
        none = msgspec.structs.replace(measured, peak_memory_bytes=0, activation_bytes=())
        return ResizedMemory(columns, none, ("The peak of memory at the new size is not known.",))
    sizes, unmatched = _sizes(graph, log, found, sizing)
    made = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
    resized = msgspec.structs.replace(log, blocks=made, reserved_bytes=0)
    peaks = [most_in_use(one) for one in (log, resized)]
    held = [_held(one) for one in (log, resized)]
    activations = tuple(
        round(size * held[1] / held[0]) if held[0] else size for size in measured.activation_bytes
    )
    before, named = _held_before(measured, log, sizes, rounded=graph.job.device.type == "cuda")
    measured = msgspec.structs.replace(
        measured, memory=resized, activation_bytes=activations, resident_bytes=named,
        start_memory_bytes=measured.start_memory_bytes + before,
        peak_memory_bytes=measured.peak_memory_bytes + before + peaks[1] - peaks[0],
    )  # fmt: skip
    columns, astray = _columns(graph, log, sizes)
    notes = [
        f"Memory: {unmatched} bytes of the step's blocks belong to no operand known and are as "
        "captured; so is what is held before the step and all through it."
    ] * bool(unmatched)
    if astray:
        notes.append(
            f"Memory: which node frees them is not told for blocks that change by {astray} bytes; "
            "what their nodes free is as captured."
        )
    return ResizedMemory(columns, measured, tuple(notes))


def _sizes(graph: Graph, log: MemoryLog, found: Growths, sizing: Sizing) -> tuple[I64, int]:
    """Return the new size of each block, and the bytes of those that no operand explains."""
    rounded = graph.job.device.type == "cuda"
    rows = {int(one): row for row, one in enumerate(graph.nodes.id)}
    by_node, by_size = dict[int, dict[int, int]](), dict[int, Counter[int]]()
    made = np.array(log.blocks.bytes, dtype=np.int64)
    missing: list[int] = []
    for place, (size, node) in enumerate(zip(log.blocks.bytes, log.blocks.node, strict=True)):
        row = rows.get(node, -1)
        if row not in by_node:
            by_node[row] = _known(found.at(row) if row >= 0 else None, sizing, rounded=rounded)
        if log.blocks.memory_class[place] in _STAY:
            continue
        workspace = log.blocks.memory_class[place] == MemoryClass.WORKSPACE
        new = _grown(size, by_node[row], workspace=workspace, rounded=rounded)
        if new is None:
            missing.append(place)
        else:
            made[place] = new
            by_size.setdefault(size, Counter())[new] += 1
    left = _left(log, made)
    unmatched = 0
    for place in missing:
        size = log.blocks.bytes[place]
        if log.blocks.allocated_at[place] < 0 and left.get(size):
            made[place] = left[size].pop()
        elif size in by_size:  # as most blocks of its size
            made[place] = by_size[size].most_common(1)[0][0]
        elif size > _SMALL:
            unmatched += size
    return made, unmatched


def _left(log: MemoryLog, sizes: I64) -> dict[int, list[int]]:
    """Return size -> new sizes of the blocks that the step leaves behind, the first made last."""
    blocks = log.blocks
    found: dict[int, list[int]] = {}
    for place in reversed(range(len(sizes))):
        stays = blocks.memory_class[place] in _STAY
        if blocks.allocated_at[place] >= 0 > blocks.freed_at[place] and not stays:
            found.setdefault(blocks.bytes[place], []).append(int(sizes[place]))
    return found


def _held_before(
    measured: Measurement, log: MemoryLog, sizes: I64, *, rounded: bool
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the growth of memory allocated before the step, and its blocks by class."""
    held = {name: list(blocks) for name, blocks in measured.resident_bytes.items()}
    grown, blocks = 0, log.blocks
    for size, new, at in zip(blocks.bytes, sizes.tolist(), blocks.allocated_at, strict=True):
        if at >= 0 or new == size:
            continue
        grown += new - size
        others = held.get(MemoryClass.OTHER.name.lower(), [])
        as_blocks = [round_size(one) if rounded else one for one in others]
        if size in as_blocks:
            others[as_blocks.index(size)] = new
    return grown, {name: tuple(one) for name, one in held.items()}


def _grown(size: int, known: Mapping[int, int], *, workspace: bool, rounded: bool) -> int | None:
    """Return the new size of a block, by the operand that it holds or is a workspace for.

    The GPU's allocator hands out a large block whole if less than a mebibyte would be left. A
    workspace may be of another type or hold partial sums: a power of two times the operand.
    """
    if size in known:
        return known[size]
    slack = SMALL_BYTES if rounded else 0
    for times in _MULTIPLES if workspace else (1,):
        for before, after in known.items():
            if 0 <= size - times * before <= slack and before > slack:
                return times * after
    return None


_MULTIPLES = (1, 2, 4, 8)
_STAY = (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, MemoryClass.OPTIMIZER)
_SMALL = 1024  # scalars and the like


def _known(operands: Operands | None, sizing: Sizing, *, rounded: bool) -> dict[int, int]:
    """Return bytes -> new bytes of the tensors of a node, results before operands."""
    known: dict[int, int] = {}
    if operands is None:
        return known
    for tensor, powers in (*operands.outputs, *operands.inputs):
        before = numel(tensor.shape) * tensor.item_bytes
        after = numel(sizing.shape(tensor.shape, powers)) * tensor.item_bytes
        if rounded:
            before, after = round_size(before), round_size(after)
        known.setdefault(before, after)
    return known


def _columns(graph: Graph, log: MemoryLog, sizes: I64) -> tuple[dict[str, I64], int]:
    """Return what each node allocates and frees: as captured, and what its blocks grew.

    And by how many bytes, shrunk or grown, blocks changed that end in no node known.
    """
    blocks, nodes = log.blocks, graph.nodes
    growth = sizes - np.array(blocks.bytes, dtype=np.int64)
    order = np.argsort(nodes.id)
    ids = np.array(blocks.node, dtype=np.int64)
    made_here = (np.array(blocks.allocated_at) >= 0) & (ids >= 0)
    place = order[np.searchsorted(nodes.id[order], ids[made_here].astype(np.uint64))]
    allocated = nodes.bytes_allocated.copy()
    np.add.at(allocated, place, growth[made_here])
    freed = nodes.bytes_freed.copy()
    freed_at = np.array(blocks.freed_at, dtype=np.int64)
    ended = np.flatnonzero(freed_at >= 0)
    ended = ended[np.argsort(freed_at[ended])]
    by = _who_freed(graph, np.array(blocks.bytes, dtype=np.int64)[ended])
    known = by >= 0
    np.add.at(freed, by[known], growth[ended[known]])
    columns = {"bytes_allocated": np.maximum(allocated, 0), "bytes_freed": np.maximum(freed, 0)}
    return columns, int(np.abs(growth[ended[~known]]).sum())


def _who_freed(graph: Graph, sizes: I64) -> I64:
    """Return the node that freed each block, of blocks in the order of their ends.

    Nodes free in the order in which they start: where the sums of both run in step, a block ends
    in the node in whose bytes its own lie.
    """
    nodes = graph.nodes
    order = np.argsort(nodes.start_ns, kind="stable")
    reach = np.cumsum(nodes.bytes_freed[order])
    middle = np.cumsum(sizes) - (sizes + 1) // 2
    place = np.searchsorted(reach, middle, side="right")
    return np.where(place < len(order), order[np.minimum(place, len(order) - 1)], -1)


def _by_results(graph: Graph, found: Growths, sizing: Sizing) -> dict[str, I64]:
    ratios = found.spread([_ratio(one, sizing) for one in found.operands], 1.0)
    return {"bytes_allocated": np.rint(graph.nodes.bytes_allocated * ratios).astype(np.int64)}


def _ratio(operands: Operands, sizing: Sizing) -> float:
    """Return how many times as many elements results have."""
    before = sum(numel(tensor.shape) for tensor, _ in operands.outputs)
    after = sum(numel(sizing.shape(t.shape, powers)) for t, powers in operands.outputs)
    return after / before if before else 1.0


def _held(log: MemoryLog) -> int:
    """Return the bytes of activations that forward leaves for backward."""
    blocks = log.blocks
    begun = zip(blocks.phase, blocks.allocated_at, strict=True)
    later = min((at for phase, at in begun if phase == Phase.BACKWARD and at >= 0), default=0)
    kept = zip(blocks.bytes, blocks.memory_class, blocks.phase, blocks.freed_at, strict=True)
    return sum(
        size
        for size, sort, phase, end in kept
        if sort == MemoryClass.ACTIVATIONS and phase == Phase.FORWARD and (end < 0 or end > later)
    )
