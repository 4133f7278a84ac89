"""What a graph holds that ASTRA-sim does not model."""

from collections.abc import Sequence

import numpy as np

from onerank.converters.expand.host_delays import NAME
from onerank.converters.expand.preconditions import prefetched_storage
from onerank.converters.targets.astra_sim.write_traces import Workload
from onerank.ir import UNKNOWN, Collective, Graph, Kind
from onerank.ir.arrays import union_duration_ns
from onerank.ir.graph import Mask

HOST = "host operations"
NO_TIME = "GPU nodes of 0 ns"
METADATA = "metadata nodes"
INVALID = "invalid nodes"
NO_IDLE_TIME = "Host time and GPU idle time are not in the workload"


def timed_compute(graph: Graph) -> Mask:
    """Return which nodes are GPU compute that takes time, bool[n]."""
    return graph.gpu_compute & (graph.nodes.duration_ns > 0)


def count_left_out(graph: Graph) -> dict[str, int]:
    """Return how many nodes do not reach ASTRA-sim, besides communications."""
    no_time = graph.gpu_compute & ~timed_compute(graph)
    return {
        HOST: int(graph.mask(Kind.HOST_OP).sum()),
        NO_TIME: int(no_time.sum()),
        METADATA: int(graph.mask(Kind.METADATA).sum()),
        INVALID: int(graph.mask(Kind.INVALID).sum()),
    }


def notes_on(workload: Workload) -> list[str]:
    """Return what a reader of the simulator's figures should know of a step, a sentence each."""
    return [*_streams(workload.graph), *_storage(workload.graph), *_communication(workload)]


def note_on_idle_time(graphs: Sequence[Graph]) -> str:
    """Note that idle time is dropped; for a single graph, its share of the step."""
    opening = NO_IDLE_TIME
    if len(graphs) > 1:
        return f"{opening}."
    (graph,) = graphs
    compute_ns = int(graph.nodes.duration_ns[timed_compute(graph)].sum())
    measurement = graph.job.measurement
    if graph.job.annotations:
        target = graph.job.annotations[-1].target
        return f"{opening}; for {target} they are not known (GPU compute: {compute_ns} ns)."
    span_ns, what = measurement.median_step_ns, "the median step without the profiler"
    if span_ns is None and measurement.profiled_step_ns:
        span_ns, what = measurement.profiled_step_ns, "the profiled step"
    if span_ns is None and graph.nodes.start_ns.any():
        ends = graph.nodes.start_ns + graph.nodes.duration_ns
        span_ns, what = int(ends.max() - graph.nodes.start_ns.min()), "the span of the trace"
    if span_ns is None:
        return f"{opening}; how long the step took is not known (GPU compute: {compute_ns} ns)."
    rest_ns = span_ns - compute_ns
    rest = f"the difference {rest_ns} ns" if rest_ns >= 0 else "more, as its streams overlap"
    return f"{opening}: {what} is {span_ns} ns, GPU compute {compute_ns} ns, {rest}."


def _streams(graph: Graph) -> list[str]:
    compute = timed_compute(graph)
    streams = np.unique(graph.nodes.stream[compute])
    notes: list[str] = []
    if len(streams) > 1:
        note = f"GPU compute lies on {len(streams)} streams; ASTRA-sim runs one node at a time"
        waits = NAME in graph.strings.values  # which tells of overlaps itself
        if graph.nodes.start_ns.any() and not graph.job.annotations and not waits:
            start, duration = graph.nodes.start_ns[compute], graph.nodes.duration_ns[compute]
            overlap_ns = int(duration.sum()) - union_duration_ns(start, start + duration)
            note += f", where the trace overlaps {overlap_ns} ns"
        notes.append(f"{note}.")
    nowhere = int((compute & (graph.nodes.stream == UNKNOWN)).sum())
    if nowhere:
        notes.append(f"{nowhere} GPU nodes name no stream; they run one after another.")
    return notes


def _storage(graph: Graph) -> list[str]:
    beside = graph.nodes.duration_ns[prefetched_storage(graph)]
    if not len(beside):
        return []
    return [
        f"What is read from storage beside the step ({beside.max()} ns) is not in the workload, "
        "since ASTRA-sim runs nothing beside a GPU's compute: no step is shorter than that."
    ]


def _communication(workload: Workload) -> list[str]:
    graph, ranks = workload.graph, workload.layout.ranks
    if not workload.places:
        return ["There is no communication between ranks; they run side by side."]
    notes: list[str] = []
    if len(set(workload.places.values())) > 1:
        notes.append("A rank's communications run one at a time, in the order of the trace.")
    sizes = {index: int(graph.nodes.comm_bytes[index]) for index in workload.places}
    small = sum(
        not workload.places[index].shift
        and size < ranks
        and graph.node(index).collective is not Collective.ALL_GATHER
        for index, size in sizes.items()
    )
    if small:
        notes.append(f"ASTRA-sim rounds {small} collectives of under {ranks} bytes up to that.")
    return notes
