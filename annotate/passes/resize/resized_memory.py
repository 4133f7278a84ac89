"""Memory of a step at another sequence length or micro-batch."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import SMALL_BYTES, round_size
from onerank.annotate.passes.resize.size_change import Sizing, numel
from onerank.annotate.passes.resize.tensor_growth import Operands, StepGrowth
from onerank.annotate.passes.tensor_locations import execution_order
from onerank.ir import Graph, Kind, Measurement, MemoryClass, MemoryLog, Phase
from onerank.ir.arrays import I64
from onerank.ir.notes import Note


class ResizedMemory(NamedTuple):
    """Memory of a resized step.

    Attributes:
        columns: node columns with new bytes.
        measurement: measurement with resized memory and without outdated figures.
        notes: notes on the quality of the result.
    """

    columns: dict[str, I64]
    measurement: Measurement
    notes: tuple[Note, ...]


def resized_memory(graph: Graph, growth: StepGrowth, sizing: Sizing) -> ResizedMemory:
    """Return the memory of the step with resized operands.

    A block belongs to an operand of the node that allocated it if that operand's rounded bytes are
    its size, or it is a workspace for it (see `_grown`). Otherwise it grows like most blocks of its
    size. Other blocks stay; a note counts those over 1024 bytes. Memory allocated before the step
    and freed in it, such as the last step's logits, grows like its counterpart in this step.
    Without a record of blocks, a node's allocations grow with its results.
    """
    log = graph.job.measurement.memory
    measurement = graph.job.measurement.untimed()
    if log is None:
        columns = _by_results(graph, growth, sizing)
        without_peak = msgspec.structs.replace(
            measurement, peak_memory_bytes=0, activation_bytes=()
        )
        return ResizedMemory(
            columns,
            without_peak,
            (Note("Peak memory at the new size is unknown.", code="resize-peak-unknown"),),
        )
    sizes, unmatched = _block_sizes(graph, log, growth, sizing)
    new_blocks = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
    # What the allocator would reserve at the new size is not known; 0 says so.
    resized = msgspec.structs.replace(log, blocks=new_blocks, reserved_bytes=0)
    peaks = [block_log.most_in_use for block_log in (log, resized)]
    saved = [_saved_activations(block_log) for block_log in (log, resized)]
    activations = tuple(
        round(size * saved[1] / saved[0]) if saved[0] else size
        for size in measurement.activation_bytes
    )
    resident_growth, resident = _resident_growth(measurement, log, sizes, rounded=log.is_rounded)
    measurement = msgspec.structs.replace(
        measurement, memory=resized, activation_bytes=activations, resident_bytes=resident,
        start_memory_bytes=measurement.start_memory_bytes + resident_growth,
        peak_memory_bytes=measurement.peak_memory_bytes + resident_growth + peaks[1] - peaks[0],
    )  # fmt: skip
    columns, unattributed = _columns(graph, log, sizes)
    notes = [
        Note(
            f"Memory: {unmatched} bytes of the step's blocks match no known operand and stay as "
            "captured; so does memory that is resident throughout the step.",
            code="resize-blocks-unmatched",
        )
    ] * bool(unmatched)
    if unattributed:
        notes.append(
            Note(
                f"Memory: blocks that change by {unattributed} bytes have no known freeing node; "
                "freed bytes of nodes stay as captured for these.",
                code="resize-blocks-without-free",
            )
        )
    return ResizedMemory(columns, measurement, tuple(notes))


def _block_sizes(
    graph: Graph, log: MemoryLog, growth: StepGrowth, sizing: Sizing
) -> tuple[I64, int]:
    """Return the new size of each block, and the bytes of blocks that match no operand."""
    rounded = log.is_rounded
    rows = {int(id_): row for row, id_ in enumerate(graph.nodes.id)}
    by_node, by_size = dict[int, dict[int, int]](), dict[int, Counter[int]]()
    writes = _Writes(graph, log, growth, sizing)
    new_sizes = np.array(log.blocks.bytes, dtype=np.int64)
    missing: list[int] = []
    for block, (size, node) in enumerate(zip(log.blocks.bytes, log.blocks.node, strict=True)):
        row = rows.get(node, -1)
        if row not in by_node:
            by_node[row] = _operand_bytes(
                growth.at(row) if row >= 0 else None, sizing, rounded=rounded
            )
        memory_class = log.blocks.memory_class[block]
        if memory_class in _FIXED_CLASSES:
            continue
        workspace = memory_class == MemoryClass.WORKSPACE
        # FSDP allocates its buffers between two calls, of which the log names the first; that has
        # other operands. The call that fills a buffer comes later.
        new = writes.new_size(block, row) if memory_class == MemoryClass.COMMUNICATION else None
        if new is None:
            new = _new_block_size(size, by_node[row], workspace=workspace, rounded=rounded)
        if new is None:
            new = writes.new_size(block, row)
        if new is None:
            missing.append(block)
        else:
            new_sizes[block] = new
            by_size.setdefault(size, Counter())[new] += 1
    # A block from before the step, such as the last step's logits, has a counterpart that outlives
    # this step. Without it the peak of a GPT that keeps its logits was 4% low.
    outliving = _blocks_outliving_step(log, new_sizes)
    unmatched = 0
    for block in missing:
        size = log.blocks.bytes[block]
        if log.blocks.allocated_at[block] < 0 and outliving.get(size):
            new_sizes[block] = outliving[size].pop()
        elif size in by_size:  # like most blocks of its size
            new_sizes[block] = by_size[size].most_common(1)[0][0]
        elif size > _SMALL:
            unmatched += size
    return new_sizes, unmatched


class _Writes:
    """Finds the call that first writes a block."""

    def __init__(self, graph: Graph, log: MemoryLog, growth: StepGrowth, sizing: Sizing) -> None:
        order = execution_order(graph)
        self._order, self._log = order, log
        self._operands = growth.of[order]
        self._position: I64 = np.full(len(graph), -1, dtype=np.int64)
        self._position[order] = np.arange(len(order))
        self._freed_by = _freeing_nodes(graph, log)
        codes, first = np.unique(self._operands, return_index=True)
        self._written = {
            int(code): _written_bytes(graph, row, growth, sizing, rounded=log.is_rounded)
            for code, row in zip(codes, order[first].tolist(), strict=True)
            if code >= 0
        }
        self._calls = dict[int, I64]()

    def new_size(self, block: int, row: int) -> int | None:
        """Return the new size of a block that the node at `row` allocated; None if not known."""
        log, size = self._log, self._log.blocks.bytes[block]
        if row < 0 or self._position[row] < 0 or log.blocks.allocated_at[block] < 0:
            return None
        if size not in self._calls:
            codes = [code for code in self._written if self._new(size, code) is not None]
            self._calls[size] = np.flatnonzero(np.isin(self._operands, codes))
        calls = self._calls[size]
        at = int(np.searchsorted(calls, int(self._position[row])))
        if at == len(calls):
            return None
        freed_by = int(self._freed_by[block])
        if freed_by >= 0 and calls[at] > self._position[freed_by] >= 0:
            return None
        return self._new(size, int(self._operands[calls[at]]))

    def _new(self, size: int, code: int) -> int | None:
        known = self._written[code]
        return _new_block_size(size, known, workspace=False, rounded=self._log.is_rounded)


def _written_bytes(
    graph: Graph, row: int, growth: StepGrowth, sizing: Sizing, *, rounded: bool
) -> dict[int, int]:
    """Return bytes -> new bytes of the tensors that a call writes."""
    operands, nodes = growth.at(row), graph.nodes
    is_communication = Kind(int(nodes.kind[row])).is_communication
    if operands is not None and not is_communication:
        operands = operands._replace(inputs=())
    return _operand_bytes(operands, sizing, rounded=rounded)


def _blocks_outliving_step(log: MemoryLog, sizes: I64) -> dict[int, list[int]]:
    """Return size -> new sizes of blocks that outlive the step, in reverse order of allocation."""
    blocks = log.blocks
    new_sizes: dict[int, list[int]] = {}
    for block in reversed(range(len(sizes))):
        is_fixed = blocks.memory_class[block] in _FIXED_CLASSES
        if blocks.allocated_at[block] >= 0 > blocks.freed_at[block] and not is_fixed:
            new_sizes.setdefault(blocks.bytes[block], []).append(int(sizes[block]))
    return new_sizes


def _resident_growth(
    measured: Measurement, log: MemoryLog, sizes: I64, *, rounded: bool
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the growth of memory allocated before the step, and its blocks by class."""
    resident = {name: list(blocks) for name, blocks in measured.resident_bytes.items()}
    grown, blocks = 0, log.blocks
    for size, new, event in zip(blocks.bytes, sizes.tolist(), blocks.allocated_at, strict=True):
        if event >= 0 or new == size:
            continue
        grown += new - size
        others = resident.get(MemoryClass.OTHER.name.lower(), [])
        block_sizes = [round_size(storage) if rounded else storage for storage in others]
        if size in block_sizes:
            others[block_sizes.index(size)] = new
    return grown, {name: tuple(storages) for name, storages in resident.items()}


