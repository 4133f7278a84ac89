"""Collectives and point-to-point calls of a trace, from recorded arguments, not kernel names.

There are two sources: the capture's marks (`onerank::comm`, whose execution-trace node carries the
whole call as JSON), and NCCL's arguments on the kernels of a real distributed run.

Coalesced NCCL calls need care. Between `ncclGroupStart` and `ncclGroupEnd` each call leaves a
`record_param_comms` event and launches nothing; one kernel without arguments follows at the end of
the group. It runs the preceding calls of the same thread that launched nothing.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Literal, TypeVar

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline, named
from onerank.converters.sources.kineto.link.link_kernels import (
    KERNEL_CATEGORY,
    NCCL_KERNEL,
    GpuOps,
)
from onerank.converters.sources.kineto.read.schema import MOST_RANKS, Args
from onerank.converters.sources.kineto.read.trace_columns import NO_CALL, ExecutionTrace
from onerank.ir import UNKNOWN, Collective, Kind, Phase
from onerank.ir.all_to_all import AllToAllBuffer, exchanged_bytes
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.nodes import ROOT_COLUMNS

# torch 2.15 adds names for collectives of one tensor (`all_gather_single`, ...) to the old ones.
NCCL_NAMES = {
    "allreduce": Collective.ALL_REDUCE,
    "allreduce_coalesced": Collective.ALL_REDUCE,
    "all_reduce": Collective.ALL_REDUCE,
    "allreduce_sparse": Collective.ALL_REDUCE,
    "reduce": Collective.REDUCE,
    "_reduce_oop": Collective.REDUCE,
    "allgather": Collective.ALL_GATHER,
    "all_gather": Collective.ALL_GATHER,
    "_allgather_base": Collective.ALL_GATHER,
    "allgather_coalesced": Collective.ALL_GATHER,
    "all_gather_single": Collective.ALL_GATHER,
    "all_gather_single_coalesced": Collective.ALL_GATHER,
    "allgather_into_tensor_coalesced": Collective.ALL_GATHER,
    "gather": Collective.GATHER,
    "gather_single": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "broadcast": Collective.BROADCAST,
    "_broadcast_oop": Collective.BROADCAST,
    "all_to_all": Collective.ALL_TO_ALL,
    "all_to_allv": Collective.ALL_TO_ALL,
    "alltoall": Collective.ALL_TO_ALL,
    "alltoall_base": Collective.ALL_TO_ALL,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "reduce_scatter_coalesced": Collective.REDUCE_SCATTER,
    "reduce_scatter_single": Collective.REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER,
    "barrier": Collective.BARRIER,
}

POINT_TO_POINT = {"send": Kind.SEND, "recv": Kind.RECV}

DTYPE_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1,
    "Float8_e5m2fnuz": 1, "Float8_e8m0fnu": 1, "Float4_e2m1fn_x2": 1, "Short": 2, "UInt16": 2,
    "Half": 2, "BFloat16": 2, "Int": 4, "UInt32": 4, "Float": 4, "ComplexHalf": 4, "Long": 8,
    "UInt64": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip

_MOST_ELEMENTS = 1 << 50

# Callers above a call that are searched for the operator that issued it; torch has about 5.
_MAX_CALLERS = 64

_ROOTED = frozenset({"c10d::broadcast_", "c10d::scatter_", "c10d::reduce_", "c10d::gather_"})

_T = TypeVar("_T")


class WaitRecord(msgspec.Struct, frozen=True):
    """A recorded wait, as `capture.fake_world.async_work` writes it into the execution trace."""

    sequence: int


class CallRecord(msgspec.Struct, frozen=True):
    """A recorded call, as `onerank.capture.fake_world.recorder` writes it into the execution trace.

    The group's ranks are in the job; older captures repeat them here.
    """

    sequence: int
    collective: str
    group: str
    bytes: int
    group_ranks: tuple[int, ...] = ()
    peer: int | None = None
    tag: int | None = None
    asynchronous: bool = False
    phase: Literal["forward", "backward"] | None = None
    micro_batch: int | None = None
    symmetric: bool = False
    exchanged_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Communication:
    """Columns of a communication node, and its place in the step.

    `group_ranks` is empty and `sequence` is UNKNOWN if not recorded. `src` and `dst` are the peer
    of a send or receive, or a collective's root. `phase` and `micro_batch` are known for sends and
    receives of pipeline stages. `symmetric`: as in `CommCall`. `exchanged`: as in the column
    `exchanged_bytes`.
    """

    kind: Kind
    collective: Collective
    name: str
    bytes: int
    group: str
    group_ranks: tuple[int, ...]
    src: int = UNKNOWN
    dst: int = UNKNOWN
    tag: int = UNKNOWN
    asynchronous: bool = False
    sequence: int = UNKNOWN
    phase: Phase = Phase.NONE
    micro_batch: int = UNKNOWN
    symmetric: bool = False
    exchanged: int = UNKNOWN


def awaited_call(timeline: HostTimeline, op: int, et: ExecutionTrace) -> int:
    """Return the number of the call that a mark of a wait names.

    Raises:
        TraceError: the mark has no execution trace node, or its JSON names no call.
    """
    return _decode_mark(timeline, op, et, WaitRecord).sequence


def _decode_mark(timeline: HostTimeline, op: int, et: ExecutionTrace, kind: type[_T]) -> _T:
    """Read the record that a mark carries as its last argument."""
    row = int(timeline.et[op])
    if row < 0:
        raise TraceError(
            f"{et.path}: a {timeline.name(op)} mark (record id {timeline.rows.rf_id[op]}) has no "
            "execution trace node; the execution trace belongs to another run, or was cut: "
            "capture again",
            code="trace-mark-not-in-et",
        )
    try:
        values = msgspec.json.decode(timeline.strings[int(et.operands[0, row])])
        return msgspec.json.decode(values[-1], type=kind)
    except (msgspec.MsgspecError, TypeError, IndexError) as error:
        record = "a call" if kind is CallRecord else "a wait"
        raise TraceError(
            f"{et.path}: node {et.id[row]} ({timeline.name(op)}) does not hold {record} as JSON: "
            f"{error}",
            code="trace-mark-not-json",
        ) from error


def from_mark(timeline: HostTimeline, op: int, et: ExecutionTrace) -> Communication:
    """Read the call that a mark carries.

    Raises:
        TraceError: the mark has no execution trace node, or its JSON is not a call.
    """
    call = _decode_mark(timeline, op, et, CallRecord)
    peer = UNKNOWN if call.peer is None else call.peer
    kind = POINT_TO_POINT.get(call.collective, Kind.COLLECTIVE)
    if kind is Kind.COLLECTIVE and call.collective.upper() not in Collective.__members__:
        number = et.id[timeline.et[op]]
        raise TraceError(
            f"{et.path}: node {number} names an unknown collective {call.collective!r}",
            code="trace-unknown-collective",
        )
    is_collective = kind is Kind.COLLECTIVE
    collective = Collective[call.collective.upper()] if is_collective else Collective.NONE
    end = ROOT_COLUMNS.get(collective)
    return Communication(
        kind=kind,
        collective=collective,
        name=call.collective,
        bytes=call.bytes,
        group=call.group,
        group_ranks=call.group_ranks,
        src=peer if kind is Kind.RECV or end == "comm_src" else UNKNOWN,
        dst=peer if kind is Kind.SEND or end == "comm_dst" else UNKNOWN,
        tag=UNKNOWN if call.tag is None else call.tag,
        asynchronous=call.asynchronous,
        sequence=call.sequence,
        phase=Phase.NONE if call.phase is None else Phase[call.phase.upper()],
        micro_batch=UNKNOWN if call.micro_batch is None else call.micro_batch,
        symmetric=call.symmetric,
        exchanged=UNKNOWN if call.exchanged_bytes is None else call.exchanged_bytes,
    )


def inputs_of(timeline: HostTimeline, op: int, et: ExecutionTrace) -> list[object] | None:
    """Return the inputs of an event, None where they are not known."""
    row = int(timeline.et[op]) if op != NONE else NONE
    if row < 0:
        return None
    try:
        return msgspec.json.decode(timeline.strings[int(et.operands[0, row])], type=list[object])
    except msgspec.MsgspecError:
        return None


def find_root(timeline: HostTimeline, op: int, et: ExecutionTrace) -> int:
    """Return the root's index in its group, from the operator that issued the call.

    NCCL's arguments contain no root; c10d operators have it as their first integer input.
    """
    for _ in range(_MAX_CALLERS):
        if op == NONE:
            break
        if timeline.name(op) in _ROOTED:
            values = inputs_of(timeline, op, et) or []
            return next((value for value in values if type(value) is int), UNKNOWN)
        op = int(timeline.parent[op])
    return UNKNOWN


def with_root(call: Communication, root: int) -> Communication:
    """Return a collective with its root, if it has one.

    Args:
        call: the call.
        root: the root's index in its group, UNKNOWN if not recorded.
    """
    if call.collective not in ROOT_COLUMNS or not 0 <= root < len(call.group_ranks):
        return call
    rank = call.group_ranks[root]
    if ROOT_COLUMNS[call.collective] == "comm_src":
        return replace(call, src=rank)
    return replace(call, dst=rank)


def from_kernel(
    place: str, kernel: str, args: Args, groups: Mapping[tuple[str, str], str]
) -> Communication:
    """Read NCCL's arguments of a kernel; a collective's root is not among them.

    Args:
        place: file and kernel, for messages.
        kernel: its name.
        args: its arguments.
        groups: label of a group, by its name and description.

    Raises:
        TraceError: the arguments name a collective or dtype that is not known, or hold a number
            that is no rank or no size.
    """
    # Checked first: `_ranks` lists the whole group, so a damaged number would take all memory.
    for field, number, most in (
        ("In msg nelems", args.in_elements, _MOST_ELEMENTS),
        ("Out msg nelems", args.out_elements, _MOST_ELEMENTS),
        ("Group size", args.group_size, MOST_RANKS),
        ("Global rank start", args.first_rank, MOST_RANKS),
        ("Global rank stride", args.rank_stride, MOST_RANKS),
        ("Src Rank", args.source, MOST_RANKS),
        ("Dst Rank", args.destination, MOST_RANKS),
    ):
        if not UNKNOWN <= number <= most:
            raise TraceError(
                f"{place} has a {field!r} of {number}: expected {UNKNOWN} to {most}",
                code="trace-number-too-large",
            )
    name = args.collective.lower()
    kind = POINT_TO_POINT.get(name, Kind.COLLECTIVE)
    if kind is Kind.COLLECTIVE and name not in NCCL_NAMES:
        raise TraceError(
            f"{place} carries an unknown collective {args.collective!r}",
            code="trace-unknown-collective",
        )
    if args.dtype not in DTYPE_BYTES:
        raise TraceError(
            f"{place} communicates an unknown dtype {args.dtype!r}", code="trace-unknown-dtype"
        )
    collective = NCCL_NAMES.get(name, Collective.NONE)
    return Communication(
        kind=kind,
        collective=collective,
        name=kernel,
        bytes=args.in_elements * DTYPE_BYTES[args.dtype],
        group=groups[args.group_name, args.group_description],
        group_ranks=_ranks(args),
        src=args.source if kind is Kind.RECV else UNKNOWN,
        dst=args.destination if kind is Kind.SEND else UNKNOWN,
        exchanged=_exchanged(args) if collective is Collective.ALL_TO_ALL else UNKNOWN,
    )


def _exchanged(args: Args) -> int:
    """Return what a rank exchanges in an all-to-all of unequal parts; UNKNOWN if not recorded."""
    ranks, rank = args.group_size, args.group_rank
    sent, received = _rows(args.in_splits), _rows(args.out_splits)
    if sent is None or received is None or args.out_elements < 0 or not 0 <= rank < ranks:
        return UNKNOWN
    if not {len(sent), len(received)} <= {0, ranks} or min((*sent, *received), default=0) < 0:
        return UNKNOWN
    item = DTYPE_BYTES[args.dtype]
    exchanged = exchanged_bytes(
        AllToAllBuffer(args.in_elements * item, sent),
        AllToAllBuffer(args.out_elements * item, received),
        rank,
        ranks,
    )
    return UNKNOWN if exchanged is None else exchanged


def _rows(splits: str) -> list[int] | None:
    """Return the rows for each rank, [] for equal parts; None if Kineto cut the list with `...`."""
    try:
        return msgspec.json.decode(splits or "[]", type=list[int])
    except msgspec.DecodeError:
        return None


def _ranks(args: Args) -> tuple[int, ...]:
    """Return the ranks of a call's group; Kineto cuts a long list with `...`, then by stride."""
    try:
        ranks = tuple(msgspec.json.decode(args.group_ranks, type=list[int]))
    except msgspec.DecodeError:
        ranks = ()
    if ranks or args.first_rank < 0 or args.rank_stride < 1:
        return ranks
    end = args.first_rank + args.group_size * args.rank_stride
    return tuple(range(args.first_rank, end, args.rank_stride))


