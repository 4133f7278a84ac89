"""Read a Kineto trace into columns, whole or cut to one `profiler.step()`.

Memory holds one piece of the file as typed records, and the columns built so far.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onerank.converters.sources.kineto.read.json_stream import ArrayFile, decode_raw
from onerank.converters.sources.kineto.read.schema import (
    Args,
    DeviceProperties,
    Distributed,
    Event,
    KinetoFile,
    read_distributed,
)
from onerank.converters.sources.kineto.read.trace_columns import (
    GPU_CATEGORIES,
    NO_CALL,
    GpuRows,
    HostRows,
    KinetoTrace,
    LaunchRows,
    MemoryRows,
    Rows,
    SyncRows,
    concatenated,
    last_of,
    pick,
)
from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, Mask, union_duration_ns, unique_values
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

_MOST_DIGITS = 20

# Other backends name the categories of their calls as CUDA does. torch 1.8 to 1.10 have names of
# their first profiler: `Runtime`, `Operator`, `Kernel`, `Memcpy` and `Memset`.
_BACKENDS = ("cuda", "hip", "xpu", "mtia", "privateuse1")

OPERATOR = "cpu_op"

LAUNCHES = frozenset(
    {f"{name}_{level}" for name in _BACKENDS for level in ("runtime", "driver")} | {"Runtime"}
)

SYNC = "cuda_sync"

MEMORY_EVENT = "[memory]"

FRAME = "python_function"

GPU = {name: place for place, name in enumerate(GPU_CATEGORIES)} | {
    "Kernel": 0, "Memcpy": 1, "Memset": 2,
}  # fmt: skip
"""Category -> place in GPU_CATEGORIES."""

_FIRST_OPERATOR = "Operator"  # annotations as well

# torch 1.8 gives annotations the category of operators; only these names distinguish them.
_ANNOTATIONS = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)")

HOST = frozenset({OPERATOR, "user_annotation", _FIRST_OPERATOR})

READ = HOST | LAUNCHES | GPU.keys() | {SYNC}

KNOWN = READ | {
    "", "Trace", FRAME, "gpu_user_annotation", "overhead", "cpu_instant_event",
    "cuda_profiler_range",
}  # fmt: skip
"""The categories that are read, and known categories without data for the graph."""


class _EventKind(msgspec.Struct, omit_defaults=True):
    """Phase, category and name of an event, of any JSON type."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""


# Other tools add events to a trace, with arguments of any type. An event that conversion does not
# read must not make the whole file invalid.
def replace_unreadable_event(event: bytes) -> bytes | None:
    """Return the kind of an event that conversion does not read, as JSON; None if it reads it."""
    try:
        kind = msgspec.json.decode(event, type=_EventKind)
    except msgspec.ValidationError:
        return None
    if str(kind.cat) in READ or kind.name == MEMORY_EVENT:
        return None
    return msgspec.json.encode(_EventKind(ph=str(kind.ph), cat=str(kind.cat)))


def is_operator(event: Event) -> bool:
    """Return whether an event of the host is an operator, not an annotation."""
    if event.cat == _FIRST_OPERATOR:
        return not event.name.startswith(_ANNOTATIONS)
    return event.cat == OPERATOR


