"""The time a GPU waits for its host, as nodes of a workload that has no host."""

from dataclasses import replace

import numpy as np

from onerank.converters.astra_sim.notes import timed_compute
from onerank.ir import UNKNOWN, Edges, Graph, Kind, Nodes, Reason
from onerank.ir.edges import I64
from onerank.ir.errors import ExportError

NAME = "idle: waiting for the host"


def with_host_time(graph: Graph) -> tuple[Graph, str]:
    """Return the graph with a node for each time in which the GPU ran nothing, and a note on it.

    The profiled step tells where these times lie; since the profiler prolongs them, they are
    scaled to the idle time of the median step without it, which is that step less the time in
    which the GPU ran anything. So on a network that takes no time the step lasts what it lasted.
    With a slower network a host would be further ahead and the GPU wait less: the simulated step
    is then too long, by up to this time.

    Raises:
        ExportError: the graph's times are of another GPU than its host's, or the trace does not
            tell when its nodes began or how long a step takes without the profiler.
    """
    step_ns = graph.job.measurement.median_step_ns
    compute = timed_compute(graph)
    shown = np.flatnonzero(compute | (graph.communication & (graph.nodes.duration_ns > 0)))
    if graph.job.annotations or step_ns is None or not compute.any():
        raise ExportError(
            "host time needs a capture on the GPU itself (not annotated for another) whose steps "
            "were timed without the profiler: leave --host-time out, or export the trace of "
            "`capture run` on a GPU"
        )
    shown = shown[np.argsort(graph.nodes.start_ns[shown], kind="stable")]
    start = graph.nodes.start_ns[shown]
    end = np.maximum.accumulate(start + graph.nodes.duration_ns[shown])
    before: I64 = np.concatenate([start[:1], end[:-1]])
    gaps = np.maximum(start - before, 0)
    busy_ns = int(end[-1] - start[0] - gaps.sum())
    idle_ns = max(step_ns - busy_ns, 0)
    until = np.cumsum(gaps)
    whole = np.rint(until / max(int(until[-1]), 1) * idle_ns).astype(np.int64)
    idle = np.diff(whole, prepend=0)
    some = np.flatnonzero(idle)
    newest = np.maximum.accumulate(np.where(compute[shown], np.arange(len(shown)), -1))
    some = some[newest[some - 1] >= 0]
    note = (
        f"The GPU waits {idle[some].sum()} ns for its host, in {len(some)} nodes: the median step "
        f"without the profiler ({step_ns} ns) less the time in which the GPU ran anything "
        f"({busy_ns} ns), laid where it waited in the profiled step. A network that takes time "
        "hides a part of it, which the simulator cannot know."
    )
    return _insert(graph, shown[newest[some - 1]], shown[some], idle[some]), note


def _insert(graph: Graph, after: I64, ahead: I64, idle_ns: I64) -> Graph:
    """Return the graph with a node of `idle_ns` after and ahead of each pair of nodes."""
    count, more = len(graph), len(after)
    strings = graph.strings.copy()
    first_id = int(graph.nodes.id.max()) + 1
    ends = graph.nodes.start_ns[after] + graph.nodes.duration_ns[after]
    made = Nodes.of(
        more,
        id=np.arange(first_id, first_id + more, dtype=np.uint64),
        name=np.full(more, strings.intern(NAME)),
        kind=np.full(more, Kind.KERNEL),
        stream=graph.nodes.stream[after],
        thread=np.full(more, UNKNOWN),
        start_ns=ends,
        duration_ns=idle_ns,
    )
    new = np.arange(count, count + more)
    edges = graph.edges
    reasons = np.full(2 * more, Reason.STREAM_ORDER, dtype=np.uint8)
    joined = Edges.from_pairs(
        count + more,
        np.concatenate([edges.source, after, new]),
        np.concatenate([edges.target, new, ahead]),
        np.concatenate([edges.reason, reasons]),
    )
    return replace(graph, nodes=Nodes.joined([graph.nodes, made]), edges=joined, strings=strings)
