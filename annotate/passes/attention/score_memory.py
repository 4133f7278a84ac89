"""Memory of a step whose attention is fused or made eager: without or with score matrices."""

from collections.abc import Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.dataflow import Flow, Operand
from onerank.annotate.passes.tensor_locations import call_of_node, parse_locations
from onerank.ir import Blocks, Graph, Measurement, MemoryClass, MemoryLog, Phase
from onerank.ir.dtypes import ITEM_BYTES

_FLOAT_BYTES = ITEM_BYTES["float32"]
# Events have whole numbers, so this is after an event and before the next.
_JUST_AFTER = 1e-3
_OUTSIDE_STEP = -1.0


class _NewBlock(NamedTuple):
    """A block that a log gains; its events are fractions, between the whole numbers of the log."""

    bytes: int
    memory_class: MemoryClass
    phase: Phase
    allocated_at: float
    freed_at: float


class _BlockChange(NamedTuple):
    """Changes of the blocks of a memory log.

    Attributes:
        removed: blocks that no longer exist.
        allocated_at: new allocation events of moved blocks.
        freed_at: new free events of moved blocks.
        new: blocks that the log gains.
    """

    removed: set[int]
    allocated_at: dict[int, float]
    freed_at: dict[int, float]
    new: list[_NewBlock]


def without_scores(
    graph: Graph, flow: Flow, calls: list[EagerCall], unused: set[int]
) -> tuple[Measurement, str]:
    """Return the measurement without the blocks of eager attention, and a note on the peak.

    A fused kernel saves queries, keys, values, output and one sum per row for backward, until the
    last block that it replaces was freed. Its gradients are allocated with the first block that the
    backward kernel replaces, and so is its workspace: dQ in float32, and dK and dV of all heads if
    these share keys, as in FlashAttention-2 and cuDNN.

    Args:
        graph: captured, with the nodes of `flow`.
        flow: data flow of the step.
        calls: the calls of attention.
        unused: indices of other calls that are removed.
    """
    measurement = graph.job.measurement
    log = measurement.memory
    if log is None:
        # 0 stands for unknown: the captured peak includes the scores.
        unknown = msgspec.structs.replace(measurement, peak_memory_bytes=0, activation_bytes=())
        return unknown, "peak memory is unknown."
    captured = _CapturedBlocks(flow, log, _blocks_by_content(graph, flow, log))
    change = _BlockChange(set(), {}, {}, [])
    for index in unused:
        change.removed.update(captured.of(operand.content for operand in flow.calls[index].writes))
    for call in calls:
        _change_blocks(captured, call, change)
    new_log = _apply_change(log, change)
    peak_drop = log.most_in_use - new_log.most_in_use
    added_bytes = [_added_activations(log, change, start) for start in _backward_starts(log)]
    activations = measurement.activation_bytes
    # The log may show fewer backwards than micro-batches; the first then stands for all.
    if len(added_bytes) != len(activations):
        added_bytes = added_bytes[:1] * len(activations)
    changed = msgspec.structs.replace(
        measurement,
        memory=new_log,
        peak_memory_bytes=measurement.peak_memory_bytes - peak_drop,
        activation_bytes=tuple(
            bytes_ + added for bytes_, added in zip(activations, added_bytes, strict=False)
        ),
    )
    return changed, f"peak memory falls by {peak_drop / 1e9:.3f} GB."


class _CapturedBlocks(NamedTuple):
    """The memory of a captured step.

    Attributes:
        flow: data flow of the step.
        log: its memory log.
        by_content: content of a tensor -> its blocks.
    """

    flow: Flow
    log: MemoryLog
    by_content: dict[int, list[int]]

    def of(self, contents: Iterable[int]) -> list[int]:
        """Return the blocks of some contents."""
        return [block for content in contents for block in self.by_content.get(content, ())]

    def internal(self, members: Iterable[int], outputs: Collection[int]) -> list[int]:
        """Return the blocks that some calls write, except those of `outputs`."""
        writes = (operand for index in members for operand in self.flow.calls[index].writes)
        return self.of(operand.content for operand in writes if operand.content not in outputs)

    def rounded(self, size: int) -> int:
        """Return the bytes of a block for a request of `size` bytes."""
        return round_size(size) if self.log.is_rounded else size


