"""Build the graph from linked events: nodes, edges, job.

Edges point forward in launch order (host events: in call order). If recorded data is contradictory
and edges form a cycle, the edges that point back in time are dropped and counted.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from onerank.converters.sources.kineto.collectives.communication import find_calls
from onerank.converters.sources.kineto.collectives.gloo import GlooCalls
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.lowering import diagnostics as notes
from onerank.converters.sources.kineto.lowering.dependency_edges import DependencyEdges
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.lowering.node_columns import (
    call_columns,
    gpu_columns,
    in_order,
    operator_columns,
    run_columns,
)
from onerank.converters.sources.kineto.lowering.recorded_collectives import (
    CallPlacement,
    recorded_calls,
)
from onerank.converters.sources.kineto.lowering.select_nodes import SelectedNodes, choose_nodes
from onerank.converters.sources.kineto.lowering.sync_edges import SyncEdges
from onerank.converters.sources.kineto.lowering.unexplained_gaps import UnexplainedGaps
from onerank.converters.sources.kineto.memory_events import Memory
from onerank.converters.sources.kineto.read.schema import ExecutionTrace
from onerank.converters.sources.kineto.sync.launch_queue import LaunchQueue
from onerank.converters.sources.kineto.sync.sync_events import Synchronizations
from onerank.converters.sources.kineto.trace_job import with_blocks, with_groups, with_step_time
from onerank.ir import Graph, Job, Nodes, Phase


def assemble(
    *,
    timeline: HostTimeline,
    gpu: GpuOps,
    gloo: GlooCalls,
    waits: Synchronizations,
    queue: LaunchQueue,
    memory: Memory,
    job: Job,
    timing: str,
    et: ExecutionTrace,
    with_operators: bool = True,
) -> tuple[Graph, Conversion]:
    """Build the graph; the report counts what was linked and what was dropped.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: the calls that Gloo ran.
        waits: synchronisations.
        queue: launches that waited for queue room.
        memory: bytes allocated and freed per host event.
        job: the job so far.
        timing: name of the file with the times.
        et: the execution trace.
        with_operators: whether operators are nodes; otherwise only GPU operations.
    """
    whole, found = gpu, find_calls(timeline, gpu)
    gpu = found.gpu
    marked = recorded_calls(timeline, gpu, et) if len(et.id) else []
    chosen = choose_nodes(timeline, gpu, gloo, with_operators=with_operators)
    kept, own = chosen.host, chosen.gpu
    work = DependencyEdges(timeline, gpu, kept, own)
    streams, threads = work.streams(), work.threads()
    placing = CallPlacement(work, streams, threads)
    if len(own):
        work.launches()
        unplaced = placing.on_streams(marked)
    else:
        unplaced = placing.on_threads(marked, gloo.found)
    work.order(streams, threads)
    waiting = SyncEdges(work, streams, threads)
    syncs, idle = waiting.synchronise(waits, queue.waits)
    own_time_ns, late = work.own_time(waiting.blocked), UnexplainedGaps()
    if not marked and len(own) == len(gpu):  # beside stand-ins nothing is late
        work.launch_order(own_time_ns, threads)
        late = waiting.late()

    threads_named = timeline.thread_numbers()
    host = operator_columns(timeline, kept, et, threads_named)
    host |= {"duration_ns": own_time_ns, "blocked_ns": waiting.blocked_ns}
    lost = work.memory(memory, host, cpu_only=not len(own)) if len(kept) else 0
    kernels, measured = gpu_columns(timeline, gpu, own, found.call, et, file=timing)
    kernels["blocked_ns"] = waiting.gpu_waits(late if with_operators else UnexplainedGaps())
    ops = np.array([call.op for call in marked], dtype=np.int64)
    given = [call.communication for call in marked]
    gloo_calls = [run.communication for run in gloo.found]
    recorded = call_columns(timeline, ops, given, et)
    recorded |= placing.columns(threads_named, to=len(marked))
    ran = run_columns(timeline, gloo.found, et)
    ran |= placing.columns(threads_named, begin=len(marked))
    columns, order = in_order([host, kernels, recorded, ran], work.start_ns)
    place = np.argsort(order)
    edges, contradictions, example = work.edges.build(place)
    job = with_groups(with_step_time(job, work.span_ns), [*given, *gloo_calls, *measured])
    job = with_blocks(job, memory, work.memory_node, place)
    graph = Graph(Nodes.of(len(order), **columns), edges, timeline.strings, job)

    report = _counts(
        timeline,
        whole,
        chosen,
        memory,
        communication=len(given) + len(gloo_calls) + len(measured),
        syncs=syncs,
        syncs_dropped=waits.unused + idle,
        timing=timing,
    )
    report.notes.extend(
        [
            *notes.of_communication(found, measured, unplaced),
            *notes.of_no_execution_trace(timeline, marked, with_operators=with_operators),
            *gloo.notes(),
            *notes.of_own_calls(timeline, kept),
            *late.notes(gpu.rows.take(own), timeline.strings, len(kept), replayed=with_operators),
        ]
    )
    if lost:
        report.notes.append(f"{lost} bytes allocated or freed on threads without operators")
    queue = replace(queue, waits=tuple(waiting.queued))
    report.notes.extend([*notes.of_waits(waits), *(queue.notes() if with_operators else [])])
    report.notes.extend(notes.of_contradictions(graph, contradictions, example))
    return graph, report


def _counts(
    timeline: HostTimeline,
    gpu: GpuOps,
    chosen: SelectedNodes,
    memory: Memory,
    *,
    communication: int,
    syncs: int,
    syncs_dropped: Counter[str],
    timing: str,
) -> Conversion:
    """Return how much of what the traces hold was linked and kept."""
    kept, is_operator = chosen.host, timeline.rows.is_operator
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
        host_ops_dropped=chosen.left_out,
        communication=communication,
        backward_ops=len(backward),
        backward_ops_with_module=int((timeline.module[backward] != 0).sum()),
        memory_events=memory.events,
        memory_events_outside_operators=memory.outside,
        memory_events_other_device=memory.elsewhere,
        syncs=syncs,
        syncs_dropped=dict(syncs_dropped),
        timing=timing,
    )
