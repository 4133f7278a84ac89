"""Replace fused attention by the kernels, memory and time of eager attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.memory.peak import most_in_use
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.eager_kernels import (
    Bytes,
    EagerKernel,
    Sizes,
    backward,
    forward,
    memory,
)
from onerank.annotate.passes.dataflow import TEXTS, as_text
from onerank.annotate.passes.remove_nodes import one_per_pair
from onerank.annotate.passes.resize.tensor_locations import launchers
from onerank.ir import (
    UNKNOWN,
    Blocks,
    Edges,
    Evidence,
    Graph,
    Kind,
    Measurement,
    MemoryClass,
    MemoryLog,
    Nodes,
    Phase,
    Reason,
)
from onerank.ir.dtypes import ITEM_BYTES
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

I64 = npt.NDArray[np.int64]

# Dtypes whose eager kernels `eager_kernels` describes.
_SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")


class CallMemory(NamedTuple):
    """Start, memory and pass of a call of attention."""

    start_ns: int
    memory: Bytes
    is_backward: bool


def with_score_memory(graph: Graph, calls: Sequence[CallMemory]) -> tuple[Measurement, str]:
    """Return the measurement with the blocks of eager attention, and a sentence on the peak.

    Backward runs in the opposite order of forward, so a backward call frees the saved blocks of the
    last forward call that are not yet freed.
    """
    measurement = graph.job.measurement
    log = measurement.memory
    if log is None:
        # 0 stands for unknown: the captured peak lacks the scores.
        unknown = msgspec.structs.replace(measurement, peak_memory_bytes=0, activation_bytes=())
        kept = sum(call.memory.kept for call in calls if not call.is_backward)
        return unknown, f"its calls keep {kept} bytes for backward, and the peak is unknown."
    peak_before = most_in_use(log)
    new_log = _add_blocks(log, calls, _events_at(graph, log, [call.start_ns for call in calls]))
    rise = most_in_use(new_log) - peak_before
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
    return changed, f"the peak of memory rises by {rise} bytes."


def _events_at(graph: Graph, log: MemoryLog, starts: list[int]) -> list[int]:
    """Return the log event at each time: the first one of a node that started later."""
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


def _add_blocks(log: MemoryLog, calls: Sequence[CallMemory], moments: list[int]) -> MemoryLog:
    """Return the log with the blocks of the calls inserted; later events get higher numbers."""
    marks: list[tuple[int, int, int]] = []  # (old event, block, +1 allocated or -1 freed)
    sizes: list[tuple[int, MemoryClass, Phase]] = []
    saved: list[int] = []
    for call, moment in sorted(zip(calls, moments, strict=True), key=lambda pair: pair[0].start_ns):
        phase = Phase.BACKWARD if call.is_backward else Phase.FORWARD
        workspace_bytes = call.memory.backward if call.is_backward else call.memory.forward
        if not call.is_backward:
            saved.append(len(sizes))
            sizes.append((call.memory.kept, MemoryClass.ACTIVATIONS, phase))
            marks.append((moment, len(sizes) - 1, 1))
        sizes.append((workspace_bytes, MemoryClass.WORKSPACE, phase))
        marks += [(moment, len(sizes) - 1, 1), (moment, len(sizes) - 1, -1)]
        if call.is_backward and saved:
            marks.append((moment, saved.pop(), -1))
    position = np.array([mark[0] for mark in marks], dtype=np.int64)
    shift = np.searchsorted(np.sort(position), np.arange(log.events + 1), side="right")
    blocks = log.blocks
    shifted = {
        name: [at + int(shift[at]) if at >= 0 else at for at in getattr(blocks, name)]
        for name in ("allocated_at", "freed_at")
    }
    order = np.argsort(position, kind="stable")
    new_position = np.empty(len(marks), dtype=np.int64)
    new_position[order] = position[order] + np.arange(len(marks))
    event_of = {1: dict[int, int](), -1: dict[int, int]()}
    for (_, block, sign), event in zip(marks, new_position.tolist(), strict=True):
        event_of[sign][block] = event
    count = len(sizes)
    blocks_with_new = Blocks(
        bytes=(*blocks.bytes, *(size for size, _, _ in sizes)),
        memory_class=(*blocks.memory_class, *(int(memory_class) for _, memory_class, _ in sizes)),
        allocated_at=(*shifted["allocated_at"], *(event_of[1][block] for block in range(count))),
        freed_at=(*shifted["freed_at"], *(event_of[-1].get(block, -1) for block in range(count))),
        node=(*blocks.node, *[-1] * count),
        phase=(*blocks.phase, *(int(phase) for _, _, phase in sizes)),
    )
    return MemoryLog(blocks_with_new, log.events + len(marks))


class _FusedCall(NamedTuple):
    """The kernels of one call of fused attention, and the eager kernels that replace them."""

    members: tuple[int, ...]
    launcher: int
    sizes: Sizes
    is_backward: bool
    dtype: str
    kernels: tuple[EagerKernel, ...]

    @property
    def first(self) -> int:
        """The node that begins the call: its launcher, or its first kernel without a launch."""
        return self.launcher if self.launcher >= 0 else self.members[0]


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """Replace fused attention by eager attention, as transformers' `eager` runs it.

    Attributes:
        from_description: the cost model of unmeasured kernels.
    """

    from_description: PredictFromDescription = predict_from_description

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with each call of fused attention as products, softmax and casts.

        The new kernels run one after another in place of the fused ones, with one launch. They are
        unmeasured, so their evidence is DATASHEET. They include no dropout.

        Args:
            graph: re-costed for `target`, or captured on it; with GPU kernels.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no fused attention with known sizes.
        """
        fused_calls = _fused_calls(graph)
        if not fused_calls:
            raise AnnotateError(
                "the graph has no fused attention of known sizes to replace; expected a fused "
                "kernel with recorded operands (eager attention is products and a softmax already)",
                code="unfuse-no-fused-attention",
            )
        expanded, new = _replace_calls(graph, fused_calls)
        expanded = self._predict(expanded, new, target)
        before = sum(int(graph.nodes.duration_ns[list(call.members)].sum()) for call in fused_calls)
        after = int(expanded.nodes.duration_ns[new].sum())
        call_memory = [
            CallMemory(
                int(graph.nodes.start_ns[call.first]),
                memory(call.sizes, call.dtype, ITEM_BYTES[call.dtype]),
                call.is_backward,
            )
            for call in fused_calls
        ]
        measurement, peak_note = with_score_memory(graph, call_memory)
        text = (
            f"What if attention were eager: {sum(len(call.members) for call in fused_calls)} "
            f"kernels of fused attention become {len(new)}, {before} ns become {after} ns, by "
            f"{target.name}'s description; {peak_note}"
        )
        notes = [Note(text, code="what-if-eager-attention")]
        if remaining := _remaining(graph, fused_calls):
            text = (
                f"Eager attention: {remaining} more attention kernels of unknown sizes or other "
                "dtypes stay fused."
            )
            notes.append(Note(text, code="eager-stays-fused"))
        measurement = measurement.untimed(*notes)
        return replace(expanded, job=msgspec.structs.replace(expanded.job, measurement=measurement))

    def _predict(self, graph: Graph, new: I64, target: Gpu) -> Graph:
        costs = op_costs_of(graph)
        kernels = KernelFeatures.of(graph, costs)
        predicted_ns, rules = self.from_description(kernels, target)
        (low, high), _ = intervals(kernels, (predicted_ns, rules), None, target, shipped())
        is_new = np.isin(costs.index, new)
        counts = ("flops", "bytes_read", "bytes_written")
        columns = {name: getattr(graph.nodes, name).copy()
                   for name in ("duration_ns", "p10_ns", "p90_ns", *counts)}  # fmt: skip
        for name, values in (("duration_ns", predicted_ns), ("p10_ns", low), ("p90_ns", high)):
            columns[name][costs.index[is_new]] = np.rint(values[is_new]).astype(np.int64)
        for name in counts:
            columns[name][costs.index[is_new]] = getattr(costs, name)[is_new]
        return graph.with_columns(**columns)


