"""Memory of a step after eager attention is fused: no score matrices."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.annotate.memory.peak import most_in_use
from onerank.annotate.passes.attention.eager_kernels import Sizes
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.dataflow import Flow, Operand
from onerank.annotate.passes.resize.tensor_locations import calls_of, parse_locations
from onerank.ir import Blocks, Graph, Measurement, MemoryClass, MemoryLog, Phase

_FLOAT_BYTES = 4
# Events have whole numbers, so this is after an event and before the next.
_JUST_AFTER = 1e-3


class _BlockChange(NamedTuple):
    """Changes of the blocks of a memory log.

    Attributes:
        removed: blocks that no longer exist.
        allocated_at: new allocation events of moved blocks.
        freed_at: new free events of moved blocks.
        new: (bytes, class, phase, allocated, freed) of each new block.
    """

    removed: set[int]
    allocated_at: dict[int, float]
    freed_at: dict[int, float]
    new: list[tuple[int, MemoryClass, Phase, float, float]]


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
        return unknown, "the peak of memory is unknown."
    block_of = _blocks_by_content(graph, flow, log)
    on_gpu = graph.job.device.type == "cuda"
    rounded: Callable[[int], int] = round_size if on_gpu else int
    change = _BlockChange(set(), {}, {}, [])
    for index in unused:
        change.removed.update(
            _blocks_of(block_of, (operand.content for operand in flow.calls[index].writes))
        )
    for call in calls:
        _record_call(flow, log, call, block_of, change, rounded)
    new_log = _apply_change(log, change)
    peak_drop = most_in_use(log) - most_in_use(new_log)
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
    return changed, f"the peak of memory falls by {peak_drop} bytes."


def _blocks_of(block_of: dict[int, list[int]], contents: Iterable[int]) -> list[int]:
    return [block for content in contents for block in block_of.get(content, ())]


def _record_call(  # noqa: PLR0917
    flow: Flow,
    log: MemoryLog,
    call: EagerCall,
    block_of: dict[int, list[int]],
    change: _BlockChange,
    rounded: Callable[[int], int],
) -> None:
    """Record the changes of the blocks of a call, in place, in `change`."""
    blocks = log.blocks
    outputs = call.outputs
    forward_blocks, backward_blocks = (
        _blocks_of(block_of, (operand.content for index in members
                              for operand in flow.calls[index].writes
                              if operand.content not in outputs))
        for members in (call.forward.members, call.backward.members if call.backward else ())
    )  # fmt: skip
    change.removed.update(forward_blocks, backward_blocks)
    if call.backward is None or call.gradients is None or not backward_blocks:
        return
    allocations = _in_step(blocks.allocated_at[block] for block in backward_blocks)
    backward_begin = float(min(allocations, default=log.events))
    saved_blocks = [block for block in forward_blocks if blocks.freed_at[block] >= backward_begin]
    frees = _in_step(blocks.freed_at[block] for block in (*saved_blocks, *backward_blocks))
    backward_end = float(max(frees, default=backward_begin))
    row_sums_bytes = rounded(call.sizes.batch * call.sizes.heads * call.sizes.rows * _FLOAT_BYTES)
    for block in _blocks_of(block_of, {operand.content for operand in call.tensors}):
        freed_at = change.freed_at.get(block, float(blocks.freed_at[block]))
        if 0 <= freed_at < backward_end:
            change.freed_at[block] = backward_end
    for block in _blocks_of(block_of, {operand.content for operand in call.gradients[1:]}):
        if blocks.allocated_at[block] > backward_begin:
            change.allocated_at[block] = backward_begin
    allocations = _in_step(blocks.allocated_at[block] for block in forward_blocks)
    allocated = float(min(allocations, default=backward_begin))
    out_blocks = _blocks_of(block_of, [call.tensors.out.content])
    allocated = max([allocated, *(float(blocks.allocated_at[block]) for block in out_blocks)])
    lifetime = (allocated, backward_end)
    change.new.append((row_sums_bytes, MemoryClass.ACTIVATIONS, Phase.FORWARD, *lifetime))
    for size in _workspace(call.sizes, call.gradients.key):
        lifetime = (backward_begin, backward_begin + _JUST_AFTER)
        change.new.append((rounded(size), MemoryClass.WORKSPACE, Phase.BACKWARD, *lifetime))


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
        size
        for size, _, _, allocated_at, freed_at in change.new
        if allocated_at < backward_start and not freed_at < backward_start
    )


def _in_step(events: Iterable[int]) -> list[int]:
    return [event for event in events if event >= 0]


def _workspace(s: Sizes, key: Operand) -> list[int]:
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
    call_of = calls_of(graph)
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


def _apply_change(log: MemoryLog, change: _BlockChange) -> MemoryLog:
    """Return the log with the changes and renumbered events."""
    blocks = log.blocks
    kept = [block for block in range(len(blocks)) if block not in change.removed]
    new = change.new
    events_of = {
        "allocated_at": [
            change.allocated_at.get(block, float(blocks.allocated_at[block])) for block in kept
        ]
        + [row[3] for row in new],
        "freed_at": [change.freed_at.get(block, float(blocks.freed_at[block])) for block in kept]
        + [row[4] for row in new],
    }
    events = np.array([*events_of["allocated_at"], *events_of["freed_at"]])
    # At equal events an allocation comes first: an operator frees its workspace after it has its
    # result.
    is_free = np.repeat([0, 1], len(kept) + len(new))
    order = np.lexsort((is_free, events))
    order = order[events[order] >= 0]
    number = np.full(len(events), -1, dtype=np.int64)
    number[order] = np.arange(len(order))
    allocated_at, freed_at = number.reshape(2, -1).tolist()
    columns = {name: [getattr(blocks, name)[block] for block in kept if getattr(blocks, name)]
               for name in ("bytes", "memory_class", "node", "phase", "pool", "spare_bytes",
                            "lingers")}  # fmt: skip
    new_columns = {
        "bytes": [row[0] for row in new],
        "memory_class": [int(row[1]) for row in new],
        "node": [-1] * len(new),
        "phase": [int(row[2]) for row in new],
    }
    for name in ("pool", "spare_bytes", "lingers"):
        new_columns[name] = [0] * len(new) if columns[name] else []
    joined = {name: (*columns[name], *new_columns[name]) for name in columns}
    new_blocks = Blocks(allocated_at=tuple(allocated_at), freed_at=tuple(freed_at), **joined)
    return msgspec.structs.replace(log, blocks=new_blocks, events=len(order), reserved_bytes=0)