def _new_block_size(
    size: int, known: Mapping[int, int], *, workspace: bool, rounded: bool
) -> int | None:
    """Return the new size of a block from its operand or, for a workspace, a multiple of one.

    None if no operand matches.
    """
    if size in known:
        return known[size]
    # The CUDA caching allocator does not split a block if the rest would be below 1 MiB.
    slack = SMALL_BYTES if rounded else 0
    for times in _MULTIPLES if workspace else (1,):
        for before, after in known.items():
            if 0 <= size - times * before <= slack and before > slack:
                return times * after
    return None


# A workspace has another dtype or partial sums: a power of two times its operand.
_MULTIPLES = (1, 2, 4, 8)
# No size of these depends on the sequence or the micro-batch.
_FIXED_CLASSES = (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, MemoryClass.OPTIMIZER)
_SMALL = 1024  # scalars and small buffers are not worth a note


def _operand_bytes(operands: Operands | None, sizing: Sizing, *, rounded: bool) -> dict[int, int]:
    """Return bytes -> new bytes of the tensors of a node; results take precedence."""
    known: dict[int, int] = {}
    if operands is None:
        return known
    for tensor, powers in (*operands.outputs, *operands.inputs):
        before = numel(tensor.shape) * tensor.item_bytes
        after = numel(sizing.shape(tensor.shape, powers)) * tensor.item_bytes
        if rounded:
            before, after = round_size(before), round_size(after)
        # Results are listed first and win: a node more often allocates a result than a copy of an
        # input.
        known.setdefault(before, after)
    return known