@dataclass(slots=True)
class _Reader:
    """Turns events into columns, a piece at a time."""

    path: Path
    strings: StringTable
    with_operands: bool
    threads: dict[int | str, int] = field(default_factory=dict[int | str, int])
    same_thread: dict[int | str, int] = field(default_factory=dict[int | str, int])
    calls: list[Args] = field(default_factory=list[Args])
    sizes: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def host(self, events: list[Event]) -> HostRows:
        args = [event.args for event in events]
        start, duration = self._times(events)
        return HostRows(
            name=self._names(events),
            is_operator=np.array([is_operator(e) for e in events], dtype=bool),
            thread=self._threads(events),
            start_ns=start,
            end_ns=start + duration,
            rf_id=self._column(events, [a.rf_id for a in args], "Record function id"),
            external_id=self._external_ids(events, args),
            sequence=self._column(events, [a.sequence for a in args], "Sequence number"),
            forward_thread=self._column(events, [a.forward_thread for a in args], "Fwd thread id"),
            event_index=self._column(events, [a.event_index for a in args], "Ev Idx"),
            call=self._calls(args),
            operands=self._operands(args),
            stream=self._streams(events, args),
            python_calls=self.strings.encode(a.python_calls for a in args),
        )

    def launches(self, events: list[Event]) -> LaunchRows:
        args = [event.args for event in events]
        start, duration = self._times(events)
        return LaunchRows(
            name=self._names(events),
            kernel=self.strings.encode(a.kernel for a in args),
            thread=self._threads(events),
            start_ns=start,
            end_ns=start + duration,
            correlation=self._column(events, [a.correlation for a in args], "correlation"),
            external_id=self._external_ids(events, args),
        )

    def gpu(self, events: list[Event]) -> GpuRows:
        args = [event.args for event in events]
        start, duration = self._times(events)
        return GpuRows(
            name=self._names(events),
            category=np.array([GPU[event.cat] for event in events], dtype=np.int64),
            start_ns=start,
            duration_ns=duration,
            correlation=self._column(events, [a.correlation for a in args], "correlation"),
            external_id=self._external_ids(events, args),
            stream=self._streams(events, args),
            device=self._column(events, [a.device for a in args], "device"),
            grid=np.array([self._size(a.grid) for a in args], dtype=np.int32),
            block=np.array([self._size(a.block) for a in args], dtype=np.int32),
            bytes=self._column(events, [a.bytes for a in args], "bytes"),
            call=self._calls(args),
            graph_node=self._column(events, [a.graph_node for a in args], "graph node id"),
        )

    def syncs(self, events: list[Event]) -> SyncRows:
        args = [event.args for event in events]
        records = [a.wait_on_record for a in args]
        waited = [a.wait_on_event for a in args]
        return SyncRows(
            name=self._names(events),
            start_ns=self._times(events)[0],
            correlation=self._column(events, [a.correlation for a in args], "correlation"),
            stream=self._streams(events, args),
            wait_on_stream=self._column(events, [a.wait_on_stream for a in args], "wait_on_stream"),
            wait_on_record=self._column(events, records, "wait_on_cuda_event_record_corr_id"),
            wait_on_event=self._column(events, waited, "wait_on_cuda_event_id"),
        )

    def memory(self, events: list[Event]) -> MemoryRows:
        args = [event.args for event in events]
        # The file has unsigned addresses and the column is int64: subtract 2^64 from the upper
        # half.
        addresses = [a.memory_address - (a.memory_address >> 63 << 64) for a in args]
        return MemoryRows(
            thread=self._threads(events),
            start_ns=self._times(events)[0],
            event_index=self._column(events, [a.event_index for a in args], "Ev Idx"),
            bytes=self._column(events, [a.memory_bytes for a in args], "Bytes"),
            address=self._column(events, addresses, "Addr"),
            allocated=self._column(events, [a.memory_allocated for a in args], "Total Allocated"),
            reserved=self._column(events, [a.memory_reserved for a in args], "Total Reserved"),
            device_type=self._column(events, [a.memory_device_type for a in args], "Device Type"),
            stream=self._streams(events, args),
        )

    def _times(self, events: list[Event]) -> tuple[I64, I64]:
        # Times are microseconds with nanosecond decimals. Truncated to integers they lose GPU time:
        # 1.12% in mlcommons/chakra 1.0.0.
        start = np.rint(np.array([event.ts for event in events], dtype=np.float64) * 1000)
        duration = np.rint(np.array([event.dur for event in events], dtype=np.float64) * 1000)
        far = ~((np.abs(start) < 2**62) & (np.abs(duration) < 2**62))
        if far.any():
            event = events[int(np.argmax(far))]
            raise TraceError(
                f"{self.path}: event {event.name!r} starts at {event.ts} us and lasts {event.dur} "
                "us, expected less than 2^62 ns: record the trace again",
                code="trace-bad-time",
            )
        return start.astype(np.int64), duration.astype(np.int64)

    def _names(self, events: list[Event]) -> I32:
        return self.strings.encode(event.name for event in events)

    def _threads(self, events: list[Event]) -> I64:
        known = self.same_thread
        for tid in dict.fromkeys(event.tid for event in events):
            if tid in known:
                continue
            # Python refuses to convert thousands of digits; no thread's number has so many.
            is_number = isinstance(tid, str) and tid.isdecimal() and len(tid) < _MOST_DIGITS
            number = int(tid) if is_number else tid
            known[tid] = self.threads.setdefault(number, len(self.threads))
        return np.array([known[event.tid] for event in events], dtype=np.int64)

    def _external_ids(self, events: list[Event], args: list[Args]) -> I64:
        ids = [a.external_id or a.first_external_id for a in args]
        return self._column(events, ids, "External id")

    def _calls(self, args: list[Args]) -> I64:
        places = np.full(len(args), NO_CALL, dtype=np.int64)
        for place, event_args in enumerate(args):
            if event_args.collective:
                places[place] = len(self.calls)
                self.calls.append(event_args)
        return places

    def _operands(self, args: list[Args]) -> I32:
        if not self.with_operands:
            return np.zeros((len(args), 3), dtype=np.int32)
        texts = (raw for a in args for raw in (a.values, a.shapes, a.types))
        return self.strings.encode(decode_raw(self.path, texts)).reshape(-1, 3)

    def _size(self, size: list[int] | str | None) -> int:
        if not size:
            return 0
        if isinstance(size, str):
            return self.strings.intern(size)
        key = tuple(size)
        code = self.sizes.get(key)
        if code is None:
            code = self.sizes[key] = self.strings.intern(str(size))
        return code

    def _streams(self, events: list[Event], args: list[Args]) -> I64:
        try:
            return self._column(events, [int(a.stream) for a in args], "stream")
        except ValueError as error:
            raise TraceError(
                f"{self.path}: the stream of an event is not a number ({error}); "
                "record the trace again with torch.profiler",
                code="trace-bad-stream",
            ) from error

    def _column(self, events: list[Event], values: list[int], name: str) -> I64:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError as error:
            place = next(n for n, value in enumerate(values) if not -(2**63) <= value < 2**63)
            raise TraceError(
                f"{self.path}: event {events[place].name!r} has {name} {values[place]}, "
                f"expected a number below 2^63 = {2**63}",
                code="trace-number-too-large",
            ) from error


