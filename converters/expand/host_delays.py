"""Delays of a GPU by its host and its storage, and the check that a graph has GPU times.

Host delays are nodes: idle time in which the GPU waits for its host. A simulated workload has no
host, so without these nodes its GPU would never wait for a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onerank.display import time
from onerank.ir import UNKNOWN, Edges, Graph, Kind, Nodes, Reason
from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra.third_party_traces import is_counted
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.steady_state import slowest_rank_excess_ns, steady_state_step

DELAY_NAME = "idle: waiting for the host"
"""Name of the nodes of host delays."""

REMEDY = "if no GPU was captured, predict the trace for one first: annotate --target H100 ..."


def insert_host_delays(
    graph: Graph, *, one_at_a_time: bool = False, ranks: int = 1
) -> tuple[Graph, list[Note]]:
    """Return the graph with a node for each idle interval of the GPU, and notes on them.

    If the host was timed without the profiler, `steady_state_step` replays the graph with that
    host and gives the idle intervals. Otherwise they come from the profiled step, scaled to the
    idle time of the median unprofiled step.

    A slower network would let the host run further ahead and the GPU wait less. The simulated step
    is then too long, by at most the inserted idle time.

    On two H200s the steps of eight slices came out 1.5% short of the measured ones in ASTRA-sim
    when scaled from the profiled step, and 0.9% short by the replay.

    All ranks of the workload get the same delays. The ranks of a real job have hosts of varying
    speed and wait for the slowest of them; the delays contain this wait
    (`slowest_rank_excess_ns`).

    Args:
        graph: one rank's step.
        one_at_a_time: set for a simulator in which a GPU runs one operation at a time. Where
            streams overlap, each operation gets its share of the time they take together.
        ranks: number of equal ranks that the graph represents; 1 adds no wait for other ranks.

    Raises:
        ExportError: the host was never timed without the profiler, or the graph has no kernel
            times.
    """
    graph, target = _target_duration(graph)
    compute = graph.gpu_compute & (graph.nodes.duration_ns > 0)
    waits = _host_waits(graph, compute, target, ranks)
    notes = _notes_on_waits(graph, waits, target, ranks)
    shares = _shares(graph, np.flatnonzero(compute))
    durations = graph.nodes.duration_ns.copy()
    # ASTRA-sim runs one operation of a GPU at a time: without shares, an FSDP2 step, whose copies
    # overlap its products, took 1.9% longer than its compute covers.
    if one_at_a_time:
        if overlap_ns := int(durations.sum() - shares.sum()):
            text = f"Streams overlap by {time(overlap_ns)}, divided among the operations."
            notes.append(Note(text, code="host-delays-divided-overlap"))
        durations = shares.copy()
    if target.slower_ns:
        # A GPU at its power limit is slower in consecutive steps than in one after a pause. The
        # profiler cannot shorten a wait, so a median step above the profiled one is slower compute.
        # For a pipeline stage on an H200 the difference was 2.4% of the kernel time.
        share = target.slower_ns / int(shares[compute].sum())
        durations[compute] = np.rint(durations[compute] * (1 + share))
        text = (
            f"The {target.slower_step} ({time(target.step_ns)}) is longer by "
            f"{time(target.slower_ns)}: its compute took {share:.1%} longer."
        )
        notes.append(Note(text, code="host-delays-slower-compute"))
    timed = graph.with_columns(duration_ns=durations)
    return _insert(timed, waits), notes


@dataclass(frozen=True)
class _TargetDuration:
    """Duration that the step must have once host delays are inserted.

    Attributes:
        step: name of the step that gives the duration, for the note.
        gaps_from: where the idle intervals were seen, for the note.
        step_ns: duration of the step.
        slower_ns: part of `step_ns` by which kernels took longer than in the graph.
        slower_step: name of the step that has `slower_ns`, for the note.
    """

    step: str
    gaps_from: str
    step_ns: int
    slower_ns: int
    slower_step: str = "median step without the profiler"


@dataclass(frozen=True)
class _HostWaits:
    """Intervals in which the GPU waits for its host.

    Attributes:
        previous: node of compute that ends before each, int64[n].
        delayed: node that starts after each, int64[n].
        idle_ns: duration of each, int64[n].
        busy_ns: time in which the GPU is not idle.
        others_ns: part of all durations in which the rank waits for the slowest of its equal ranks.
    """

    previous: I64
    delayed: I64
    idle_ns: I64
    busy_ns: int
    others_ns: int


def _host_waits(graph: Graph, compute: Mask, target: _TargetDuration, ranks: int) -> _HostWaits:
    """Return the idle intervals, scaled so that the step takes its target duration.

    Args:
        graph: with the start times from which the idle intervals are read.
        compute: nodes of compute that take time, bool[n].
        target: duration of the step.
        ranks: number of equal ranks that the graph represents.
    """
    other_work = graph.communication & (graph.nodes.duration_ns > 0)
    other_work |= storage_delays(graph) & ~prefetched_storage(graph)
    busy = np.flatnonzero(compute | other_work)
    busy = busy[np.argsort(graph.nodes.start_ns[busy], kind="stable")]
    start = graph.nodes.start_ns[busy]
    # The running maximum, because a long node of one stream can end after later ones of another.
    end = np.maximum.accumulate(start + graph.nodes.duration_ns[busy])
    before: I64 = np.concatenate([start[:1], end[:-1]])
    gaps = np.maximum(start - before, 0)
    busy_ns = int(end[-1] - start[0] - gaps.sum())
    # Measured on four H200s, where the host limits a tensor-parallel step of 41 ms: all four ranks
    # take as long as the slowest in each step. Without this wait ASTRA-sim's step was 9.5% short.
    others_ns = slowest_rank_excess_ns(graph, ranks) if gaps.any() else 0
    idle_ns = max(target.step_ns - target.slower_ns - busy_ns, 0) + others_ns
    # Rounding the running sum, not each gap, keeps the total exact.
    gap_sum = np.cumsum(gaps)
    idle_sum = np.rint(gap_sum / max(int(gap_sum[-1]), 1) * idle_ns).astype(np.int64)
    idle = np.diff(idle_sum, prepend=0)
    delayed = np.flatnonzero(idle)
    last_compute = np.maximum.accumulate(np.where(compute[busy], np.arange(len(busy)), -1))
    # A delay needs a stream, which it takes from the compute before it.
    delayed = delayed[last_compute[delayed - 1] >= 0]
    return _HostWaits(
        busy[last_compute[delayed - 1]], busy[delayed], idle[delayed], busy_ns, others_ns
    )


def _notes_on_waits(
    graph: Graph, waits: _HostWaits, target: _TargetDuration, ranks: int
) -> list[Note]:
    text = (
        f"The GPU waits {time(int(waits.idle_ns.sum()))} for its host, in {len(waits.idle_ns)} "
        f"nodes: the {target.step} ({time(target.step_ns - target.slower_ns)}) less GPU busy time "
        f"({time(waits.busy_ns)}), placed where the GPU waited {target.gaps_from}. Network time "
        "hides a part of it, which the simulator cannot know."
    )
    notes = [Note(text, code="host-delays")]
    emulated = graph.job.measurement.emulated_calls
    if graph.job.measurement.host_overhead and emulated is not None and emulated.excess_ns:
        calls = emulated.synchronous + emulated.asynchronous
        text = (
            f"Each of {calls} emulated calls kept the host {time(emulated.excess_ns)} longer than "
            "a call of NCCL does; the delays leave that out."
        )
        notes.append(Note(text, code="host-delays-emulated-calls"))
    if waits.others_ns:
        text = (
            f"They contain {time(waits.others_ns)} by which the slowest of the {ranks} ranks is "
            "expected to exceed the median step, by the spread of the slice's steps."
        )
        notes.append(Note(text, code="host-delays-slowest-rank"))
    return notes


def has_timed_host(graph: Graph) -> bool:
    """Return whether the graph's host was timed without the profiler, or has a described time."""
    measurement = graph.job.measurement
    has_captured_times = not graph.job.annotations and measurement.median_step_ns is not None
    return has_captured_times or measurement.host_overhead is not None


