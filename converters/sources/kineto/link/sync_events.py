"""Synchronisation events: which stream or host call waits for which event record.

Drivers since CUDA 13 leave the stream and the record of a `cuda_sync` event open; the event id and
the times of runtime calls remain. torch creates an event when it first records it, and ids ascend
with creation. So for events created within the trace, records come in the order of ids. An event
older than the trace is assumed to be the event that the same thread recorded just before the wait.
Its stream is the stream on which that thread launched last. A communication stream waits for the
stream on which the thread last launched anything else: torch records that event on the stream of
the call's inputs.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import groups, named
from onerank.converters.sources.kineto.link.inferred_waits import InferredWait, StreamTimelines
from onerank.converters.sources.kineto.link.link_kernels import (
    CLOCK_NS,
    KERNEL_CATEGORY,
    is_communication,
)
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace, last_of
from onerank.ir.arrays import unique_values

RECORDS = frozenset({"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord"})

QUERIES = frozenset({"cudaEventQuery", "hipEventQuery"})

STREAM_WAITS = frozenset({"cudaStreamWaitEvent", "hipStreamWaitEvent"})


# A capture without a device counts ticks where a profiler has microseconds.
TICK_NS = 1000

NO_THREAD = -1
"""Thread of a wait in a capture without a device, in which one thread runs at a time."""


class EventRecords:
    """The event records of a trace, and the streams that threads launched on.

    Calls are identified by their row among the trace's launches.
    """

    def __init__(self, trace: KinetoTrace) -> None:
        calls, strings = trace.launches, trace.strings
        self._thread: list[int] = calls.thread.tolist()
        self._start: list[int] = calls.start_ns.tolist()
        # Without a correlation id no synchronisation event refers to the call.
        has_id = calls.correlation != 0
        recording = has_id & named(calls.name, strings, RECORDS.__contains__)
        waiting = has_id & named(calls.name, strings, STREAM_WAITS.__contains__)
        self._recording: list[bool] = recording.tolist()
        self._calls = self._ordered(np.flatnonzero(recording).tolist())
        self._by_thread: dict[int, list[int]] = defaultdict(list)
        for call in self._ordered(np.flatnonzero(recording | waiting).tolist()):
            self._by_thread[self._thread[call]].append(call)
        by_correlation = {
            correlation: call
            for call, correlation in enumerate(calls.correlation.tolist())
            if correlation
        }
        self._launches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        pairs = zip(trace.gpu.correlation.tolist(), trace.gpu.stream.tolist(), strict=True)
        for correlation, stream in pairs:
            launch = by_correlation.get(correlation)
            if launch is not None:
                self._launches[self._thread[launch]].append((self._start[launch], stream))
        self._communicating = _communication_streams(trace)
        self._before_other: dict[int, list[int]] = {}
        """Thread -> place of the last earlier launch on another stream for each launch, or -1."""
        for thread, launched in self._launches.items():
            launched.sort()
            before: list[int] = []
            for place, (_, stream) in enumerate(launched):
                same = place > 0 and launched[place - 1][1] == stream
                before.append(before[-1] if same else place - 1)
            self._before_other[thread] = before
        queries = named(calls.name, strings, QUERIES.__contains__)
        self._position_by_event = self._in_order(trace, by_correlation, queries.tolist())

    def _ordered(self, calls: list[int]) -> list[int]:
        return sorted(calls, key=self._start.__getitem__)

    def _in_order(
        self, trace: KinetoTrace, by_correlation: dict[int, int], queries: list[bool]
    ) -> dict[int, int]:
        """Return event id -> position of its record, the latest that order and waits allow.

        From the highest id down: a record lies before the event's first wait, and as many records
        before that of the next id as the ids are apart.
        """
        first: dict[int, int] = {}
        syncs = trace.syncs
        pairs = zip(syncs.correlation.tolist(), syncs.wait_on_event.tolist(), strict=True)
        for correlation, event in pairs:
            call = by_correlation.get(correlation)
            if call is None or queries[call]:
                continue
            if event >= 0:
                first[event] = min(first.get(event, self._start[call]), self._start[call])
        starts = [self._start[call] for call in self._calls]
        positions: dict[int, int] = {}
        ceiling, above = len(starts), max(first, default=0) + 1
        for event in sorted(first, reverse=True):
            position = min(bisect_right(starts, first[event]) - 1, ceiling - (above - event))
            if position < 0:
                # This event and the older ones were there before the trace began.
                break
            positions[event] = position
            ceiling, above = position, event
        return positions

    def record(self, event: int, wait: int) -> int:
        """Return the call that recorded the awaited event, -1 if unknown."""
        position = self._position_by_event.get(event)
        if position is not None:
            return self._calls[position]
        members = self._by_thread.get(self._thread[wait], [])
        place = bisect_right(members, self._start[wait], key=self._start.__getitem__) - 1
        while place >= 0 and members[place] == wait:
            place -= 1
        before = members[place] if place >= 0 else -1
        return before if before >= 0 and self._recording[before] else -1

    def stream(self, record: int, *, waiting: int | None) -> int | None:
        """Return the stream that `record` was called on, None if unknown.

        Args:
            record: the call.
            waiting: the stream that waits for it, None if the host does.
        """
        # A stage's backward runs on autograd's thread. So the thread that sends the gradient last
        # launched a receive, on another communication stream. With this receive as the send's
        # input, the send overtook the backward: a 1F1B step of 4 stages came out 8% short.
        passed = self._communicating if waiting in self._communicating else {waiting}
        thread = self._thread[record]
        launched = self._launches.get(thread, [])
        place = bisect_right(launched, self._start[record], key=lambda launch: launch[0]) - 1
        while place >= 0 and launched[place][1] in passed:
            place = self._before_other[thread][place]
        return launched[place][1] if place >= 0 else None


def _communication_streams(trace: KinetoTrace) -> set[int]:
    """Return the streams whose kernels all communicate."""
    gpu = trace.gpu
    communicates = named(gpu.name, trace.strings, is_communication)
    streams = [
        gpu.stream[(gpu.category == KERNEL_CATEGORY) & (communicates == chosen)]
        for chosen in (True, False)
    ]
    communicating, computing = (set(unique_values(chosen).tolist()) for chosen in streams)
    return communicating - computing


class WaitScope(Enum):
    """Scope that a blocking call waits for."""

    DEVICE = 0
    STREAM = 1


# Calls that hold the host back until a device or a stream is done.
_BLOCKING = {
    "cudaDeviceSynchronize": WaitScope.DEVICE,
    "hipDeviceSynchronize": WaitScope.DEVICE,
    "cuCtxSynchronize": WaitScope.DEVICE,
    "cudaStreamSynchronize": WaitScope.STREAM,
    "hipStreamSynchronize": WaitScope.STREAM,
    "cuStreamSynchronize": WaitScope.STREAM,
    "cudaMemcpy": WaitScope.STREAM,
    "hipMemcpy": WaitScope.STREAM,
    "hipMemcpyWithStream": WaitScope.STREAM,
}

# Parts of the names of copies that block their call: copies to host memory, or from pageable.
_HOST_COPIES = ("DtoH", "Pageable")

_UNKNOWN_EVENT = "wait for an event: the trace does not record which event"

_EVENT_WAITS = frozenset({"cudaEventSynchronize", "hipEventSynchronize", "cuEventSynchronize"})


@dataclass(frozen=True, slots=True)
class Wait:
    """A synchronisation: the waiter follows all operations launched before `horizon_ns`.

    Attributes:
        stream: stream waited for; None for all streams.
        horizon_ns: host time of the event record, or of the call.
        waiting_stream: stream that waits; None when the host does.
        thread: calling thread, a place in the trace's `threads`.
        start_ns: host time of the call.
        end_ns: host time at which the call returned.
    """

    stream: int | None
    horizon_ns: int
    waiting_stream: int | None
    thread: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Synchronizations:
    """The synchronisations of a trace.

    Attributes:
        used: the waits that become edges, in the order of their calls.
        inferred_waits: operations that waited for another stream's, inferred from times only.
        unused: unusable ones, by reason.
        inferred: number in `used` whose event record the trace does not name.
        by_time: number in `used` and `inferred_waits` inferred from calls and times, in a trace
            without synchronisation events.
    """

    used: list[Wait] = field(default_factory=list[Wait])
    inferred_waits: list[InferredWait] = field(default_factory=list[InferredWait])
    unused: Counter[str] = field(default_factory=Counter[str])
    inferred: int = 0
    by_time: int = 0


def synchronizations(trace: KinetoTrace) -> Synchronizations:
    """Return the synchronisations of the trace.

    If the profiler did not record them, return those of the host, inferred from runtime calls and
    times.
    """
    result = Synchronizations()
    syncs, calls = trace.syncs, trace.launches
    if not len(syncs):
        return _of_calls(trace)
    if not len(calls) and not len(trace.gpu):
        return _of_emulated_streams(trace)
    call_of = last_of(calls.correlation, syncs.correlation).tolist()
    record_of = last_of(calls.correlation, np.maximum(syncs.wait_on_record, 0)).tolist()
    queries = named(calls.name, trace.strings, QUERIES.__contains__)
    records: EventRecords | None = None
    names = trace.strings.decode(syncs.name)
    columns = (syncs.stream, syncs.wait_on_stream, syncs.wait_on_event)
    rows = zip(call_of, names, *(column.tolist() for column in columns), strict=True)
    for place, (call, name, sync_stream, waited_for, event) in enumerate(rows):
        if call < 0:
            result.unused["the call that waits is not in the trace"] += 1
            continue
        # `cudaEventQuery` returns at once, whatever the GPU does, and yet has a synchronisation
        # event.
        if queries[call]:
            result.unused["an event query does not wait"] += 1
            continue
        record: int = record_of[place]
        on_stream = name == "Stream Wait Event"
        waiting = sync_stream if on_stream else None
        # A `Stream Sync` names its stream in `stream`; only event waits have `wait_on_stream`.
        stream = waited_for if waited_for >= 0 else sync_stream
        if record < 0 and (on_stream or name == "Event Sync"):
            records = records or EventRecords(trace)
            record = records.record(event, call)
            if record < 0:
                result.unused["the trace does not identify the awaited event record"] += 1
                continue
            recorded = records.stream(record, waiting=waiting)
            if recorded is None:
                result.unused["a stream waits for work that it runs itself"] += 1
                continue
            stream = recorded
            result.inferred += 1
        result.used.append(
            Wait(
                stream=None if name == "Context Sync" or stream < 0 else stream,
                horizon_ns=int(calls.start_ns[record if record >= 0 else call]),
                waiting_stream=waiting,
                thread=int(calls.thread[call]),
                start_ns=int(calls.start_ns[call]),
                end_ns=int(calls.end_ns[call]),
            )
        )
    result.used.extend(_of_copies(trace))
    result.used.sort(key=lambda wait: wait.start_ns)
    return result


def _of_emulated_streams(trace: KinetoTrace) -> Synchronizations:
    """Return the waits of a capture without a device, which names the awaited tick itself."""
    syncs = trace.syncs
    columns = syncs.stream, syncs.wait_on_stream, syncs.wait_on_event, syncs.start_ns
    waits = [
        Wait(
            stream=awaited if awaited >= 0 else None,
            horizon_ns=until * TICK_NS,
            waiting_stream=stream if stream >= 0 else None,
            thread=NO_THREAD,
            start_ns=start_ns,
            end_ns=start_ns if stream >= 0 else start_ns + TICK_NS,
        )
        for stream, awaited, until, start_ns in zip(*(c.tolist() for c in columns), strict=True)
    ]
    return Synchronizations(used=sorted(waits, key=lambda wait: wait.start_ns))


# Time in such a call belongs to the GPU. Counted as the operator's, it would not shrink on a faster
# GPU: a TimesFormer step (162.8 ms, 158 of them on the GPU) kept its duration at twice the speed,
# and takes 87.1 ms with these waits.
def _of_copies(trace: KinetoTrace) -> list[Wait]:
    """Return the waits of calls for the copies that they launched themselves.

    A copy from or to memory that is not pinned keeps its call until it is done.
    """
    calls, gpu = trace.launches, trace.gpu
    call = last_of(calls.correlation, gpu.correlation)
    chosen = named(gpu.name, trace.strings, lambda name: any(part in name for part in _HOST_COPIES))
    rows = np.flatnonzero(chosen & (call >= 0))
    call = call[rows]
    ended = gpu.start_ns[rows] + gpu.duration_ns[rows]
    kept = (calls.start_ns[call] < ended) & (ended <= calls.end_ns[call] + CLOCK_NS)
    columns = (
        gpu.stream[rows[kept]],
        calls.thread[call[kept]],
        calls.start_ns[call[kept]],
        calls.end_ns[call[kept]],
    )
    return [
        Wait(stream, start, None, thread, start, end)
        for stream, thread, start, end in zip(*(column.tolist() for column in columns), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _EventCalls:
    """Event records and streams' waits for them, per thread in the order of their calls."""

    starts: dict[int, list[int]]
    recorded: dict[int, list[int]]
    """When the call before each recorded an event, -1 where it waited for one."""
    records: dict[int, tuple[list[int], list[int]]]
    """When the thread recorded events: all, and those that its next call waited for."""

    @classmethod
    def of(cls, trace: KinetoTrace) -> "_EventCalls":
        calls = trace.launches
        recording = named(calls.name, trace.strings, RECORDS.__contains__)
        event_calls = recording | named(calls.name, trace.strings, STREAM_WAITS.__contains__)
        rows = np.flatnonzero(event_calls)
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        event_calls_by_thread = cls({}, {}, {})
        for members in groups(calls.thread[rows]):
            thread_rows = rows[members]
            thread = int(calls.thread[thread_rows[0]])
            start = calls.start_ns[thread_rows]
            before = np.where(recording[thread_rows], start, -1)
            event_calls_by_thread.starts[thread] = start.tolist()
            event_calls_by_thread.recorded[thread] = [-1, *before[:-1].tolist()]
            waited = np.append(~recording[thread_rows][1:], False) & recording[thread_rows]
            event_calls_by_thread.records[thread] = (
                start[recording[thread_rows]].tolist(),
                start[waited].tolist(),
            )
        return event_calls_by_thread

    def before(self, thread: int, wait_ns: int) -> int:
        """Return when the call before a wait recorded an event, -1 where it was another wait."""
        return self.recorded[thread][bisect_left(self.starts[thread], wait_ns)]