def load_kineto(
    path: Path,
    strings: StringTable | None = None,
    *,
    operands: bool = False,
    frames: re.Pattern[str] | None = None,
) -> KinetoTrace:
    """Read a Kineto trace, gzip-compressed or not.

    Args:
        path: the file.
        strings: table for its texts; None for a new one.
        operands: whether to read recorded operands (`record_shapes`).
        frames: pattern of the Python frames to read (`with_stack`); None for no frames.

    Raises:
        TraceError: not a Kineto trace; the message names the place.
    """
    reader = _Reader(path, StringTable() if strings is None else strings, operands)
    makers: dict[str, Callable[[list[Event]], Rows]] = {
        "host": reader.host,
        "launches": reader.launches,
        "gpu": reader.gpu,
        "syncs": reader.syncs,
        "memory": reader.memory,
        "frames": reader.host,
    }
    rows: dict[str, list[Rows]] = {kind: [] for kind in makers}
    run = _RunFields()
    unread = Counter[str]()
    count = 0
    expected = "a Kineto trace (an object with `traceEvents`)"
    for part in ArrayFile(
        path, "traceEvents", KinetoFile, expected, instead=replace_unreadable_event
    ):
        _check_durations(path, part.events, count)
        count += len(part.events)
        for kind, events in _group_by_kind(part.events, unread, frames).items():
            if events or not rows[kind]:
                rows[kind].append(makers[kind](events))
        run.read(part)
    ranks_of = run.ranks_of_groups()
    return KinetoTrace(
        path=path,
        strings=reader.strings,
        threads=list(reader.threads),
        calls=[_with_ranks(call, ranks_of) for call in reader.calls],
        device=run.devices[0] if run.devices else None,
        distributed=run.distributed,
        lost_run=run.lost,
        vllm_version=run.vllm_version,
        has_unread_frames=unread[FRAME] > 0,
        unread={cat: n for cat, n in unread.items() if cat not in KNOWN},
        **{kind: concatenated(pieces) for kind, pieces in rows.items()},  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class _RunFields:
    """What a trace says of its run, in fields that may come before or after the events.

    Attributes:
        devices: GPUs of the run.
        distributed: rank and process groups; None if not recorded.
        lost: whether a part has these and they cannot be read.
        vllm_version: "" if not recorded.
    """

    devices: list[DeviceProperties] = field(default_factory=list[DeviceProperties])
    distributed: Distributed | None = None
    lost: bool = False
    vllm_version: str = ""

    def read(self, part: KinetoFile) -> None:
        """Take over the fields that a part of the file has."""
        if isinstance(part.device_properties, list):
            self.devices += part.device_properties
        read = read_distributed(part.distributed)
        self.lost |= read is None and bool(bytes(part.distributed))
        # A part without the field must not replace the one that has it.
        self.distributed = read or self.distributed
        self.vllm_version = self.vllm_version or part.vllm_version_text

    def ranks_of_groups(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each process group by its name.

        Kineto shortens long lists of ranks in a call with `...`; `distributedInfo` has them whole.
        Groups that the script does not describe are all called `undefined`, so the name is the key.
        """
        groups = self.distributed.groups if self.distributed else ()
        # Reversed, so that the first of a name counts.
        return {group.name: group.ranks for group in reversed(groups)}


def _with_ranks(call: Args, ranks_of: Mapping[str, tuple[int, ...]]) -> Args:
    """Return a call with the ranks of its group, if it lacks some."""
    if call.group_ranks.endswith("]") and "..." not in call.group_ranks:
        return call
    ranks = ranks_of.get(call.group_name, ())
    return msgspec.structs.replace(call, group_ranks=str([*ranks])) if ranks else call


def _check_durations(path: Path, events: list[Event], first: int) -> None:
    for number, event in enumerate(events):
        if event.dur < 0 and event.cat in READ:
            raise TraceError(
                f"{path}: event {first + number} ({event.name!r}) lasts {event.dur} us; "
                "a duration cannot be negative: record the trace again",
                code="trace-negative-duration",
            )


def _group_by_kind(
    events: Iterable[Event], unread: Counter[str], frames: re.Pattern[str] | None
) -> dict[str, list[Event]]:
    """Return the events that conversion reads, by kind; count the categories of others."""
    groups: dict[str, list[Event]] = {
        "host": [], "launches": [], "gpu": [], "syncs": [], "memory": [], "frames": []
    }  # fmt: skip
    takes = {
        **dict.fromkeys(HOST, groups["host"].append),
        **dict.fromkeys(LAUNCHES, groups["launches"].append),
        **dict.fromkeys(GPU, groups["gpu"].append),
        SYNC: groups["syncs"].append,
    }
    for event in events:
        if event.name == MEMORY_EVENT:
            groups["memory"].append(event)
        elif take := takes.get(event.cat):
            take(event)
        elif event.cat == FRAME and frames is not None:
            if frames.fullmatch(event.name):
                groups["frames"].append(event)
        # Other phases (flows, metadata) have no duration and are never work.
        elif event.ph == "X":
            unread[event.cat] += 1
    groups["host"] = [event for event in groups["host"] if event.ph == "X"]
    return groups


ALL = "all"

MEDIAN = "median"

_MARK = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True, slots=True)
class ProfilerStep:
    """A step of a trace: its number, and the host's times at its begin and end, nanoseconds."""

    number: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Time from begin to end."""
        return self.end_ns - self.start_ns


def steps(trace: KinetoTrace) -> list[ProfilerStep]:
    """Return the steps of a trace in order; none if profiler.step() was never called."""
    host = trace.host
    annotations = np.flatnonzero(~host.is_operator)
    codes = unique_values(host.name[annotations]).tolist()
    marks = {code: _MARK.fullmatch(trace.strings[code]) for code in codes}
    number = {code: int(mark.group(1)) for code, mark in marks.items() if mark}
    rows = annotations[np.isin(host.name[annotations], [*number])]
    # By code, then by row: steps of equal start keep this order.
    rows = rows[np.argsort(host.name[rows], kind="stable")]
    columns = (column[rows].tolist() for column in (host.name, host.start_ns, host.end_ns))
    marked = [
        ProfilerStep(number[code], start, end) for code, start, end in zip(*columns, strict=True)
    ]
    return sorted(marked, key=lambda step: step.start_ns)


def choose(path: Path, available: Sequence[ProfilerStep], step: str) -> ProfilerStep:
    """Return the selected step.

    Args:
        path: the trace.
        available: its steps.
        step: "median" for the step of median duration (of two, the shorter), or a step's number.

    Raises:
        TraceError: the trace has no such step, or none.
    """
    if not available:
        raise TraceError(
            f"{path}: step {step} requested, but the trace has no steps (no ProfilerStep "
            "annotation): call profiler.step() after each step, or convert the whole trace "
            "(--step all)",
            code="step-none-in-trace",
        )
    if step == MEDIAN:
        return sorted(available, key=lambda item: item.duration_ns)[(len(available) - 1) // 2]
    for item in available:
        if str(item.number) == step:
            return item
    numbers = ", ".join(str(item.number) for item in available)
    raise TraceError(
        f"{path}: no step {step}; expected one of {numbers}, {MEDIAN!r} or {ALL!r}",
        code="step-unknown",
    )


def cut(trace: KinetoTrace, step: ProfilerStep) -> tuple[KinetoTrace, list[Note]]:
    """Return the part of a trace that belongs to one step, and notes on what was cut off.

    Host events, launches and allocations belong to it if they begin within it; GPU operations if
    they were launched within it, whenever they ran.
    """
    launches = trace.launches.take(_within(trace.launches.start_ns, step))
    launched = last_of(launches.correlation, trace.gpu.correlation) >= 0
    known = last_of(trace.launches.correlation, trace.gpu.correlation) >= 0
    # A step's last kernels run after the host has left the step, so the launch decides. Without a
    # launch in the whole trace only the start remains.
    in_step = launched | (~known & _within(trace.gpu.start_ns, step))
    host = trace.host.take(_within(trace.host.start_ns, step))
    step_trace = replace(
        trace,
        host=host,
        launches=launches,
        gpu=trace.gpu.take(in_step),
        syncs=trace.syncs.take(last_of(launches.correlation, trace.syncs.correlation) >= 0),
        memory=trace.memory.take(_within(trace.memory.start_ns, step)),
    )
    text = (
        f"only step {step.number} ({step.duration_ns / 1e6:.3f} ms of host time): "
        f"{len(trace.host) - len(host)} host events and {int((~in_step).sum())} GPU operations of "
        "other steps are dropped"
    )
    notes = [Note(text, code="other-steps-dropped")]
    if earlier_ns := _earlier_work_ns(trace, step):
        text = (
            f"the GPU ran {earlier_ns / 1e6:.3f} ms of earlier steps after this step began, and "
            "the first launches waited for that: a replay keeps the wait"
        )
        notes.append(Note(text, code="step-waits-for-earlier"))
    return step_trace, notes


def _earlier_work_ns(trace: KinetoTrace, step: ProfilerStep) -> int:
    """Return the GPU time within the step of operations that were launched before it."""
    gpu, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, gpu.correlation)
    launched_ns = np.where(launch >= 0, pick(launches.start_ns, launch, 0), gpu.start_ns)
    end = gpu.start_ns + gpu.duration_ns
    running = (launched_ns < step.start_ns) & (end > step.start_ns)
    # Operations of several streams overlap, and their time counts once.
    return union_duration_ns(np.maximum(gpu.start_ns[running], step.start_ns), end[running])


def _within(start_ns: I64, step: ProfilerStep) -> Mask:
    return (start_ns >= step.start_ns) & (start_ns < step.end_ns)
