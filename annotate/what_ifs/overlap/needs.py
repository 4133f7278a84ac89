"""Which calls must wait for what computes, and what computes for which calls, by their data.

Storages are followed through the step as it ran. Memory that the allocator hands out again holds
other data, so nobody waits for it: a real step would hold on to what a call still uses.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.overlap.lanes import NEVER, NO_LANE, Lanes
from onerank.annotate.what_ifs.overlap.spans import Span, Touch, touches_of
from onerank.annotate.what_ifs.sizes.places import calls_of, launchers, places_of
from onerank.annotate.work.classes import base_name
from onerank.ir import UNKNOWN, Graph, Kind

I64 = npt.NDArray[np.int64]

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
    """What needs what.

    Attributes:
        of: what each call needs that can move, in the order in which they ran.
        waits: (call, node that needs it), in the order in which the latter ran.
        fixed: calls that tell no tensors and stay where they are.
        unread: calls of which nothing reads what they wrote.
    """

    of: dict[int, Need] = field(default_factory=dict[int, Need])
    waits: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    fixed: list[int] = field(default_factory=list[int])
    unread: set[int] = field(default_factory=set[int])


def needs_of(graph: Graph, lanes: Lanes, before: I64, after: I64) -> Needs:
    """Return what each call needs and who needs it.

    Nothing needs what it did not wait for as captured: it was none of its data. A node that does
    not tell its tensors needs all that it waited for. What a call wrote that nobody reads in the
    step is awaited as captured: of a slice, whose peers are absent, what is made up in place of a
    sum may lie elsewhere.

    Args:
        graph: as captured.
        lanes: its lanes.
        before: what each node waits for, `Lanes.before` of the graph.
        after: who waits for each, `Lanes.after` of the graph.
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
