"""Infer event waits from times, for traces without synchronisation events.

The runtime calls are in the trace (`cudaStreamWaitEvent`, `cudaEventSynchronize`), but not their
event and stream. Three rules infer them:

- An operation that was launched long before, whose own stream was idle, and that started as soon as
  an operation of another stream ended, waited for that operation.
- A host call that returns as an operation ends waited for that operation. The same rule covers
  calls from before the trace began.
- If a thread records an event and waits for one in its next call, it is the same event
  (`wait_stream`, as around NCCL calls): the first other stream that the thread launches on before
  it records again waits for the stream that it launched on last. The rule does not apply where that
  wait exists already, where another record lies between and the launch is long ago, or where times
  contradict it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import groups
from onerank.converters.sources.kineto.link.link_kernels import CLOCK_NS, launch_times
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace, last_of
from onerank.ir.arrays import I64
from onerank.ir.start_delays import RELEASE_NS

# Checked against a trace that has synchronisation events: without this bound, and without the rule
# for streams that are already awaited, 3 of 5 inferred waits named a wrong stream. With both there
# are 4, all of them right.
RECENT_NS = 1_000_000
"""An event recorded later than this after the thread's last launch may be another stream's."""

ROUNDING_NS = 1_000
"""Overlaps up to a microsecond, the time unit of older traces, are rounding."""


@dataclass(frozen=True, slots=True)
class InferredWait:
    """An operation delayed by another stream: its start, and the end of the other operation."""

    stream: int
    start_ns: int
    waited_for: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A stream that is waited for, and the stream that waits."""

    stream: int
    waiting: int


@dataclass(frozen=True, slots=True)
class StreamTimeline:
    """A stream's operations by start.

    Attributes:
        launched: issue time of each, int64[n].
        start: int64[n].
        ended: time at which all operations up to each have ended, int64[n].
        backlog: number of operations launched before the trace began.
    """

    launched: I64
    start: I64
    ended: I64
    backlog: int

    def last_launched(self, before_ns: int) -> int:
        """Return the place of the last operation launched by that time, -1 for none."""
        return int(np.searchsorted(self.launched, before_ns, side="right")) - 1


@dataclass(frozen=True, slots=True)
class _OperationEnds:
    """Operations of all streams by their `StreamTimeline.ended`, then stream and start; n of them.

    One sorted list answers which operation of any stream ended last before a time. Asking every
    stream instead would take streams x waits steps.

    Attributes:
        ended: ascending, int64[n].
        stream: int64[n].
        launched: when it and all earlier ones of its stream had been launched, int64[n].
        next_launched: `launched` of the next operation of its stream, int64[n].
    """

    ended: I64
    stream: I64
    launched: I64
    next_launched: I64

    @classmethod
    def of(cls, timelines: dict[int, StreamTimeline]) -> "_OperationEnds":
        if not timelines:
            return cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        lines = timelines.values()
        never = np.iinfo(np.int64).max
        ended = np.concatenate([line.ended for line in lines])
        launched = np.concatenate([line.launched for line in lines])
        following = np.concatenate([np.append(line.launched[1:], never) for line in lines])
        stream = np.repeat(np.array([*timelines]), [len(line.ended) for line in lines])
        # Stable, so operations of a stream stay in order.
        order = np.lexsort((stream, ended))
        return cls(ended[order], stream[order], launched[order], following[order])

    def last(
        self,
        since_ns: int,
        until_ns: int,
        launched_by_ns: int,
        *,
        other_than: int | None = None,
        last_launched: bool = False,
    ) -> int | None:
        """Return the place of the last operation that ended within an interval.

        Args:
            since_ns: it ended after this time.
            until_ns: it ended at this time or before.
            launched_by_ns: it was launched at this time or before.
            other_than: its stream is not this one.
            last_launched: it is the last operation of its stream that was launched by then.
        """
        low = int(np.searchsorted(self.ended, since_ns, side="right"))
        high = int(np.searchsorted(self.ended, until_ns, side="right"))
        while low < high:
            # Mostly one of the last few operations fits: this window is searched first.
            window = slice(max(low, high - _WINDOW), high)
            usable = self.launched[window] <= launched_by_ns
            if other_than is not None:
                usable &= self.stream[window] != other_than
            if last_launched:
                usable &= self.next_launched[window] > launched_by_ns
            places = np.flatnonzero(usable)
            if len(places):
                return window.start + int(places[-1])
            high = window.start
        return None


_WINDOW = 1024  # operations whose ends are compared at once


@dataclass(frozen=True, slots=True)
class _ThreadLaunches:
    """The GPU operations that one thread launched, n of them, by launch.

    Attributes:
        rows: rows among the GPU operations, int64[n].
        launched: int64[n].
        stream: int64[n].
        next_other: place of the next operation on another stream, n for none, int64[n].
    """

    rows: I64
    launched: I64
    stream: I64
    next_other: I64

    @classmethod
    def of(cls, rows: I64, launched: I64, stream: I64) -> "_ThreadLaunches":
        changes = np.append(np.flatnonzero(np.diff(stream[rows])) + 1, len(rows))
        following = np.searchsorted(changes, np.arange(len(rows)), side="right")
        return cls(rows, launched[rows], stream[rows], changes[following])


