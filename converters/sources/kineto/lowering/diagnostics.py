"""Diagnostics of a conversion: what was linked, dropped, or inconsistent."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.collectives.communication import (
    Communication,
    CommunicationKernels,
)
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.lowering.recorded_collectives import RecordedCall
from onerank.converters.sources.kineto.lowering.select_nodes import own_calls
from onerank.converters.sources.kineto.read.schema import ExecutionTrace, KinetoTrace
from onerank.converters.sources.kineto.sync.sync_events import Synchronizations
from onerank.ir import UNKNOWN, Graph, Kind, Reason
from onerank.ir.arrays import I64
from onerank.ir.errors import TraceError

CLOCK_NS = 1000
"""Overlaps up to a microsecond, the unit of older traces, are rounding."""

_PAIRS = 3
"""Number of overlapping pairs of GPU operations that a note names."""


def overlap_notes(path: Path, timeline: HostTimeline, gpu: GpuOps) -> list[str]:
    """Return a note for each kind of overlap, with count and duration.

    Operators of a thread are nested or consecutive. Operations of a stream are consecutive,
    although a kernel may start before its predecessor has ended; none starts before its launch.

    Raises:
        TraceError: over a tenth of the operators overlap, so callers cannot be determined.
    """
    notes: list[str] = []
    rows, parent = timeline.rows, timeline.parent
    inner = np.flatnonzero(rows.is_operator & (parent >= 0))
    inner = inner[rows.is_operator[parent[inner]]]
    over_ns = rows.end_ns[inner] - rows.end_ns[parent[inner]]
    if (over_ns > CLOCK_NS).any():
        count, operators = int((over_ns > CLOCK_NS).sum()), int(rows.is_operator.sum())
        worst = int(inner[over_ns.argmax()])
        told = (
            f"{count} of {operators} operators outlast the one they begin in, by {over_ns.max()} "
            f"ns at most ({timeline.name(worst)!r} in {timeline.name(int(parent[worst]))!r})"
        )
        if count > operators // 10:
            raise TraceError(
                f"{path}: {told}; operators of a thread call each other or follow each other: "
                "record the trace again",
                code="trace-events-overlap",
            )
        notes.append(told)
    rows = gpu.rows
    before, after, by_ns = _overlaps(gpu)
    if len(by_ns):
        names = timeline.strings
        pairs = Counter(zip(rows.name[before].tolist(), rows.name[after].tolist(), strict=True))
        most = "; ".join(
            f"{names[second]!r} within {names[first]!r} ({count})"
            for (first, second), count in pairs.most_common(_PAIRS)
        )
        notes.append(
            f"{len(by_ns)} of {len(gpu)} GPU operations begin before the one before them on their "
            f"stream has ended, by {by_ns.max()} ns at most; so they do in a replay "
            f"(of {len(pairs)} pairs the most frequent: {most})"
        )
    early = gpu.launch_ns - rows.start_ns
    early = early[early > CLOCK_NS]
    if len(early):
        notes.append(
            f"{len(early)} of {len(gpu)} GPU operations start before they are launched, by "
            f"{early.max()} ns at most: the clocks of host and GPU disagree"
        )
    return notes


def _overlaps(gpu: GpuOps) -> tuple[I64, I64, I64]:
    """Return neighbours of a stream that overlap, the earlier and the later, and by how much."""
    rows = gpu.rows
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    one, other = order[:-1], order[1:]
    alike = (rows.device[one] == rows.device[other]) & (rows.stream[one] == rows.stream[other])
    by_ns = rows.start_ns[one] + rows.duration_ns[one] - rows.start_ns[other]
    overlap = alike & (by_ns > CLOCK_NS)
    return one[overlap], other[overlap], by_ns[overlap]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Counts of a conversion. Times are nanoseconds.

    Attributes:
        gpu_ops: kernels, memcpys and memsets in the trace.
        gpu_ops_linked: of these, by rule.
        gpu_ops_unlinked: of these, kept without an operator, by reason.
        gpu_ops_dropped: count and summed time of those that emulate communication.
        host_ops: operators in the trace's window.
        host_ops_kept: of these, those that became nodes.
        host_ops_without_record: kept operators that the execution trace lacks (no shapes).
        host_ops_dropped: by reason.
        communication: recorded or measured calls.
        backward_ops: backward operators among the nodes.
        backward_ops_with_module: of these, those with a known module.
        memory_events: allocations and frees.
        memory_events_outside_operators: of these, those outside any operator; they count for the
            memory peak only.
        memory_events_other_device: dropped: on another device type (the host, in a GPU trace).
        syncs: synchronisations that became edges.
        syncs_dropped: synchronisations that did not, by reason.
        timing: file that the times come from, or how several were combined.
        steps: number of profiled steps behind each compute node's median duration.
        steps_dropped: profiled steps with another sequence of compute.
        step_times_ns: summed compute of each step used.
        notes: statements on the quality of the trace.
    """

    gpu_ops: int
    gpu_ops_linked: dict[str, int]
    gpu_ops_unlinked: dict[str, int]
    gpu_ops_dropped: tuple[int, int]
    host_ops: int
    host_ops_kept: int
    host_ops_without_record: int
    host_ops_dropped: dict[str, int]
    communication: int
    backward_ops: int
    backward_ops_with_module: int
    memory_events: int
    memory_events_outside_operators: of these, those outside any operator; they count for the
        memory peak only.
    memory_events_other_device: dropped: on another device type (the host, in a GPU trace).
    syncs: int
    syncs_dropped: dict[str, int]
    timing: str
    steps: int = 1
    steps_dropped: int = 0
    step_times_ns: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list[str])


