"""Diagnostics of a conversion: what was linked, dropped, or inconsistent."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.collectives import (
    Communication,
    CommunicationKernels,
)
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.link.inferred_waits import ROUNDING_NS
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.link.sync_events import Synchronizations
from onerank.converters.sources.kineto.lowering.recorded_collectives import RecordedCall
from onerank.converters.sources.kineto.lowering.select_nodes import unattributed_calls
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace, KinetoTrace
from onerank.ir import UNKNOWN, Graph, Kind, Reason
from onerank.ir.arrays import I64
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

# Number of overlapping pairs of GPU operations that a note names.
_NAMED_PAIRS = 3


def overlap_notes(path: Path, timeline: HostTimeline, gpu: GpuOps) -> list[Note]:
    """Return a note for each kind of overlap, with count and duration.

    Operators of a thread are nested or consecutive. Operations of a stream are consecutive,
    although a kernel may start before its predecessor has ended; none starts before its launch.

    Raises:
        TraceError: over a tenth of the operators overlap, so callers cannot be determined.
    """
    notes: list[Note] = []
    rows, parent = timeline.rows, timeline.parent
    inner = np.flatnonzero(rows.is_operator & (parent >= 0))
    inner = inner[rows.is_operator[parent[inner]]]
    over_ns = rows.end_ns[inner] - rows.end_ns[parent[inner]]
    if (over_ns > ROUNDING_NS).any():
        count, operators = int((over_ns > ROUNDING_NS).sum()), int(rows.is_operator.sum())
        worst = int(inner[over_ns.argmax()])
        overlap = (
            f"{count} of {operators} operators outlast their caller, by {over_ns.max()} "
            f"ns at most ({timeline.name(worst)!r} in {timeline.name(int(parent[worst]))!r})"
        )
        # Public traces of old schemas have a few such operators.
        if count > operators // 10:
            raise TraceError(
                f"{path}: {overlap}; expected at most {operators // 10}, because operators of a "
                "thread nest or follow each other: record the trace again",
                code="trace-events-overlap",
            )
        notes.append(Note(overlap, code="operators-overlap"))
    rows = gpu.rows
    before, after, by_ns = _overlaps(gpu)
    if len(by_ns):
        names = timeline.strings
        pairs = Counter(zip(rows.name[before].tolist(), rows.name[after].tolist(), strict=True))
        most = "; ".join(
            f"{names[second]!r} within {names[first]!r} ({count})"
            for (first, second), count in pairs.most_common(_NAMED_PAIRS)
        )
        notes.append(
            Note(
                f"{len(by_ns)} of {len(gpu)} GPU operations begin before the previous operation of "
                f"their stream ends, by {by_ns.max()} ns at most; a replay keeps the overlap "
                f"(most frequent of {len(pairs)} pairs: {most})",
                code="gpu-operations-overlap",
            )
        )
    # Real traces have both: overlaps on a stream, and starts before the launch.
    early = gpu.launch_ns - rows.start_ns
    early = early[early > ROUNDING_NS]
    if len(early):
        notes.append(
            Note(
                f"{len(early)} of {len(gpu)} GPU operations start before they are launched, by "
                f"{early.max()} ns at most: the clocks of host and GPU disagree",
                code="gpu-starts-before-launch",
            )
        )
    return notes


def device_notes(gpu: GpuOps) -> list[Note]:
    """Return a note if one process used several GPUs, which a graph holds as one rank."""
    devices, counts = np.unique(gpu.rows.device, return_counts=True)
    if len(devices) < 2:
        return []
    operations = ", ".join(
        f"{count} on GPU {device}" for device, count in zip(devices, counts, strict=True)
    )
    return [
        Note(
            f"The process used {len(devices)} GPUs ({operations}), which the graph holds as one "
            "rank: a replay runs them at once, a simulated rank one after another.",
            code="several-gpus",
        )
    ]


def _overlaps(gpu: GpuOps) -> tuple[I64, I64, I64]:
    """Return neighbours of a stream that overlap, the earlier and the later, and by how much."""
    rows = gpu.rows
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    earlier, later = order[:-1], order[1:]
    same_stream = rows.device[earlier] == rows.device[later]
    same_stream &= rows.stream[earlier] == rows.stream[later]
    by_ns = rows.start_ns[earlier] + rows.duration_ns[earlier] - rows.start_ns[later]
    overlap = same_stream & (by_ns > ROUNDING_NS)
    return earlier[overlap], later[overlap], by_ns[overlap]


# The field names are the keys of `convert --json`, so they must not change.
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
        memory_events_outside: of these, those outside any operator; they count for the
            memory peak only.
        memory_events_elsewhere: dropped, on another device type (the host, in a GPU trace).
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
    memory_events_outside: int
    memory_events_elsewhere: int
    syncs: int
    syncs_dropped: dict[str, int]
    timing: str
    steps: int = 1
    steps_dropped: int = 0
    step_times_ns: tuple[int, ...] = ()
    notes: list[Note] = field(default_factory=list[Note])


def of_communication(
    kernel_calls: CommunicationKernels, measured: list[Communication], unplaced: list[RecordedCall]
) -> list[Note]:
    """Return notes on kernels with unknown calls, and on partly recorded calls.

    Args:
        kernel_calls: the calls of GPU operations.
        measured: the communication nodes of GPU operations.
        unplaced: recorded calls that are assumed blocking.
    """
    notes = [
        Note(
            f"{count} kernels that communicate ({ns / 1e6:.3f} ms) are kept as kernels, not as "
            f"communication: {reason}",
            code="communication-kept-as-kernels",
        )
        for reason, (count, ns) in kernel_calls.unknown.items()
    ]
    if kernel_calls.split:
        notes.append(
            Note(
                f"{kernel_calls.split} NCCL kernels that carried out several calls at once are "
                "one node per call, sends before receives, one after another, their time split "
                "by bytes",
                code="nccl-kernel-of-several-calls",
            )
        )
    # Kineto records `Src Rank` and `Dst Rank` only in newer versions of torch.
    peers = Counter(call.kind for call in measured if max(call.src, call.dst) == UNKNOWN)
    if without_peer := peers[Kind.SEND] + peers[Kind.RECV]:
        notes.append(
            Note(
                f"{without_peer} sends and receives have no peer: older versions of torch do not "
                "record it",
                code="p2p-without-peer",
            )
        )
    blocking = sum(call.communication.asynchronous for call in unplaced)
    if blocking:
        notes.append(
            Note(
                f"{blocking} asynchronous calls are assumed blocking: the trace does not show what "
                "they overlap",
                code="async-assumed-blocking",
            )
        )
    return notes


def of_unread(trace: KinetoTrace, et: ExecutionTrace) -> list[Note]:
    """Return notes on content of the files that was missing or could not be read."""
    notes: list[Note] = []
    if et.without_caller:
        notes.append(
            Note(
                f"{et.path.name}: {et.without_caller} nodes have a caller that is not in the file; "
                "they become roots of their call trees",
                code="et-caller-missing",
            )
        )
    if trace.lost_run:
        notes.append(
            Note(
                "distributedInfo is ignored: its rank is not within its world_size",
                code="distributed-info-ignored",
            )
        )
    if trace.unread:
        counts = ", ".join(f"{count} of category {cat!r}" for cat, count in trace.unread.items())
        notes.append(
            Note(
                f"events of unknown categories are dropped: {counts}",
                code="events-of-unknown-category",
            )
        )
    return notes


def of_waits(waits: Synchronizations) -> list[Note]:
    """Return notes on inferred waits for the GPU."""
    notes: list[Note] = []
    if waits.inferred:
        notes.append(
            Note(
                f"the event records of {waits.inferred} event waits are inferred from the order "
                "of the event ids; the driver does not report them",
                code="event-records-inferred",
            )
        )
    if waits.by_time:
        notes.append(
            Note(
                f"{waits.by_time} waits are inferred from call order and times: the trace has no "
                "synchronisation events (profile with enable_cuda_sync_events)",
                code="waits-inferred",
            )
        )
    return notes


def of_no_execution_trace(
    timeline: HostTimeline, recorded: list[RecordedCall], *, with_operators: bool
) -> list[Note]:
    """Return notes on what the graph lacks without an execution trace."""
    notes: list[Note] = []
    if unread := int(timeline.is_mark.sum()) - len(recorded):
        notes.append(
            Note(
                f"{unread} recorded communication calls are dropped: their arguments are in the "
                "execution trace, and none was given",
                code="calls-without-arguments",
            )
        )
    if not with_operators:
        notes.append(
            Note(
                "without an execution trace the graph holds only GPU operations: it lacks the "
                "delays by the host, so its replay is faster than the step; --operators keeps "
                "the operators",
                code="gpu-operations-only",
            )
        )
    return notes


def of_unattributed_calls(timeline: HostTimeline, kept: I64) -> list[Note]:
    """Return a note on launches outside operators that became nodes."""
    calls = int(unattributed_calls(timeline)[kept].sum())
    if not calls:
        return []
    return [
        Note(
            f"{calls} runtime calls that launch work outside any operator are host nodes",
            code="launches-outside-operators",
        )
    ]


def of_contradictions(
    graph: Graph, dropped: Counter[Reason], example: tuple[int, int] | None
) -> list[Note]:
    """Return a note on edges dropped because they closed a cycle; `example` is one of them."""
    if example is None:
        return []
    counts = ", ".join(
        f"{count} {reason.name.lower().replace('_', ' ')}" for reason, count in dropped.items()
    )
    source, target = (graph.node(index) for index in example)
    return [
        Note(
            f"{dropped.total()} edges are dropped because they close a cycle ({counts}): for "
            f"example, {target.name!r} would wait for {source.name!r} but started before it",
            code="edges-of-cycle-dropped",
        )
    ]
