"""Data dependencies between communication and compute, from stream order and byte ranges.

The pass follows storages through the step in execution order. Memory that the allocator reuses
holds other data, so reuse is no dependency: a real step would keep memory that a call still uses.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import OpClass, base_name, op_class
from onerank.annotate.op_costs.operands import Call, Operand, flatten
from onerank.annotate.passes.tensor_locations import (
    OVERWRITES,
    call_of_node,
    parse_locations,
)
from onerank.ir import UNKNOWN, Collective, Edges, Graph, Kind
from onerank.ir.arrays import I64, Mask

NO_LANE = -1
"""Lane of nodes that neither compute nor communicate."""

NEVER = np.iinfo(np.int64).max
"""Rank of the first node that waits, if none waits: above every rank."""


class Lanes(NamedTuple):
    """The lanes on which n nodes that compute or communicate run one after another.

    A lane is a stream, or a thread without streams. Communication has separate lanes: per stream,
    or per group and thread.

    Attributes:
        of: lane of each node, `NO_LANE` for all others, int64[n].
        rank: position of each node in a topological order, int64[n].
        order: the nodes in that order, int64[n].
        compute: whether a lane computes, bool[lanes].
    """

    of: I64
    rank: I64
    order: I64
    compute: Mask

    @classmethod
    def from_graph(cls, graph: Graph) -> Self:
        """Return the lanes of a captured graph.

        Raises:
            GraphError: the graph has a cycle.
        """
        nodes, is_call = graph.nodes, graph.communication
        device_nodes = np.flatnonzero(compute_mask(graph) | is_call)
        on_thread = nodes.stream[device_nodes] == UNKNOWN
        keys = np.stack(
            [
                is_call[device_nodes],
                nodes.stream[device_nodes],
                np.where(on_thread, nodes.thread[device_nodes], UNKNOWN),
                # Without streams (a CPU capture) calls of one thread still run side by side if
                # their groups differ.
                np.where(on_thread & is_call[device_nodes], nodes.group[device_nodes], UNKNOWN),
            ],
            axis=1,
        )
        lane_keys, lane = np.unique(keys, axis=0, return_inverse=True)
        of = np.full(len(graph), NO_LANE, dtype=np.int64)
        of[device_nodes] = lane.reshape(-1)
        # Topological, not by start time: only then does every predecessor have a lower rank.
        order, rank = graph.topological_order(), np.empty(len(graph), dtype=np.int64)
        rank[order] = np.arange(len(graph))
        return cls(of, rank, order, lane_keys[:, 0] == 0)

    def before(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the highest rank on the lane that the node waits for.

        On the node's lane that is the rank of the node; `UNKNOWN` if it waits for none. The result
        is int64[n, lanes].

        Args:
            edges: edges of the graph, or other edges among the same nodes.
            order: topological order of the nodes, int64[n].
        """
        highest = np.full((len(order), len(self.compute)), UNKNOWN, dtype=np.int64)
        offsets, lane = edges.offsets.tolist(), self.of.tolist()
        for node in order.tolist():
            first, end = offsets[node], offsets[node + 1]
            if first < end:
                # One row per node suffices, because what a predecessor waited for is in its row
                # already.
                highest[node] = highest[edges.source[first:end]].max(axis=0)
            if lane[node] != NO_LANE:
                highest[node, lane[node]] = self.rank[node]
        return highest

    def after(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the lowest rank on the lane that waits for the node.

        On the node's lane that is the rank of the node; `NEVER` if none waits. Arguments and shape
        are those of `before`.
        """
        lowest = np.full((len(order), len(self.compute)), NEVER, dtype=np.int64)
        by_source = np.argsort(edges.source, kind="stable")
        followers = edges.target[by_source]
        starts = np.searchsorted(edges.source[by_source], np.arange(len(order) + 1)).tolist()
        lane = self.of.tolist()
        for node in order[::-1].tolist():
            first, end = starts[node], starts[node + 1]
            if first < end:
                lowest[node] = lowest[followers[first:end]].min(axis=0)
            if lane[node] != NO_LANE:
                lowest[node, lane[node]] = self.rank[node]
        return lowest

    def count_overlapping(self, calls: I64, before: I64, after: I64) -> I64:
        """Return how many compute nodes may overlap each of `calls`, int64[len(calls)].

        Args:
            calls: indices.
            before: what each node waits for, by `before`.
            after: the nodes that wait for each, by `after`.
        """
        count = np.zeros(len(calls), dtype=np.int64)
        for lane in np.flatnonzero(self.compute).tolist():
            on_lane = np.zeros(len(self.rank) + 1, dtype=np.int64)
            on_lane[self.rank[self.of == lane] + 1] = 1
            below = np.cumsum(on_lane)  # number of the lane's nodes with a lower rank
            end = np.minimum(after[calls, lane], len(self.rank))
            count += np.maximum(below[end] - below[before[calls, lane] + 1], 0)
        return count


# Collectives with separate outputs: inputs come first in the recorded tensors, outputs after.
_SEPARATE_OUTPUT = frozenset(
    {
        Collective.ALL_GATHER,
        Collective.GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    }
)

# Part of the name of operators that update running statistics among their operands.
_ALSO_WRITES = "batch_norm"


class ByteRange(NamedTuple):
    """A range of bytes in a storage; a tensor is assumed to be contiguous."""

    storage: int
    begin: int
    end: int

    def overlaps(self, other: "ByteRange") -> bool:
        """Return whether another range of the same storage shares bytes with this one."""
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: "ByteRange") -> bool:
        """Return whether this range contains another range of the same storage."""
        return self.begin <= other.begin and other.end <= self.end


class MemoryAccess(NamedTuple):
    """The memory that a node reads and writes.

    Attributes:
        reads: byte ranges that it reads.
        writes: byte ranges that it writes.
        created: storages of results outside the memory of its operands.
        overwritten: storages that it overwrites without reading them.
    """

    reads: tuple[ByteRange, ...]
    writes: tuple[ByteRange, ...]
    created: frozenset[int] = frozenset()
    overwritten: frozenset[int] = frozenset()


NOTHING = MemoryAccess((), ())


def memory_accesses(graph: Graph) -> Callable[[int], MemoryAccess | None]:
    """Return a function from a node to its memory accesses; None if not recorded."""
    nodes, strings, call_of = graph.nodes, graph.strings, call_of_node(graph)
    communicates = graph.communication

    def access_of(node: int) -> MemoryAccess | None:
        op = strings[int(nodes.op[node])]
        on_host = nodes.kind[node] == Kind.HOST_OP
        # A view or an allocation touches no memory, although it names tensors.
        if on_host and op_class(op) in (OpClass.NOTHING, OpClass.COMMUNICATION):
            return NOTHING
        call = call_of(node)
        if call is None:
            return None
        reads = _byte_ranges(call.inputs, strings[int(nodes.input_values[node])])
        writes = _byte_ranges(call.outputs, strings[int(nodes.output_values[node])])
        if reads is None or writes is None:
            return None
        if communicates[node]:
            kind, collective = Kind(int(nodes.kind[node])), Collective(int(nodes.collective[node]))
            return _communication_access(kind, collective, int(nodes.comm_bytes[node]), reads)
        return _operator_access(op, call, reads, writes)

    return access_of


def _byte_ranges(operands: tuple[Operand, ...], text: str) -> tuple[ByteRange, ...] | None:
    """Return the byte range of each tensor; None if the location of one is unknown."""
    byte_ranges: list[ByteRange] = []
    for tensor, place in zip(flatten(operands), parse_locations(operands, text), strict=True):
        if not tensor.numel:
            continue
        if place is None:
            if tensor.shape:
                return None
            # A Python number that torch wrapped in a tensor has no location.
            continue
        first_byte = place.offset * tensor.item_bytes
        byte_ranges.append(ByteRange(place.storage, first_byte, first_byte + tensor.nbytes))
    return tuple(byte_ranges)


def _operator_access(
    op: str, call: Call, reads: tuple[ByteRange, ...], writes: tuple[ByteRange, ...]
) -> MemoryAccess:
    """Return the memory accesses of an operator's kernel.

    Operators of `aten` write their results, or their operands if they have no results. Custom
    operators may write both. A result in an operand's memory is that operand; any other result of
    an `aten` operator has new memory.
    """
    is_aten = op.startswith("aten::")
    # `copy_` and `fill_` take their result as the first operand and do not read it.
    if is_aten and call.op in OVERWRITES and reads[:1] == writes:
        return _overwriting(reads[1:], writes)
    operand_storages = {span.storage for span in reads}
    only_results = is_aten and bool(call.outputs) and _ALSO_WRITES not in call.op
    new_storages = (
        frozenset(span.storage for span in writes if span.storage not in operand_storages)
        if is_aten
        else ()
    )
    return MemoryAccess(
        reads, writes if only_results else (*writes, *reads), frozenset(new_storages)
    )


def _communication_access(
    kind: Kind, collective: Collective, nbytes: int, tensors: tuple[ByteRange, ...]
) -> MemoryAccess | None:
    """Return the memory accesses of a communication call; None without recorded tensors."""
    if not tensors:
        return None
    if kind is Kind.SEND:
        return MemoryAccess(tensors, ())
    if kind is Kind.RECV:
        return _overwriting((), tensors)
    if collective in _SEPARATE_OUTPUT:
        size, count = 0, 0
        # `record_param_comms` lists inputs before outputs without a border; the recorded size of
        # the message shows where the inputs end.
        while count < len(tensors) and size < nbytes:
            size += tensors[count].end - tensors[count].begin
            count += 1
        if size == nbytes:
            return _overwriting(tensors[:count], tensors[count:])
    return MemoryAccess(tensors, tensors)


def _overwriting(reads: tuple[ByteRange, ...], writes: tuple[ByteRange, ...]) -> MemoryAccess:
    read = {span.storage for span in reads}
    return MemoryAccess(
        reads, writes, overwritten=frozenset(span.storage for span in writes) - read
    )


_ALLOCATES = frozenset({"empty", "empty_strided", "empty_permuted", "new_empty",
                        "new_empty_strided"})  # fmt: skip


class _Use(NamedTuple):
    """A byte range that a node read or wrote."""

    node: int
    span: ByteRange
    writes: bool


@dataclass(slots=True)
class CallDependencies:
    """Dependencies of a communication call.

    Attributes:
        compute: compute nodes that must precede it.
        calls: calls that must precede it.
        has_writer: whether one of them wrote the input of the call.
    """

    compute: set[int] = field(default_factory=set[int])
    calls: set[int] = field(default_factory=set[int])
    has_writer: bool = False


@dataclass(slots=True)
class CommDependencies:
    """Dependencies between communication calls and other nodes.

    Attributes:
        of: dependencies of each movable call, in execution order.
        waits: (call, dependent node), by execution order of the latter.
        fixed: calls without recorded tensors, which stay in place.
        unread: calls whose result nothing reads.
    """

    of: dict[int, CallDependencies] = field(default_factory=dict[int, CallDependencies])
    waits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    fixed: list[int] = field(default_factory=list[int])
    unread: set[int] = field(default_factory=set[int])


def find_dependencies(graph: Graph, lanes: Lanes, before: I64, after: I64) -> CommDependencies:
    """Return the dependencies and dependents of each call.

    An operation depends only on operations it waited for during capture; anything else cannot have
    produced its inputs. A node without recorded tensors depends on everything it waited for. The
    result of a call that nothing in the step reads is awaited as captured: in a slice with absent
    peers, an emulated sum may lie in other memory.

    Args:
        graph: as captured.
        lanes: its lanes.
        before: what each node waits for, `Lanes.before` of the graph.
        after: the nodes that wait for each, `Lanes.after` of the graph.
    """
    dependencies = _DependencyWalk(graph, lanes, before).run()
    for call in sorted(dependencies.unread):
        # As captured: only the first node per lane that waited has to, since later ones follow it.
        ranks = after[call, lanes.compute]
        dependencies.waits += [(call, node) for node in lanes.order[ranks[ranks != NEVER]].tolist()]
    dependencies.waits.sort(key=lambda wait: int(lanes.rank[wait[1]]))
    return dependencies


class _DependencyWalk:
    """Visits device nodes in order, and tracks the uses of each storage since its creation."""

    def __init__(self, graph: Graph, lanes: Lanes, before: I64) -> None:
        self._lanes, self._before = lanes, before
        self._access_of = memory_accesses(graph)
        self._issued = _issue_times(graph)
        self._allocated = _allocations(graph)
        self._communicates = graph.communication
        self._uses = defaultdict[int, list[_Use]](list)
        # lane -> its last node without recorded tensors
        self._opaque = dict[int, int]()
        # lane -> calls that it has not waited for yet
        self._open = defaultdict[int, dict[int, None]](dict)
        self._dependencies = CommDependencies()

    def run(self) -> CommDependencies:
        lane = self._lanes.of
        for node in self._lanes.order[lane[self._lanes.order] != NO_LANE].tolist():
            access = self._access_of(node)
            if access is not None and self._communicates[node]:
                self._add_call(node, access)
            elif access is not None:
                self._add_compute(node, access)
            else:
                self._add_opaque(node)
        return self._dependencies

    def _add_call(self, call: int, access: MemoryAccess) -> None:
        dependencies = self._dependencies.of[call] = CallDependencies()
        # First, because an earlier use of memory that was freed and reused since is no conflict.
        self._drop_old_uses(call, access)
        for use, writes in self._conflicts(call, access):
            (dependencies.calls if self._communicates[use.node] else dependencies.compute).add(
                use.node
            )
            dependencies.has_writer |= use.writes and not writes
            self._note_read(use, writes)
        dependencies.compute.update(
            opaque for opaque in self._opaque.values() if self._waited_for(opaque, call)
        )
        self._record_uses(call, access)
        # Unread until a later node reads it.
        if access.writes:
            self._dependencies.unread.add(call)
        for lane in np.flatnonzero(self._lanes.compute).tolist():
            self._open[lane][call] = None

    def _add_compute(self, node: int, access: MemoryAccess) -> None:
        self._drop_old_uses(node, access)
        calls = set[int]()
        for use, writes in self._conflicts(node, access):
            if self._communicates[use.node]:
                calls.add(use.node)
                self._note_read(use, writes)
        self._wait(node, sorted(calls))
        self._record_uses(node, access)

    def _add_opaque(self, node: int) -> None:
        """Keep all captured dependencies of a node without recorded tensors, in both directions."""
        if self._communicates[node]:
            self._dependencies.fixed.append(node)
        lane = int(self._lanes.of[node])
        known = self._open[lane] if self._lanes.compute[lane] else self._dependencies.of
        waited = [call for call in known if self._waited_for(call, node)]
        self._wait(node, waited)
        self._dependencies.unread.difference_update(waited)
        self._opaque[lane] = node

    def _note_read(self, use: _Use, writes: bool) -> None:
        """Mark the result of a call as read if this use reads it."""
        if use.writes and not writes:
            self._dependencies.unread.discard(use.node)

    def _wait(self, node: int, calls: list[int]) -> None:
        """Add waits of a node for calls, except for calls that its lane has waited for already."""
        known = self._open[int(self._lanes.of[node])]
        for call in calls:
            if not self._lanes.compute[self._lanes.of[node]] or call in known:
                self._dependencies.waits.append((call, node))
                known.pop(call, None)

    def _conflicts(self, node: int, access: MemoryAccess) -> list[tuple[_Use, bool]]:
        """Return earlier uses that conflict with an access, each with whether the node writes."""
        sides = ((access.writes, True), (access.reads, False))
        return [
            (use, writes)
            for spans, writes in sides
            for span in spans
            for use in self._uses.get(span.storage, ())
            if (writes or use.writes)
            and use.span.overlaps(span)
            and self._waited_for(use.node, node)
        ]

    def _waited_for(self, node: int, later: int) -> bool:
        """Return whether a later node waited for a node in the capture."""
        return bool(self._before[later, self._lanes.of[node]] >= self._lanes.rank[node])

    def _record_uses(self, node: int, access: MemoryAccess) -> None:
        """Record the uses of a node, and drop earlier uses that they imply.

        A wait for this node includes the waits of the node: for uses of bytes that it wrote and,
        for compute, for earlier uses on its lane.
        """
        lane = int(self._lanes.of[node])
        computes = self._lanes.compute[lane]
        for ranges, writes in ((access.writes, True), (access.reads, False)):
            for byte_range in ranges:
                self._uses[byte_range.storage] = [
                    use
                    for use in self._uses[byte_range.storage]
                    if not byte_range.contains(use.span)
                    or not (writes or (computes and not use.writes and self._lane(use) == lane))
                ]
                self._uses[byte_range.storage].append(_Use(node, byte_range, writes))

    def _lane(self, use: _Use) -> int:
        return int(self._lanes.of[use.node])

    def _drop_old_uses(self, node: int, access: MemoryAccess) -> None:
        """Drop the uses of memory that the node's results reuse, or that it fills as new memory."""
        # A created result is new in any case; an overwritten one only if its memory was allocated
        # since.
        for storage in (*access.created, *access.overwritten):
            if storage in access.created or self._is_new(storage, node):
                self._uses.pop(storage, None)

    def _is_new(self, storage: int, node: int) -> bool:
        """Return whether memory that a node fills was allocated after all its recorded uses."""
        issued = self._issued[node]
        # Both are host times: an operator allocates when the host runs it, before its kernel runs.
        allocations = [at for at in self._allocated.get(storage, ()) if at <= issued]
        uses = self._uses.get(storage, ())
        return bool(allocations) and all(self._issued[use.node] < allocations[-1] for use in uses)


def _issue_times(graph: Graph) -> list[int]:
    """Return the start time of each node's launching operator, or of the node without a launch."""
    launcher, start = graph.launchers(), graph.nodes.start_ns
    return np.where(launcher == UNKNOWN, start, start[launcher]).tolist()


def _allocations(graph: Graph) -> dict[int, list[int]]:
    """Return the times at which operators allocated each storage without writing, ascending."""
    nodes, strings, call_of = graph.nodes, graph.strings, call_of_node(graph)
    ops = np.unique(nodes.op)
    codes = [int(op) for op in ops if base_name(strings[int(op)]) in _ALLOCATES]
    allocated_ns = defaultdict[int, list[int]](list)
    rows = np.flatnonzero(np.isin(nodes.op, codes) & (nodes.kind == Kind.HOST_OP))
    for node in rows[np.argsort(nodes.start_ns[rows], kind="stable")].tolist():
        call = call_of(node)
        if call is None:
            continue
        for place in parse_locations(call.outputs, strings[int(nodes.output_values[node])]):
            if place is not None:
                allocated_ns[place.storage].append(int(nodes.start_ns[node]))
    return allocated_ns
