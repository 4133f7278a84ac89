"""The schedule of one rank, computed event by event, so that ranks can be replayed together.

An operation that occupies multiprocessors starts and ends by events, because what else runs changes
its rate (`contention.py`). All others, as those of the host, take their duration: their times are
set as soon as their last predecessor's are.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.contention import Contention, RunningOperation, SharedGpu
from onerank.ir.edges import Edges
from onerank.ir.nodes import UNKNOWN

_Outgoing = list[tuple[int, int, int]]
"""Edges as (target, delay in ns, edge)."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the starts of nodes, by source, as lists for loops over single elements.

    Attributes:
        after_start: per node, the edges whose delay counts from its start.
        before_end: those whose delay is negative and counts from its end.
        after_end: the others.
        lead: how long before its end the first successor may start, in ns.
        count: number of edges to each node.
    """

    after_start: list[_Outgoing]
    before_end: list[_Outgoing]
    after_end: list[_Outgoing]
    lead: list[int]
    count: list[int]

    @classmethod
    def of(cls, edges: Edges, delay: I64, from_start: Mask, ignored: Mask) -> Self:
        """Return the constraints of a graph's edges.

        Args:
            edges: of n nodes.
            delay: delay of each edge in ns.
            from_start: whether it counts from the source's start, not its end.
            ignored: edges that do not constrain their target.
        """
        nodes = len(edges.offsets) - 1
        by_kind: list[list[_Outgoing]] = [[[] for _ in range(nodes)] for _ in range(3)]
        kind = np.where(from_start, 0, np.where(delay < 0, 1, 2))
        kept = np.flatnonzero(~ignored)
        sources: list[int] = edges.source.tolist()
        targets: list[int] = edges.target.tolist()
        delays, kinds = list[int](delay.tolist()), list[int](kind.tolist())
        for edge in kept.tolist():
            by_kind[kinds[edge]][sources[edge]].append((targets[edge], delays[edge], edge))
        lead = np.zeros(nodes, dtype=np.int64)
        overlapping = kept[kind[kept] == 1]
        np.maximum.at(lead, edges.source[overlapping], -delay[overlapping])
        count = np.bincount(edges.target[kept], minlength=nodes)
        after_start, before_end, after_end = by_kind
        return cls(after_start, before_end, after_end, lead.tolist(), count.tolist())


@dataclass(frozen=True, slots=True)
class SharedCalls:
    """The operations of a rank that involve other ranks, by node.

    Attributes:
        waits: whether an operation waits for other ranks. It may start before they come, and then
            holds its stream and its multiprocessors, but makes no progress.
        awaited: whether other ranks wait for its start.
    """

    waits: list[bool]
    awaited: list[bool]


class RankSchedule:
    """The schedule of a rank's nodes, which `handle_event` advances in the order of time.

    Attributes:
        start_ns: start of each node, once it has one.
        end_ns: end of each node, once it has one.
        blocker: node that each node waited for last, UNKNOWN for none.
        released_by: edge of that wait; UNKNOWN for none, or if the node waited for
            multiprocessors.
        arrival_ns: time when the last other rank reached each node's call, 0 for none.
        started: awaited nodes that have started; the caller empties the list.
        next_event_ns: time of the next event; infinite if all nodes have ended, or if those that
            run wait for other ranks.
        unfinished: number of nodes that have no end yet.

    Args:
        constraints: of the graph's n nodes.
        duration_ns: time of each node alone.
        earliest_ns: start of each node, unless an edge constrains it.
        floor_ns: time before which each node never starts, whatever its edges.
        contention: of the same graph.
        calls: the nodes that involve other ranks; None: no node does.
    """

    def __init__(
        self,
        constraints: Constraints,
        duration_ns: list[int],
        *,
        earliest_ns: list[int],
        floor_ns: list[int],
        contention: Contention,
        calls: SharedCalls | None = None,
    ) -> None:
        count = len(duration_ns)
        self._constraints, self._duration_ns, self._floor_ns = constraints, duration_ns, floor_ns
        self._gpu = SharedGpu(contention, duration_ns)
        self._waits = calls.waits.copy() if calls else [False] * count
        self._awaited = calls.awaited if calls else [False] * count
        self._open = constraints.count.copy()
        self._ready_ns = earliest_ns.copy()
        # (time, order, node, whether it waited for multiprocessors)
        self._starts: list[tuple[float, int, int, bool]] = []
        self._pushed = 0
        # Nodes that occupy nothing, have started, and wait for other ranks.
        self._suspended = set[int]()
        self.start_ns = [0] * count
        self.end_ns = [0] * count
        self.blocker = [UNKNOWN] * count
        self.released_by = [UNKNOWN] * count
        self.arrival_ns = [0] * count
        self.started = list[int]()
        self.unfinished = count
        self._release([node for node, count in enumerate(self._open) if not count])
        self._find_next_event()

    def handle_event(self) -> None:
        """Advance to the next event and handle it."""
        if self._next_is_start:
            _, _, node, waited = heapq.heappop(self._starts)
            self._gpu.advance(self.next_event_ns)
            self._begin(node, waited=waited)
        else:
            gpu = self._gpu
            gpu.advance(self.next_event_ns)
            now_ns = gpu.now_ns
            for entry in [entry for entry in gpu.running if entry.event_ns(now_ns) <= now_ns]:
                self._handle_event_of(entry)
            gpu.set_rates()
        self._find_next_event()

    def arrive(self, node: int, arrival_ns: int) -> None:
        """Let a node that waits for other ranks make progress from a time on.

        Args:
            node: the node, which may not have started yet.
            arrival_ns: time when the last other rank reaches its call; no earlier than the event
                that was handled last.
        """
        self._waits[node], self.arrival_ns[node] = False, arrival_ns
        if node in self._suspended:
            self._suspended.remove(node)
            end_ns = max(self.start_ns[node], arrival_ns) + self._duration_ns[node]
            self._release(self._end(node, end_ns))
        for entry in self._gpu.running:
            if entry.node == node:
                # Starts are rounded, so that an arrival can lie up to 0.5 ns before this moment.
                entry.resumes_ns = max(float(arrival_ns), self._gpu.now_ns)
        self._find_next_event()

    def waiting_nodes(self) -> list[int]:
        """Return the nodes that have started and wait for other ranks without a known end."""
        running = [entry.node for entry in self._gpu.running if math.isinf(entry.resumes_ns)]
        return sorted([*self._suspended, *running])

    def _find_next_event(self) -> None:
        now_ns = self._gpu.now_ns
        event_ns = math.inf
        for entry in self._gpu.running:
            event_ns = min(event_ns, entry.event_ns(now_ns))
        # Operations that end at the same time free their multiprocessors first.
        self._next_is_start = bool(self._starts) and self._starts[0][0] < event_ns
        self.next_event_ns = max(self._starts[0][0], now_ns) if self._next_is_start else event_ns

    def _begin(self, node: int, *, waited: bool) -> None:
        """Start a node that occupies multiprocessors, or let it wait for some."""
        gpu = self._gpu
        begin_ns = round(gpu.now_ns)
        arrived = not self._waits[node] and self.arrival_ns[node] <= gpu.now_ns
        if arrived and not self._duration_ns[node]:
            self._release([*self._start(node, begin_ns), *self._end(node, begin_ns)])
            return
        if not waited:
            wait_ns, kernel = gpu.until_multiprocessors_free(node)
            if wait_ns:
                self.blocker[node], self.released_by[node] = kernel, UNKNOWN
                self._push(gpu.now_ns + wait_ns, node, waited=True)
                return
        gpu.begin(
            RunningOperation(
                node,
                left=float(self._duration_ns[node]),
                lead=float(self._constraints.lead[node]),
                resumes_ns=math.inf if self._waits[node] else float(self.arrival_ns[node]),
                waits=not arrived,
            )
        )
        self._release(self._start(node, begin_ns))

    def _handle_event_of(self, entry: RunningOperation) -> None:
        """End an operation's wait, release what may overlap its end, or end it."""
        node, now_ns = entry.node, self._gpu.now_ns
        if entry.waits:
            entry.waits = False
            if entry.event_ns(now_ns) > now_ns:
                return
        if entry.left > 0:
            entry.lead = 0.0
            self.end_ns[node] = round(now_ns + entry.left / entry.rate)
            before_end = self._constraints.before_end[node]
            self._release(self._satisfy(node, before_end, self.end_ns[node]))
            return
        self._gpu.running.remove(entry)
        self.end_ns[node] = round(now_ns)
        self.unfinished -= 1
        self._release(self._satisfy(node, self._constraints.after_end[node], self.end_ns[node]))

    def _start(self, node: int, start_ns: int) -> list[int]:
        """Set a node's start; return the nodes that are now without open constraints."""
        self.start_ns[node] = start_ns
        if self._awaited[node]:
            self.started.append(node)
        edges = self._constraints.after_start[node]
        return self._satisfy(node, edges, start_ns) if edges else []

    def _end(self, node: int, end_ns: int) -> list[int]:
        """Set a node's end; return the nodes that are now without open constraints."""
        self.end_ns[node] = end_ns
        self.unfinished -= 1
        released = self._satisfy(node, self._constraints.after_end[node], end_ns)
        # Few nodes have successors that overlap them.
        if before_end := self._constraints.before_end[node]:
            return self._satisfy(node, before_end, end_ns) + released
        return released

    def _satisfy(self, node: int, edges: _Outgoing, time_ns: int) -> list[int]:
        """Satisfy edges from a node; return the targets without open constraints.

        Args:
            node: the node.
            edges: some of its edges.
            time_ns: its start or end, from which their delays count.
        """
        satisfied = list[int]()
        begun = self.start_ns[node]
        for target, delay, edge in edges:
            # A negative delay lets a node overlap its predecessor, never precede its start.
            at = max(time_ns + delay, begun)
            # The first constraint replaces `earliest`, even by an earlier time.
            if at > self._ready_ns[target] or self.released_by[target] == UNKNOWN:
                self._ready_ns[target], self.released_by[target] = at, edge
                self.blocker[target] = node
            self._open[target] -= 1
            if not self._open[target]:
                satisfied.append(target)
        return satisfied

    def _release(self, nodes: list[int]) -> None:
        """Queue the starts of nodes without open constraints, and set the times of others at once.

        Only operations that take time on the GPU are queued. The others end at a known time, so
        the nodes that wait for them follow in the same loop; unless they wait for other ranks.
        """
        while nodes:
            node = nodes.pop()
            begin_ns = max(self._ready_ns[node], self._floor_ns[node])
            waits = self._waits[node]
            progress_ns = max(begin_ns, self.arrival_ns[node])
            takes_time = waits or self._duration_ns[node] or progress_ns > begin_ns
            if takes_time and self._gpu.is_occupied_by(node):
                self._push(begin_ns, node, waited=False)
            elif waits:
                self._suspended.add(node)
                nodes += self._start(node, begin_ns)
            else:
                nodes += self._start(node, begin_ns)
                nodes += self._end(node, progress_ns + self._duration_ns[node])

    def _push(self, time_ns: float, node: int, *, waited: bool) -> None:
        heapq.heappush(self._starts, (time_ns, self._pushed, node, waited))
        self._pushed += 1