# Kernels of libraries that exchange data without torch's knowledge: NVSHMEM, DeepEP. They matter:
# 113 of the 244 ms of GPU time of a DualPipe step are kernels of DeepEP.
_OTHER_LIBRARIES = re.compile(r"nvshmem|\bdeep_ep::|\bep::(intra|inter)node", re.IGNORECASE)

_NO_LAUNCH = frozenset({"wait", "init", "barrier"})


@dataclass(frozen=True, slots=True)
class CommunicationKernels:
    """The communication of GPU operations.

    Attributes:
        gpu: the GPU operations. An operation that runs calls of several kinds appears once per
            kind, in sequence, with its duration split in proportion to bytes, exact to the
            nanosecond.
        call: index of each operation's call in `timeline.calls`, NO_CALL for none, int64[n].
        split: kernels that were split.
        unknown: kernels that communicate without a recorded call: count and time, by reason.
    """

    gpu: GpuOps
    call: I64
    split: int
    unknown: dict[str, tuple[int, int]]


def find_calls(timeline: HostTimeline, gpu: GpuOps) -> CommunicationKernels:
    """Find the call that each GPU operation runs.

    Calls of one kind that ran as one kernel are added up to one call. Sends and receives
    (`batch_isend_irecv`) stay separate calls, sends first.
    """
    rows, host = gpu.rows, timeline.rows
    kernel = rows.category == KERNEL_CATEGORY
    call = rows.call.copy()
    linked = np.flatnonzero(kernel & (gpu.operator >= 0) & (call == NO_CALL))
    # RCCL's kernels carry no arguments; the `record_param_comms` event that launched them does.
    call[linked] = host.call[gpu.operator[linked]]
    nccl = named(rows.name, timeline.strings, lambda name: bool(NCCL_KERNEL.match(name)))
    open_kernels = np.flatnonzero(nccl & kernel & (call == NO_CALL) & (gpu.in_mark < 0))
    others = named(rows.name, timeline.strings, lambda name: bool(_OTHER_LIBRARIES.search(name)))
    others &= kernel & (call == NO_CALL)
    unknown = _count_unknown(
        rows.duration_ns[others], "the library (NVSHMEM, DeepEP) reports nothing to torch"
    )
    if not len(open_kernels):
        return CommunicationKernels(gpu, call, 0, unknown)
    waiting = _pending_calls(timeline, gpu, call != NO_CALL)
    taken = Counter[int]()  # thread -> number of its calls that earlier kernels ran
    multiple: dict[int, list[Args]] = {}
    unmatched: list[int] = []
    for kernel_row in open_kernels.tolist():  # in the order of their launch
        thread = int(gpu.thread[kernel_row])
        calls, begin = waiting.get(thread, []), taken[thread]
        until = bisect_right(calls, int(gpu.launch_ns[kernel_row]), lo=begin, key=lambda c: c[0])
        kernel_calls = _merge_calls([timeline.calls[place] for _, place in calls[begin:until]])
        taken[thread] = until
        if not kernel_calls:
            unmatched.append(kernel_row)
            continue
        call[kernel_row] = len(timeline.calls)
        timeline.calls.extend(kernel_calls)
        if len(kernel_calls) > 1:
            multiple[kernel_row] = kernel_calls
    reason = "neither the NCCL kernel nor a call before it records arguments"
    unknown = _count_unknown(rows.duration_ns[unmatched], reason) | unknown
    if not multiple:
        return CommunicationKernels(gpu, call, 0, unknown)
    return _split(gpu, call, multiple, unknown)


