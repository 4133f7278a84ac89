"""Replay a graph, as one step or in steady state: schedule every node by its edges and delay.

The start delay is the time between the end of a node's last dependency and its start in the
capture: launch latency, host work that the trace does not record, or unexplained waiting.
"""

import copy
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np

from onerank.ir.arrays import I64, Mask, union_duration_ns
from onerank.ir.contention import Constraints, ContendedSchedule, Contention, TimeLimits
from onerank.ir.edges import Edges
from onerank.ir.enums import LAUNCH_NS, Evidence, Kind, Reason
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

QUEUED_NS = 5_000
"""Longest gap after which the previous operation on the stream still counts as the cause of a
start."""

RELEASE_NS = 20_000
"""Longest time from the end of an operation to the start of what waited for it.

Measured: 2 to 15 us; 4 to 8 us for the return of a launch that waited for room in the queue.
"""

# Half the range, so that adding a duration does not overflow.
_NEVER = np.iinfo(np.int64).max // 2


def edge_delays(graph: Graph, call_excess_ns: float = 0.0) -> tuple[list[int], list[bool]]:
    """Return the delay of each edge in ns, and whether it counts from the source's start.

    The other delays count from the source's end. A delay is the measured time between the two
    nodes without the target's waiting. Host time in it is scaled by `Job.host_factor`; in a launch
    latency, host time is the part within the launching operator.

    The rules, in order; a later one replaces the delay of an earlier one:

    1. to a host operator: its wake-up, or along the program the thread's time between two starts.
    2. a launch: the latency from the operator's start.
    3. from one GPU operation to another: the median gap of its kind of order; the measured gap if
       the target waited for the source alone.
    4. a measured overlap on one stream replaces the delay; a wait for causes that the trace does
       not record is added to it.

    Args:
        graph: the graph.
        call_excess_ns: host time by which each emulated call exceeds a real one.
    """
    measured = _MeasuredTimes.of(graph)
    delay, from_start = _delays_to_host(measured, call_excess_ns)
    start_limit_ns = _start_limits(measured)
    delay = np.where(measured.launch, _launch_delays(measured, start_limit_ns), delay)
    delay = _with_gpu_gaps(measured, delay, start_limit_ns)
    # A negative value is the measured overlap of two kernels on one stream; a replay keeps it.
    on_host, reason = measured.is_host[graph.edges.target], graph.edges.reason
    waited = np.where(on_host, 0, graph.nodes.blocked_ns[graph.edges.target])
    follows_stream = (reason == Reason.STREAM_ORDER) | (reason == Reason.ROOM)
    delay = np.where(follows_stream & (waited < 0), waited, delay + np.maximum(waited, 0))
    return delay.tolist(), (from_start | measured.launch).tolist()


@dataclass(frozen=True, slots=True)
class _MeasuredTimes:
    """The times of a captured step with n nodes and e edges, as its own host took them.

    Attributes:
        graph: the graph, whose host may be another one by `Job.host_factor`.
        is_host: which nodes are host operators, bool[n].
        duration_ns: durations on the measured host, int64[n].
        start_ns: int64[n].
        end_ns: int64[n].
        launch: which edges are launches, bool[e].
    """

    graph: Graph
    is_host: Mask
    duration_ns: I64
    start_ns: I64
    end_ns: I64
    launch: Mask

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Return the times of a graph, whose host durations may be scaled."""
        factor = graph.job.host_factor
        is_host = graph.nodes.kind == Kind.HOST_OP
        duration = graph.nodes.duration_ns
        # Start times are those of the measured host, so end times must use its durations too.
        if factor not in (0, 1):
            duration = np.where(is_host, np.rint(duration / factor), duration).astype(np.int64)
        start = graph.nodes.start_ns
        return cls(graph, is_host, duration, start, start + duration, launches(graph))


def _delays_to_host(measured: _MeasuredTimes, call_excess_ns: float) -> tuple[I64, Mask]:
    """Return the delays of edges to host operators in ns, and which follow the program.

    Those that follow the program count from the source's start. Other edges have 0.
    """
    graph, is_host = measured.graph, measured.is_host
    edges, reason, factor = graph.edges, graph.edges.reason, graph.job.host_factor
    on_host = is_host[edges.target]
    is_host_call = _untimed_host_communication(graph)
    program = (reason == Reason.PROGRAM_ORDER) & is_host[edges.source]
    program &= on_host | is_host_call[edges.target]
    after_call = (reason == Reason.PROGRAM_ORDER) & is_host_call[edges.source] & ~program
    after_call &= on_host | is_host_call[edges.target]
    between, wakeup = _host_delays(measured)
    delay = np.where(on_host, wakeup, 0)
    delay = np.where(program | after_call, np.rint(between * factor).astype(np.int64), delay)
    if call_excess_ns:
        after_emulated = program & on_host & _emulated_issuers(graph)[edges.source]
        delay = np.where(after_emulated, np.maximum(delay - round(call_excess_ns), 0), delay)
    return delay, program


def _launch_delays(measured: _MeasuredTimes, start_limit_ns: I64) -> I64:
    """Return the latency of each launch from its operator's start, in ns; int64[e]."""
    graph = measured.graph
    latency = _launch_latencies(measured, start_limit_ns)
    # Latency after the operator belongs to the driver and the GPU: the host factor does not scale
    # it.
    host_part = np.minimum(latency, measured.duration_ns[graph.edges.source])
    return latency - host_part + np.rint(host_part * graph.job.host_factor).astype(np.int64)


