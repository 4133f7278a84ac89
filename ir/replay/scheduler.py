"""Replay a graph: schedule every node by its edges and start delay.

The start delay is the time between the end of a node's last dependency and its start in the
capture: launch latency, host work that the trace does not record, or unexplained waiting.
"""

import copy
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.edges import Edges
from onerank.ir.enums import LAUNCH_NS, Evidence, Kind, Reason
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

QUEUED_NS = 5_000

"""A GPU operation that started this soon after the one before it on its stream was held by it."""

RELEASE_NS = 20_000

"""Likewise of one that waited for another stream's."""

_NEVER = np.iinfo(np.int64).max // 2


def edge_delays(graph: Graph) -> tuple[list[int], list[bool]]:
    """Return per edge how long its target starts after the source, and if after its start.

    Nanoseconds. As measured between the two, less what the target spent waiting, times what
    another host takes of it (`annotate --host`). Of a launch that is the part within its operator.
    """
    edges, reason = graph.edges, graph.edges.reason
    factor = graph.job.host_factor
    is_host = graph.nodes.kind == Kind.HOST_OP
    lasted = graph.nodes.duration_ns
    if factor not in (0, 1):  # start times are the measured host's, and so must the ends be
        lasted = np.where(is_host, np.rint(lasted / factor), lasted).astype(np.int64)
    begun, ended = graph.nodes.start_ns, graph.nodes.start_ns + lasted
    on_host = is_host[edges.target]
    called = _called(graph)
    program = (reason == Reason.PROGRAM_ORDER) & is_host[edges.source]
    program &= on_host | called[edges.target]
    behind_call = (reason == Reason.PROGRAM_ORDER) & called[edges.source] & ~program
    behind_call &= on_host | called[edges.target]
    between, waking = _host_delays(graph, is_host, begun, ended)
    delay = np.where(on_host, waking, 0)
    delay = np.where(program | behind_call, np.rint(between * factor).astype(np.int64), delay)
    launch = launches(graph)
    untold = untold_waits(graph)
    within_ns = _within(graph, launch, begun, ended)
    latency = _launch_latencies(graph, launch, begun - untold, begun, ended, within_ns)
    within = np.minimum(latency, lasted[edges.source])
    latency = latency - within + np.rint(within * factor).astype(np.int64)
    delay = np.where(launch, latency, delay)
    behind = ~on_host & ~is_host[edges.source]
    gap = begun[edges.target] - ended[edges.source]
    queued = _queued(graph, launch, begun, ended, within_ns) & (gap >= 0) & (gap <= RELEASE_NS)
    source_end = ended[edges.source]
    last = _latest(graph, ~launch, source_end)[edges.target] == source_end
    for order, at_most in ((Reason.STREAM_ORDER, QUEUED_NS), (Reason.SYNC, RELEASE_NS)):
        chosen = behind & (reason == order)
        soon = gap[chosen & last & (gap >= 0) & (gap <= at_most)]
        usual = int(np.median(soon)) if len(soon) else 0
        delay = np.where(chosen, np.where(queued, gap, usual), delay)
    waited = np.where(on_host, 0, graph.nodes.blocked_ns[edges.target])
    leads = (reason == Reason.STREAM_ORDER) | (reason == Reason.ROOM)
    delay = np.where(leads & (waited < 0), waited, delay + np.maximum(waited, 0))
    return delay.tolist(), (program | launch).tolist()


def _called(graph: Graph) -> Mask:
    """Return which communication a thread carried out itself, and in no time: nobody was there.

    Its time is what a network makes of it: what follows on the thread waits for its end.
    """
    nodes = graph.nodes
    on_thread = (nodes.stream == UNKNOWN) & (nodes.thread != UNKNOWN)
    return graph.communication & on_thread & (nodes.evidence == Evidence.NONE)


def launches(graph: Graph) -> Mask:
    """Return which edges tell when an operation of a stream was launched, bool[m].

    By the operator that launched it, or by what that had called before.
    """
    edges, is_host = graph.edges, graph.nodes.kind == Kind.HOST_OP
    on_stream = ~is_host[edges.target] & (graph.nodes.stream != UNKNOWN)[edges.target]
    called = on_stream & is_host[edges.source] & (edges.reason == Reason.PROGRAM_ORDER)
    return (edges.reason == Reason.LAUNCH) | called


def begins(graph: Graph) -> I64:
    """Return when each node can begin that waits for no other, int64[n].

    A GPU operation after what it waited for that the trace does not tell; the host, whose GPU may
    have been at work before, as long after it as measured.
    """
    found = untold_waits(graph)
    host = np.flatnonzero(graph.nodes.kind == Kind.HOST_OP)
    if len(host):
        first = host[np.argmin(graph.nodes.start_ns[host])]
        found[first] = graph.nodes.start_ns[first] - graph.nodes.start_ns.min()
    return found


def untold_waits(graph: Graph) -> I64:
    """Return how long each GPU operation waited for what the trace does not tell, int64[n]."""
    return np.where(graph.nodes.kind == Kind.HOST_OP, 0, np.maximum(graph.nodes.blocked_ns, 0))


