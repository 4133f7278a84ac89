"""Replay scheduler: start and end of every node from durations and edges only.

A host thread needs the measured time between two starts, minus the time the GPU blocked it. That
difference is host work, including Python.

A GPU operation starts when three conditions hold: the previous operation on its stream has ended
(plus the gap between the two, 20 us at most), its dependencies have ended, and its launch has
reached the GPU. The scheduler never reads the measured start of a GPU operation. It does read how
long the operation waited for a cause that the trace does not record (`queued_ns`). So a graph with
a missing edge replays too fast, and one with a false edge too slow.

Nodes without a stream (a generator's workload) run one at a time, in the order in which they could
begin: GPU compute is one queue, and each group's collectives are another.
"""

import copy
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from onerank.ir.edges import Edges
from onerank.ir.enums import Kind, Reason
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN
from onerank.ir.replay.start_delays import begins, edge_delays, launches

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ROUNDS = 8
"""Most steps to replay until the step time is steady."""
EVEN = 1e-4
NEVER = np.iinfo(np.int64).min
"""Delay of an edge that holds nothing back."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Replayed start and end of every node, and the node it waited for last.

    Attributes:
        start_ns: int64[n].
        end_ns: int64[n].
        held_by: node that each node waited for last, UNKNOWN for none, int64[n].
        by_launch: whether that last wait was for the launch, bool[n].
    """

    start_ns: I64
    end_ns: I64
    held_by: I64
    by_launch: Mask


class Run:
    """A graph prepared for scheduling, as one step or as consecutive steps.

    Args:
        graph: the graph.
        queues: whether the host waits for room in launch queues where it did.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """

    def __init__(self, graph: Graph, *, queues: bool = True) -> None:
        if not graph.nodes.duration_ns.any():
            raise GraphError(
                f"none of the graph's {len(graph)} nodes takes time, so there is nothing to replay;"
                " annotate it for a GPU first: annotate --target H100 ..."
            )
        self._take(graph, queues=queues)
        lanes = _lanes(graph)
        if lanes:
            self._take(_one_at_a_time(graph, lanes, self.schedule().start_ns), queues=queues)

    def _take(self, graph: Graph, *, queues: bool) -> None:
        self._graph = graph
        self._delay, self._from_start = edge_delays(graph)
        if not queues:
            for edge in np.flatnonzero(graph.edges.reason == Reason.LAUNCH_QUEUE).tolist():
                self._delay[edge] = NEVER
        self._is_launch: list[bool] = launches(graph).tolist()
        self._order: list[int] = graph.topological_order().tolist()
        self._least = begins(graph)

    def lasting(self, gpu_ns: I64) -> Self:
        """Return it with other durations of what is no host operator, int64[n]; delays stay."""
        made, nodes = copy.copy(self), self._graph.nodes
        duration = np.where(nodes.kind == Kind.HOST_OP, nodes.duration_ns, gpu_ns)
        made._graph = self._graph.with_columns(duration_ns=duration)
        return made

    def schedule(self, floor: I64 | None = None) -> Schedule:
        """Return when each node runs; none of them before `floor`, int64[n]."""
        graph = self._graph
        offsets: list[int] = graph.edges.offsets.tolist()
        sources: list[int] = graph.edges.source.tolist()
        duration: list[int] = graph.nodes.duration_ns.tolist()
        delay, from_start, is_launch = self._delay, self._from_start, self._is_launch
        start: list[int] = [0] * len(graph)
        end: list[int] = [0] * len(graph)
        held: list[int] = [UNKNOWN] * len(graph)
        launched: list[bool] = [False] * len(graph)
        least: list[int] = (self._least + (0 if floor is None else floor)).tolist()
        floors: list[int] = [0] * len(graph) if floor is None else floor.tolist()
        for node in self._order:
            ready, holder, by_launch = least[node], UNKNOWN, False
            for edge in range(offsets[node], offsets[node + 1]):
                source = sources[edge]
                if delay[edge] == NEVER:
                    continue
                at = (start if from_start[edge] else end)[source] + delay[edge]
                at = max(at, start[source])  # one that overlaps it begins behind it all the same
                if at > ready or holder == UNKNOWN:
                    ready, holder, by_launch = at, source, is_launch[edge]
            ready = max(ready, floors[node])
            start[node], end[node] = ready, ready + duration[node]
            held[node], launched[node] = holder, by_launch
        return Schedule(np.array(start), np.array(end), np.array(held), np.array(launched))

    def in_a_row(self, between_ns: int) -> tuple[Schedule, int]:
        """Return when each node runs in a step that follows its likes, and how long these take.

        The host goes on with a step when it is through with the one before, however far behind the
        GPU is; the GPU, when it is through with that.

        Args:
            between_ns: the host's time from its last node of a step to its first of the next.
        """
        is_host = self._graph.nodes.kind == Kind.HOST_OP
        one = self.schedule()
        period = UNKNOWN
        for _ in range(ROUNDS):
            host, gpu = int(one.end_ns[is_host].max(initial=0)), int(one.end_ns.max())
            following = self.schedule(np.where(is_host, host + between_ns, gpu))
            before, period = period, int(following.end_ns.max()) - int(one.end_ns.max())
            one = following
            if before != UNKNOWN and abs(period - before) <= EVEN * period:
                break
        return one, period


def _lanes(graph: Graph) -> list[I64]:
    """Return nodes that one GPU, or one group, runs one at a time and no stream orders."""
    nodes = graph.nodes
    free = (nodes.stream == UNKNOWN) & (nodes.thread == UNKNOWN)
    calls = free & (nodes.kind == Kind.COLLECTIVE)
    lanes = [calls & (nodes.group == group) for group in np.unique(nodes.group[calls])]
    return [np.flatnonzero(lane) for lane in (free & graph.gpu_compute, *lanes) if lane.sum() > 1]


def _one_at_a_time(graph: Graph, lanes: list[I64], start_ns: I64) -> Graph:
    """Return the graph with each lane's nodes in the order in which they can begin."""
    place = np.empty(len(graph), dtype=np.int64)
    place[graph.topological_order()] = np.arange(len(graph))
    lanes = [lane[np.lexsort((place[lane], start_ns[lane]))] for lane in lanes]
    edges = graph.edges
    source = np.concatenate([edges.source, *(lane[:-1] for lane in lanes)])
    target = np.concatenate([edges.target, *(lane[1:] for lane in lanes)])
    more = np.full(len(source) - len(edges), int(Reason.STREAM_ORDER), dtype=np.uint8)
    reason = np.concatenate([edges.reason, more])
    return replace(graph, edges=Edges.from_pairs(len(graph), source, target, reason))


def schedule(graph: Graph) -> Schedule:
    """Return when each node runs.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    return Run(graph).schedule()