def _with_gpu_gaps(measured: _MeasuredTimes, delay: I64, start_limit_ns: I64) -> I64:
    """Return the delays with the gaps between GPU operations, by stream order and by waits."""
    graph, start, end = measured.graph, measured.start_ns, measured.end_ns
    edges, reason = graph.edges, graph.edges.reason
    gpu_to_gpu = ~measured.is_host[edges.target] & ~measured.is_host[edges.source]
    gap = start[edges.target] - end[edges.source]
    last = _ended_last(measured)
    # These waited in the queue of their stream, for the source alone.
    queued = _launched_before_source_ended(measured, start_limit_ns) & last
    queued &= graph.nodes.evidence[edges.source] == Evidence.MEASURED
    queued &= (gap >= 0) & (gap <= RELEASE_NS)
    # The source released the target only if it ended last and the gap is short. Other gaps contain
    # kernels, or have a cause that the trace does not record. As the delay of a wait they added
    # 6 us each in a re-costed CPU capture with context parallelism, 2% of the step.
    for order, at_most in ((Reason.STREAM_ORDER, QUEUED_NS), (Reason.SYNC, RELEASE_NS)):
        has_order = gpu_to_gpu & (reason == order)
        short_gaps = gap[has_order & last & (gap >= 0) & (gap <= at_most)]
        median_gap = int(np.median(short_gaps)) if len(short_gaps) else 0
        # A queued operation keeps its measured gap: with the median for all, a step of 15,000
        # operations replayed 1% too short.
        delay = np.where(has_order, np.where(queued, gap, median_gap), delay)
    return delay


def _untimed_host_communication(graph: Graph) -> Mask:
    """Return the communication calls on a host thread that have no duration, bool[n].

    No peer took part in them; a network model times them. The next operation of the thread waits
    for the end of the call.
    """
    nodes = graph.nodes
    on_thread = (nodes.stream == UNKNOWN) & (nodes.thread != UNKNOWN)
    return graph.communication & on_thread & (nodes.evidence == Evidence.NONE)


def _emulated_issuers(graph: Graph) -> Mask:
    """Return the host operators that issued an emulated communication call, bool[n]."""
    edges, nodes = graph.edges, graph.nodes
    emulated = graph.communication & (nodes.evidence != Evidence.MEASURED)
    issuers = np.zeros(len(graph), dtype=np.bool_)
    issuers[edges.source[(edges.reason == Reason.LAUNCH) & emulated[edges.target]]] = True
    return issuers & (nodes.kind == Kind.HOST_OP)


def launches(graph: Graph) -> Mask:
    """Return the edges from a launching operator to an operation of a stream, bool[m].

    The source is the operator itself, or an operator that it had called before.
    """
    edges, is_host = graph.edges, graph.nodes.kind == Kind.HOST_OP
    on_stream = ~is_host[edges.target] & (graph.nodes.stream != UNKNOWN)[edges.target]
    called = on_stream & is_host[edges.source] & (edges.reason == Reason.PROGRAM_ORDER)
    return (edges.reason == Reason.LAUNCH) | called


