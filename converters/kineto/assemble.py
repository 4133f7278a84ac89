"""Turn linked events into the nodes and edges of a graph.

Edges run forward in launch order (host events: in call order); where the data contradicts itself
so that edges make a circle, those that lead back in time are left out and counted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.calls import Recorded, recorded_calls
from onerank.converters.kineto.coalesced import Found, find_calls
from onerank.converters.kineto.columns import I64, OWN_CALL, ExecutionTrace, Mask
from onerank.converters.kineto.communication import Communication
from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.gloo import Runs
from onerank.converters.kineto.host import MODULE_SCOPE, HostTimeline
from onerank.converters.kineto.late import Late
from onerank.converters.kineto.launch_queue import LaunchQueue
from onerank.converters.kineto.leaves import leaves
from onerank.converters.kineto.memory import Memory
from onerank.converters.kineto.nodes import (
    Columns,
    call_columns,
    gpu_columns,
    operator_columns,
    run_columns,
)
from onerank.converters.kineto.report import Conversion
from onerank.converters.kineto.waiting import Waiting
from onerank.converters.kineto.waits import Waits
from onerank.converters.kineto.wiring import Wiring
from onerank.ir import UNKNOWN, Graph, Job, Kind, Nodes, Phase, ProcessGroup, Reason
from onerank.ir.kinds import DATA_LOADING
from onerank.ir.nodes import TEXT_COLUMNS


def assemble(
    *,
    timeline: HostTimeline,
    gpu: GpuOps,
    gloo: Runs,
    waits: Waits,
    queue: LaunchQueue,
    memory: Memory,
    job: Job,
    timing: str,
    et: ExecutionTrace,
    with_operators: bool = True,
) -> tuple[Graph, Conversion]:
    """Build the graph; the report counts what was linked and what was left out.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: what Gloo carried out.
        waits: synchronisations.
        queue: launches that waited for room.
        memory: bytes allocated and freed per host event.
        job: what is known of the job.
        timing: which file the times are of.
        et: the execution trace.
        with_operators: whether the operators are nodes; else GPU operations alone.
    """
    whole, found = gpu, find_calls(timeline, gpu)
    gpu = found.gpu
    marked = recorded_calls(timeline, gpu, et) if len(et.id) else []
    own = np.flatnonzero(gpu.in_mark < 0)
    kept = _kept_operators(timeline, cpu_only=not len(own))[: None if with_operators else 0]
    unrun = kept[_unrun(timeline, kept)] if not len(own) else kept[:0]
    inside = gloo.within(timeline)
    kept = np.union1d(np.setdiff1d(kept[~inside[kept]], unrun), gloo.callers())
    own = own[np.argsort(gpu.rows.start_ns[own], kind="stable")]
    work = Wiring(timeline, gpu, kept, own)
    streams, threads = work.streams(), work.threads()
    unplaced = (
        work.calls_on_streams(marked, streams)
        if len(own)
        else work.calls_on_threads(marked, gloo.found, threads)
    )
    work.order(streams, threads)
    waiting = Waiting(work, streams, threads, gpu, kept, own)
    syncs, idle = waiting.synchronise(waits, queue.waits)
    own_time_ns, late = work.own_time(waiting.blocked), Late()
    if not marked and len(own) == len(gpu):  # beside stand-ins nothing is late
        work.launch_order(own_time_ns, threads)
        late = waiting.late()

    threads_named = timeline.thread_numbers()
    host = operator_columns(timeline, kept, et, threads_named)
    host |= {"duration_ns": own_time_ns, "queued_ns": waiting.queued_ns}
    lost = work.memory(memory, host, cpu_only=not len(own)) if len(kept) else 0
    kernels, measured = gpu_columns(timeline, gpu, own, found.call, et)
    kernels["queued_ns"] = waiting.gpu_waits(late if with_operators else Late())
    ops = np.array([call.op for call in marked], dtype=np.int64)
    given = [call.communication for call in marked]
    gloo_calls = [run.communication for run in gloo.found]
    recorded = call_columns(timeline, ops, given, et) | work.placed(threads_named, to=len(marked))
    ran = run_columns(timeline, gloo.found, et) | work.placed(threads_named, begin=len(marked))
    columns, order = _in_order([host, kernels, recorded, ran], work.start_ns)
    place = np.argsort(order)
    edges, contradictions, example = work.edges.build(place)
    job = _with_groups(_with_step_time(job, work.span_ns), [*given, *gloo_calls, *measured])
    job = _with_blocks(job, memory, work.memory_node, place)
    graph = Graph(Nodes.of(len(order), **columns), edges, timeline.strings, job)

    backward = kept[timeline.phase[kept] == Phase.BACKWARD]
    emulation = whole.in_mark >= 0
    linked = whole.linked & ~emulation
    report = Conversion(
        gpu_ops=len(whole),
        gpu_ops_linked=whole.rules(linked),
        gpu_ops_unlinked=whole.rules(~linked & ~emulation),
        gpu_ops_left_out=(int(emulation.sum()), int(whole.rows.duration_ns[emulation].sum())),
        host_ops=int(timeline.rows.is_operator.sum()),
        host_ops_kept=int(timeline.rows.is_operator[kept].sum()),
        host_ops_without_record=int((timeline.rows.is_operator & (timeline.et < 0))[kept].sum()),
        host_ops_left_out=_left_out(timeline, kept, unrun, inside, with_operators=with_operators),
        communication=len(given) + len(gloo_calls) + len(measured),
        backward_ops=len(backward),
        backward_ops_with_module=int((timeline.module[backward] != 0).sum()),
        memory_events=memory.events,
        memory_events_outside=memory.outside,
        memory_events_elsewhere=memory.elsewhere,
        syncs=syncs,
        syncs_left_out=dict(waits.unused + idle),
        timing=timing,
    )
    report.notes.extend(
        [
            *_of_communication(found, measured, unplaced),
            *_of_no_execution_trace(timeline, marked, with_operators=with_operators),
            *gloo.notes(),
            *_of_own_calls(timeline, kept),
            *late.notes(gpu.rows.take(own), timeline.strings, len(kept), replayed=with_operators),
        ]
    )
    if lost:
        report.notes.append(f"{lost} bytes allocated or freed on threads without operators")
    queue = replace(queue, waits=tuple(waiting.queued))
    report.notes.extend([*_of_waits(waits), *(queue.notes() if with_operators else [])])
    if example is not None:
        report.notes.append(_contradiction(graph, contradictions, example))
    return graph, report


def _of_communication(
    found: Found, measured: list[Communication], unplaced: list[Recorded]
) -> list[str]:
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


def _of_waits(waits: Waits) -> list[str]:
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


def _of_no_execution_trace(
    timeline: HostTimeline, marked: list[Recorded], *, with_operators: bool
) -> list[str]:
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


def _contradiction(graph: Graph, left_out: Counter[Reason], example: tuple[int, int]) -> str:
    counts = ", ".join(
        f"{count} {reason.name.lower().replace('_', ' ')}" for reason, count in left_out.items()
    )
    source, target = (graph.node(index) for index in example)
    return (
        f"{left_out.total()} edges are left out, since the trace contradicts itself there "
        f"({counts}): {target.name!r} started before {source.name!r}, for one, which it would have "
        "to wait for"
    )


def _kept_operators(timeline: HostTimeline, *, cpu_only: bool) -> I64:
    loading = np.flatnonzero(timeline.named(lambda name: name.startswith(DATA_LOADING)))
    if cpu_only:
        return np.union1d(np.array(leaves(timeline), dtype=np.int64), loading)
    chosen = timeline.rows.is_operator | _own_calls(timeline)
    chosen &= (timeline.in_mark < 0) & ~timeline.is_wait
    return np.union1d(np.flatnonzero(chosen), loading)


def _of_own_calls(timeline: HostTimeline, kept: I64) -> list[str]:
    calls = int(_own_calls(timeline)[kept].sum())
    if not calls:
        return []
    return [f"{calls} runtime calls that launch outside of any operator are nodes of the host"]


def _own_calls(timeline: HostTimeline) -> Mask:
    return timeline.rows.event_index == OWN_CALL


def _unrun(timeline: HostTimeline, kept: I64) -> Mask:
    """Return which kept operators only began, bool[n].

    torch.utils.checkpoint ends a recomputation by an exception once it has what backward asks for:
    the operator that was beginning leaves an event, and no record in the execution trace.
    """
    unrecorded = (timeline.et[kept] < 0) & (timeline.phase[kept] == Phase.BACKWARD)
    if not unrecorded.any():
        return unrecorded
    scope = timeline.nearest(timeline.named(lambda name: name.startswith(MODULE_SCOPE)))
    return unrecorded & (scope[kept] >= 0)


def _left_out(
    timeline: HostTimeline, kept: I64, unrun: I64, in_gloo: Mask, *, with_operators: bool
) -> dict[str, int]:
    left = timeline.rows.is_operator.copy()
    left[kept] = left[unrun] = False
    recorder = left & ((timeline.in_mark >= 0) | timeline.is_wait)
    other = "not a leaf, a view or free" if with_operators else "no execution trace is given"
    counts = {
        other: int((left & ~recorder & ~in_gloo).sum()),
        "emulates communication": int(recorder.sum()),
        "part of a call by Gloo": int((left & ~recorder & in_gloo).sum()),
        "begun only: a recomputed checkpoint had what backward asked for": len(unrun),
    }
    return {reason: count for reason, count in counts.items() if count}


def _with_groups(job: Job, calls: Iterable[Communication]) -> Job:
    """Add the groups that calls name and the job does not know."""
    known = {group.name: group for group in job.groups}
    for call in calls:
        if call.group and call.group not in known and call.group_ranks:
            known[call.group] = ProcessGroup(call.group, call.group_ranks)
    return msgspec.structs.replace(job, groups=tuple(known.values()))


def _with_step_time(job: Job, span_ns: int) -> Job:
    """Take the time from the first start to the last end where the job tells of no step's.

    A replay is held against it.
    """
    if job.measurement.profiled_step_ns:
        return job
    measurement = msgspec.structs.replace(job.measurement, profiled_step_ns=span_ns)
    return msgspec.structs.replace(job, measurement=measurement)


def _with_blocks(job: Job, memory: Memory, node: dict[int, int], place: I64) -> Job:
    """Add what the step did with memory, block by block.

    Args:
        job: the job so far.
        memory: the blocks.
        node: host event -> node that answers for what it allocated or freed.
        place: number of each node in the graph.
    """
    if memory.blocks is None:
        return job
    node_of = {index: int(place[number]) for index, number in node.items()}
    log = memory.blocks.log(memory.events, memory.peak_reserved_bytes, node_of)
    measurement = msgspec.structs.replace(job.measurement, memory=log)
    return msgspec.structs.replace(job, measurement=measurement)


def _in_order(parts: list[Columns], start: I64) -> tuple[dict[str, npt.NDArray[Any]], I64]:
    """Join the columns, ordered by start; return them and the number of each node.

    Time starts at zero.
    """
    order = np.argsort(start, kind="stable")
    sizes = [len(part["kind"]) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part)
    empty = Nodes.of(0)
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in names:
        dtype = getattr(empty, name).dtype
        default = _default(name)
        pieces = [
            part.pop(name).astype(dtype, copy=False)
            if name in part
            else np.full(size, default, dtype=dtype)
            for part, size in zip(parts, sizes, strict=True)
        ]
        columns[name] = np.concatenate(pieces)[order]
    columns["id"] = np.arange(len(order), dtype=np.uint64)
    columns["start_ns"] = start[order] - (start[order[0]] if len(order) else 0)
    return columns, order


def _default(name: str) -> Any:
    return 0 if name in TEXT_COLUMNS else Nodes.of(1).__getattribute__(name)[0]