def _target_duration(graph: Graph) -> tuple[Graph, _TargetDuration]:
    """Return the graph with steady-state start times, and the duration its step must have."""
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            "host delays need kernels with durations\n"
            "  leave --include-host-delays out, or export a trace of `capture run` on a GPU",
            code="host-delays-no-kernels",
        )
    steady = steady_state_step(graph)
    if steady is None and (storage := int(storage_delays(graph).sum())):
        raise ExportError(
            f"host delays of a graph with {storage} storage nodes: the measured step had none, and "
            "the host was not timed without the profiler\n"
            "  export the trace from before `onerank storage`, capture again on a GPU, or leave "
            "--include-host-delays out",
            code="host-delays-with-storage",
        )
    if steady is None:
        return graph, _measured_duration(graph)
    target = _TargetDuration(
        "steady-state step of the replay",
        "in this replay",
        steady.step_ns + steady.residual_ns,
        max(steady.residual_ns, 0),
        "step measured without the profiler",
    )
    return graph.with_columns(start_ns=steady.times.start_ns), target


def _measured_duration(graph: Graph) -> _TargetDuration:
    """Return the duration of the median step, for a graph that still has its captured times."""
    measurement = graph.job.measurement
    step_ns = measurement.median_step_ns
    if step_ns is None or not has_timed_host(graph):
        raise ExportError(
            "host delays need a host that was timed without the profiler; this trace has none\n"
            "  capture again on a GPU, or leave --include-host-delays out (`onerank replay` shows "
            "the waits under the profiler)",
            code="host-delays-untimed-host",
        )
    profiled_ns = measurement.profiled_step_ns or step_ns
    slower_ns = max(step_ns - profiled_ns, 0)
    step = "profiled step" if slower_ns else "median step without the profiler"
    return _TargetDuration(step, "in the profiled step", step_ns, slower_ns)