def _change_blocks(captured: _CapturedBlocks, call: EagerCall, change: _BlockChange) -> None:
    """Record the changes of the blocks of a call, in place, in `change`."""
    log, blocks = captured.log, captured.log.blocks
    forward_blocks = captured.internal(call.forward.members, call.outputs)
    of_backward = call.backward.members if call.backward else ()
    backward_blocks = captured.internal(of_backward, call.outputs)
    change.removed.update(forward_blocks, backward_blocks)
    if call.backward is None or call.gradients is None or not backward_blocks:
        return
    allocations = _in_step(blocks.allocated_at[block] for block in backward_blocks)
    backward_begin = float(min(allocations, default=log.events))
    saved_blocks = [block for block in forward_blocks if blocks.freed_at[block] >= backward_begin]
    frees = _in_step(blocks.freed_at[block] for block in (*saved_blocks, *backward_blocks))
    backward_end = float(max(frees, default=backward_begin))
    row_sums_bytes = captured.rounded(
        call.sizes.batch * call.sizes.heads * call.sizes.rows * _FLOAT_BYTES
    )
    for block in captured.of({operand.content for operand in call.tensors}):
        freed_at = change.freed_at.get(block, float(blocks.freed_at[block]))
        if 0 <= freed_at < backward_end:
            change.freed_at[block] = backward_end
    for block in captured.of({operand.content for operand in call.gradients[1:]}):
        if blocks.allocated_at[block] > backward_begin:
            change.allocated_at[block] = backward_begin
    allocations = _in_step(blocks.allocated_at[block] for block in forward_blocks)
    allocated = float(min(allocations, default=backward_begin))
    out_blocks = captured.of([call.tensors.out.content])
    allocated = max([allocated, *(float(blocks.allocated_at[block]) for block in out_blocks)])
    lifetime = (allocated, backward_end)
    change.new.append(_NewBlock(row_sums_bytes, MemoryClass.ACTIVATIONS, Phase.FORWARD, *lifetime))
    for size in _workspace(call.sizes, call.gradients.key):
        lifetime = (backward_begin, backward_begin + _JUST_AFTER)
        change.new.append(
            _NewBlock(captured.rounded(size), MemoryClass.WORKSPACE, Phase.BACKWARD, *lifetime)
        )


def _backward_starts(log: MemoryLog) -> list[int]:
    """Return the events at which backward begins, one for each micro-batch."""
    blocks, starts, previous = log.blocks, list[int](), 0
    for event, phase in sorted(zip(blocks.allocated_at, blocks.phase, strict=True)):
        if event < 0 or phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        if phase == Phase.BACKWARD and previous == Phase.FORWARD:
            starts.append(event)
        previous = phase
    return starts


def _added_activations(log: MemoryLog, change: _BlockChange, backward_start: int) -> int:
    """Return the additional bytes in use when backward begins.

    Activation checkpointing frees blocks of forward before that event, so a sum over all blocks
    that forward allocates would count them too.
    """
    blocks = log.blocks

    def bytes_in_use(block: int, allocated_at: float, freed_at: float) -> int:
        allocated = 0 <= allocated_at < backward_start
        return blocks.bytes[block] * (allocated and not 0 <= freed_at < backward_start)

    added = 0
    for block in {*change.removed, *change.allocated_at, *change.freed_at}:
        allocated_at, freed_at = blocks.allocated_at[block], blocks.freed_at[block]
        added -= bytes_in_use(block, allocated_at, freed_at)
        if block not in change.removed:
            allocated_at = change.allocated_at.get(block, allocated_at)
            added += bytes_in_use(block, allocated_at, change.freed_at.get(block, freed_at))
    return added + sum(
        block.bytes
        for block in change.new
        if block.allocated_at < backward_start and not block.freed_at < backward_start
    )


def _in_step(events: Iterable[int]) -> list[int]:
    return [event for event in events if event >= 0]


def _workspace(s: AttentionSizes, key: Operand) -> list[int]:
    """Return the bytes of the backward pass in addition to its results."""
    rows = s.batch * s.heads * s.rows
    sizes = [rows * s.d * _FLOAT_BYTES, rows * _FLOAT_BYTES]
    if s.heads != s.key_heads:
        sizes += [
            s.batch * s.heads * s.keys * width * key.tensor.item_bytes for width in (s.d, s.dv)
        ]
    return sizes


