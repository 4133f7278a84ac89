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
from onerank.annotate.models.cost_model import Alone
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_alone
from onerank.annotate.op_costs.node_costs import characters
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.eager_kernels import (
    Bytes,
    EagerKernel,
    Sizes,
    backward,
    forward,
    memory,
)
from onerank.annotate.passes.remove_nodes import one_per_pair
from onerank.annotate.passes.resize.tensor_locations import launchers
from onerank.annotate.passes.tensor_access import TEXTS, as_text
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


class AttentionCall(NamedTuple):
    """A call of attention: when it began, what it takes, and which pass it is."""

    start_ns: int
    takes: Bytes
    is_backward: bool


def with_scores(graph: Graph, calls: Sequence[AttentionCall]) -> tuple[Measurement, str]:
    """Return the measurement with the blocks of eager attention, and a sentence on the peak.

    A backward call frees what the last forward call not yet freed has kept: backward runs in the
    opposite order.
    """
    measured = graph.job.measurement
    log = measured.memory
    if log is None:
        none = msgspec.structs.replace(measured, peak_memory_bytes=0, activation_bytes=())
        kept = sum(call.takes.kept for call in calls if not call.is_backward)
        return none, f"its calls keep {kept} bytes for backward, and the peak is not known."
    before = most_in_use(log)
    made = _with_blocks(log, calls, _moments(graph, log, [call.start_ns for call in calls]))
    more = most_in_use(made) - before
    kept = sum(call.takes.kept for call in calls if not call.is_backward)
    micro_batches = max(1, len(measured.activation_bytes))
    changed = msgspec.structs.replace(
        measured,
        memory=made,
        peak_memory_bytes=measured.peak_memory_bytes + more,
        activation_bytes=tuple(b + kept // micro_batches for b in measured.activation_bytes),
    )
    return changed, f"the peak of memory rises by {more} bytes."


def _moments(graph: Graph, log: MemoryLog, starts: list[int]) -> list[int]:
    """Return at which event of the log each time is: the first of a node that started later."""
    order = np.argsort(graph.nodes.id)
    ids = np.array(log.blocks.node, dtype=np.int64)
    at = np.array(log.blocks.allocated_at, dtype=np.int64)
    known = (ids >= 0) & (at >= 0)
    sorted_ids = graph.nodes.id[order].astype(np.int64)
    place = np.minimum(np.searchsorted(sorted_ids, ids[known]), len(order) - 1)
    there = sorted_ids[place] == ids[known]
    events = at[known][there]
    times = graph.nodes.start_ns[order[place[there]]]
    by_event = np.argsort(events)
    events, times = events[by_event], np.maximum.accumulate(times[by_event])
    first = np.searchsorted(times, np.array(starts), side="left")
    return [int(events[one]) if one < len(events) else log.events for one in first.tolist()]


def _with_blocks(log: MemoryLog, calls: Sequence[AttentionCall], moments: list[int]) -> MemoryLog:
    """Return the log with the blocks of the calls; events later than each move back."""
    marks: list[tuple[int, int, int]] = []  # (old event, block, +1 allocated or -1 freed)
    sizes: list[tuple[int, MemoryClass, Phase]] = []
    held: list[int] = []
    for call, moment in sorted(zip(calls, moments, strict=True), key=lambda one: one[0].start_ns):
        phase = Phase.BACKWARD if call.is_backward else Phase.FORWARD
        own = call.takes.backward if call.is_backward else call.takes.forward
        if not call.is_backward:
            held.append(len(sizes))
            sizes.append((call.takes.kept, MemoryClass.ACTIVATIONS, phase))
            marks.append((moment, len(sizes) - 1, 1))
        sizes.append((own, MemoryClass.WORKSPACE, phase))
        marks += [(moment, len(sizes) - 1, 1), (moment, len(sizes) - 1, -1)]
        if call.is_backward and held:
            marks.append((moment, held.pop(), -1))
    position = np.array([mark[0] for mark in marks], dtype=np.int64)
    shift = np.searchsorted(np.sort(position), np.arange(log.events + 1), side="right")
    blocks = log.blocks
    old = {name: [at + int(shift[at]) if at >= 0 else at for at in getattr(blocks, name)]
           for name in ("allocated_at", "freed_at")}  # fmt: skip
    order = np.argsort(position, kind="stable")
    place = np.empty(len(marks), dtype=np.int64)
    place[order] = position[order] + np.arange(len(marks))
    new = {1: dict[int, int](), -1: dict[int, int]()}
    for (_, block, sign), at in zip(marks, place.tolist(), strict=True):
        new[sign][block] = at
    count = len(sizes)
    made = Blocks(
        bytes=(*blocks.bytes, *(size for size, _, _ in sizes)),
        memory_class=(*blocks.memory_class, *(int(sort) for _, sort, _ in sizes)),
        allocated_at=(*old["allocated_at"], *(new[1][one] for one in range(count))),
        freed_at=(*old["freed_at"], *(new[-1].get(one, -1) for one in range(count))),
        node=(*blocks.node, *[-1] * count),
        phase=(*blocks.phase, *(int(phase) for _, _, phase in sizes)),
    )
    return MemoryLog(made, log.events + len(marks))


I64 = npt.NDArray[np.int64]

_TAKEN_APART = ("bfloat16", "float16", "float32")


class _Instance(NamedTuple):
    """The kernels of one call of fused attention, and what takes their place."""

    members: tuple[int, ...]
    launcher: int
    sizes: Sizes
    is_backward: bool
    dtype: str
    kernels: tuple[EagerKernel, ...]

    @property
    def first(self) -> int:
        """The node that begins it: what launched it, or its first kernel where none is known."""
        return self.launcher if self.launcher >= 0 else self.members[0]


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """Replace fused attention by eager attention, as transformers' `eager` runs it.

    Attributes:
        alone: the cost model of unmeasured kernels.
    """

    alone: Alone = predict_alone

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with each call of fused attention as products, softmax and the like.

        The new kernels follow one another where the fused ones ran, launched with the first.
        Nobody measured them: their evidence is DATASHEET. Dropout is not in them.

        Args:
            graph: re-costed for `target`, or captured on it; with GPU kernels.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no fused attention with known sizes.
        """
        calls = _calls(graph)
        if not calls:
            raise AnnotateError(
                "no kernel is fused attention of known sizes, so that there is none to take apart; "
                "a trace of eager attention has products and a softmax in its place",
                code="unfuse-no-fused-attention",
            )
        made, new = _expanded(graph, calls)
        made = self._timed(made, new, target)
        before = sum(int(graph.nodes.duration_ns[list(one.members)].sum()) for one in calls)
        after = int(made.nodes.duration_ns[new].sum())
        taking = [
            AttentionCall(
                int(graph.nodes.start_ns[call.first]),
                memory(call.sizes, call.dtype, ITEM_BYTES[call.dtype]),
                call.is_backward,
            )
            for call in calls
        ]
        told, peak = with_scores(graph, taking)
        note = (
            f"What if attention were eager: {sum(len(c.members) for c in calls)} kernels of fused "
            f"attention become {len(new)}, {before} ns become {after} ns, by {target.name}'s "
            f"description; {peak}"
        )
        if left := _left(graph, calls):
            note += f" {left} more attention kernels, of unknown sizes or other types, stay fused."
        told = told.untimed(note)
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))

    def _timed(self, graph: Graph, new: I64, target: Gpu) -> Graph:
        found = characters(graph)
        kernels = KernelFeatures.of(graph, found)
        moved, rules = self.alone(kernels, target)
        (low, high), _ = intervals(kernels, (moved, rules), None, target, shipped())
        mine = np.isin(found.index, new)
        counts = ("flops", "bytes_read", "bytes_written")
        columns = {name: getattr(graph.nodes, name).copy()
                   for name in ("duration_ns", "p10_ns", "p90_ns", *counts)}  # fmt: skip
        for name, values in (("duration_ns", moved), ("p10_ns", low), ("p90_ns", high)):
            columns[name][found.index[mine]] = np.rint(values[mine]).astype(np.int64)
        for name in counts:
            columns[name][found.index[mine]] = getattr(found, name)[mine]
        return graph.with_columns(**columns)


def _left(graph: Graph, calls: list[_Instance]) -> int:
    """Return how many attention kernels are not taken apart."""
    found = characters(graph)
    fused = found.index[found.is_class(OpClass.ATTENTION) & graph.mask(Kind.KERNEL)[found.index]]
    return len(np.setdiff1d(fused, [node for one in calls for node in one.members]))


def _calls(graph: Graph) -> list[_Instance]:
    """Return the calls of fused attention, their kernels in order."""
    found = characters(graph)
    by = launchers(graph)
    members: dict[tuple[int, int], list[int]] = {}
    whose = dict[tuple[int, int], int]()
    fused = np.array(
        [bool(w.attention) and w.dtype in _TAKEN_APART for w in found.works], dtype=bool
    )
    rows = np.flatnonzero(fused[found.call] & graph.mask(Kind.KERNEL, Kind.MEMSET)[found.index])
    for row in rows[np.argsort(graph.nodes.start_ns[found.index[rows]], kind="stable")].tolist():
        node = int(found.index[row])
        key = (int(by[node]), -1) if by[node] >= 0 else (-1, node)
        members.setdefault(key, []).append(node)
        whose[key] = int(found.call[row])
    made: list[_Instance] = []
    for key, nodes in members.items():
        work = found.works[whose[key]]
        sizes, is_backward = Sizes(*work.attention[:7]), bool(work.attention[8])
        kernels = (backward if is_backward else forward)(sizes, work.dtype)
        made.append(_Instance(tuple(nodes), key[0], sizes, is_backward, work.dtype, tuple(kernels)))
    return made


def _expanded(graph: Graph, calls: list[_Instance]) -> tuple[Graph, I64]:
    """Return the graph with the new kernels, and their indices."""
    nodes, count = graph.nodes, len(graph)
    gone = np.zeros(count, dtype=bool)
    rows, after = list[int](), list[float]()
    enter, leave = np.arange(count), np.arange(count)
    chain: list[tuple[int, int, Reason]] = []
    for call in calls:
        members, first = list(call.members), count + len(rows)
        gone[members] = True
        for place in range(len(call.kernels)):
            rows.append(members[0])
            after.append(members[0] + (place + 1) / (len(call.kernels) + 1))
            if place:
                chain.append((first + place - 1, first + place, Reason.STREAM_ORDER))
        enter[members], leave[members] = first, first + len(call.kernels) - 1
    joined = Nodes.joined([nodes, _new_nodes(nodes, rows)])
    texts = {name: graph.strings.decode(getattr(joined, name)) for name in TEXTS}
    for place, kernel in enumerate(kernel for call in calls for kernel in call.kernels):
        for name, value in _columns(kernel).items():
            texts[name][count + place] = value
    made = replace(graph, nodes=joined, edges=Edges.from_pairs(
        len(joined), graph.edges.source, graph.edges.target, graph.edges.reason))  # fmt: skip
    made = made.with_columns(**texts)
    edges = graph.edges
    links = np.array([pair[:2] for pair in chain], dtype=np.int64).reshape(-1, 2)
    source = np.concatenate([leave[edges.source], links[:, 0]])
    waiter = np.concatenate([enter[edges.target], links[:, 1]])
    reason = np.concatenate([edges.reason, np.array([p[2] for p in chain], dtype=np.uint8)])
    inside = np.concatenate([  # between kernels of one call
        gone[edges.source] & gone[edges.target] & (enter[edges.source] == enter[edges.target]),
        np.zeros(len(links), dtype=bool),
    ])  # fmt: skip
    source, waiter, reason = one_per_pair(source[~inside], waiter[~inside], reason[~inside])
    order = np.argsort(np.concatenate([np.arange(count, dtype=np.float64), after]), kind="stable")
    kept = order[~np.concatenate([gone, np.zeros(len(rows), dtype=bool)])[order]]
    place_of = np.full(len(joined), -1, dtype=np.int64)
    place_of[kept] = np.arange(len(kept))
    made = replace(
        made,
        nodes=made.nodes.take(kept),
        edges=Edges.from_pairs(len(kept), place_of[source], place_of[waiter], reason),
    )
    return made, np.sort(place_of[count:])


def _new_nodes(nodes: Nodes, rows: list[int]) -> Nodes:
    """Return one kernel for each row, where the kernel at the row ran."""
    made = nodes.take(np.array(rows, dtype=np.int64))
    unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
    zero = np.zeros(len(rows), dtype=np.int64)
    first = int(nodes.id.max(initial=0)) + 1
    places = np.array(rows)
    offset = np.arange(len(rows)) - np.searchsorted(places, places)  # rows ascend
    columns = {
        "id": np.arange(first, first + len(rows)).astype(np.uint64),
        "kind": np.full(len(rows), Kind.KERNEL, dtype=np.uint8),
        "evidence": np.full(len(rows), Evidence.DATASHEET, dtype=np.uint8),
        "start_ns": made.start_ns + offset,
    }
    spent = ("duration_ns", "spread_ns", "samples", "bytes_allocated", "bytes_freed")
    untold = ("uncontended_ns", "p10_ns", "p90_ns", "flops", "bytes_read", "bytes_written")
    columns |= dict.fromkeys(spent, zero) | dict.fromkeys(untold, unknown)
    return replace(made, **{n: v.astype(getattr(made, n).dtype) for n, v in columns.items()})


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