class StreamTimelines:
    """The streams of a trace."""

    def __init__(self, trace: KinetoTrace) -> None:
        gpu, calls = trace.gpu, trace.launches
        launched, ended = launch_times(trace), gpu.start_ns + gpu.duration_ns
        launch = last_of(calls.correlation, gpu.correlation)
        self.timelines: dict[int, StreamTimeline] = {}
        self._place = np.zeros(len(gpu), dtype=np.int64)
        for members in groups(gpu.stream):
            rows = members[np.argsort(gpu.start_ns[members], kind="stable")]
            self._place[rows] = np.arange(len(rows))
            known = np.flatnonzero(launch[rows] >= 0)
            self.timelines[int(gpu.stream[rows[0]])] = StreamTimeline(
                # Accumulated, since a stream starts in launch order: an operation was not queued
                # before its predecessor, whatever its own launch says.
                launched=np.maximum.accumulate(launched[rows]),
                start=gpu.start_ns[rows],
                ended=np.maximum.accumulate(ended[rows]),
                backlog=int(known[0]) if len(known) else 0,
            )
        self._ends = _OperationEnds.of(self.timelines)
        rows = np.flatnonzero(launch >= 0)
        rows = rows[np.lexsort((gpu.start_ns[rows], launched[rows]))]
        thread = calls.thread[launch[rows]]
        self._by_thread = {
            int(thread[members[0]]): _ThreadLaunches.of(rows[members], launched, gpu.stream)
            for members in groups(thread)
        }

    def delayed_by_call(self, thread: int, call_ns: int) -> InferredWait | None:
        """Return the operation that a stream's event wait, called at that time, delayed.

        None if the next operation that the thread launched started for another reason.
        """
        launches = self._by_thread.get(thread)
        place = 0 if launches is None else int(np.searchsorted(launches.launched, call_ns))
        if launches is None or place == len(launches.rows):
            return None
        stream, at = int(launches.stream[place]), int(self._place[launches.rows[place]])
        return self._find_cause(self._ends, stream, at, call_ns)

    def pair_record(
        self,
        thread: int,
        record_ns: int,
        call_ns: int,
        records: Sequence[int],
        waited: Sequence[int],
    ) -> StreamWait | None:
        """Return the waiting stream of an event recorded just before a stream's wait, or None.

        Args:
            thread: calling thread.
            record_ns: host time of the record.
            call_ns: host time of the wait.
            records: of all records of the thread, ascending.
            waited: of those that its next call waited for.
        """
        launches = self._by_thread.get(thread)
        if launches is None:
            return None
        launched = launches.launched
        before, after = np.searchsorted(launched, [record_ns, call_ns]).tolist()
        if not before or after == len(launched):
            return None
        since_ns = int(launched[before - 1])
        again = bisect_left(waited, record_ns) > bisect_left(waited, since_ns)
        another = bisect_left(records, record_ns) > bisect_left(records, since_ns)
        if again or (another and record_ns - since_ns > RECENT_NS):
            return None
        following = bisect_right(records, int(launched[after]))
        end = len(launched)
        if following < len(records):
            end = int(np.searchsorted(launched, records[following]))
        stream = int(launches.stream[before - 1])
        other = after if launches.stream[after] != stream else int(launches.next_other[after])
        if other >= end:
            return None
        waiting, timeline = int(launches.stream[other]), self.timelines[stream]
        source = timeline.last_launched(record_ns)
        start = int(self.timelines[waiting].start[self._place[launches.rows[other]]])
        if source < 0 or timeline.ended[source] > start + ROUNDING_NS:
            return None
        return StreamWait(stream, waiting)

    def delayed_backlog(self) -> Iterator[InferredWait]:
        """Yield operations of the backlog that another stream's backlog delayed."""
        backlogs = _OperationEnds.of(
            {
                stream: StreamTimeline(
                    *(column[: line.backlog] for column in (line.launched, line.start, line.ended)),
                    backlog=line.backlog,
                )
                for stream, line in self.timelines.items()
            }
        )
        for stream, timeline in self.timelines.items():
            for at in range(timeline.backlog):
                # All of the backlog was launched before the trace began, so no launch is too late.
                if wait := self._find_cause(backlogs, stream, at, np.iinfo(np.int64).max):
                    yield wait

    def _find_cause(
        self, ends: _OperationEnds, stream: int, at: int, launched_by_ns: int
    ) -> InferredWait | None:
        """Return the cause of a delayed operation: one of `ends` that another stream ran."""
        timeline = self.timelines[stream]
        start = int(timeline.start[at])
        # What was queued before the trace began has no launch time; only the previous operation
        # bounds it.
        since = int(timeline.launched[at]) if at >= timeline.backlog else -1
        # If its own stream was busy until just before the start, that explains the start.
        since = max(since, int(timeline.ended[at - 1]) if at else since, start - RELEASE_NS)
        cause = ends.last(since, start + ROUNDING_NS, launched_by_ns, other_than=stream)
        if cause is None:
            return None
        return InferredWait(stream, start, int(ends.stream[cause]), int(ends.ended[cause]))

    def ended_last(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return stream and launch time of the operation that a host call waited for, or None.

        That is the operation launched before that ended last before the call returned.
        """
        # One nanosecond less, since `last` excludes its lower bound.
        since_ns = max(start_ns, end_ns - RELEASE_NS - 1)
        place = self._ends.last(since_ns, end_ns + CLOCK_NS, start_ns)
        if place is None:
            return None
        return int(self._ends.stream[place]), int(self._ends.launched[place])

    def finished_last(self, start_ns: int, end_ns: int) -> int | None:
        """Return the stream that finished last during a host call, None if none did.

        A stream finishes when all that was launched on it before the call has ended.
        """
        place = self._ends.last(start_ns, end_ns + CLOCK_NS, start_ns, last_launched=True)
        return None if place is None else int(self._ends.stream[place])