def earliest_starts(graph: Graph) -> I64:
    """Return the earliest start of each node without regard to its edges, int64[n].

    For a GPU operation this is its wait for causes that the trace does not record. The first host
    operator keeps its measured distance from the first node, because the GPU may have run first.
    """
    earliest = unrecorded_waits(graph)
    host = np.flatnonzero(graph.nodes.kind == Kind.HOST_OP)
    if len(host):
        first = host[np.argmin(graph.nodes.start_ns[host])]
        earliest[first] = graph.nodes.start_ns[first] - graph.nodes.start_ns.min()
    return earliest


def unrecorded_waits(graph: Graph) -> I64:
    """Return how long each GPU operation waited for causes not in the trace, int64[n]."""
    return np.where(graph.nodes.kind == Kind.HOST_OP, 0, np.maximum(graph.nodes.blocked_ns, 0))


def _host_delays(measured: _MeasuredTimes) -> tuple[I64, I64]:
    """Return two times for each edge to a host operator: the thread's own time, and its wake-up.

    Between two starts, a thread runs the first operator, may be blocked until the GPU or another
    thread is done, and wakes up. Blocked time is not host work. `blocked_ns` gives it if the trace
    records it.
    """
    # With the wait for the GPU counted as host time, a TimesFormer step of 163 ms (158 ms on the
    # GPU) stayed at 162.8 ms on a GPU of twice the speed; without it, it takes 87.1 ms.
    graph, is_host = measured.graph, measured.is_host
    start, end = measured.start_ns, measured.end_ns
    edges, evidence = graph.edges, graph.nodes.evidence
    queued, woken = edges.reason == Reason.LAUNCH_QUEUE, edges.reason == Reason.SYNC
    is_end_known = evidence[edges.source] == Evidence.MEASURED
    # `edge_delays` restores the measured ends of host operators, except for a factor of 0.
    is_end_known |= is_host[edges.source] & (graph.job.host_factor != 0)
    next_start = _next_starts(graph, Reason.STREAM_ORDER, start)
    released = np.where(queued, next_start[edges.source], start[edges.target])
    released = np.where(is_end_known, end[edges.source], released)
    released = np.minimum(released, start[edges.target])
    last_release = _latest_release(graph, woken, released)[edges.target]
    recorded = graph.nodes.blocked_ns[edges.target]
    by_host = _latest_release(graph, woken & is_host[edges.source], released)[edges.target]
    before = np.minimum(end[edges.source], start[edges.target])
    blocked = np.maximum(np.where(recorded > 0, by_host, last_release) - before, 0)
    blocked = np.maximum(blocked, recorded)
    between = np.maximum(start[edges.target] - start[edges.source], 0) - blocked
    last_room = _latest_release(graph, queued, released)[edges.target]
    last = (woken & (released == last_release)) | (queued & (released == last_room))
    return between, np.where(last, start[edges.target] - released, 0)


def _latest_release(graph: Graph, chosen: Mask, release_ns: I64) -> I64:
    """Return the latest of `release_ns` over the chosen edges to each node, int64[n].

    UNKNOWN for a node without a chosen edge.
    """
    latest = np.full(len(graph), UNKNOWN)
    np.maximum.at(latest, graph.edges.target[chosen], release_ns[chosen])
    return latest


def _next_starts(graph: Graph, order: Reason, start: I64) -> I64:
    """Return the start of the next node on each node's stream or thread; `_NEVER` for the last."""
    edges = graph.edges
    on_host = (graph.nodes.kind == Kind.HOST_OP)[edges.target]
    follows = (edges.reason == order) & (on_host | (order == Reason.STREAM_ORDER))
    next_start = np.full(len(graph), _NEVER)
    np.minimum.at(next_start, edges.source[follows], start[edges.target[follows]])
    return next_start


def _ended_last(measured: _MeasuredTimes) -> Mask:
    """Return the edges whose source ended last of all that the target waited for, bool[e].

    Launches do not count: their operators may end later than what they launch begins.
    """
    source_end = measured.end_ns[measured.graph.edges.source]
    latest = _latest_release(measured.graph, ~measured.launch, source_end)
    return latest[measured.graph.edges.target] == source_end