def _shares(graph: Graph, members: I64) -> I64:
    """Return durations, int64[n], in which concurrent `members` divide their time equally.

    While k of them run, each gets a k-th of the time. Their durations then sum to the time that
    their intervals cover.
    """
    start = graph.nodes.start_ns[members]
    end = start + graph.nodes.duration_ns[members]
    times = np.unique(np.concatenate([start, end]))
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, np.searchsorted(times, start), 1)
    np.add.at(change, np.searchsorted(times, end), -1)
    # Where none runs, 1 avoids a division by 0, and no share has this time.
    running = np.maximum(np.cumsum(change)[:-1], 1)
    shared_ns = np.concatenate([[0], np.cumsum(np.diff(times) / running)])
    share = shared_ns[np.searchsorted(times, end)] - shared_ns[np.searchsorted(times, start)]
    durations = graph.nodes.duration_ns.copy()
    # At least 1 ns: nodes of 0 ns are not simulated.
    durations[members] = np.maximum(np.rint(share), 1)
    return durations


def insert_host_delays_by_rank(
    graphs: Sequence[Graph], *, one_at_a_time: bool = False
) -> tuple[list[Graph], list[Note]]:
    """Return the graphs of several ranks with host delays, and the notes of each rank.

    For a pipeline, pass the captured stages before a schedule orders them. A delay then moves and
    repeats with the node that it holds back. It follows the previous work of its GPU, so a pipeline
    bubble hides it, just as a bubble hides the launches of a real host.

    Raises:
        ExportError: as for `insert_host_delays`.
    """
    results = [insert_host_delays(graph, one_at_a_time=one_at_a_time) for graph in graphs]
    notes = [
        note.at(f"Rank {graph.job.rank} as captured")
        for graph, (_, rank_notes) in zip(graphs, results, strict=True)
        for note in rank_notes
    ]
    return [graph for graph, _ in results], notes


