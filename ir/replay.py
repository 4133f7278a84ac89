"""Replay a graph: schedule every node by its edges and their delays, as one step or as several.

`start_delays.py` has the delays, `steady_state.py` the steps without a profiler.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.contention import Contention
from onerank.ir.edges import Edges
from onerank.ir.enums import Kind, Reason
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN
from onerank.ir.rank_schedule import Constraints, RankSchedule, SharedCalls
from onerank.ir.start_delays import earliest_starts, edge_delays, launches

MAX_STEPS = 8
"""Most steps to replay until the step time is steady."""

STEADY_TOLERANCE = 1e-4
"""Largest relative change between two step times that counts as steady."""

NO_DELAY = np.iinfo(np.int64).min
"""Marks an edge that does not constrain its target."""


@dataclass(frozen=True, slots=True)
class ReplayTimes:
    """Replayed start and end of every node, and the node it waited for last.

    Attributes:
        start_ns: int64[n].
        end_ns: int64[n].
        blocked_by: node that each node waited for last, UNKNOWN for none, int64[n].
        by_launch: whether that last wait was for the launch, bool[n].
    """

    start_ns: I64
    end_ns: I64
    blocked_by: I64
    by_launch: Mask


class ReplayedRank:
    """A graph prepared for scheduling, as one step or as consecutive steps.

    Args:
        graph: the graph.
        queues: whether the host waits for room in launch queues where it did in the capture.
        call_excess_ns: as for `edge_delays`.
        contention: shares of the GPU that operations occupy; None: each takes its duration.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        queues: bool = True,
        call_excess_ns: float = 0.0,
        contention: Contention | None = None,
    ) -> None:
        if not graph.nodes.duration_ns.any():
            raise GraphError(
                f"none of the graph's {len(graph)} nodes takes time, so there is nothing to replay;"
                " annotate it for a GPU first: annotate --target H100 ...",
                code="replay-no-durations",
            )
        self._call_excess_ns = call_excess_ns
        self._contention = contention
        self._prepare(graph, queues=queues)
        # Without streams nothing orders the GPU's kernels, and they would all run at once. Their
        # order comes from a first schedule, which needs the delays: hence the second preparation.
        # Without its stream order an H200 capture replays a tenth too fast.
        lanes = _lanes(graph)
        if lanes:
            self._prepare(_one_at_a_time(graph, lanes, self.schedule().start_ns), queues=queues)

    def _prepare(self, graph: Graph, *, queues: bool) -> None:
        self._graph = graph
        self._constraints: Constraints | None = None
        self._delay, self._from_start = edge_delays(graph, self._call_excess_ns)
        if not queues:
            for edge in np.flatnonzero(graph.edges.reason == Reason.LAUNCH_QUEUE).tolist():
                self._delay[edge] = NO_DELAY
        self._is_launch: list[bool] = launches(graph).tolist()
        self._order: list[int] = graph.topological_order().tolist()
        self._earliest = earliest_starts(graph)

    def with_gpu_durations(self, gpu_ns: I64) -> Self:
        """Return a copy with other durations for all nodes except host operators.

        Delays stay as they were measured.

        Args:
            gpu_ns: int64[n]; the entries of host operators are ignored.
        """
        replayed, nodes = copy.copy(self), self._graph.nodes
        duration = np.where(nodes.kind == Kind.HOST_OP, nodes.duration_ns, gpu_ns)
        replayed._graph = self._graph.with_columns(duration_ns=duration)
        return replayed

    def schedule(self, floor: I64 | None = None) -> ReplayTimes:
        """Return the start and end of each node.

        Args:
            floor: earliest start of each node, int64[n].
        """
        if self._contention is None:
            return self._uncontended_schedule(floor)
        schedule = self.begin(floor)
        while math.isfinite(schedule.next_event_ns):
            schedule.handle_event()
        return self.times_of(schedule)

    def begin(self, floor: I64 | None = None, calls: SharedCalls | None = None) -> RankSchedule:
        """Return the schedule at its begin, to be advanced with those of other ranks.

        Args:
            floor: earliest start of each node, int64[n].
            calls: the nodes that involve other ranks; None: no node does.
        """
        graph = self._graph
        if self._constraints is None:
            delay = np.array(self._delay, dtype=np.int64)
            self._constraints = Constraints.of(
                graph.edges, delay, np.array(self._from_start, dtype=np.bool_), delay == NO_DELAY
            )
        earliest_ns, floor_ns = self._limits(floor)
        return RankSchedule(
            self._constraints,
            graph.nodes.duration_ns.tolist(),
            earliest_ns=earliest_ns,
            floor_ns=floor_ns,
            contention=self._contention or Contention.none(len(graph)),
            calls=calls,
        )

    def times_of(self, schedule: RankSchedule) -> ReplayTimes:
        """Return the times of a schedule all of whose nodes have ended."""
        # Edge UNKNOWN, -1, is the appended one.
        is_launch = np.array([*self._is_launch, False])
        return ReplayTimes(
            np.array(schedule.start_ns),
            np.array(schedule.end_ns),
            np.array(schedule.blocker),
            is_launch[np.array(schedule.released_by)],
        )

    def _limits(self, floor: I64 | None) -> tuple[list[int], list[int]]:
        """Return the start of each node that no edge constrains, and its earliest one, in ns."""
        if floor is None:
            return self._earliest.tolist(), [0] * len(self._graph)
        return (self._earliest + floor).tolist(), floor.tolist()

    def _uncontended_schedule(self, floor: I64 | None) -> ReplayTimes:
        graph = self._graph
        # Lists, because the loop reads single elements, which is slow on numpy arrays.
        offsets: list[int] = graph.edges.offsets.tolist()
        sources: list[int] = graph.edges.source.tolist()
        duration: list[int] = graph.nodes.duration_ns.tolist()
        delay, from_start, is_launch = self._delay, self._from_start, self._is_launch
        start: list[int] = [0] * len(graph)
        end: list[int] = [0] * len(graph)
        blocker: list[int] = [UNKNOWN] * len(graph)
        launched: list[bool] = [False] * len(graph)
        earliest, floors = self._limits(floor)
        for node in self._order:
            ready, last_source, by_launch = earliest[node], UNKNOWN, False
            for edge in range(offsets[node], offsets[node + 1]):
                source = sources[edge]
                if delay[edge] == NO_DELAY:
                    continue
                time = (start if from_start[edge] else end)[source] + delay[edge]
                # A negative delay lets a node overlap its predecessor, never precede its start.
                time = max(time, start[source])
                # The delays include unrecorded waits, so the first edge replaces `earliest`, even
                # by an earlier time.
                if time > ready or last_source == UNKNOWN:
                    ready, last_source, by_launch = time, source, is_launch[edge]
            ready = max(ready, floors[node])
            start[node], end[node] = ready, ready + duration[node]
            blocker[node], launched[node] = last_source, by_launch
        return ReplayTimes(np.array(start), np.array(end), np.array(blocker), np.array(launched))

    def steady_state(self, inter_step_host_ns: int) -> tuple[ReplayTimes, int]:
        """Replay consecutive steps; return the schedule of one in steady state, and its time in ns.

        The host starts a step as soon as it has finished the previous one, even if the GPU is
        behind; the GPU starts it when it has finished the previous one.

        Args:
            inter_step_host_ns: host time from the last node of a step to the first of the next.
        """
        # A profiled step starts with an idle GPU. Without the lead that the host has in consecutive
        # steps, replays of a host-bound slice on an H200 were 5 to 63% too long.
        is_host = self._graph.nodes.kind == Kind.HOST_OP
        current = self.schedule()
        period = UNKNOWN
        for _ in range(MAX_STEPS):
            # Each has its own floor: only so can the host run ahead into the next step.
            host, gpu = int(current.end_ns[is_host].max(initial=0)), int(current.end_ns.max())
            next_step = self.schedule(np.where(is_host, host + inter_step_host_ns, gpu))
            previous_period = period
            period = int(next_step.end_ns.max()) - int(current.end_ns.max())
            current = next_step
            if (
                previous_period != UNKNOWN
                and abs(period - previous_period) <= STEADY_TOLERANCE * period
            ):
                break
        return current, period