def of_communication(
    found: CommunicationKernels, measured: list[Communication], unplaced: list[RecordedCall]
) -> list[str]:
    """Add notes on kernels with unknown calls, and on partly recorded calls.

    Args:
        found: the calls that GPU operations run.
        measured: these calls.
        unplaced: recorded calls that are assumed blocking.
    """
    notes = [
        f"{count} kernels that communicate ({ns / 1e6:.3f} ms) are kept as kernels, not as "
        f"communication: {reason}"
        for reason, (count, ns) in found.unknown.items()
    ]
    if found.split:
        notes.append(
            f"{found.split} NCCL kernels that carried out several calls at once are one node per "
            "call, sends before receives, one after another, their time split by bytes"
        )
    peers = Counter(call.kind for call in measured if max(call.src, call.dst) == UNKNOWN)
    if alone := peers[Kind.SEND] + peers[Kind.RECV]:
        notes.append(
            f"{alone} sends and receives do not tell of their peer: older versions of torch did "
            "not record it"
        )
    blocking = sum(call.communication.asynchronous for call in unplaced)
    if blocking:
        notes.append(
            f"{blocking} asynchronous calls are taken as blocking: the trace does not tell what "
            "they overlap"
        )
    return notes


def of_unread(trace: KinetoTrace, et: ExecutionTrace) -> list[str]:
    """Tell what of the files themselves was not read, or was not there."""
    notes: list[str] = []
    if et.without_caller:
        notes.append(
            f"{et.path.name}: the callers of {et.without_caller} nodes are not in the file; these "
            "count as called by nobody"
        )
    if trace.lost_run:
        notes.append(
            "distributedInfo is left out: it tells no rank within a world (rank, world_size)"
        )
    if trace.unread:
        told = ", ".join(f"{count} of category {cat!r}" for cat, count in trace.unread.items())
        notes.append(f"events of unknown categories are left out: {told}")
    return notes


def of_waits(waits: Synchronizations) -> list[str]:
    """Tell what of the waits for the GPU is inferred."""
    notes: list[str] = []
    if waits.inferred:
        notes.append(
            f"which record {waits.inferred} waits for an event refer to is inferred from the order "
            "of the event ids; the driver does not tell"
        )
    if waits.by_time:
        notes.append(
            f"{waits.by_time} waits are told by the order of calls, and by what ended and started "
            "when: the trace has no synchronisation events (enable_cuda_sync_events)"
        )
    return notes


def of_no_execution_trace(
    timeline: HostTimeline, marked: list[RecordedCall], *, with_operators: bool
) -> list[str]:
    """Tell what is not in the graph since no execution trace was given."""
    notes: list[str] = []
    if unread := int(timeline.is_mark.sum()) - len(marked):
        notes.append(
            f"{unread} recorded communication calls are left out: what they are stands in the "
            "execution trace"
        )
    if not with_operators:
        notes.append(
            "without an execution trace the graph holds GPU operations alone: what the host held "
            "back is not in it, so that its replay is faster than the step; --operators keeps the "
            "operators"
        )
    return notes


def of_own_calls(timeline: HostTimeline, kept: I64) -> list[str]:
    """Tell how many launches outside of operators are nodes."""
    calls = int(own_calls(timeline)[kept].sum())
    if not calls:
        return []
    return [f"{calls} runtime calls that launch outside of any operator are nodes of the host"]


def of_contradictions(
    graph: Graph, left_out: Counter[Reason], example: tuple[int, int] | None
) -> list[str]:
    """Add a note on edges dropped because they closed a cycle; `example` is one of them."""
    if example is None:
        return []
    counts = ", ".join(
        f"{count} {reason.name.lower().replace('_', ' ')}" for reason, count in left_out.items()
    )
    source, target = (graph.node(index) for index in example)
    return [
        f"{left_out.total()} edges are left out, since the trace contradicts itself there "
        f"({counts}): {target.name!r} started before {source.name!r}, for one, which it would have "
        "to wait for"
    ]