def _remaining(graph: Graph, calls: list[_FusedCall]) -> int:
    """Return the number of attention kernels that stay fused."""
    costs = op_costs_of(graph)
    fused = costs.index[costs.is_class(OpClass.ATTENTION) & graph.mask(Kind.KERNEL)[costs.index]]
    return len(np.setdiff1d(fused, [node for call in calls for node in call.members]))


def _fused_calls(graph: Graph) -> list[_FusedCall]:
    """Return the calls of fused attention, each with its kernels in order."""
    costs = op_costs_of(graph)
    launcher = launchers(graph)
    members: dict[tuple[int, int], list[int]] = {}
    cost_row = dict[tuple[int, int], int]()
    fused = np.array(
        [bool(work.attention) and work.dtype in _SUPPORTED_DTYPES for work in costs.works],
        dtype=bool,
    )
    rows = np.flatnonzero(fused[costs.call] & graph.mask(Kind.KERNEL, Kind.MEMSET)[costs.index])
    for row in rows[np.argsort(graph.nodes.start_ns[costs.index[rows]], kind="stable")].tolist():
        node = int(costs.index[row])
        key = (int(launcher[node]), -1) if launcher[node] >= 0 else (-1, node)
        members.setdefault(key, []).append(node)
        cost_row[key] = int(costs.call[row])
    calls: list[_FusedCall] = []
    for key, nodes in members.items():
        work = costs.works[cost_row[key]]
        sizes, is_backward = Sizes(*work.attention[:7]), bool(work.attention[8])
        kernels = (backward if is_backward else forward)(sizes, work.dtype)
        calls.append(
            _FusedCall(tuple(nodes), key[0], sizes, is_backward, work.dtype, tuple(kernels))
        )
    return calls


