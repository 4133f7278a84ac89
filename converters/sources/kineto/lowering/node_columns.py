"""The columns of the nodes: of operators, GPU operations, recorded calls and Gloo calls.

Each kind of node has a function that returns its columns; `join_by_start` joins them. A column that
a kind lacks has its default.
"""

import re
from collections import Counter, defaultdict
from dataclasses import fields

import msgspec
import numpy as np

from onerank.converters.sources.kineto.collectives import (
    Communication,
    find_root,
    from_kernel,
    labels,
    with_root,
)
from onerank.converters.sources.kineto.gloo import GlooCall
from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.link.link_kernels import (
    KERNEL_CATEGORY,
    KIND_OF_CATEGORY,
    GpuOps,
)
from onerank.converters.sources.kineto.lowering.dependency_edges import Columns
from onerank.converters.sources.kineto.read.trace_columns import (
    GPU_CATEGORIES,
    NO_CALL,
    ExecutionTrace,
    pick,
)
from onerank.converters.sources.kineto.shape_inference.inputs import UNKNOWN_TYPE
from onerank.ir import (
    GPU_COMPUTE,
    UNKNOWN,
    Collective,
    Evidence,
    Kind,
    Nodes,
    Phase,
    StringTable,
)
from onerank.ir.arrays import I32, I64
from onerank.ir.dtypes import DTYPES, TENSOR_TYPES, split_types
from onerank.ir.nodes import (
    ROOT_COLUMNS,
    SYMMETRIC_BARRIER,
    SYMMETRIC_COPY,
    default_of,
    dtype_of,
)
from onerank.ir.python_calls import UNTRACKED, python_calls_of, python_calls_text

_MEMCPY = GPU_CATEGORIES.index("gpu_memcpy")