def _host_delays(graph: Graph, is_host: Mask, begun: I64, ended: I64) -> tuple[I64, I64]:
    """Return per edge to a host operator the thread's own time before it, and its waking time.

    A thread that was blocked until the GPU, or another thread, was done spent the time between two
    starts on the first operator, blocked, and waking up; the second is no work of its own. When the
    GPU was done a re-costed duration does not tell: then the thread is taken to have been blocked
    to the end. How long calls waited for the GPU, the graph tells where the trace did
    (`blocked_ns`). One that waited for room in a launch queue had work on the GPU, which was done
    with an operation when it began the next.
    """
    edges, evidence = graph.edges, graph.nodes.evidence
    queued, woken = edges.reason == Reason.LAUNCH_QUEUE, edges.reason == Reason.SYNC
    known = evidence[edges.source] == Evidence.MEASURED
    known |= is_host[edges.source] & (graph.job.host_factor != 0)  # its ends are the measured ones
    following = _next_begun(graph, Reason.STREAM_ORDER, begun)
    done = np.where(queued, following[edges.source], begun[edges.target])
    done = np.where(known, ended[edges.source], done)
    done = np.minimum(done, begun[edges.target])
    latest = _latest(graph, woken, done)[edges.target]
    told = graph.nodes.blocked_ns[edges.target]
    by_host = _latest(graph, woken & is_host[edges.source], done)[edges.target]
    before = np.minimum(ended[edges.source], begun[edges.target])
    blocked = np.maximum(np.where(told > 0, by_host, latest) - before, 0)
    blocked = np.maximum(blocked, told)
    between = np.maximum(begun[edges.target] - begun[edges.source], 0) - blocked
    made_room = _latest(graph, queued, done)[edges.target]
    last = (woken & (done == latest)) | (queued & (done == made_room))
    return between, np.where(last, begun[edges.target] - done, 0)


def _latest(graph: Graph, chosen: Mask, done: I64) -> I64:
    """Return per node when the last of the chosen edges to it was done, UNKNOWN for none."""
    found = np.full(len(graph), UNKNOWN)
    np.maximum.at(found, graph.edges.target[chosen], done[chosen])
    return found


def _next_begun(graph: Graph, order: Reason, begun: I64) -> I64:
    """Return when the next on each one's stream or thread began; after all time for the last."""
    edges = graph.edges
    on_host = (graph.nodes.kind == Kind.HOST_OP)[edges.target]
    follows = (edges.reason == order) & (on_host | (order == Reason.STREAM_ORDER))
    found = np.full(len(graph), _NEVER)
    np.minimum.at(found, edges.source[follows], begun[edges.target[follows]])
    return found


def _queued(graph: Graph, launch: Mask, begun: I64, ended: I64, within_ns: I64) -> Mask:
    """Return which edges are all that their target waited for, with a measured source, bool[m].

    It had been launched before, and ended behind all else.
    """
    edges = graph.edges
    asked = np.full(len(graph), UNKNOWN)
    np.maximum.at(asked, edges.target[launch], (begun[edges.source] + within_ns)[launch])
    before = asked[edges.target] <= ended[edges.source]
    last = _latest(graph, ~launch, ended[edges.source])[edges.target] == ended[edges.source]
    return before & last & (graph.nodes.evidence[edges.source] == Evidence.MEASURED)


def _within(graph: Graph, is_launch: Mask, begun: I64, ended: I64) -> I64:
    """Return per edge until when after its source's start a launched operation starts at most.

    On an idle GPU: LAUNCH_NS after the operator's end; after the begin of its thread's next one,
    where the source is what the operator had called before.
    """
    edges = graph.edges
    within_ns = (ended - begun)[edges.source] + LAUNCH_NS
    called = is_launch & (edges.reason == Reason.PROGRAM_ORDER)
    following = _next_begun(graph, Reason.PROGRAM_ORDER, begun) - begun
    within_ns[called] = following[edges.source[called]] + LAUNCH_NS
    return within_ns


def _launch_latencies(  # noqa: PLR0917
    graph: Graph, is_launch: Mask, ready: I64, begun: I64, ended: I64, within_ns: I64
) -> I64:
    """Return per edge the time from an operator's start until its GPU operation can start.

    Told by those that waited for nothing else; the others had it hidden, and get the shorter of
    what was seen and the median of the rest. What started long after its operator waited for
    something, whether the graph knows it or not.
    """
    edges = graph.edges
    waited = np.full(len(graph), np.iinfo(np.int64).min)
    np.maximum.at(waited, edges.target[~is_launch], ended[edges.source[~is_launch]])
    own = within_ns.copy()
    own[graph.nodes.stream[edges.target] == UNKNOWN] = np.iinfo(np.int64).max  # a thread wakes up
    own[ready[edges.target] < begun[edges.target]] = np.iinfo(np.int64).max  # it is known
    seen = np.clip(ready[edges.target] - begun[edges.source], 0, own)
    free = is_launch & (ready[edges.target] > waited[edges.target] + QUEUED_NS)
    usual = int(np.median(seen[free])) if free.any() else 0
    return np.where(free, seen, np.minimum(seen, usual))


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
        queues: whether the host waits for room in launch queues where it did.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """

    def __init__(self, graph: Graph, *, queues: bool = True) -> None:
        if not graph.nodes.duration_ns.any():
            raise GraphError(
                f"none of the graph's {len(graph)} nodes takes time, so there is nothing to replay;"
                " annotate it for a GPU first: annotate --target H100 ...",
                code="replay-no-durations",
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

    def in_a_row(self, inter_step_host_ns: int) -> tuple[Schedule, int]:
        """Return when each node runs in a step that follows its likes, and how long these take.

        The host goes on with a step when it is through with the one before, however far behind the
        GPU is; the GPU, when it is through with that.

        Args:
            inter_step_host_ns: host time from the last node of a step to the first of the next.
        """
        is_host = self._graph.nodes.kind == Kind.HOST_OP
        one = self.schedule()
        period = UNKNOWN
        for _ in range(ROUNDS):
            host, gpu = int(one.end_ns[is_host].max(initial=0)), int(one.end_ns.max())
            following = self.schedule(np.where(is_host, host + inter_step_host_ns, gpu))
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
    return ReplayedRank(graph).schedule()