def _replace_calls(graph: Graph, calls: list[_FusedCall]) -> tuple[Graph, I64]:
    """Return the graph with the new kernels, and their indices."""
    nodes, count = graph.nodes, len(graph)
    removed = np.zeros(count, dtype=bool)
    rows, order_keys = list[int](), list[float]()
    first_of, last_of = np.arange(count), np.arange(count)
    chain: list[tuple[int, int, Reason]] = []
    for call in calls:
        members, first = list(call.members), count + len(rows)
        removed[members] = True
        for offset in range(len(call.kernels)):
            rows.append(members[0])
            # Fractions put the new kernels between the first fused kernel and the next node.
            order_keys.append(members[0] + (offset + 1) / (len(call.kernels) + 1))
            if offset:
                chain.append((first + offset - 1, first + offset, Reason.STREAM_ORDER))
        first_of[members], last_of[members] = first, first + len(call.kernels) - 1
    joined = Nodes.joined([nodes, _new_nodes(nodes, rows)])
    texts = {name: graph.strings.decode(getattr(joined, name)) for name in TEXTS}
    for offset, kernel in enumerate(kernel for call in calls for kernel in call.kernels):
        for name, value in _columns(kernel).items():
            texts[name][count + offset] = value
    expanded = replace(graph, nodes=joined, edges=Edges.from_pairs(
        len(joined), graph.edges.source, graph.edges.target, graph.edges.reason))  # fmt: skip
    expanded = expanded.with_columns(**texts)
    edges = graph.edges
    links = np.array([pair[:2] for pair in chain], dtype=np.int64).reshape(-1, 2)
    source = np.concatenate([last_of[edges.source], links[:, 0]])
    waiter = np.concatenate([first_of[edges.target], links[:, 1]])
    reason = np.concatenate([edges.reason, np.array([link[2] for link in chain], dtype=np.uint8)])
    internal = np.concatenate([  # edges between kernels of one fused call
        removed[edges.source] & removed[edges.target]
        & (first_of[edges.source] == first_of[edges.target]),
        np.zeros(len(links), dtype=bool),
    ])  # fmt: skip
    source, waiter, reason = one_per_pair(source[~internal], waiter[~internal], reason[~internal])
    order = np.argsort(
        np.concatenate([np.arange(count, dtype=np.float64), order_keys]), kind="stable"
    )
    kept = order[~np.concatenate([removed, np.zeros(len(rows), dtype=bool)])[order]]
    new_index = np.full(len(joined), -1, dtype=np.int64)
    new_index[kept] = np.arange(len(kept))
    expanded = replace(
        expanded,
        nodes=expanded.nodes.take(kept),
        edges=Edges.from_pairs(len(kept), new_index[source], new_index[waiter], reason),
    )
    return expanded, np.sort(new_index[count:])


def _new_nodes(nodes: Nodes, rows: list[int]) -> Nodes:
    """Return one new kernel per row, on the stream of the kernel at the row."""
    copies = nodes.take(np.array(rows, dtype=np.int64))
    unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
    zero = np.zeros(len(rows), dtype=np.int64)
    first = int(nodes.id.max(initial=0)) + 1
    positions = np.array(rows)
    # Distinct start times keep the kernels of a call in order; rows of one call are neighbours.
    offset = np.arange(len(rows)) - np.searchsorted(positions, positions)
    columns = {
        "id": np.arange(first, first + len(rows)).astype(np.uint64),
        "kind": np.full(len(rows), Kind.KERNEL, dtype=np.uint8),
        "evidence": np.full(len(rows), Evidence.DATASHEET, dtype=np.uint8),
        "start_ns": copies.start_ns + offset,
    }
    zeroed = ("duration_ns", "spread_ns", "samples", "bytes_allocated", "bytes_freed")
    unknown_columns = ("uncontended_ns", "p10_ns", "p90_ns", "flops", "bytes_read", "bytes_written")
    columns |= dict.fromkeys(zeroed, zero) | dict.fromkeys(unknown_columns, unknown)
    return replace(copies, **{n: v.astype(getattr(copies, n).dtype) for n, v in columns.items()})


def _columns(kernel: EagerKernel) -> dict[str, str]:
    """Return the text columns of a kernel."""
    return {
        "name": f"eager attention: {kernel.op.removeprefix('aten::')}",
        "op": kernel.op,
        "grid": "",
        "block": "",
        "input_shapes": as_text([list(shape) for shape, _ in kernel.inputs]),
        "input_types": as_text([kind for _, kind in kernel.inputs]),
        "input_values": "",
        "output_shapes": as_text([list(shape) for shape, _ in kernel.outputs]),
        "output_types": as_text([kind for _, kind in kernel.outputs]),
        "output_values": "",
    }
