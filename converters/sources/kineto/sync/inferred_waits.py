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
"""Overlaps up to a microsecond, the unit of older traces, are none."""


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
        self.lanes: dict[int, StreamTimeline] = {}
        self._place = np.zeros(len(gpu), dtype=np.int64)
        for stream in np.unique(gpu.stream).tolist():
            own = np.flatnonzero(gpu.stream == stream)
            own = own[np.argsort(gpu.start_ns[own], kind="stable")]
            self._place[own] = np.arange(len(own))
            known = np.flatnonzero(launch[own] >= 0)
            self.lanes[stream] = StreamTimeline(
                launched=np.maximum.accumulate(launched[own]),
                start=gpu.start_ns[own],
                ended=np.maximum.accumulate(ended[own]),
                backlog=int(known[0]) if len(known) else 0,
            )
        rows = np.flatnonzero(launch >= 0)
        rows = rows[np.lexsort((gpu.start_ns[rows], launched[rows]))]
        self._launched, self._stream = launched, gpu.stream
        thread = calls.thread[launch[rows]]
        self._by_thread = {one: rows[thread == one] for one in np.unique(thread).tolist()}

    def held_by_call(self, thread: int, call_ns: int) -> InferredWait | None:
        """Return the operation that a stream's event wait, called at that time, delayed.

        None if the next operation that the thread launched started for another reason.
        """
        own = self._by_thread.get(thread)
        place = 0 if own is None else int(np.searchsorted(self._launched[own], call_ns))
        if own is None or place == len(own):
            return None
        row = own[place]
        until = {s: other.last_launched(call_ns) + 1 for s, other in self.lanes.items()}
        return self._held(int(self._stream[row]), int(self._place[row]), until)

    def paired(
        self,
        thread: int,
        record_ns: int,
        call_ns: int,
        records: Sequence[int],
        waited: Sequence[int],
    ) -> StreamWait | None:
        """Return what an event recorded just before a stream's wait makes wait, None for nothing.

        Args:
            thread: calling thread.
            record_ns: host time of the record.
            call_ns: of the wait.
            records: of all records of the thread, ascending.
            waited: of those that its next call waited for.
        """
        own = self._by_thread.get(thread)
        if own is None:
            return None
        launched = self._launched[own]
        before, behind = np.searchsorted(launched, [record_ns, call_ns]).tolist()
        if not before or behind == len(own):
            return None
        since_ns = int(launched[before - 1])
        again = bisect_left(waited, record_ns) > bisect_left(waited, since_ns)
        other = bisect_left(records, record_ns) > bisect_left(records, since_ns)
        if again or (other and record_ns - since_ns > RECENT_NS):
            return None
        following = bisect_right(records, int(launched[behind]))
        end = len(own)
        if following < len(records):
            end = int(np.searchsorted(launched, records[following]))
        stream = int(self._stream[own[before - 1]])
        others = np.flatnonzero(self._stream[own[behind:end]] != stream)
        if not len(others):
            return None
        row = own[behind + int(others[0])]
        waiting, lane = int(self._stream[row]), self.lanes[stream]
        source = lane.last_launched(record_ns)
        start = int(self.lanes[waiting].start[self._place[row]])
        if source < 0 or lane.ended[source] > start + ROUNDING_NS:
            return None
        return StreamWait(stream, waiting)

    def held_backlog(self) -> Iterator[InferredWait]:
        """Yield operations of the backlog that another stream's backlog delayed."""
        until = {stream: lane.backlog for stream, lane in self.lanes.items()}
        for stream, lane in self.lanes.items():
            for at in range(lane.backlog):
                if held := self._held(stream, at, until):
                    yield held

    def _held(self, stream: int, at: int, until: dict[int, int]) -> InferredWait | None:
        """Return the cause of a delayed operation, among the first `until` of other streams."""
        lane = self.lanes[stream]
        start = int(lane.start[at])
        since = int(lane.launched[at]) if at >= lane.backlog else -1
        since = max(since, int(lane.ended[at - 1]) if at else since, start - RELEASE_NS)
        found: tuple[int, int] | None = None
        for other, theirs in self.lanes.items():
            if other == stream:
                continue
            last = np.searchsorted(theirs.ended, start + ROUNDING_NS, side="right") - 1
            last = min(int(last), until[other] - 1)
            if last >= 0 and theirs.ended[last] > since:
                one = int(theirs.ended[last]), other
                found = max(found, one) if found else one
        return InferredWait(stream, start, found[1], found[0]) if found else None

    def ended_last(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return stream and launch of what a host waited for between two times, None for nothing.

        That is the operation launched before that ended last before the call returned.
        """
        found: tuple[int, int, int] | None = None
        for stream, lane in self.lanes.items():
            last = int(np.searchsorted(lane.ended, end_ns + CLOCK_NS, side="right")) - 1
            last = min(last, lane.last_launched(start_ns))
            if last < 0:
                continue
            ended = int(lane.ended[last])
            if start_ns < ended and end_ns - ended <= RELEASE_NS:
                one = ended, stream, int(lane.launched[last])
                found = max(found, one) if found else one
        return found[1:] if found else None
