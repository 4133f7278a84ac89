"""How long after what it waits for a node of a replayed graph starts."""

import numpy as np
import numpy.typing as npt

from onerank.ir import UNKNOWN, Evidence, Graph, Kind, Reason

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

LAUNCH_NS = 20_000
"""From the end of an operator until what it launched starts on an idle GPU, at most."""
QUEUED_NS = 5_000
"""A GPU operation that started this soon after the one before it on its stream was held by it."""


def edge_delays(graph: Graph) -> tuple[list[int], list[bool]]:
    """Return per edge how long its target starts after the source, and if after its start.

    Nanoseconds. As measured between the two, less what the target spent waiting, times what
    another host takes of it (`annotate --host`). Of a launch that is the part within its operator.
    """
    reason = graph.edges.reason
    factor = graph.job.host_factor
    is_host = graph.nodes.kind == Kind.HOST_OP
    lasted = graph.nodes.duration_ns
    if factor not in (0, 1):  # start times are the measured host's, and so must the ends be
        lasted = np.where(is_host, np.rint(lasted / factor), lasted).astype(np.int64)
    begun, ended = graph.nodes.start_ns, graph.nodes.start_ns + lasted
    on_host = is_host[graph.edges.target]
    program = on_host & (reason == Reason.PROGRAM_ORDER)
    between, waking = _host_delays(graph, begun, ended)
    delay = np.where(on_host, waking, 0)
    delay = np.where(program, np.rint(between * factor).astype(np.int64), delay)
    launch = reason == Reason.LAUNCH
    latency = _launch_latencies(graph, begun, ended)
    within = np.minimum(latency, lasted[graph.edges.source])
    latency = latency - within + np.rint(within * factor).astype(np.int64)
    delay = np.where(launch, latency, delay)
    delay = np.where(reason == Reason.STREAM_ORDER, _stream_gap(graph, begun, ended), delay)
    return delay.tolist(), (program | launch).tolist()


def _host_delays(graph: Graph, begun: I64, ended: I64) -> tuple[I64, I64]:
    """Return per edge to a host operator the thread's own time before it, and its waking time.

    A thread that was blocked until the GPU, or another thread, was done spent the time between two
    starts on the first operator, blocked, and waking up; the second is no work of its own. When the
    GPU was done a re-costed duration does not tell: then the thread is taken to have been blocked
    to the end. How long it waited for room in a launch queue, the graph tells; the GPU had work
    then, so it was done with an operation when it began the next.
    """
    edges, evidence = graph.edges, graph.nodes.evidence
    queued, woken = edges.reason == Reason.LAUNCH_QUEUE, edges.reason == Reason.SYNC
    known = evidence[edges.source] == Evidence.MEASURED
    done = np.where(queued, _next_begun(graph, begun)[edges.source], begun[edges.target])
    done = np.where(known, ended[edges.source], done)
    done = np.minimum(done, begun[edges.target])
    latest = _latest(graph, woken, done)[edges.target]
    before = np.minimum(ended[edges.source], begun[edges.target])
    blocked = np.maximum(latest - before, 0)
    blocked = np.maximum(blocked, graph.nodes.queued_ns[edges.target])
    between = np.maximum(begun[edges.target] - begun[edges.source], 0) - blocked
    made_room = _latest(graph, queued, done)[edges.target]
    last = (woken & (done == latest)) | (queued & (done == made_room))
    return between, np.where(last, begun[edges.target] - done, 0)


def _latest(graph: Graph, chosen: Mask, done: I64) -> I64:
    """Return per node when the last of the chosen edges to it was done, UNKNOWN for none."""
    found = np.full(len(graph), UNKNOWN)
    np.maximum.at(found, graph.edges.target[chosen], done[chosen])
    return found


def _next_begun(graph: Graph, begun: I64) -> I64:
    """Return when the next operation of each one's stream began; after all time for the last."""
    follows = graph.edges.reason == Reason.STREAM_ORDER
    found = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(found, graph.edges.source[follows], begun[graph.edges.target[follows]])
    return found


def _stream_gap(graph: Graph, begun: I64, ended: I64) -> int:
    """Return the median time between two operations of a stream that were queued, 0 if none."""
    edges = graph.edges
    gaps = begun[edges.target] - ended[edges.source]
    queued = gaps[(edges.reason == Reason.STREAM_ORDER) & (gaps >= 0) & (gaps <= QUEUED_NS)]
    return int(np.median(queued)) if len(queued) else 0


def _launch_latencies(graph: Graph, begun: I64, ended: I64) -> I64:
    """Return per edge the time from an operator's start until its GPU operation can start.

    Told by those that waited for nothing else; the others had it hidden, and get the shorter of
    what was seen and the median of the rest. What started long after its operator waited for
    something, whether the graph knows it or not.
    """
    edges = graph.edges
    is_launch = edges.reason == Reason.LAUNCH
    waited = np.full(len(graph), np.iinfo(np.int64).min)
    np.maximum.at(waited, edges.target[~is_launch], ended[edges.source[~is_launch]])
    own = (ended - begun)[edges.source] + LAUNCH_NS
    own[graph.nodes.stream[edges.target] == UNKNOWN] = np.iinfo(np.int64).max  # a thread wakes up
    seen = np.clip(begun[edges.target] - begun[edges.source], 0, own)
    free = is_launch & (begun[edges.target] > waited[edges.target] + QUEUED_NS)
    usual = int(np.median(seen[free])) if free.any() else 0
    return np.where(free, seen, np.minimum(seen, usual))
