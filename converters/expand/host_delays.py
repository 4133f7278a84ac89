"""Host delays: GPU idle time that waits for the host, as nodes of a workload without a host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onerank.converters.expand.preconditions import beside_the_step, storage_delays
from onerank.ir import UNKNOWN, Edges, Graph, Kind, Nodes, Reason
from onerank.ir.edges import I64
from onerank.ir.errors import ExportError
from onerank.ir.replay.steady_state import steady_state_step

NAME = "idle: waiting for the host"


def insert_host_delays(graph: Graph, *, one_at_a_time: bool = False) -> tuple[Graph, str]:
    """Return the graph with a node for each time in which the GPU ran nothing, and a note on it.

    Where the host was timed without the profiler, a replay with that host tells where these times
    lie and how long they are (`steady_state_step`), and what the median step took beyond it
    prolongs
    compute: a GPU at its power limit is slower in a row of steps than in one after a pause. With a
    slower network a host would be further ahead and the GPU wait less: the simulated step is then
    too long, by up to this time.

    Elsewhere the profiled step tells where they lie; since the profiler prolongs them, they are
    scaled to the idle time of the median step without it, which is that step less the time in
    which the GPU ran anything. A profiler cannot shorten waits: where the median step lasts longer
    than the profiled one, compute is prolonged by the difference. On two H200s eight slices' steps
    came out 1.5% short of their own so in ASTRA-sim, 0.9% by the replay.

    Args:
        graph: one rank's step.
        one_at_a_time: for a simulator in which a GPU runs one operation at a time: where streams
            overlapped, each operation gets its share of the time that they took together.

    Raises:
        ExportError: nobody measured the graph's host without the profiler, or the trace does not
            tell when its nodes began.
    """
    graph, lasts = _lasting(graph)
    compute = graph.gpu_compute & (graph.nodes.duration_ns > 0)
    others = graph.communication & (graph.nodes.duration_ns > 0)
    others |= storage_delays(graph) & ~beside_the_step(graph)
    shown = np.flatnonzero(compute | others)
    shown = shown[np.argsort(graph.nodes.start_ns[shown], kind="stable")]
    start = graph.nodes.start_ns[shown]
    end = np.maximum.accumulate(start + graph.nodes.duration_ns[shown])
    before: I64 = np.concatenate([start[:1], end[:-1]])
    gaps = np.maximum(start - before, 0)
    busy_ns = int(end[-1] - start[0] - gaps.sum())
    idle_ns = max(lasts.step_ns - lasts.slower_ns - busy_ns, 0)
    until = np.cumsum(gaps)
    whole = np.rint(until / max(int(until[-1]), 1) * idle_ns).astype(np.int64)
    idle = np.diff(whole, prepend=0)
    some = np.flatnonzero(idle)
    newest = np.maximum.accumulate(np.where(compute[shown], np.arange(len(shown)), -1))
    some = some[newest[some - 1] >= 0]
    note = (
        f"The GPU waits {idle[some].sum()} ns for its host, in {len(some)} nodes: the {lasts.what} "
        f"({lasts.step_ns - lasts.slower_ns} ns) less the time in which the GPU ran anything "
        f"({busy_ns} ns), laid where it waited {lasts.where}. A network that takes time hides a "
        "part of it, which the simulator cannot know."
    )
    ends = shown[newest[some - 1]], shown[some]
    shares = _shares(graph, np.flatnonzero(compute))
    durations = graph.nodes.duration_ns.copy()
    if one_at_a_time:
        if overlap_ns := int(durations.sum() - shares.sum()):
            note += f" Streams overlap by {overlap_ns} ns: each operation has its share of that."
        durations = shares.copy()
    if lasts.slower_ns:
        share = lasts.slower_ns / int(shares[compute].sum())
        durations[compute] = np.rint(durations[compute] * (1 + share))
        note += (
            f" The {lasts.whole} ({lasts.step_ns} ns) is longer by "
            f"{lasts.slower_ns} ns: its compute took {share:.1%} longer."
        )
    return _insert(graph.with_columns(duration_ns=durations), *ends, idle[some]), note


@dataclass(frozen=True)
class _Lasts:
    """How long a step is to last.

    Attributes:
        what: which step, in words.
        where: in which the GPU waited.
        step_ns: its time.
        slower_ns: part of it by which kernels took longer than the graph's.
        whole: which step took as much longer, in words.
    """

    what: str
    where: str
    step_ns: int
    slower_ns: int
    whole: str = "median step without the profiler"


def _lasting(graph: Graph) -> tuple[Graph, _Lasts]:
    """Return the graph, begun when its nodes begin, and how long its step is to last."""
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            "host time needs kernels and their times: leave --include-host-delays out, or export "
            "the trace "
            "of `capture run` on a GPU"
        )
    row = steady_state_step(graph)
    if row is None and (storage := int(storage_delays(graph).sum())):
        raise ExportError(
            f"host time of a graph with {storage} reads and writes of storage: the step that was "
            "measured had none, and the host was not timed by itself. Export the trace as it was "
            "before `onerank storage`, leave --include-host-delays out, or capture again: "
            "`capture run` on a "
            "GPU times the host"
        )
    if row is None:
        return graph, _as_measured(graph)
    lasts = _Lasts(
        "step as replayed in a row",
        "in this replay",
        row.step_ns + row.residual_ns,
        max(row.residual_ns, 0),
        "step by those that were measured without the profiler",
    )
    return graph.with_columns(start_ns=row.times.start_ns), lasts


def _as_measured(graph: Graph) -> _Lasts:
    """Return how long the median step lasted, where the trace's durations are those it had."""
    measurement = graph.job.measurement
    step_ns = measurement.median_step_ns
    if step_ns is None or graph.job.annotations:
        raise ExportError(
            "host time needs a trace whose host was timed without the profiler, by `capture run` "
            "on a GPU: leave --include-host-delays out, or capture again; `onerank replay` tells "
            "when the GPU waits for the host as it ran under the profiler"
        )
    profiled_ns = measurement.profiled_step_ns or step_ns
    slower_ns = max(step_ns - profiled_ns, 0)
    what = "profiled step" if slower_ns else "median step without the profiler"
    return _Lasts(what, "in the profiled step", step_ns, slower_ns)