def _lanes(graph: Graph) -> list[I64]:
    """Return groups of nodes that run one at a time, but that no stream or thread orders."""
    nodes = graph.nodes
    unordered = (nodes.stream == UNKNOWN) & (nodes.thread == UNKNOWN)
    collectives = unordered & (nodes.kind == Kind.COLLECTIVE)
    # One GPU computes one kernel at a time, and one group runs one collective at a time.
    lanes = [collectives & (nodes.group == group) for group in np.unique(nodes.group[collectives])]
    return [
        np.flatnonzero(lane) for lane in (unordered & graph.gpu_compute, *lanes) if lane.sum() > 1
    ]


def _one_at_a_time(graph: Graph, lanes: list[I64], start_ns: I64) -> Graph:
    """Return the graph with each lane's nodes in the order in which they can begin."""
    place = np.empty(len(graph), dtype=np.int64)
    place[graph.topological_order()] = np.arange(len(graph))
    lanes = [lane[np.lexsort((place[lane], start_ns[lane]))] for lane in lanes]
    edges = graph.edges
    source = np.concatenate([edges.source, *(lane[:-1] for lane in lanes)])
    target = np.concatenate([edges.target, *(lane[1:] for lane in lanes)])
    added_reasons = np.full(len(source) - len(edges), int(Reason.STREAM_ORDER), dtype=np.uint8)
    reason = np.concatenate([edges.reason, added_reasons])
    return replace(graph, edges=Edges.from_pairs(len(graph), source, target, reason))


def schedule(graph: Graph, contention: Contention | None = None) -> ReplayTimes:
    """Return the start and end of each node; `contention` is as for `ReplayedRank`.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    return ReplayedRank(graph, contention=contention).schedule()