# Columns of operands; `input_strides` is one more that only an execution trace has.
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
    """Return the columns of the operators that are nodes, with total durations.

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
        "stream": rows.stream[kept],
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
        calls: index in `timeline.calls` of each GPU operation's call, or NO_CALL.
        et: the execution trace.
        file: name of the trace, for messages.

    Raises:
        TraceError: a kernel's collective or dtype is unknown, or an argument is out of range.
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
        # An NCCL kernel's size is in its arguments. Its operator may have issued several calls.
        **_operands(timeline, et, np.where(communicates, NONE, operator)),
    }
    kinds = [columns[name] for name in _TYPES]
    columns.update(zip(_TYPES, _types_by_kernels(rows.name, kinds, timeline.strings), strict=True))
    # A collective's time depends on the network: it has no uncontended time of its GPU.
    columns["uncontended_ns"] = np.where(communicates, UNKNOWN, gpu.uncontended_ns[chosen])
    kernels, issuers = rows.name[communicates], operator[communicates]
    communications = _communications(timeline, et, kernels, issuers, call[communicates], file=file)
    for name, values in _communication_columns(communications, timeline.strings).items():
        default = Kind.KERNEL if name == "kind" else UNKNOWN
        whole = columns.get(name)
        if whole is None:
            whole = np.full(len(chosen), 0 if name == "group" else default, dtype=np.int64)
        columns[name] = whole.copy()
        columns[name][communicates] = values
    return columns, communications


def _communications(
    timeline: HostTimeline,
    et: ExecutionTrace,
    kernels: I32,
    issuers: I64,
    calls: I64,
    *,
    file: str,
) -> list[Communication]:
    """Return the communication of kernels, with its root where the collective has one.

    Args:
        timeline: the host events.
        et: the execution trace.
        kernels: their names, int32[m].
        issuers: operators that issued them, or NONE, int64[m].
        calls: index in `timeline.calls` of each, int64[m].
        file: name of the trace, for messages.
    """
    names = timeline.strings
    places: list[int] = calls.tolist()
    # All calls of the window, not only those of chosen kernels: a label must be unique among them.
    groups = labels((args.group_name, args.group_description) for args in timeline.calls)
    communications = [
        from_kernel(f"{file}: kernel {names[code]!r}", names[code], timeline.calls[place], groups)
        for code, place in zip(kernels.tolist(), places, strict=True)
    ]
    return [
        with_root(comm, find_root(timeline, op, et)) if comm.collective in ROOT_COLUMNS else comm
        for comm, op in zip(communications, issuers.tolist(), strict=True)
    ]


def _communication_columns(communications: list[Communication], strings: StringTable) -> Columns:
    """Return the columns of communication."""
    return {
        "name": strings.encode(call.name for call in communications),
        "kind": np.array([call.kind for call in communications], dtype=np.uint8),
        "collective": np.array([call.collective for call in communications], dtype=np.int64),
        "comm_bytes": np.array([call.bytes for call in communications], dtype=np.int64),
        "exchanged_bytes": np.array([call.exchanged for call in communications], dtype=np.int64),
        "group": strings.encode(call.group for call in communications),
        "comm_src": np.array([call.src for call in communications], dtype=np.int64),
        "comm_dst": np.array([call.dst for call in communications], dtype=np.int64),
        "comm_tag": np.array([call.tag for call in communications], dtype=np.int64),
    }


def recorded_columns(
    timeline: HostTimeline, ops: I64, communications: list[Communication], et: ExecutionTrace
) -> Columns:
    """Return the columns of recorded calls, except their time and stream.

    Args:
        timeline: the host events.
        ops: indices of their marks, int64[n].
        communications: the recorded requests.
        et: the execution trace.
    """
    strings = timeline.strings
    tensors: dict[str, list[int]] = {name: [] for name in _OPERANDS[:3]}
    for row in timeline.et[ops].tolist():
        for name, code in zip(tensors, et.operands[:3, row].tolist(), strict=True):
            tensors[name].append(strings.intern(_tensor_arguments(strings[code])))
    context = _context(timeline, ops)
    phase = np.array([call.phase for call in communications], dtype=np.int64)
    # A pipeline stage names phase and micro-batch itself; other calls get them by issue time.
    named = phase != Phase.NONE
    number = np.array([call.micro_batch for call in communications], dtype=np.int64)
    context["phase"] = np.where(named, phase, context["phase"])
    context["micro_batch"] = np.where(named, number, context["micro_batch"])
    return {
        **_communication_columns(communications, strings),
        "op": strings.encode(_operator_of(call) for call in communications),
        **{name: np.array(codes, dtype=np.int32) for name, codes in tensors.items()},
        **context,
    }


def _operator_of(call: Communication) -> str:
    if not call.symmetric:
        return ""
    return SYMMETRIC_BARRIER if call.collective is Collective.BARRIER else SYMMETRIC_COPY


def gloo_columns(timeline: HostTimeline, calls: list[GlooCall], et: ExecutionTrace) -> Columns:
    """Return the columns of Gloo calls, except their time and thread."""
    ops = np.array([call.op for call in calls], dtype=np.int64)
    callers = np.array([call.caller for call in calls], dtype=np.int64)
    return {
        **_communication_columns([call.communication for call in calls], timeline.strings),
        "op": pick(timeline.rows.name, callers, 0),
        **_context(timeline, callers),
        **_operands(timeline, et, ops),
    }


def _tensor_arguments(text: str) -> str:
    """Return the tensors of a recorded call, without the last argument: the call as JSON."""
    return msgspec.json.encode(msgspec.json.decode(text)[:-1]).decode()


def _context(timeline: HostTimeline, ops: I64) -> Columns:
    """Return module, phase and micro-batch of host events; defaults for NONE."""
    return {
        "module": pick(timeline.module, ops, 0),
        "phase": pick(timeline.phase, ops, Phase.NONE),
        "micro_batch": pick(timeline.micro_batch, ops, UNKNOWN),
    }


def _operands(timeline: HostTimeline, et: ExecutionTrace, ops: I64) -> Columns:
    """Return the operands of host events, from the execution trace or else the profiler."""
    rows = pick(timeline.et, ops, NONE)
    *recorded, strides = et.operands
    columns = {
        name: np.where(rows >= 0, pick(of_trace, rows, 0), pick(of_profile, ops, 0))
        for name, of_trace, of_profile in zip(_OPERANDS, recorded, timeline.operands, strict=True)
    }
    return columns | {"input_strides": np.where(rows >= 0, pick(strides, rows, 0), 0)}


# torch's name of the range in which a subclass of Tensor runs an operator in Python.
_SUBCLASS = "PythonSubclass"

_ONE_DISPATCH = python_calls_text({"dtensor": 1})


def python_call_column(timeline: HostTimeline, start_ns: I64, kind: I64) -> I32:
    """Return for each node the calls of Python since the node before, int32[n].

    A capture without a device counts them. In a trace of a profiler, operators that a subclass of
    Tensor dispatches show as ranges; they count as DTensor's, the most common subclass.

    Args:
        timeline: the host events.
        start_ns: start of each node, ascending, int64[n].
        kind: kind of each node, int64[n].
    """
    calls = np.zeros(len(start_ns), dtype=np.int32)
    rows, strings = timeline.rows, timeline.strings
    codes = rows.python_calls.copy()
    subclass, one = strings.encode([_SUBCLASS, _ONE_DISPATCH])
    codes[rows.name == subclass] = one
    counted = np.flatnonzero(codes)
    on_gpu = np.isin(kind, GPU_COMPUTE).any()
    # On a GPU, operators are the host's nodes; without a device, communication is too.
    nodes = np.flatnonzero(kind == Kind.HOST_OP) if on_gpu else np.arange(len(kind))
    if not len(counted) or not len(nodes):
        return calls
    # Calls after the last node have no node that follows, and count for the last one.
    place = np.searchsorted(start_ns[nodes], rows.start_ns[counted])
    place = nodes[np.minimum(place, len(nodes) - 1)]
    # A mark is of one operator. That of a view, which is no node, marks nothing.
    own = start_ns[place] == rows.start_ns[counted]
    sums = defaultdict[int, Counter[str]](Counter)
    for node, code, is_own in zip(
        place.tolist(), codes[counted].tolist(), own.tolist(), strict=True
    ):
        counts = python_calls_of(strings[code])
        if not is_own:
            del counts[UNTRACKED]
        sums[node] += counts
    calls[list(sums)] = strings.encode(map(python_calls_text, sums.values()))
    return calls


def join_by_start(parts: list[Columns], start: I64) -> tuple[Columns, I64]:
    """Join the columns, ordered by start; return them and the row of each node, int64[n].

    Time starts at zero.
    """
    order = np.argsort(start, kind="stable")
    sizes = [len(part["kind"]) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part)
    specs = {spec.name: spec for spec in fields(Nodes)}
    columns: Columns = {}
    for name in names:
        dtype = dtype_of(specs[name])
        pieces = [
            part.pop(name).astype(dtype, copy=False)
            if name in part
            else np.full(size, default_of(specs[name]), dtype=dtype)
            for part, size in zip(parts, sizes, strict=True)
        ]
        columns[name] = np.concatenate(pieces)[order]
    columns["id"] = np.arange(len(order), dtype=np.uint64)
    columns["start_ns"] = start[order] - (start[order[0]] if len(order) else 0)
    return columns, order


# PyTorch's list kernels are templates, and their names have the arguments: `OpaqueType<bytes>` in
# aten/src/ATen/native/cuda/Shape.cu, the dtype as the functor's first argument in
# MultiTensorApply.cuh.
_CONCATENATION = re.compile(r"CatArrayBatchedCopy\w{0,64}<[^<]*OpaqueType<(\d{1,3})")

_FOREACH = "multi_tensor_apply_kernel<"

# Searched one after the other: in one pattern, a long name without a functor takes cubic time.
_FOREACH_LISTS = re.compile(r"Metadata<(\d{1,3})>")

_FOREACH_FUNCTOR = re.compile(r"\b(\w+)Functor<(.*)")

_TYPE_BY_BYTES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}

_STEPS = TENSOR_TYPES["float32"]  # fused optimizers take one more list: the step counts


def _types_by_kernels(names: I32, types: list[I32], strings: StringTable) -> list[I32]:
    """Return types with those of tensors in lists filled in, if the kernel's name shows them.

    A concatenation copies bytes of any meaning: its tensors become unsigned integers.

    Args:
        names: codes of the kernels' names, int32[n].
        types: codes of the JSON texts of the types of inputs, then of outputs, each int32[n].
        strings: the texts.
    """
    incomplete = [UNKNOWN_TYPE in text for text in strings.values]
    rows = np.flatnonzero(np.array(incomplete, dtype=np.bool_)[types[0]])
    if not len(rows):
        return types
    keys = np.column_stack([names[rows], *(column[rows] for column in types)])
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    types_filled = distinct[:, 1:].astype(np.int32)
    for number, key in enumerate(distinct.tolist()):
        name, *texts = (strings[code] for code in key)
        if kinds := _list_types(name):
            types_filled[number] = strings.encode([_fill_types(text, kinds) for text in texts])
    filled = [column.copy() for column in types]
    # `reshape`, since numpy 2.0 returns the inverse of an axis with two dimensions.
    for at, column in enumerate(filled):
        column[rows] = types_filled[place.reshape(-1), at]
    return filled


def _list_types(kernel: str) -> tuple[str, ...]:
    """Return the tensor type of each list, the last one repeated for more; () if unknown."""
    if match := _CONCATENATION.search(kernel):
        dtype = _TYPE_BY_BYTES.get(int(match[1]))
        return (TENSOR_TYPES[dtype],) if dtype else ()
    template = kernel.partition(_FOREACH)[2]
    lists = _FOREACH_LISTS.search(template)
    functor = _FOREACH_FUNCTOR.search(template, lists.end()) if lists else None
    if lists is None or functor is None:
        return ()
    arguments = [_tensor_type(text) for text in split_types(functor[2])[:2]]
    if not arguments[0]:
        return ()
    # The destination may have another type than the source.
    if functor[1] == "Copy":
        return tuple(arguments) if all(arguments) else ()
    same = (arguments[0],) * int(lists[1])
    return same + ((_STEPS,) if functor[1].startswith("Fused") else ())


def _tensor_type(argument: str) -> str:
    name = argument.strip()
    return TENSOR_TYPES[DTYPES[name][0]] if name in DTYPES else ""


def _fill_types(text: str, kinds: tuple[str, ...]) -> str:
    """Return a JSON list of types with the types of tensors in lists filled in."""
    if not text:
        return text
    filled, number = list[str](), 0
    for kind in msgspec.json.decode(text, type=list[str]):
        # Lists take the types in order; an optimizer's further lists repeat the last one.
        filled.append(kind.replace(UNKNOWN_TYPE, kinds[min(number, len(kinds) - 1)]))
        number += kind.startswith("GenericList[") and UNKNOWN_TYPE in kind
    return msgspec.json.encode(filled).decode()