def _count_unknown(duration_ns: I64, reason: str) -> dict[str, tuple[int, int]]:
    return {reason: (len(duration_ns), int(duration_ns.sum()))} if len(duration_ns) else {}


def _split(
    gpu: GpuOps, call: I64, multiple: dict[int, list[Args]], unknown: dict[str, tuple[int, int]]
) -> CommunicationKernels:
    """Put as many rows in the place of a kernel as it has calls."""
    counts = np.ones(len(gpu), dtype=np.int64)
    counts[list(multiple)] = [len(calls) for calls in multiple.values()]
    index: I64 = np.repeat(np.arange(len(gpu)), counts)
    places, rows = call[index], gpu.rows.take(index)
    for kernel_row, begin in zip(
        multiple, (np.cumsum(counts) - counts)[list(multiple)], strict=True
    ):
        calls = multiple[kernel_row]
        parts_of_kernel = slice(int(begin), int(begin) + len(calls))
        until = _shares(calls, int(gpu.rows.duration_ns[kernel_row]))
        places[parts_of_kernel] = call[kernel_row] + np.arange(len(calls))
        rows.start_ns[parts_of_kernel] += until[:-1]
        rows.duration_ns[parts_of_kernel] = np.diff(until)
    parts = {
        spec.name: getattr(gpu, spec.name)[index] for spec in fields(gpu) if spec.name != "rows"
    }
    return CommunicationKernels(GpuOps(rows=rows, **parts), places, len(multiple), unknown)


