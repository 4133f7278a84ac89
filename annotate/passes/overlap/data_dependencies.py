"""Data dependencies between communication and compute, from stream order and byte ranges.

The pass follows storages through the step in execution order. Memory that the allocator reuses
holds other data, so reuse is no dependency: a real step would keep memory that a call still uses.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import OpClass, base_name, op_class
from onerank.annotate.op_costs.operands import Call, Operand
from onerank.annotate.passes.resize.operand_growth import flat
from onerank.annotate.passes.resize.tensor_locations import (
    OVERWRITES,
    calls_of,
    launchers,
    places_of,
)
from onerank.ir import UNKNOWN, Collective, Edges, Graph, Kind

I64 = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]

NO_LANE = -1

NEVER = np.iinfo(np.int64).max


class Lanes(NamedTuple):
    """Where n nodes that compute or communicate run one after another.

    Calls have lanes of their own: those of a stream, or of a group on a thread.

    Attributes:
        of: lane of each node, `NO_LANE` for all others, int64[n].
        rank: place of each node in an order in which none comes before what it waits for, int64[n].
        order: the nodes in that order, int64[n].
        compute: which lanes compute, bool[lanes].
    """

    of: I64
    rank: I64
    order: I64
    compute: Mask

    @classmethod
    def from_graph(cls, graph: Graph) -> Self:
        """Return those of a graph as captured.

        Raises:
            GraphError: the graph has a cycle.
        """
        nodes, calls = graph.nodes, graph.communication
        works = np.flatnonzero(compute_mask(graph) | calls)
        on_thread = nodes.stream[works] == UNKNOWN
        keys = np.stack(
            [
                calls[works],
                nodes.stream[works],
                np.where(on_thread, nodes.thread[works], UNKNOWN),
                np.where(on_thread & calls[works], nodes.group[works], UNKNOWN),
            ],
            axis=1,
        )
        distinct, place = np.unique(keys, axis=0, return_inverse=True)
        of = np.full(len(graph), NO_LANE, dtype=np.int64)
        of[works] = place.reshape(-1)
        order, rank = graph.topological_order(), np.empty(len(graph), dtype=np.int64)
        rank[order] = np.arange(len(graph))
        return cls(of, rank, order, distinct[:, 0] == 0)

    def before(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the highest rank of a node there that it waits for, or its own.

        `UNKNOWN` for none. A loop over nodes: each result follows from the node's sources.

        Args:
            edges: of the graph, or of one with other edges among the same nodes.
            order: topological order of the nodes, int64[n].
        """
        found = np.full((len(order), len(self.compute)), UNKNOWN, dtype=np.int64)
        offsets, lane = edges.offsets.tolist(), self.of.tolist()
        for node in order.tolist():
            begin, end = offsets[node], offsets[node + 1]
            if begin < end:
                found[node] = found[edges.source[begin:end]].max(axis=0)
            if lane[node] != NO_LANE:
                found[node, lane[node]] = self.rank[node]
        return found

    def after(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the lowest rank of a node there that waits for it, or its own.

        `NEVER` for none; arguments as for `before`.
        """
        found = np.full((len(order), len(self.compute)), NEVER, dtype=np.int64)
        by_source = np.argsort(edges.source, kind="stable")
        followers = edges.target[by_source]
        starts = np.searchsorted(edges.source[by_source], np.arange(len(order) + 1)).tolist()
        lane = self.of.tolist()
        for node in order[::-1].tolist():
            begin, end = starts[node], starts[node + 1]
            if begin < end:
                found[node] = found[followers[begin:end]].min(axis=0)
            if lane[node] != NO_LANE:
                found[node, lane[node]] = self.rank[node]
        return found

    def beside(self, calls: I64, before: I64, after: I64) -> I64:
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
            until = np.cumsum(on_lane)  # how many of the lane have a rank below
            end = np.minimum(after[calls, lane], len(self.rank))
            count += np.maximum(until[end] - until[before[calls, lane] + 1], 0)
        return count


_INTO_ANOTHER = frozenset(
    {
        Collective.ALL_GATHER,
        Collective.GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    }
)
"""Of these the tensors whose bytes count come first, and then those they fill."""

_ALSO_WRITES = "batch_norm"
"""In the name of operators that keep statistics in operands of theirs."""


class Span(NamedTuple):
    """Bytes of a storage, as of a tensor that lies there without gaps."""

    storage: int
    begin: int
    end: int

    def meets(self, other: "Span") -> bool:
        """Return whether another span of the same storage shares bytes with it."""
        return self.begin < other.end and other.begin < self.end

    def holds(self, other: "Span") -> bool:
        """Return whether another span of the same storage is contained in it."""
        return self.begin <= other.begin and other.end <= self.end


class Touch(NamedTuple):
    """The memory that a node reads and writes.

    Attributes:
        reads: spans it reads.
        writes: spans it writes.
        made: storages that it creates: results outside its operands' memory.
        filled: storages that it overwrites completely.
    """

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    made: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()


NOTHING = Touch((), ())


def touches_of(graph: Graph) -> Callable[[int], Touch | None]:
    """Return a function from a node to its memory accesses; None if not recorded."""
    nodes, strings, call_of = graph.nodes, graph.strings, calls_of(graph)
    communicates = graph.communication

    def touch_of(node: int) -> Touch | None:
        op = strings[int(nodes.op[node])]
        on_host = nodes.kind[node] == Kind.HOST_OP
        if on_host and op_class(op) in (OpClass.NOTHING, OpClass.COMMUNICATION):
            return NOTHING
        call = call_of(node)
        if call is None:
            return None
        reads = _spans(call.inputs, strings[int(nodes.input_values[node])])
        writes = _spans(call.outputs, strings[int(nodes.output_values[node])])
        if reads is None or writes is None:
            return None
        if communicates[node]:
            kind, collective = Kind(int(nodes.kind[node])), Collective(int(nodes.collective[node]))
            return _of_call(kind, collective, int(nodes.comm_bytes[node]), reads)
        return _of_operator(op, call, reads, writes)

    return touch_of


def _spans(operands: tuple[Operand, ...], text: str) -> tuple[Span, ...] | None:
    """Return the byte span of each tensor; None if the location of one is unknown."""
    made: list[Span] = []
    for tensor, place in zip(flat(operands), places_of(operands, text), strict=True):
        if not tensor.numel:
            continue
        if place is None:
            if tensor.shape:
                return None
            continue  # a number that became a tensor
        begin = place.offset * tensor.item_bytes
        made.append(Span(place.storage, begin, begin + tensor.nbytes))
    return tuple(made)


def _of_operator(op: str, call: Call, reads: tuple[Span, ...], writes: tuple[Span, ...]) -> Touch:
    """Return the memory accesses of an operator's kernel.

    PyTorch's own operators write their results, or their operands if they have no results; other
    operators may write either. A result in an operand's memory is that operand; any other result
    has new memory.
    """
    ours = op.startswith("aten::")
    if ours and call.op in OVERWRITES and reads[:1] == writes:
        return _filling(reads[1:], writes)
    owned = {span.storage for span in reads}
    pure = ours and bool(call.outputs) and _ALSO_WRITES not in call.op
    made = frozenset(span.storage for span in writes if span.storage not in owned) if ours else ()
    return Touch(reads, writes if pure else (*writes, *reads), frozenset(made))


def _of_call(
    kind: Kind, collective: Collective, nbytes: int, tensors: tuple[Span, ...]
) -> Touch | None:
    """Return the memory accesses of a communication call; None without recorded tensors."""
    if not tensors:
        return None
    if kind is Kind.SEND:
        return Touch(tensors, ())
    if kind is Kind.RECV:
        return _filling((), tensors)
    if collective in _INTO_ANOTHER:
        size, count = 0, 0
        while count < len(tensors) and size < nbytes:
            size += tensors[count].end - tensors[count].begin
            count += 1
        if size == nbytes:
            return _filling(tensors[:count], tensors[count:])
    return Touch(tensors, tensors)


def _filling(reads: tuple[Span, ...], writes: tuple[Span, ...]) -> Touch:
    read = {span.storage for span in reads}
    return Touch(reads, writes, filled=frozenset(span.storage for span in writes) - read)


_ALLOCATES = frozenset({"empty", "empty_strided", "empty_permuted", "new_empty",
                        "new_empty_strided"})  # fmt: skip


class _Use(NamedTuple):
    """A span that a node used."""

    node: int
    span: Span
    writes: bool


@dataclass(slots=True)
class Need:
    """What a call needs.

    Attributes:
        compute: nodes that compute and come before it.
        calls: calls that come before it.
        made: whether one of them wrote what it reads.
    """

    compute: set[int] = field(default_factory=set[int])
    calls: set[int] = field(default_factory=set[int])
    made: bool = False


@dataclass(slots=True)
class Needs:
    """Dependencies between communication calls and other nodes.

    Attributes:
        of: dependencies of each movable call, in execution order.
        waits: (call, dependent node), by execution order of the latter.
        fixed: calls without recorded tensors, which stay in place.
        unread: calls whose result nothing reads.
    """

    of: dict[int, Need] = field(default_factory=dict[int, Need])
    waits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    fixed: list[int] = field(default_factory=list[int])
    unread: set[int] = field(default_factory=set[int])


def needs_of(graph: Graph, lanes: Lanes, before: I64, after: I64) -> Needs:
    """Return the dependencies and dependents of each call.

    An operation depends only on operations it waited for during capture; anything else cannot have
    produced its inputs. A node without recorded tensors depends on everything it waited for. The
    result of a call that nothing in the step reads is
    awaited as captured: in a slice with absent peers, a filled-in sum may lie elsewhere.

    Args:
        graph: as captured.
        lanes: its lanes.
        before: what each node waits for, `Lanes.before` of the graph.
        after: the nodes that wait for each, `Lanes.after` of the graph.
    """
    found = _Walk(graph, lanes, before).through()
    for call in sorted(found.unread):
        ranks = after[call, lanes.compute]
        found.waits += [(call, node) for node in lanes.order[ranks[ranks != NEVER]].tolist()]
    found.waits.sort(key=lambda wait: int(lanes.rank[wait[1]]))
    return found


class _Walk:
    """Goes through what works, in order, and keeps who used each storage since it was made."""

    def __init__(self, graph: Graph, lanes: Lanes, before: I64) -> None:
        self._lanes, self._before = lanes, before
        self._touch_of = touches_of(graph)
        self._issued = _issued(graph)
        self._allocated = _allocations(graph)
        self._communicates = graph.communication
        self._uses = defaultdict[int, list[_Use]](list)
        self._untold = dict[int, int]()  # lane -> the last node there that tells no tensors
        self._open = defaultdict[int, dict[int, None]](dict)  # lane -> calls it did not wait for
        self._found = Needs()

    def through(self) -> Needs:
        lane = self._lanes.of
        for node in self._lanes.order[lane[self._lanes.order] != NO_LANE].tolist():
            touch = self._touch_of(node)
            if touch is not None and self._communicates[node]:
                self._call(node, touch)
            elif touch is not None:
                self._compute(node, touch)
            else:
                self._tells_nothing(node)
        return self._found

    def _call(self, call: int, touch: Touch) -> None:
        need = self._found.of[call] = Need()
        self._forget(call, touch)
        for use, writes in self._met(call, touch):
            (need.calls if self._communicates[use.node] else need.compute).add(use.node)
            need.made |= use.writes and not writes
            self._read(use, writes)
        need.compute.update(one for one in self._untold.values() if self._waited(one, call))
        self._keep(call, touch)
        if touch.writes:
            self._found.unread.add(call)
        for lane in np.flatnonzero(self._lanes.compute).tolist():
            self._open[lane][call] = None

    def _compute(self, node: int, touch: Touch) -> None:
        self._forget(node, touch)
        met = set[int]()
        for use, writes in self._met(node, touch):
            if self._communicates[use.node]:
                met.add(use.node)
                self._read(use, writes)
        self._wait(node, sorted(met))
        self._keep(node, touch)

    def _tells_nothing(self, node: int) -> None:
        """Let it wait for all that it waited for, and those behind it for it."""
        if self._communicates[node]:
            self._found.fixed.append(node)
        lane = int(self._lanes.of[node])
        known = self._open[lane] if self._lanes.compute[lane] else self._found.of
        waited = [call for call in known if self._waited(call, node)]
        self._wait(node, waited)
        self._found.unread.difference_update(waited)
        self._untold[lane] = node

    def _read(self, use: _Use, writes: bool) -> None:
        """Take note of who wrote what is read."""
        if use.writes and not writes:
            self._found.unread.discard(use.node)

    def _wait(self, node: int, calls: list[int]) -> None:
        """Let a node wait for calls, but for those that its lane waited for before."""
        known = self._open[int(self._lanes.of[node])]
        for call in calls:
            if not self._lanes.compute[self._lanes.of[node]] or call in known:
                self._found.waits.append((call, node))
                known.pop(call, None)

    def _met(self, node: int, touch: Touch) -> list[tuple[_Use, bool]]:
        """Return who used the same bytes before, one of both writing, and whether the node does."""
        sides = ((touch.writes, True), (touch.reads, False))
        return [
            (use, writes)
            for spans, writes in sides
            for span in spans
            for use in self._uses.get(span.storage, ())
            if (writes or use.writes) and use.span.meets(span) and self._waited(use.node, node)
        ]

    def _waited(self, node: int, later: int) -> bool:
        """Return whether a node came before a later one as captured."""
        return bool(self._before[later, self._lanes.of[node]] >= self._lanes.rank[node])

    def _keep(self, node: int, touch: Touch) -> None:
        """Keep what a node used, in place of what it makes superfluous.

        Who waits for it waits for all that it waited for: for those whose bytes it wrote, and where
        it computes for what its lane did before.
        """
        own = int(self._lanes.of[node])
        follows = self._lanes.compute[own]
        for spans, writes in ((touch.writes, True), (touch.reads, False)):
            for span in spans:
                self._uses[span.storage] = [
                    use
                    for use in self._uses[span.storage]
                    if not span.holds(use.span)
                    or not (writes or (follows and not use.writes and self._lane(use) == own))
                ]
                self._uses[span.storage].append(_Use(node, span, writes))

    def _lane(self, use: _Use) -> int:
        return int(self._lanes.of[use.node])

    def _forget(self, node: int, touch: Touch) -> None:
        """Forget who used memory that is a node's results', or was given out for it to fill."""
        for storage in (*touch.made, *touch.filled):
            if storage in touch.made or self._is_new(storage, node):
                self._uses.pop(storage, None)

    def _is_new(self, storage: int, node: int) -> bool:
        """Return whether memory that a node fills was allocated after all who used it so far."""
        issued = self._issued[node]
        made = [at for at in self._allocated.get(storage, ()) if at <= issued]
        uses = self._uses.get(storage, ())
        return bool(made) and all(self._issued[use.node] < made[-1] for use in uses)


def _issued(graph: Graph) -> list[int]:
    """Return when the operator that launched each node began; of what none did, the node."""
    by, start = launchers(graph), graph.nodes.start_ns
    return np.where(by == UNKNOWN, start, start[by]).tolist()


def _allocations(graph: Graph) -> dict[int, list[int]]:
    """Return when operators allocated each storage without writing to it, ascending."""
    nodes, strings, call_of = graph.nodes, graph.strings, calls_of(graph)
    ops = np.unique(nodes.op)
    chosen = [int(op) for op in ops if base_name(strings[int(op)]) in _ALLOCATES]
    made = defaultdict[int, list[int]](list)
    rows = np.flatnonzero(np.isin(nodes.op, chosen) & (nodes.kind == Kind.HOST_OP))
    for node in rows[np.argsort(nodes.start_ns[rows], kind="stable")].tolist():
        call = call_of(node)
        if call is None:
            continue
        for place in places_of(call.outputs, strings[int(nodes.output_values[node])]):
            if place is not None:
                made[place.storage].append(int(nodes.start_ns[node]))
    return made