def _shares(graph: Graph, chosen: I64) -> I64:
    """Return durations, int64[n], in which the chosen operations sum up to the time they cover.

    Time in which k of them run is a k-th of it for each.
    """
    start = graph.nodes.start_ns[chosen]
    end = start + graph.nodes.duration_ns[chosen]
    times = np.unique(np.concatenate([start, end]))
    opened = np.zeros(len(times), dtype=np.int64)
    np.add.at(opened, np.searchsorted(times, start), 1)
    np.add.at(opened, np.searchsorted(times, end), -1)
    running = np.maximum(np.cumsum(opened)[:-1], 1)
    passed = np.concatenate([[0], np.cumsum(np.diff(times) / running)])
    share = passed[np.searchsorted(times, end)] - passed[np.searchsorted(times, start)]
    durations = graph.nodes.duration_ns.copy()
    durations[chosen] = np.maximum(np.rint(share), 1)
    return durations


def insert_host_delays_by_rank(
    graphs: Sequence[Graph], *, one_at_a_time: bool = False
) -> tuple[list[Graph], list[str]]:
    """Return graphs of several ranks, each as by `insert_host_delays`, and notes.

    Of a pipeline they are the captured stages, before a schedule orders them: a wait goes where
    the node goes that it holds back, and is repeated with it. It follows what its GPU did before,
    so a bubble hides it, as it hides the launches of a host that runs on meanwhile.

    Raises:
        ExportError: as for `insert_host_delays`.
    """
    made = [insert_host_delays(graph, one_at_a_time=one_at_a_time) for graph in graphs]
    notes = [f"Rank {graph.job.rank} as captured: {note}" for graph, (_, note) in
             zip(graphs, made, strict=True)]  # fmt: skip
    return [graph for graph, _ in made], notes


def host_delay_nodes(graph: Graph) -> dict[int, int]:
    """Return the nodes in which the GPU waits for its host, each with the node it holds back."""
    named = np.array([name == NAME for name in graph.strings.values], dtype=bool)
    idle = named[graph.nodes.name] & graph.gpu_compute
    held = idle[graph.edges.source]
    pairs = zip(graph.edges.source[held].tolist(), graph.edges.target[held].tolist(), strict=True)
    return dict(pairs)


def _insert(graph: Graph, after: I64, ahead: I64, idle_ns: I64) -> Graph:
    """Return the graph with a node of `idle_ns` after and ahead of each pair of nodes.

    It gets the index before the one it is ahead of: among nodes that are ready the lowest index
    goes first, so that communication keeps its order.
    """
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
    order = np.argsort(np.concatenate([2 * np.arange(count) + 1, 2 * ahead]), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(count + more)
    edges = graph.edges
    reasons = np.full(2 * more, Reason.STREAM_ORDER, dtype=np.uint8)
    joined = Edges.from_pairs(
        count + more,
        place[np.concatenate([edges.source, after, new])],
        place[np.concatenate([edges.target, new, ahead])],
        np.concatenate([edges.reason, reasons]),
    )
    nodes = Nodes.joined([graph.nodes, made]).take(order)
    return replace(graph, nodes=nodes, edges=joined, strings=strings)
