"""Select the events that become nodes, and lay them out as columns in order of start."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.collectives.gloo import Run, Runs
from onerank.converters.sources.kineto.collectives.nccl_kernels import (
    Communication,
    from_kernel,
    root_asked,
    with_root,
)
from onerank.converters.sources.kineto.link.cpu_leaf_ops import leaves
from onerank.converters.sources.kineto.link.host_timeline import MODULE_SCOPE, NONE, HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import (
    KERNEL_CATEGORY,
    KIND_OF_CATEGORY,
    GpuOps,
)
from onerank.converters.sources.kineto.link.operand_shapes import types_by_kernels
from onerank.converters.sources.kineto.read.process_groups import labels
from onerank.converters.sources.kineto.read.trace_columns import (
    GPU_CATEGORIES,
    I64,
    NO_CALL,
    OWN_CALL,
    ExecutionTrace,
    Mask,
    pick,
)
from onerank.ir import UNKNOWN, Evidence, Kind, Nodes, Phase, StringTable
from onerank.ir.enums import DATA_LOADING
from onerank.ir.nodes import ROOT_COLUMNS, TEXT_COLUMNS


@dataclass(frozen=True, slots=True)
class SelectedNodes:
    """Which events become nodes.

    Attributes:
        host: indices of the host events, ascending, int64[n].
        gpu: rows of the GPU operations, by start, int64[m].
        left_out: operators that are no nodes, by reason.
    """

    host: I64
    gpu: I64
    left_out: dict[str, int]


def choose_nodes(
    timeline: HostTimeline, gpu: GpuOps, gloo: Runs, *, with_operators: bool
) -> SelectedNodes:
    """Choose what becomes a node: all that ran on a GPU but emulates nothing, and operators.

    Where nothing ran on a GPU, the operators that compute do: the leaves.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: what Gloo carried out, whose operators are part of its calls.
        with_operators: whether operators are nodes.
    """
    ran = np.flatnonzero(gpu.in_mark < 0)
    ran = ran[np.argsort(gpu.rows.start_ns[ran], kind="stable")]
    cpu_only = not len(ran)
    kept = _operators(timeline, cpu_only=cpu_only)[: None if with_operators else 0]
    unrun = kept[_unrun(timeline, kept)] if cpu_only else kept[:0]
    inside = gloo.within(timeline)
    kept = np.union1d(np.setdiff1d(kept[~inside[kept]], unrun), gloo.callers())
    left_out = _left_out(timeline, kept, unrun, inside, with_operators=with_operators)
    return SelectedNodes(kept, ran, left_out)


def _operators(timeline: HostTimeline, *, cpu_only: bool) -> I64:
    loading = np.flatnonzero(timeline.named(lambda name: name.startswith(DATA_LOADING)))
    if cpu_only:
        return np.union1d(np.array(leaves(timeline), dtype=np.int64), loading)
    chosen = timeline.rows.is_operator | own_calls(timeline)
    chosen &= (timeline.in_mark < 0) & ~timeline.is_wait
    return np.union1d(np.flatnonzero(chosen), loading)


def own_calls(timeline: HostTimeline) -> Mask:
    """Return which host events are runtime calls outside of any operator, bool[n]."""
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


Columns = dict[str, npt.NDArray[Any]]

_MEMCPY = GPU_CATEGORIES.index("gpu_memcpy")

_OPERANDS = (
    "input_values",
    "input_shapes",
    "input_types",
    "output_values",
    "output_shapes",
    "output_types",
)

_TYPES = ("input_types", "output_types")


def operator_columns(
    timeline: HostTimeline, kept: I64, et: ExecutionTrace, threads: I64
) -> Columns:
    """Return the columns of the operators that are nodes, their durations whole.

    Args:
        timeline: the host events.
        kept: indices of the operators that are nodes, int64[n].
        et: the execution trace.
        threads: number of each thread of the trace.
    """
    rows = timeline.rows
    name = rows.name[kept]
    return {
        "name": name,
        "op": name,
        "kind": np.full(len(kept), Kind.HOST_OP, dtype=np.uint8),
        "thread": threads[rows.thread[kept]],
        "duration_ns": rows.end_ns[kept] - rows.start_ns[kept],
        "evidence": np.full(len(kept), Evidence.MEASURED, dtype=np.uint8),
        **_context(timeline, kept),
        **_operands(timeline, et, kept),
    }


def gpu_columns(
    timeline: HostTimeline, gpu: GpuOps, chosen: I64, calls: I64, et: ExecutionTrace, *, file: str
) -> tuple[Columns, list[Communication]]:
    """Return the columns of the chosen GPU operations, and the communication among them.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        chosen: rows of `gpu`, int64[n].
        calls: place in the trace's calls of what each row of `gpu` communicates, or NO_CALL.
        et: the execution trace.
        file: name of the file that the operations are of.

    Raises:
        TraceError: a kernel communicates by a collective or a dtype that is not known, or by a
            number that cannot be.
    """
    rows, operator = gpu.rows.take(chosen), np.where(gpu.linked, gpu.operator, NONE)[chosen]
    kernel = rows.category == KERNEL_CATEGORY
    call = calls[chosen]
    communicates = call != NO_CALL
    copies = rows.category == _MEMCPY
    columns: Columns = {
        "name": rows.name,
        "kind": KIND_OF_CATEGORY[rows.category],
        "stream": rows.stream,
        "duration_ns": rows.duration_ns,
        "evidence": np.full(len(chosen), Evidence.MEASURED, dtype=np.uint8),
        "grid": rows.grid,
        "block": rows.block,
        "bytes_written": np.where(kernel, UNKNOWN, rows.bytes),
        "bytes_read": np.where(kernel, UNKNOWN, np.where(copies, rows.bytes, 0)),
        "op": pick(timeline.rows.name, operator, 0),
        **_context(timeline, operator),
        **_operands(timeline, et, np.where(communicates, NONE, operator)),
    }
    kinds = [columns[name] for name in _TYPES]
    columns.update(zip(_TYPES, types_by_kernels(rows.name, kinds, timeline.strings), strict=True))
    columns["alone_ns"] = np.where(communicates, UNKNOWN, gpu.alone_ns[chosen])
    names = timeline.strings
    kernels: list[int] = rows.name[communicates].tolist()
    places: list[int] = call[communicates].tolist()
    groups = labels((one.group_name, one.group_description) for one in timeline.calls)
    given = [
        from_kernel(f"{file}: kernel {names[code]!r}", names[code], timeline.calls[place], groups)
        for code, place in zip(kernels, places, strict=True)
    ]
    asked: list[int] = operator[communicates].tolist()
    given = [
        with_root(one, root_asked(timeline, op, et)) if one.collective in ROOT_COLUMNS else one
        for one, op in zip(given, asked, strict=True)
    ]
    for name, values in communication_columns(given, names).items():
        default = Kind.KERNEL if name == "kind" else UNKNOWN
        whole = columns.get(name)
        if whole is None:
            whole = np.full(len(chosen), 0 if name == "group" else default, dtype=np.int64)
        columns[name] = whole.copy()
        columns[name][communicates] = values
    return columns, given


def communication_columns(given: list[Communication], strings: StringTable) -> Columns:
    """Return the columns that tell of communication."""
    return {
        "name": strings.encode(call.name for call in given),
        "kind": np.array([call.kind for call in given], dtype=np.uint8),
        "collective": np.array([call.collective for call in given], dtype=np.int64),
        "comm_bytes": np.array([call.bytes for call in given], dtype=np.int64),
        "group": strings.encode(call.group for call in given),
        "comm_src": np.array([call.src for call in given], dtype=np.int64),
        "comm_dst": np.array([call.dst for call in given], dtype=np.int64),
        "comm_tag": np.array([call.tag for call in given], dtype=np.int64),
    }


def call_columns(
    timeline: HostTimeline, ops: I64, given: list[Communication], et: ExecutionTrace
) -> Columns:
    """Return the columns of recorded calls, but for where and when they run.

    Args:
        timeline: the host events.
        ops: indices of their marks, int64[n].
        given: what was asked for.
        et: the execution trace.
    """
    strings = timeline.strings
    tensors: dict[str, list[int]] = {name: [] for name in _OPERANDS[:3]}
    for row in timeline.et[ops].tolist():
        for name, code in zip(tensors, et.operands[:3, row].tolist(), strict=True):
            tensors[name].append(strings.intern(_tensors(strings[code])))
    context = _context(timeline, ops)
    phase = np.array([call.phase for call in given], dtype=np.int64)
    told = phase != Phase.NONE  # of others by when they were issued
    number = np.array([call.micro_batch for call in given], dtype=np.int64)
    context["phase"] = np.where(told, phase, context["phase"])
    context["micro_batch"] = np.where(told, number, context["micro_batch"])
    return {
        **communication_columns(given, strings),
        **{name: np.array(codes, dtype=np.int32) for name, codes in tensors.items()},
        **context,
    }


def run_columns(timeline: HostTimeline, runs: list[Run], et: ExecutionTrace) -> Columns:
    """Return the columns of what Gloo carried out, but for where and when it ran."""
    ops = np.array([run.op for run in runs], dtype=np.int64)
    callers = np.array([run.caller for run in runs], dtype=np.int64)
    return {
        **communication_columns([run.communication for run in runs], timeline.strings),
        "op": pick(timeline.rows.name, callers, 0),
        **_context(timeline, callers),
        **_operands(timeline, et, ops),
    }


def _tensors(text: str) -> str:
    """Return the tensors of a recorded call; what follows them in its mark is the call as JSON."""
    return msgspec.json.encode(msgspec.json.decode(text)[:-1]).decode()


def _context(timeline: HostTimeline, ops: I64) -> Columns:
    """Return module, phase and micro-batch of host events; nothing is known of NONE."""
    return {
        "module": pick(timeline.module, ops, 0),
        "phase": pick(timeline.phase, ops, Phase.NONE),
        "micro_batch": pick(timeline.micro_batch, ops, UNKNOWN),
    }


def _operands(timeline: HostTimeline, et: ExecutionTrace, ops: I64) -> Columns:
    """Return the operands of host events: as the execution trace has them, or as the profiler."""
    rows = pick(timeline.et, ops, NONE)
    columns = zip(_OPERANDS, et.operands, timeline.operands, strict=True)
    return {
        name: np.where(rows >= 0, pick(recorded, rows, 0), pick(own, ops, 0))
        for name, recorded, own in columns
    }


def in_order(parts: list[Columns], start: I64) -> tuple[Columns, I64]:
    """Join the columns, ordered by start; return them and which row each node is, int64[n].

    Time starts at zero.
    """
    order = np.argsort(start, kind="stable")
    sizes = [len(part["kind"]) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part)
    empty = Nodes.of(0)
    columns: Columns = {}
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
