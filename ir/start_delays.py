"""The delay of each edge of a graph, by which a replay reproduces the captured starts of its nodes.

A delay is the time between the end of a node's last dependency and its start in the capture: launch
latency, host work that the trace does not record, or unexplained waiting.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.enums import LAUNCH_NS, Evidence, Kind, Reason
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

QUEUED_NS = 5_000
"""Longest gap after which the previous operation on the stream still counts as the cause of a
start."""

RELEASE_NS = 20_000
"""Longest time from the end of an operation to the start of what waited for it.

Measured: 2 to 15 us; 4 to 8 us for the return of a launch that waited for room in the queue.
"""

# Gap between two kernels of a stream that the host launches, where both times are predicted: an
# H100 takes 0.9 us after kernels of 1 us, 1.1 after GEMMs, 1.5 to 2.1 after kernels that stream 50
# MB and more, with and without the profiler (2026-11-28-norms-sums-h100). Kernels of a CUDA graph
# have other gaps, see `serving.graph_gaps`.
_PREDICTED_GAP_NS = 1_300

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
       the target waited for the source alone; a usual gap between predicted kernels of a stream.
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
    if measured.is_host.any():
        predicted = graph.compute & (graph.nodes.evidence == Evidence.DATASHEET)
        between = predicted[edges.source] & predicted[edges.target]
        delay = np.where(between & (reason == Reason.STREAM_ORDER), _PREDICTED_GAP_NS, delay)
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
