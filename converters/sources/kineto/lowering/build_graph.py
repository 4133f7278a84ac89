"""Build the graph from linked events: nodes, edges, job.

Edges point forward in launch order (host events: in call order). If recorded data is contradictory
and edges form a cycle, the edges that point back in time are dropped and counted.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from onerank.converters.sources.kineto.collectives.communication import find_calls
from onerank.converters.sources.kineto.collectives.gloo import GlooCalls
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.lowering import diagnostics as notes
from onerank.converters.sources.kineto.lowering.dependency_edges import DependencyEdges
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.lowering.node_columns import (
    gloo_columns,
    gpu_columns,
    join_by_start,
    operator_columns,
    recorded_columns,
)
from onerank.converters.sources.kineto.lowering.recorded_collectives import (
    CallPlacement,
    recorded_calls,
)
from onerank.converters.sources.kineto.lowering.select_nodes import SelectedNodes, select_nodes
from onerank.converters.sources.kineto.lowering.sync_edges import SyncEdges
from onerank.converters.sources.kineto.lowering.unexplained_gaps import UnexplainedGaps
from onerank.converters.sources.kineto.memory_events import Memory
from onerank.converters.sources.kineto.read.schema import ExecutionTrace
from onerank.converters.sources.kineto.sync.launch_queue import LaunchQueue
from onerank.converters.sources.kineto.sync.sync_events import Synchronizations
from onerank.converters.sources.kineto.trace_job import with_blocks, with_groups, with_step_time
from onerank.ir import Graph, Job, Nodes, Phase


@dataclass(frozen=True, slots=True)
class LinkedTrace:
    """The linked events of one window: everything that a graph is built from.

    Attributes:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: the calls that Gloo ran.
        waits: synchronisations.
        queue: launches that waited for queue room.
        memory: bytes allocated and freed per host event.
        et: the execution trace.
        timing: name of the file with the times.
    """

    timeline: HostTimeline
    gpu: GpuOps
    gloo: GlooCalls
    waits: Synchronizations
    queue: LaunchQueue
    memory: Memory
    et: ExecutionTrace
    timing: str


def assemble(
    trace: LinkedTrace, job: Job, *, with_operators: bool = True
) -> tuple[Graph, Conversion]:
    """Build the graph; the report counts what was linked and what was dropped.

    Args:
        trace: the linked events.
        job: the job so far; process groups, step time and memory blocks are added.
        with_operators: whether operators are nodes; otherwise only GPU operations.
    """
    timeline, et, gloo, memory = trace.timeline, trace.et, trace.gloo, trace.memory
    kernel_calls = find_calls(timeline, trace.gpu)
    gpu = kernel_calls.gpu
    recorded = recorded_calls(timeline, gpu, et) if len(et.id) else []
    selected = select_nodes(timeline, gpu, gloo, with_operators=with_operators)
    kept, gpu_rows = selected.host, selected.gpu
    builder = DependencyEdges(timeline, gpu, kept, gpu_rows)
    streams, threads = builder.streams(), builder.threads()
    placement = CallPlacement(builder, streams, threads)
    # Calls must be in their sequences before `add_order` chains the members of each sequence.
    if len(gpu_rows):
        builder.add_launches()
        unplaced = placement.on_streams(recorded)
    else:
        unplaced = placement.on_threads(recorded, gloo.found)
    builder.add_order(streams, threads)
    sync_edges = SyncEdges(builder, streams, threads)
    syncs, without_edge = sync_edges.add_waits(trace.waits, trace.queue.waits)
    self_times_ns, gaps = builder.self_times(sync_edges.blocked), UnexplainedGaps()
    # Kernels that emulate collectives delay others by times that mean nothing: no gaps then.
    if not recorded and len(gpu_rows) == len(gpu):
        builder.add_launch_order(self_times_ns, threads)
        gaps = sync_edges.explain_gaps()

    thread_numbers = timeline.thread_numbers()
    host = operator_columns(timeline, kept, et, thread_numbers)
    host |= {"duration_ns": self_times_ns, "blocked_ns": sync_edges.blocked_ns}
    lost_bytes = builder.add_memory(memory, host, cpu_only=not len(gpu_rows)) if len(kept) else 0
    kernels, measured = gpu_columns(
        timeline, gpu, gpu_rows, kernel_calls.call, et, file=trace.timing
    )
    kernels["blocked_ns"] = sync_edges.gpu_waits(gaps if with_operators else UnexplainedGaps())
    marks = np.array([call.op for call in recorded], dtype=np.int64)
    requests = [call.communication for call in recorded]
    gloo_calls = [call.communication for call in gloo.found]
    recorded_part = recorded_columns(timeline, marks, requests, et)
    recorded_part |= placement.columns(thread_numbers, to=len(recorded))
    gloo_part = gloo_columns(timeline, gloo.found, et)
    gloo_part |= placement.columns(thread_numbers, begin=len(recorded))
    columns, order = join_by_start([host, kernels, recorded_part, gloo_part], builder.start_ns)
    place = np.argsort(order)
    edges, contradictions, example = builder.edges.build(place)
    job = with_groups(with_step_time(job, builder.span_ns), [*requests, *gloo_calls, *measured])
    job = with_blocks(job, memory, builder.memory_node, place)
    graph = Graph(Nodes.of(len(order), **columns), edges, timeline.strings, job)

    report = _count(
        trace,
        selected,
        communication=len(requests) + len(gloo_calls) + len(measured),
        syncs=syncs,
        syncs_dropped=trace.waits.unused + without_edge,
    )
    gpu_nodes = gpu.rows.take(gpu_rows)
    report.notes.extend(
        [
            *notes.of_communication(kernel_calls, measured, unplaced),
            *notes.of_no_execution_trace(timeline, recorded, with_operators=with_operators),
            *gloo.notes(),
            *notes.of_unattributed_calls(timeline, kept),
            *gaps.notes(gpu_nodes, timeline.strings, len(kept), replayed=with_operators),
        ]
    )
    if lost_bytes:
        report.notes.append(f"{lost_bytes} bytes allocated or freed on threads without operators")
    queue = replace(trace.queue, waits=tuple(sync_edges.queued))
    report.notes.extend([*notes.of_waits(trace.waits), *(queue.notes() if with_operators else [])])
    report.notes.extend(notes.of_contradictions(graph, contradictions, example))
    return graph, report


def _count(
    trace: LinkedTrace,
    selected: SelectedNodes,
    *,
    communication: int,
    syncs: int,
    syncs_dropped: Counter[str],
) -> Conversion:
    """Count how many of the traces' events were linked and kept."""
    timeline, gpu, memory = trace.timeline, trace.gpu, trace.memory
    kept, is_operator = selected.host, timeline.rows.is_operator
    backward = kept[timeline.phase[kept] == Phase.BACKWARD]
    emulation = gpu.in_mark >= 0
    linked = gpu.linked & ~emulation
    return Conversion(
        gpu_ops=len(gpu),
        gpu_ops_linked=gpu.rules(linked),
        gpu_ops_unlinked=gpu.rules(~linked & ~emulation),
        gpu_ops_dropped=(int(emulation.sum()), int(gpu.rows.duration_ns[emulation].sum())),
        host_ops=int(is_operator.sum()),
        host_ops_kept=int(is_operator[kept].sum()),
        host_ops_without_record=int((is_operator & ~timeline.has_shapes)[kept].sum()),
        host_ops_dropped=selected.dropped,
        communication=communication,
        backward_ops=len(backward),
        backward_ops_with_module=int((timeline.module[backward] != 0).sum()),
        memory_events=memory.events,
        memory_events_outside=memory.outside,
        memory_events_elsewhere=memory.elsewhere,
        syncs=syncs,
        syncs_dropped=dict(syncs_dropped),
        timing=trace.timing,
    )