def _shares(calls: list[Args], duration_ns: int) -> I64:
    """Return when each call's share of a kernel's time is over, the first at 0, int64[n + 1]."""
    weights = [args.in_elements * DTYPE_BYTES.get(args.dtype, 1) for args in calls]
    total = sum(weights)
    if total <= 0:
        weights, total = [1] * len(calls), len(calls)
    return np.array([duration_ns * part // total for part in accumulate(weights, initial=0)])


def _pending_calls(
    timeline: HostTimeline, gpu: GpuOps, done: Mask
) -> dict[int, list[tuple[int, int]]]:
    """Return the start and place of each thread's calls that launched nothing, in order."""
    rows = timeline.rows
    launched = np.zeros(len(timeline), dtype=bool)
    launched[gpu.operator[done & (gpu.operator >= 0)]] = True
    pending: dict[int, list[tuple[int, int]]] = {}
    for index in np.flatnonzero((rows.call != NO_CALL) & ~launched).tolist():
        place = int(rows.call[index])
        args = timeline.calls[place]
        # In a group of one rank NCCL launches nothing.
        if args.collective.lower() not in _NO_LAUNCH and args.group_size != 1:
            entry = int(rows.start_ns[index]), place
            pending.setdefault(int(rows.thread[index]), []).append(entry)
    return pending


def _merge_calls(calls: list[Args]) -> list[Args]:
    """Return calls that ran as one kernel, merged by kind, sends first."""
    merged: dict[object, Args] = {}
    for place, args in enumerate(calls):
        name = args.collective.lower()
        single = place if name in POINT_TO_POINT else NO_CALL
        key = (args.collective, args.dtype, args.group_name, single)
        before = merged.get(key)
        elements = args.in_elements + (before.in_elements if before else 0)
        merged[key] = msgspec.structs.replace(before or args, in_elements=elements)
        if before:
            # The splits are those of one call, so what all calls exchange is not known.
            merged[key] = msgspec.structs.replace(merged[key], out_elements=UNKNOWN)
    # Sends first: a simulator that waits for one receive at a time must not deadlock, whatever
    # order the ranks use.
    return sorted(merged.values(), key=lambda args: args.collective.lower() != "send")


# torch calls all groups that the script does not describe `undefined`.
_UNNAMED = ("", "undefined")


def labels(groups: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the labels of groups, by name and description: a unique description, else with name.

    torch names groups by number. Descriptions come from the script and may repeat.
    """
    names: dict[str, set[str]] = {}
    pairs = set(groups)
    for name, description in pairs:
        names.setdefault(description, set()).add(name)
    return {
        (name, described): described
        if described not in _UNNAMED and len(names[described]) == 1
        else f"{described} {name}"
        if described not in _UNNAMED
        else name
        for name, described in pairs
    }