def _blocks_by_content(graph: Graph, flow: Flow, log: MemoryLog) -> dict[int, list[int]]:
    """Return the blocks of each content: those that its writer or an earlier operator allocated.

    The operator that allocates a tensor has the tensor's id and storage among its results and runs
    before the writer. Other blocks that the writer allocates belong to the content as well.
    """
    written = dict[tuple[int, int], list[tuple[int, int]]]()
    by_node = dict[int, list[int]]()
    for call in flow.calls:
        for operand in call.writes:
            key = operand.place.tensor, operand.place.storage
            written.setdefault(key, []).append((call.issued_ns, operand.content))
            for node in (*call.nodes, call.launcher):
                by_node.setdefault(node, []).append(operand.content)
    row_of_id = {int(id_): index for index, id_ in enumerate(graph.nodes.id.tolist())}
    call_of = call_of_node(graph)
    result = dict[int, list[int]]()
    for block, id_ in enumerate(log.blocks.node):
        node = row_of_id.get(id_)
        if node is None or log.blocks.allocated_at[block] < 0:
            continue
        call, issued_ns = call_of(node), int(graph.nodes.start_ns[node])
        text = graph.strings[int(graph.nodes.output_values[node])]
        content = by_node.get(node, [None])[0]
        for place in parse_locations(call.outputs, text) if call is not None else ():
            writes = written.get((place.tensor, place.storage), []) if place is not None else []
            content = next((later for ns, later in writes if ns >= issued_ns), content)
        if content is not None:
            result.setdefault(content, []).append(block)
    return result


class EagerMemory(NamedTuple):
    """Memory of a call of eager attention in addition to its operands and results, in bytes.

    Attributes:
        kept: saved for backward: softmax in float32 and rounded, repeated keys and values.
        forward: additional peak in forward: the masked scores, and those in the softmax's input
            dtype.
        backward: additional peak in backward: dP in float32, its product with P, the result.
    """

    kept: int
    forward: int
    backward: int


def eager_memory(s: AttentionSizes, dtype: str) -> EagerMemory:
    """Return the memory of a call of eager attention with operands of a dtype."""
    item = ITEM_BYTES[dtype]
    repeated_heads = (
        s.batch * s.heads * s.keys * (s.d + s.dv) * item if s.heads != s.key_heads else 0
    )
    rounded_bytes = item if dtype != "float32" else 0
    cast_bytes = _FLOAT_BYTES if dtype == "bfloat16" else 0
    return EagerMemory(
        # The softmax saves its float32 result for its backward, and the product with V saves the
        # rounded one.
        kept=s.scores * (_FLOAT_BYTES + rounded_bytes) + repeated_heads,
        forward=s.scores * (item + cast_bytes),
        backward=s.scores * (2 * _FLOAT_BYTES + (cast_bytes or item)),
    )


class CallMemory(NamedTuple):
    """Start, memory and pass of a call of attention."""

    start_ns: int
    memory: EagerMemory
    is_backward: bool


def with_score_memory(graph: Graph, calls: Sequence[CallMemory]) -> tuple[Measurement, str]:
    """Return the measurement with the blocks of eager attention, and a sentence on the peak."""
    measurement = graph.job.measurement
    log = measurement.memory
    if log is None:
        # 0 stands for unknown: the captured peak lacks the scores.
        unknown = msgspec.structs.replace(measurement, peak_memory_bytes=0, activation_bytes=())
        kept = sum(call.memory.kept for call in calls if not call.is_backward)
        return (
            unknown,
            f"its calls keep {kept / 1e9:.3f} GB for backward; peak memory is unknown.",
        )
    peak_before = log.most_in_use
    moments = _events_at(graph, log, [call.start_ns for call in calls])
    new_log = _apply_change(log, _eager_blocks(calls, moments))
    rise = new_log.most_in_use - peak_before
    kept = sum(call.memory.kept for call in calls if not call.is_backward)
    micro_batches = max(1, len(measurement.activation_bytes))
    changed = msgspec.structs.replace(
        measurement,
        memory=new_log,
        peak_memory_bytes=measurement.peak_memory_bytes + rise,
        activation_bytes=tuple(
            # The calls are those of all micro-batches.
            bytes_ + kept // micro_batches
            for bytes_ in measurement.activation_bytes
        ),
    )
    return changed, f"peak memory rises by {rise / 1e9:.3f} GB."


