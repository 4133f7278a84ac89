"""Build the graph from linked events: node columns, edges, job.

Edges point forward in launch order (host events: in call order). If recorded data is contradictory
and edges form a cycle, the edges that point back in time are dropped and counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onerank.converters.sources.kineto.collectives import (
    Communication,
    CommunicationKernels,
    find_calls,
)
from onerank.converters.sources.kineto.gloo import GlooCalls
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.link.launch_queue import LaunchQueue
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.link.sync_events import Synchronizations, Wait
from onerank.converters.sources.kineto.lowering import diagnostics as notes
from onerank.converters.sources.kineto.lowering.dependency_edges import (
    Columns,
    DependencyEdges,
    StreamSequences,
    ThreadSequences,
)
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.lowering.node_columns import (
    gloo_columns,
    gpu_columns,
    join_by_start,
    operator_columns,
    python_call_column,
    recorded_columns,
)
from onerank.converters.sources.kineto.lowering.recorded_collectives import (
    CallPlacement,
    RecordedCall,
    recorded_calls,
)
from onerank.converters.sources.kineto.lowering.select_nodes import SelectedNodes, select_nodes
from onerank.converters.sources.kineto.lowering.sync_edges import SyncEdges, UnexplainedGaps
from onerank.converters.sources.kineto.memory_events import MemoryHistory
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace
from onerank.converters.sources.kineto.trace_job import with_blocks, with_groups, with_profiled_step
from onerank.ir import Graph, Job, Nodes, Phase
from onerank.ir.arrays import I64
from onerank.ir.notes import Note


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
    memory: MemoryHistory
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
    events = _NodeEvents.of(trace, with_operators=with_operators)
    connected = _connect(events)
    builder = connected.builder
    columns = _node_columns(events, connected)
    joined, order = join_by_start(columns.parts, builder.start_ns)
    joined["python_calls"] = python_call_column(
        trace.timeline, builder.start_ns[order], joined["kind"]
    )
    place = np.argsort(order)
    # Last, once every kind of edge is there: only then do cycles between kinds show.
    edges, contradictions, example = builder.edges.build(place)
    communication = [*events.requests, *events.gloo_calls, *columns.measured]
    job = with_groups(with_profiled_step(job, builder.span_ns), communication)
    job = with_blocks(job, trace.memory, builder.memory_node, place)
    graph = Graph(Nodes.of(len(order), **joined), edges, trace.timeline.strings, job)
    report = _count(
        trace,
        events.selected,
        communication=len(communication),
        syncs=connected.syncs,
        syncs_dropped=trace.waits.unused + connected.syncs_without_edge,
    )
    report.notes.extend(_notes(events, connected, columns))
    report.notes.extend(notes.of_contradictions(graph, contradictions, example))
    return graph, report


@dataclass(frozen=True, slots=True)
class _NodeEvents:
    """The events of a window that become nodes.

    Attributes:
        trace: the linked events.
        kernels: the GPU operations, with the calls that they communicate for.
        recorded: the calls that an emulated rank recorded.
        selected: rows of the host events and GPU operations that become nodes.
        with_operators: whether operators are nodes.
    """

    trace: LinkedTrace
    kernels: CommunicationKernels
    recorded: list[RecordedCall]
    selected: SelectedNodes
    with_operators: bool

    @classmethod
    def of(cls, trace: LinkedTrace, *, with_operators: bool) -> "_NodeEvents":
        """Choose the events of a window."""
        kernels = find_calls(trace.timeline, trace.gpu)
        recorded = recorded_calls(trace.timeline, kernels.gpu, trace.et) if len(trace.et.id) else []
        selected = select_nodes(
            trace.timeline, kernels.gpu, trace.gloo, with_operators=with_operators
        )
        return cls(trace, kernels, recorded, selected, with_operators)

    @property
    def requests(self) -> list[Communication]:
        """Communication of the recorded calls."""
        return [call.communication for call in self.recorded]

    @property
    def gloo_calls(self) -> list[Communication]:
        """Communication of the calls that Gloo ran."""
        return [call.communication for call in self.trace.gloo.calls]


@dataclass(frozen=True, slots=True)
class _Connected:
    """The nodes' times and edges, and the calls and waits that have none.

    Attributes:
        builder: times of the nodes, and edges.
        placement: the nodes of recorded calls and Gloo calls.
        sync_edges: the edges of waits.
        self_times_ns: time of each host event without its children and waits, int64[n].
        gaps: idle times of the GPU that no edge explains.
        unplaced: recorded calls that no stream shows.
        syncs: number of edges of waits.
        syncs_without_edge: number of waits without an edge, by the reason.
    """

    builder: DependencyEdges
    placement: CallPlacement
    sync_edges: SyncEdges
    self_times_ns: I64
    gaps: UnexplainedGaps
    unplaced: list[RecordedCall]
    syncs: int
    syncs_without_edge: Counter[str]


def _connect(events: _NodeEvents) -> _Connected:
    """Place the nodes in their streams and threads, and add all edges."""
    trace, gpu, selected = events.trace, events.kernels.gpu, events.selected
    builder = DependencyEdges(trace.timeline, gpu, selected.host, selected.gpu)
    streams, threads = builder.streams(), builder.threads()
    placement = CallPlacement(builder, streams, threads)
    # Calls must be in their sequences before `add_order` chains the members of each sequence.
    if len(selected.gpu):
        builder.add_launches()
        unplaced = placement.on_streams(events.recorded)
    else:
        unplaced = placement.on_threads(events.recorded, trace.gloo.calls)
    sync_edges = SyncEdges(builder, streams, threads)
    syncs, without_edge = _add_order_and_waits(
        trace, builder, sync_edges, (streams, threads), placement.waits
    )
    self_times_ns, gaps = builder.self_times(sync_edges.blocked), UnexplainedGaps()
    # Kernels that emulate collectives delay others by times that mean nothing: no gaps then.
    if not events.recorded and len(selected.gpu) == len(gpu):
        builder.add_launch_order(self_times_ns, threads)
        gaps = sync_edges.explain_gaps()
    return _Connected(
        builder=builder,
        placement=placement,
        sync_edges=sync_edges,
        self_times_ns=self_times_ns,
        gaps=gaps,
        unplaced=unplaced,
        syncs=syncs,
        syncs_without_edge=without_edge,
    )


def _add_order_and_waits(
    trace: LinkedTrace,
    builder: DependencyEdges,
    sync_edges: SyncEdges,
    sequences: tuple[StreamSequences, ThreadSequences],
    of_calls: Sequence[Wait],
) -> tuple[int, Counter[str]]:
    """Add the order of streams and threads, and the waits; return what `add_waits` returns."""
    if len(builder.gpu_rows):
        builder.add_order(*sequences)
        return sync_edges.add_waits(trace.waits, trace.queue.waits)
    # An edge keeps its first reason. Without a device the waits come first, because re-costing
    # drops the order of calls and keeps waits.
    counts = sync_edges.add_waits(trace.waits, trace.queue.waits, of_calls)
    builder.add_order(*sequences)
    return counts


@dataclass(frozen=True, slots=True)
class _NodeColumns:
    """Columns of the nodes.

    Attributes:
        parts: columns of host events, GPU operations, recorded calls and Gloo calls, in the order
            of the builder's nodes.
        measured: communication among the GPU operations.
        lost_bytes: bytes allocated or freed on threads without operators.
    """

    parts: list[Columns]
    measured: list[Communication]
    lost_bytes: int


def _node_columns(events: _NodeEvents, connected: _Connected) -> _NodeColumns:
    """Return the columns of all nodes, except their starts."""
    trace, selected, placement = events.trace, events.selected, connected.placement
    timeline, et, sync_edges = trace.timeline, trace.et, connected.sync_edges
    thread_numbers = timeline.thread_numbers()
    host = operator_columns(timeline, selected.host, et, thread_numbers)
    host |= {"duration_ns": connected.self_times_ns, "blocked_ns": sync_edges.blocked_ns}
    lost_bytes = 0
    if len(selected.host):
        on_cpu = not len(selected.gpu)
        lost_bytes = connected.builder.add_memory(trace.memory, host, cpu_only=on_cpu)
    kernels, measured = gpu_columns(
        timeline, events.kernels.gpu, selected.gpu, events.kernels.call, et, file=trace.timing
    )
    kernels["blocked_ns"] = sync_edges.gpu_waits(
        connected.gaps if events.with_operators else UnexplainedGaps()
    )
    marks = np.array([call.op for call in events.recorded], dtype=np.int64)
    recorded = recorded_columns(timeline, marks, events.requests, et)
    recorded |= placement.columns(thread_numbers, to=len(events.recorded))
    gloo = gloo_columns(timeline, trace.gloo.calls, et)
    gloo |= placement.columns(thread_numbers, begin=len(events.recorded))
    return _NodeColumns([host, kernels, recorded, gloo], measured, lost_bytes)


def _notes(events: _NodeEvents, connected: _Connected, columns: _NodeColumns) -> list[Note]:
    """Return notes on what the window lacks or contradicts."""
    trace, with_operators = events.trace, events.with_operators
    timeline, kept = trace.timeline, events.selected.host
    gpu_nodes = events.kernels.gpu.rows.take(events.selected.gpu)
    result = [
        *notes.of_communication(events.kernels, columns.measured, connected.unplaced),
        *notes.of_no_execution_trace(timeline, events.recorded, with_operators=with_operators),
        *trace.gloo.notes(),
        *notes.of_unattributed_calls(timeline, kept),
        *connected.gaps.notes(gpu_nodes, timeline.strings, len(kept), replayed=with_operators),
    ]
    if columns.lost_bytes:
        result.append(
            Note(
                f"{columns.lost_bytes} bytes allocated or freed on threads without operators",
                code="memory-without-operator",
            )
        )
    result += notes.of_waits(trace.waits)
    if with_operators:
        result += replace(trace.queue, waits=tuple(connected.sync_edges.queued)).notes()
    return result


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