def host_delay_nodes(graph: Graph) -> dict[int, int]:
    """Return host-delay node -> the node that it holds back."""
    is_delay = np.array([name == DELAY_NAME for name in graph.strings.values], dtype=bool)
    delays = is_delay[graph.nodes.name] & graph.gpu_compute
    source, target = graph.edges.source, graph.edges.target
    from_delay = delays[source]
    return dict(zip(source[from_delay].tolist(), target[from_delay].tolist(), strict=True))


def _insert(graph: Graph, waits: _HostWaits) -> Graph:
    """Return the graph with a node for each wait, between the nodes around it."""
    previous, delayed = waits.previous, waits.delayed
    count, added = len(graph), len(previous)
    strings = graph.strings.copy()
    first_id = int(graph.nodes.id.max()) + 1
    delays = Nodes.of(
        added,
        id=np.arange(first_id, first_id + added, dtype=np.uint64),
        name=np.full(added, strings.intern(DELAY_NAME)),
        kind=np.full(added, Kind.KERNEL),
        stream=graph.nodes.stream[previous],
        thread=np.full(added, UNKNOWN),
        start_ns=graph.nodes.start_ns[previous] + graph.nodes.duration_ns[previous],
        duration_ns=waits.idle_ns,
    )
    delay_index = np.arange(count, count + added)
    # Each delay goes directly in front of the node that it holds back: simulators run the ready
    # node of the lowest index first, and communication must keep its order.
    order = np.argsort(np.concatenate([2 * np.arange(count) + 1, 2 * delayed]), kind="stable")
    new_index = np.empty_like(order)
    new_index[order] = np.arange(count + added)
    edges = graph.edges
    reasons = np.full(2 * added, Reason.STREAM_ORDER, dtype=np.uint8)
    joined = Edges.from_pairs(
        count + added,
        new_index[np.concatenate([edges.source, previous, delay_index])],
        new_index[np.concatenate([edges.target, delay_index, delayed])],
        np.concatenate([edges.reason, reasons]),
    )
    nodes = Nodes.joined([graph.nodes, delays]).take(order)
    return replace(graph, nodes=nodes, edges=joined, strings=strings)


def require_gpu_work(graph: Graph) -> None:
    """Check that a graph has timed work on a GPU.

    Raises:
        ExportError: it has host operations and no GPU node, or workload counts instead of times.
    """
    if graph.mask(Kind.HOST_OP).any() and not graph.gpu_compute.any():
        raise ExportError(
            f"the graph has host operations and no GPU node\n  {REMEDY}", code="graph-no-gpu-time"
        )
    if is_counted(graph):
        raise ExportError(
            "the graph's nodes have workload counts (num_ops, tensor_size) and no times\n"
            "  annotate it for a GPU first: annotate --target H100 ...",
            code="graph-counts-no-times",
        )


def storage_delays(graph: Graph) -> Mask:
    """Return which nodes read or write storage, bool[n].

    Raises:
        ExportError: such a node has no time.
    """
    storage = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    for index in np.flatnonzero(storage & (graph.nodes.duration_ns <= 0)).tolist():
        node = graph.node(index)
        # The simulators model no remote memory, so the duration is all they can use.
        raise ExportError(
            f"node {node.id} ({node.name!r}) is a {node.kind.name} without a duration\n"
            "  remove such nodes from the graph, or add storage with `onerank storage`",
            code="storage-no-duration",
        )
    return storage


def prefetched_storage(graph: Graph) -> Mask:
    """Return which storage nodes have no edge to any other node, bool[n].

    A batch that is read ahead for the next step is such a node.
    """
    connected = np.diff(graph.edges.offsets) > 0
    connected[graph.edges.source] = True
    return storage_delays(graph) & ~connected
