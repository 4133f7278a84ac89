"""Launches that block because the launch queue of their stream is full.

The driver queues a bounded number of unfinished launches per stream, fewer with large arguments
(1022 on a V100 and on an H200; 811 with 4 KiB of arguments). The bounds are measured:
benchmarks/results/2026-11-21-launch-queue-h200.txt. A host that is further ahead blocks in the
launch call until one finishes. No trace records the bound or the wait. But a call that normally
takes microseconds then takes as long as a kernel, and it returns a few microseconds after a kernel
ends.
"""

from dataclasses import dataclass

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import groups
from onerank.converters.sources.kineto.link.link_kernels import CLOCK_NS
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace, last_of
from onerank.ir.arrays import I32, I64, Mask
from onerank.ir.notes import Note
from onerank.ir.start_delays import RELEASE_NS

LEAST_PENDING = 256
"""A queue is not known to be full with fewer."""
LEAST_WAITS = 3
"""A host that is ahead of a full queue stays so; fewer slow calls are chance."""
LEAST_WAIT_NS = 2_000
"""A call that takes twice the usual time and this much more, waited."""


@dataclass(frozen=True, slots=True)
class QueueWait:
    """A launch that waited.

    Attributes:
        stream_key: device and stream.
        thread: calling thread, a place in the trace's `threads`.
        start_ns: host time of the call.
        end_ns: host time at which the call returned.
        waited_ns: time beyond the usual duration of the call.
        freed_ns: when the operation ended for which it waited.
    """

    stream_key: tuple[int, int]
    thread: int
    start_ns: int
    end_ns: int
    waited_ns: int
    freed_ns: int


@dataclass(frozen=True, slots=True)
class LaunchQueue:
    """The launches of a trace that waited, and how many others were pending then at most."""

    waits: tuple[QueueWait, ...] = ()
    depth: int = 0

    def notes(self) -> list[Note]:
        """Return a note on the launches that waited."""
        if not self.waits:
            return []
        total_ms = sum(wait.waited_ns for wait in self.waits) / 1e6
        return [
            Note(
                f"the launch queue was full: {len(self.waits)} launches waited {total_ms:.3f} ms "
                f"in all, with up to {self.depth} others pending on their stream. Each waits for "
                "the operation whose end made room; the wait is not part of its operator's time",
                code="launch-queue-full",
            )
        ]


# A wait for queue room shrinks on a faster GPU, an operator's time does not. Eight Llama-8B layers
# measured on an H200 and re-costed to a B200 replay in 88.6 ms with these waits and in 126.7 ms
# without; their compute takes 80.2 ms.
def launch_queue(trace: KinetoTrace) -> LaunchQueue:
    """Find the launches of a trace that waited for a place in the queue of their stream."""
    calls, gpu = trace.launches, trace.gpu
    call = last_of(calls.correlation, gpu.correlation)
    queue_waits: list[QueueWait] = []
    depth = 0
    _, stream_of = np.unique(np.stack([gpu.device, gpu.stream]), axis=1, return_inverse=True)
    launched = np.flatnonzero(call >= 0)
    # numpy 2.0 returns the inverse of an axis with two dimensions; other versions return one.
    for members in groups(stream_of.reshape(-1)[launched]):
        rows = launched[members]
        if len(rows) < LEAST_PENDING:
            continue
        key = int(gpu.device[rows[0]]), int(gpu.stream[rows[0]])
        stream = _StreamLaunches.of(trace, rows, call)
        waits = stream.waits()
        if not len(waits):
            continue
        depth = max(depth, int(stream.pending[waits].max()))
        waiting = zip(*(column[waits].tolist() for column in stream.wait_columns), strict=True)
        queue_waits += [QueueWait(key, *row) for row in waiting]
    return LaunchQueue(tuple(sorted(queue_waits, key=lambda wait: wait.start_ns)), depth)


@dataclass(frozen=True, slots=True)
class _StreamLaunches:
    """The calls that launched the operations of one stream, n of them, by time.

    Attributes:
        name: codes.
        thread: places in the trace's `threads`.
        start_ns: of the call.
        end_ns: of the call.
        pending: operations launched before that had not ended when the call began.
        still_pending: of these, operations that had not ended when the call returned.
        freed_ns: end of the last operation that ended before the call did, or just after.
    """

    name: I32
    thread: I64
    start_ns: I64
    end_ns: I64
    pending: I64
    still_pending: I64
    freed_ns: I64

    @classmethod
    def of(cls, trace: KinetoTrace, rows: I64, call: I64) -> "_StreamLaunches":
        """Collect the calls that launched the GPU operations `rows`; `call` holds their rows."""
        calls, gpu = trace.launches, trace.gpu
        rows = rows[np.lexsort((gpu.start_ns[rows], calls.start_ns[call[rows]]))]
        # The queue frees its places in order: an operation that ended early waits for its
        # predecessors.
        ends = np.maximum.accumulate(gpu.start_ns[rows] + gpu.duration_ns[rows])
        # One row per call: a graph launch has several operations and takes one place.
        first = np.flatnonzero(np.diff(call[rows], prepend=-1))
        launching = call[rows[first]]
        start, end = calls.start_ns[launching], calls.end_ns[launching]
        last = np.searchsorted(ends, end, side="right") - 1
        within = (last >= 0) & (ends[last] > start)
        return cls(
            name=calls.name[launching],
            thread=calls.thread[launching],
            start_ns=start,
            end_ns=end,
            pending=first - np.searchsorted(ends, start, side="right"),
            still_pending=first - np.searchsorted(ends, end, side="right"),
            freed_ns=ends[np.minimum(np.where(within, last, last + 1), len(ends) - 1)],
        )

    @property
    def _ahead(self) -> Mask:
        """Calls that began and returned while the host was far ahead of the GPU, bool[n]."""
        most = int(self.pending.max())
        return (2 * self.pending >= max(most, 2 * LEAST_PENDING)) & (
            2 * self.still_pending >= self.pending
        )

    @property
    def _usual_ns(self) -> I64:
        """Usual duration of each call, int64[n]: the median of its name's calls with queue room.

        If no call of the name surely had room, it is the shortest duration.
        """
        took = self.end_ns - self.start_ns
        usual = np.zeros(len(took), dtype=np.int64)
        ahead = self._ahead
        for same in groups(self.name.astype(np.int64)):
            free = same[~ahead[same]]
            usual[same] = np.median(took[free]) if len(free) else took[same].min()
        return usual

    @property
    def wait_columns(self) -> tuple[I64, I64, I64, I64, I64]:
        """The columns of a `QueueWait`, without its stream key."""
        waited = self.end_ns - self.start_ns - self._usual_ns
        return self.thread, self.start_ns, self.end_ns, waited, self.freed_ns

    def waits(self) -> I64:
        """Return which calls waited, int64[m]."""
        longer = self.end_ns - self.start_ns > 2 * self._usual_ns + LEAST_WAIT_NS
        after = self.end_ns - self.freed_ns
        released = (self.freed_ns > self.start_ns) & (after >= -CLOCK_NS) & (after <= RELEASE_NS)
        slow = self._ahead & longer
        waits = np.flatnonzero(slow & released)
        # A host ahead of a full queue keeps waiting: few such calls, or a minority of the slow
        # ones, are chance.
        enough = max(LEAST_WAITS, int(slow.sum()) / 2)
        return waits if len(waits) >= enough else waits[:0]