def _of_calls(trace: KinetoTrace) -> Synchronizations:
    """Return the waits that follow from runtime calls and times.

    The host waited for the stream whose operations launched before the call all ended during it,
    the last of several. A call during which no stream finished waited for nothing. Event waits:
    `inferred_waits`.
    """
    result = Synchronizations()
    calls = trace.launches
    names = {code: trace.strings[code] for code in unique_values(calls.name).tolist()}
    blocking = [
        code
        for code, name in names.items()
        if name in _BLOCKING or name in STREAM_WAITS or name in _EVENT_WAITS
    ]
    streams, records = StreamTimelines(trace), _EventCalls.of(trace)
    result.used.extend(_of_copies(trace))
    # A blocking copy is known exactly: its call waits for the copy that it launched.
    copied = {(wait.thread, wait.start_ns) for wait in result.used}
    rows = np.flatnonzero(np.isin(calls.name, blocking))
    for row in rows[np.argsort(calls.start_ns[rows], kind="stable")].tolist():
        start, end = int(calls.start_ns[row]), int(calls.end_ns[row])
        thread, name = int(calls.thread[row]), names[int(calls.name[row])]
        if (thread, start) in copied:
            continue
        if name in STREAM_WAITS:
            record_ns = records.before(thread, start)
            if pair := streams.pair_record(thread, record_ns, start, *records.records[thread]):
                result.used.append(Wait(pair.stream, record_ns, pair.waiting, thread, start, end))
            elif wait := streams.delayed_by_call(thread, start):
                result.inferred_waits.append(wait)
            else:
                result.unused[f"a stream's {_UNKNOWN_EVENT}"] += 1
        elif waited_for := (
            streams.ended_last(start, end)
            if name in _EVENT_WAITS
            else _blocking(streams, _BLOCKING[name], start, end)
        ):
            result.used.append(Wait(*waited_for, None, thread, start, end))
        elif name in _EVENT_WAITS:
            result.unused[f"the host's {_UNKNOWN_EVENT}"] += 1
        else:
            result.unused["no operation ended during the call"] += 1
    result.used.sort(key=lambda wait: wait.start_ns)
    result.inferred_waits.extend(streams.delayed_backlog())
    result.by_time = len(result.used) + len(result.inferred_waits)
    return result


def _blocking(
    streams: StreamTimelines, scope: WaitScope, start_ns: int, end_ns: int
) -> tuple[int | None, int] | None:
    """Return the stream (None: all) and the horizon that a blocking call waited for, or None."""
    stream = streams.finished_last(start_ns, end_ns)
    if stream is None:
        return None
    return (None if scope is WaitScope.DEVICE else stream), start_ns