def _launched_before_source_ended(measured: _MeasuredTimes, start_limit_ns: I64) -> Mask:
    """Return the edges whose target was launched when the source ended, bool[e]."""
    edges, launch = measured.graph.edges, measured.launch
    launched_at = np.full(len(measured.graph), UNKNOWN)
    ready = measured.start_ns[edges.source] + start_limit_ns
    np.maximum.at(launched_at, edges.target[launch], ready[launch])
    return launched_at[edges.target] <= measured.end_ns[edges.source]


def _start_limits(measured: _MeasuredTimes) -> I64:
    """Return for each edge the longest time from the source's start to a launch on an idle GPU.

    The limit is LAUNCH_NS after the end of the source. If the launching operator had called the
    source before, the limit is LAUNCH_NS after the start of the thread's next operator.
    """
    graph, start = measured.graph, measured.start_ns
    edges = graph.edges
    limit_ns = (measured.end_ns - start)[edges.source] + LAUNCH_NS
    # Without this limit such an operation kept its measured queueing time on a faster GPU.
    called = measured.launch & (edges.reason == Reason.PROGRAM_ORDER)
    following = _next_starts(graph, Reason.PROGRAM_ORDER, start) - start
    limit_ns[called] = following[edges.source[called]] + LAUNCH_NS
    return limit_ns


def _launch_latencies(measured: _MeasuredTimes, start_limit_ns: I64) -> I64:
    """Return per edge the time from an operator's start until its GPU operation can start.

    Only operations that waited for nothing else show their latency. The others get the shorter of
    their observed time and the median latency of the former.
    """
    graph, is_launch = measured.graph, measured.launch
    edges, start = graph.edges, measured.start_ns
    ready = start - unrecorded_waits(graph)
    other = ~is_launch
    blocked_until = np.full(len(graph), np.iinfo(np.int64).min)
    np.maximum.at(blocked_until, edges.target[other], measured.end_ns[edges.source[other]])
    # An operation that started long after its operator waited for something, even if the graph
    # does not record it. There is no limit for a thread that wakes up or for a recorded wait.
    limit = start_limit_ns.copy()
    limit[graph.nodes.stream[edges.target] == UNKNOWN] = np.iinfo(np.int64).max
    limit[ready[edges.target] < start[edges.target]] = np.iinfo(np.int64).max
    observed = np.clip(ready[edges.target] - start[edges.source], 0, limit)
    unblocked = is_launch & (ready[edges.target] > blocked_until[edges.target] + QUEUED_NS)
    # The median, since a few launches wait for locks or page faults.
    median_latency = int(np.median(observed[unblocked])) if unblocked.any() else 0
    return np.where(unblocked, observed, np.minimum(observed, median_latency))


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

    def schedule(self, floor: I64 | None = None, arrival: I64 | None = None) -> ReplayTimes:
        """Return the start and end of each node.

        Args:
            floor: earliest start of each node, int64[n].
            arrival: time when the last other rank reaches a node's call, before which a node that
                has started makes no progress, int64[n].
        """
        none = [0] * len(self._graph)
        limits = TimeLimits(
            (self._earliest + (0 if floor is None else floor)).tolist(),
            none if floor is None else floor.tolist(),
            none if arrival is None else arrival.tolist(),
        )
        if self._contention is None:
            return self._uncontended_schedule(limits)
        return self._contended_schedule(self._contention, limits)

    def _uncontended_schedule(self, limits: TimeLimits) -> ReplayTimes:
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
        earliest, floors, arrivals = limits.earliest, limits.floors, limits.arrivals
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
            start[node], end[node] = ready, max(ready, arrivals[node]) + duration[node]
            blocker[node], launched[node] = last_source, by_launch
        return ReplayTimes(np.array(start), np.array(end), np.array(blocker), np.array(launched))

    def _contended_schedule(self, contention: Contention, limits: TimeLimits) -> ReplayTimes:
        graph = self._graph
        if self._constraints is None:
            delay = np.array(self._delay, dtype=np.int64)
            self._constraints = Constraints.of(
                graph.edges, delay, np.array(self._from_start, dtype=np.bool_), delay == NO_DELAY
            )
        duration: list[int] = graph.nodes.duration_ns.tolist()
        shared = ContendedSchedule(self._constraints, limits, duration, contention)
        # Edge UNKNOWN, -1, is the appended one.
        is_launch = np.array([*self._is_launch, False])
        return ReplayTimes(
            np.array(shared.start),
            np.array(shared.end),
            np.array(shared.blocker),
            is_launch[np.array(shared.released_by)],
        )

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