def _events_at(graph: Graph, log: MemoryLog, starts: list[int]) -> list[int]:
    """Return the log event at each start, in ns: the first one of a node that started later."""
    order = np.argsort(graph.nodes.id)
    ids = np.array(log.blocks.node, dtype=np.int64)
    allocated_at = np.array(log.blocks.allocated_at, dtype=np.int64)
    known = (ids >= 0) & (allocated_at >= 0)
    sorted_ids = graph.nodes.id[order].astype(np.int64)
    position = np.minimum(np.searchsorted(sorted_ids, ids[known]), len(order) - 1)
    exists = sorted_ids[position] == ids[known]
    events = allocated_at[known][exists]
    times = graph.nodes.start_ns[order[position[exists]]]
    by_event = np.argsort(events)
    # An operator may allocate after an inner operator that started later, and the search needs
    # ascending times.
    events, times = events[by_event], np.maximum.accumulate(times[by_event])
    first = np.searchsorted(times, np.array(starts), side="left")
    return [int(events[at]) if at < len(events) else log.events for at in first.tolist()]


def _eager_blocks(calls: Sequence[CallMemory], moments: list[int]) -> _BlockChange:
    """Return the blocks of calls of eager attention, which begin before the events at `moments`.

    Backward runs in the opposite order of forward, so a backward call frees the saved blocks of the
    last forward call that are not yet freed.
    """
    new, saved, order = list[_NewBlock](), list[int](), count(1)
    events = 4 * len(calls)

    def before(moment: int) -> float:
        # Each event has a separate fraction: several calls may begin before one event of the log,
        # and a call frees its workspace before the next call allocates.
        return moment - 1 + next(order) / (events + 1)

    for call, moment in sorted(zip(calls, moments, strict=True), key=lambda pair: pair[0].start_ns):
        phase = Phase.BACKWARD if call.is_backward else Phase.FORWARD
        if not call.is_backward:
            saved.append(len(new))
            lifetime = (before(moment), _OUTSIDE_STEP)
            new.append(_NewBlock(call.memory.kept, MemoryClass.ACTIVATIONS, phase, *lifetime))
        size = call.memory.backward if call.is_backward else call.memory.forward
        lifetime = (before(moment), before(moment))
        new.append(_NewBlock(size, MemoryClass.WORKSPACE, phase, *lifetime))
        if call.is_backward and saved:
            block = saved.pop()
            new[block] = new[block]._replace(freed_at=before(moment))
    return _BlockChange(set(), {}, {}, new)


def _apply_change(log: MemoryLog, change: _BlockChange) -> MemoryLog:
    """Return the log with the changes and renumbered events."""
    blocks = log.blocks
    kept = [block for block in range(len(blocks)) if block not in change.removed]
    new = change.new
    events_of = {
        "allocated_at": [
            change.allocated_at.get(block, float(blocks.allocated_at[block])) for block in kept
        ]
        + [block.allocated_at for block in new],
        "freed_at": [change.freed_at.get(block, float(blocks.freed_at[block])) for block in kept]
        + [block.freed_at for block in new],
    }
    events = np.array([*events_of["allocated_at"], *events_of["freed_at"]])
    # At equal events an allocation comes first: an operator frees its workspace after it has its
    # result.
    is_free = np.repeat([0, 1], len(kept) + len(new))
    order = np.lexsort((is_free, events))
    order = order[events[order] > _OUTSIDE_STEP]
    number = np.full(len(events), -1, dtype=np.int64)
    number[order] = np.arange(len(order))
    allocated_at, freed_at = number.reshape(2, -1).tolist()
    columns = {name: [getattr(blocks, name)[block] for block in kept if getattr(blocks, name)]
               for name in ("bytes", "memory_class", "node", "phase", "pool", "spare_bytes",
                            "lingers")}  # fmt: skip
    new_columns = {
        "bytes": [block.bytes for block in new],
        "memory_class": [int(block.memory_class) for block in new],
        "node": [-1] * len(new),
        "phase": [int(block.phase) for block in new],
    }
    for name in ("pool", "spare_bytes", "lingers"):
        new_columns[name] = [0] * len(new) if columns[name] else []
    joined = {name: (*columns[name], *new_columns[name]) for name in columns}
    new_blocks = Blocks(allocated_at=tuple(allocated_at), freed_at=tuple(freed_at), **joined)
    return msgspec.structs.replace(log, blocks=new_blocks, events=len(order), reserved_bytes=0)
