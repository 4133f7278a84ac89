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

from onerank.converters.sources.kineto.link.kernel_launches import CLOCK_NS, launch_times
from onerank.converters.sources.kineto.read.schema import KinetoTrace, last_of
from onerank.ir.arrays import I64

RELEASE_NS = 20_000
"""Within this time of an operation's end starts what waited for it; 2 to 15 us were seen."""

RECENT_NS = 1_000_000
"""An event recorded this long behind a launch, and another record, may be of another stream."""

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
    """A stream that is waited for, and the one that waits."""

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


class StreamTimelines:
    """The streams of a trace."""

    def __init__(self, trace: KinetoTrace) -> None:
        gpu, calls = trace.gpu, trace.launches
        launched, ended = launch_times(trace), gpu.start_ns + gpu.duration_ns
        launch = last_of(calls.correlation, gpu.correlation)
        self.timelines: dict[int, StreamTimeline] = {}
        self._place = np.zeros(len(gpu), dtype=np.int64)
        for stream in np.unique(gpu.stream).tolist():
            rows = np.flatnonzero(gpu.stream == stream)
            rows = rows[np.argsort(gpu.start_ns[rows], kind="stable")]
            self._place[rows] = np.arange(len(rows))
            known = np.flatnonzero(launch[rows] >= 0)
            self.timelines[stream] = StreamTimeline(
                launched=np.maximum.accumulate(launched[rows]),
                start=gpu.start_ns[rows],
                ended=np.maximum.accumulate(ended[rows]),
                backlog=int(known[0]) if len(known) else 0,
            )
        rows = np.flatnonzero(launch >= 0)
        rows = rows[np.lexsort((gpu.start_ns[rows], launched[rows]))]
        self._launched, self._stream = launched, gpu.stream
        thread = calls.thread[launch[rows]]
        self._by_thread = {number: rows[thread == number] for number in np.unique(thread).tolist()}

    def delayed_by_call(self, thread: int, call_ns: int) -> InferredWait | None:
        """Return the operation that a stream's event wait, called at that time, delayed.

        None if the next operation that the thread launched started for another reason.
        """
        thread_rows = self._by_thread.get(thread)
        place = (
            0 if thread_rows is None else int(np.searchsorted(self._launched[thread_rows], call_ns))
        )
        if thread_rows is None or place == len(thread_rows):
            return None
        row = thread_rows[place]
        until = {s: other.last_launched(call_ns) + 1 for s, other in self.timelines.items()}
        return self._find_cause(int(self._stream[row]), int(self._place[row]), until)

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
        thread_rows = self._by_thread.get(thread)
        if thread_rows is None:
            return None
        launched = self._launched[thread_rows]
        before, behind = np.searchsorted(launched, [record_ns, call_ns]).tolist()
        if not before or behind == len(thread_rows):
            return None
        since_ns = int(launched[before - 1])
        again = bisect_left(waited, record_ns) > bisect_left(waited, since_ns)
        other = bisect_left(records, record_ns) > bisect_left(records, since_ns)
        if again or (other and record_ns - since_ns > RECENT_NS):
            return None
        following = bisect_right(records, int(launched[behind]))
        end = len(thread_rows)
        if following < len(records):
            end = int(np.searchsorted(launched, records[following]))
        stream = int(self._stream[thread_rows[before - 1]])
        others = np.flatnonzero(self._stream[thread_rows[behind:end]] != stream)
        if not len(others):
            return None
        row = thread_rows[behind + int(others[0])]
        waiting, timeline = int(self._stream[row]), self.timelines[stream]
        source = timeline.last_launched(record_ns)
        start = int(self.timelines[waiting].start[self._place[row]])
        if source < 0 or timeline.ended[source] > start + ROUNDING_NS:
            return None
        return StreamWait(stream, waiting)

    def delayed_backlog(self) -> Iterator[InferredWait]:
        """Yield operations of the backlog that another stream's backlog delayed."""
        until = {stream: timeline.backlog for stream, timeline in self.timelines.items()}
        for stream, timeline in self.timelines.items():
            for at in range(timeline.backlog):
                if wait := self._find_cause(stream, at, until):
                    yield wait

    def _find_cause(self, stream: int, at: int, until: dict[int, int]) -> InferredWait | None:
        """Return the cause of a delayed operation, among the first `until` of other streams."""
        timeline = self.timelines[stream]
        start = int(timeline.start[at])
        since = int(timeline.launched[at]) if at >= timeline.backlog else -1
        since = max(since, int(timeline.ended[at - 1]) if at else since, start - RELEASE_NS)
        cause: tuple[int, int] | None = None
        for other, other_timeline in self.timelines.items():
            if other == stream:
                continue
            last = np.searchsorted(other_timeline.ended, start + ROUNDING_NS, side="right") - 1
            last = min(int(last), until[other] - 1)
            if last >= 0 and other_timeline.ended[last] > since:
                candidate = int(other_timeline.ended[last]), other
                cause = max(cause, candidate) if cause else candidate
        return InferredWait(stream, start, cause[1], cause[0]) if cause else None

    def ended_last(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return stream and launch time of the operation that a host call waited for, or None.

        That is the operation launched before that ended last before the call returned.
        """
        latest: tuple[int, int, int] | None = None
        for stream, timeline in self.timelines.items():
            last = int(np.searchsorted(timeline.ended, end_ns + CLOCK_NS, side="right")) - 1
            last = min(last, timeline.last_launched(start_ns))
            if last < 0:
                continue
            ended = int(timeline.ended[last])
            if start_ns < ended and end_ns - ended <= RELEASE_NS:
                candidate = ended, stream, int(timeline.launched[last])
                latest = max(latest, candidate) if latest else candidate
        return latest[1:] if latest else None