def _columns(graph: Graph, log: MemoryLog, sizes: I64) -> tuple[dict[str, I64], int]:
    """Return the bytes that each node allocates and frees, with the growth of its blocks.

    The second result is the absolute change in bytes of blocks without a known freeing node.
    """
    blocks, nodes = log.blocks, graph.nodes
    growth = sizes - np.array(blocks.bytes, dtype=np.int64)
    order = np.argsort(nodes.id)
    ids = np.array(blocks.node, dtype=np.int64)
    in_step = (np.array(blocks.allocated_at) >= 0) & (ids >= 0)
    allocator_node = order[np.searchsorted(nodes.id[order], ids[in_step].astype(np.uint64))]
    allocated = nodes.bytes_allocated.copy()
    # Not `+=`, which would count only one of several blocks of a node.
    np.add.at(allocated, allocator_node, growth[in_step])
    freed = nodes.bytes_freed.copy()
    freed_by = _freeing_nodes(graph, log)
    known = freed_by >= 0
    np.add.at(freed, freed_by[known], growth[known])
    columns = {"bytes_allocated": np.maximum(allocated, 0), "bytes_freed": np.maximum(freed, 0)}
    unattributed = ~known & (np.array(blocks.freed_at) >= 0)
    return columns, int(np.abs(growth[unattributed]).sum())


def _freeing_nodes(graph: Graph, log: MemoryLog) -> I64:
    """Return the node that freed each block; -1 for none, and for a block that is not freed.

    The log names no freeing node. Nodes free in start order, so the cumulative bytes of blocks and
    of nodes match: a block belongs to the node whose range of freed bytes contains its middle.
    """
    nodes = graph.nodes
    freed_at = np.array(log.blocks.freed_at, dtype=np.int64)
    freed = np.flatnonzero(freed_at >= 0)
    freed = freed[np.argsort(freed_at[freed])]
    sizes = np.array(log.blocks.bytes, dtype=np.int64)[freed]
    order = np.argsort(nodes.start_ns, kind="stable")
    freed_until = np.cumsum(nodes.bytes_freed[order])
    # The middle of a block tolerates rounding at both of its ends.
    middle = np.cumsum(sizes) - (sizes + 1) // 2
    position = np.searchsorted(freed_until, middle, side="right")
    freed_by = np.full(len(freed_at), -1, dtype=np.int64)
    freed_by[freed] = np.where(
        position < len(order), order[np.minimum(position, len(order) - 1)], -1
    )
    return freed_by


def _by_results(graph: Graph, growth: StepGrowth, sizing: Sizing) -> dict[str, I64]:
    ratios = growth.spread([_ratio(operands, sizing) for operands in growth.operands], 1.0)
    return {"bytes_allocated": np.rint(graph.nodes.bytes_allocated * ratios).astype(np.int64)}


def _ratio(operands: Operands, sizing: Sizing) -> float:
    """Return the ratio of new to captured elements of results."""
    before = sum(numel(tensor.shape) for tensor, _ in operands.outputs)
    after = sum(numel(sizing.shape(t.shape, powers)) for t, powers in operands.outputs)
    return after / before if before else 1.0


def _saved_activations(log: MemoryLog) -> int:
    """Return the bytes of activations that forward saves for backward."""
    blocks = log.blocks
    allocations = zip(blocks.phase, blocks.allocated_at, strict=True)
    backward_start = min(
        (event for phase, event in allocations if phase == Phase.BACKWARD and event >= 0), default=0
    )
    rows = zip(blocks.bytes, blocks.memory_class, blocks.phase, blocks.freed_at, strict=True)
    return sum(
        size
        for size, memory_class, phase, freed_at in rows
        if memory_class == MemoryClass.ACTIVATIONS
        and phase == Phase.FORWARD
        and (freed_at < 0 or freed_at > backward_start)
    )