@dataclass(frozen=True, slots=True)
class SteadyStateStep:
    """One step in steady state, without a profiler: the GPU may still run the previous step.

    Attributes:
        times: replayed start and end of its nodes.
        step_ns: replayed step time; a measured step took `residual_ns` longer.
        residual_ns: `HostOverhead.residual_ns`, raised if needed so that `step_ns + residual_ns`
            is at least the GPU's busy time.
    """

    times: ReplayTimes
    step_ns: int
    residual_ns: int

    def device_begin_ns(self, graph: Graph) -> int:
        """Return the time in `times` from which the device is available to this step."""
        # The host runs ahead into the next step, so the device's last operation ends the step.
        ended_ns = self.times.end_ns[graph.compute | graph.communication].max(initial=0)
        return int(ended_ns) - self.step_ns


def steady_state_step(
    graph: Graph,
    gpu_ns: I64 | None = None,
    *,
    as_captured: bool = False,
    contention: Contention | None = None,
) -> SteadyStateStep | None:
    """Replay the graph as consecutive steps without a profiler; return one in steady state.

    Emulated calls keep the host as long as real ones would (`EmulatedCalls.excess_ns`).

    Returns None if the graph has no host operators, or if its host was not measured without the
    profiler.

    Args:
        graph: the graph.
        gpu_ns: durations to use for GPU operations, int64[n]; None keeps the graph's.
        as_captured: keep the host time of the emulation, as the measured steps contain it.
        contention: as for `ReplayedRank`.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    overhead = graph.job.measurement.host_overhead
    if overhead is None or not graph.mask(Kind.HOST_OP).any():
        return None
    inter_step_host_ns = round(overhead.inter_step_host_ns * graph.job.host_factor)
    emulated = None if as_captured else graph.job.measurement.emulated_calls
    # The measured host was that of the capture: a host of another speed issues real calls at its
    # own speed, too.
    excess_ns = emulated.excess_ns * graph.job.host_factor if emulated else 0.0
    replayed = replay_without_profiler(graph, overhead.host_factor, excess_ns, contention)
    if gpu_ns is not None:
        replayed = replayed.with_gpu_durations(gpu_ns)
    times, step_ns = replayed.steady_state(inter_step_host_ns)
    gpu = ~graph.mask(Kind.HOST_OP)
    # A negative residual must not make the step shorter than the GPU's work.
    busy_ns = union_duration_ns(times.start_ns[gpu], times.end_ns[gpu])
    return SteadyStateStep(times, step_ns, max(overhead.residual_ns, busy_ns - step_ns))


def with_steady_state_kernels(graph: Graph) -> Graph:
    """Return the graph with kernels that take their time in steady state.

    In a slice whose GPU sets the pace, kernels take `HostOverhead.kernel_factor` times their
    profiled time. The factor replaces the residual: what remains of it is the time of copies that
    emulate communication.
    """
    overhead = graph.job.measurement.host_overhead
    if overhead is None or overhead.kernel_factor == 1:
        return graph
    duration = graph.nodes.duration_ns.copy()
    duration[graph.compute] = np.rint(duration[graph.compute] * overhead.kernel_factor)
    overhead = msgspec.structs.replace(overhead, kernel_factor=1.0, residual_ns=0)
    measurement = msgspec.structs.replace(graph.job.measurement, host_overhead=overhead)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return replace(graph.with_columns(duration_ns=duration), job=job)


def launch_waits_ns(graph: Graph, times: ReplayTimes, begun_ns: int) -> int:
    """Return the idle time before operations of the device that waited for their launch.

    Args:
        graph: the graph.
        times: of its replay.
        begun_ns: time from which the device is available.
    """
    gpu = np.flatnonzero(graph.compute | graph.communication)
    gpu = gpu[np.argsort(times.start_ns[gpu], kind="stable")]
    if not len(gpu):
        return 0
    # Streams overlap: the device is idle only from the latest end of all earlier operations on.
    reach = np.maximum.accumulate(times.end_ns[gpu])
    before = np.concatenate([[begun_ns], reach[:-1]])
    idle = np.maximum(times.start_ns[gpu] - before, 0)
    return int(idle[times.by_launch[gpu]].sum())


def job_step_ns(graph: Graph, ranks: int) -> int | None:
    """Return the expected step of a job of equal ranks, which wait for the slowest of them.

    Emulated calls take the host as long as real ones (`emulation_excess_ns`). None if the graph is
    not a slice of such a rank, or if too few of its steps were measured
    (`Measurement.slowest_step_ns`).

    Args:
        graph: the slice.
        ranks: ranks of the job.
    """
    slowest_ns = graph.job.measurement.slowest_step_ns(ranks) if _stands_for_all(graph) else None
    return None if slowest_ns is None else slowest_ns - emulation_excess_ns(graph)


def emulation_excess_ns(graph: Graph) -> int:
    """Return by how much a measured step is longer because calls were emulated.

    Emulated calls keep the host longer than real ones. 0 if the GPU limits the step, or if the time
    of emulated calls was not measured.
    """
    if graph.job.measurement.emulated_calls is None:
        return 0
    captured, real = (steady_state_step(graph, as_captured=each) for each in (True, False))
    return max(captured.step_ns - real.step_ns, 0) if captured and real else 0


def slowest_rank_excess_ns(graph: Graph, ranks: int) -> int:
    """Return by how much the slowest of `ranks` equal ranks exceeds the median step.

    0 if the graph is not a slice of such a rank, or if too few steps were measured.
    """
    excess_ns = graph.job.measurement.slowest_excess_ns(ranks) if _stands_for_all(graph) else None
    return max(excess_ns or 0, 0)


def _stands_for_all(graph: Graph) -> bool:
    """Return whether a graph is the slice of a job whose ranks all do the same work."""
    nodes = graph.nodes
    calls = graph.communication & (nodes.duration_ns > 0)
    # A real rank's own steps wait already.
    emulated = bool(calls.any()) and not (nodes.evidence[calls] == Evidence.MEASURED).all()
    return emulated and graph.job.world.sizes.get("pp", 1) == 1


def with_step_time(graph: Graph, step_ns: int) -> Graph:
    """Return the graph with its host overhead set so that a steady-state step takes `step_ns`."""
    steady = steady_state_step(graph, as_captured=True)
    measurement = graph.job.measurement
    if steady is None or measurement.host_overhead is None:
        return graph
    overhead = msgspec.structs.replace(
        measurement.host_overhead, residual_ns=step_ns - steady.step_ns
    )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def replay_without_profiler(
    graph: Graph,
    host_factor: float,
    call_excess_ns: float = 0.0,
    contention: Contention | None = None,
) -> ReplayedRank:
    """Return the graph ready for scheduling, its host time scaled by `host_factor`.

    Waits for room in launch queues are dropped. `call_excess_ns` is as for `edge_delays`,
    `contention` as for `ReplayedRank`.
    """
    # In 20 ms without the profiler a host launched 1050 kernels that took 50 ms; the profiled host
    # was already waiting for room in the launch queue, so its waits do not apply.
    scaled = with_host_factor(graph, host_factor)
    return ReplayedRank(scaled, queues=False, call_excess_ns=call_excess_ns, contention=contention)


def with_host_factor(graph: Graph, factor: float) -> Graph:
    """Return the graph with the duration of every host operator multiplied by `factor`.

    Start times stay as measured. A replay derives the host time between operators from them and
    scales it by `Job.host_factor`. Copies between host and GPU keep their durations.
    """
    host = graph.mask(Kind.HOST_OP) & (graph.nodes.duration_ns > 0)
    duration, spread = graph.nodes.duration_ns.copy(), graph.nodes.spread_ns.copy()
    # Starts stay: replay derives the time between operators from them, and would scale it twice.
    duration[host] = np.rint(duration[host] * factor).astype(np.int64)
    spread[host] = np.rint(spread[host] * factor).astype(np.int64)
    job = msgspec.structs.replace(graph.job, host_factor=graph.job.host_factor * factor)
    return replace(graph.with_columns(duration_ns=duration, spread_ns=spread), job=job)
