"""Turn synchronisations into edges: waits of streams and host for events, copies and queue room.

Node sequences (of streams and threads) and node numbers are those of `DependencyEdges`.

Some GPU operations start later than launch, stream order and recorded waits explain. Usually an
operation of another stream caused the delay: through an event wait that the trace does not
identify, or because it left no free SMs. The delayed operation then starts when that operation
ends, or when its last blocks run. If nothing ended at that time, the cause is not in the trace.
"""

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from onerank.converters.sources.kineto.link.inferred_waits import (
    ROUNDING_NS,
    InferredWait,
)
from onerank.converters.sources.kineto.link.launch_queue import QueueWait
from onerank.converters.sources.kineto.link.sync_events import Synchronizations, Wait
from onerank.converters.sources.kineto.lowering.dependency_edges import (
    DependencyEdges,
    NodeSequence,
    StreamSequences,
    ThreadSequences,
)
from onerank.converters.sources.kineto.read.trace_columns import GpuRows
from onerank.ir import Reason, StringTable
from onerank.ir.arrays import I64
from onerank.ir.notes import Note
from onerank.ir.start_delays import RELEASE_NS

LATE_NS = 20_000
"""An operation that begins this soon after all that it waits for is not late."""

LAST_BLOCKS = 0.1
"""Share of an operation's time, at its end, in which it leaves free SMs; measured: 2 to 6%."""

# Number of operations that a note names.
_NAMED_GAPS = 3

# Characters of a kernel's name in a note.
_NAME_LENGTH = 60

NEVER_LATE = np.iinfo(np.int64).max // 2


@dataclass(slots=True)
class UnexplainedGaps:
    """Late operations, by the numbers of future nodes.

    Attributes:
        explained: source, target and reason of the edges that explain them.
        unexplained_ns: waiting time of those without an explanation.
    """

    explained: list[tuple[int, int, Reason]] = field(default_factory=list[tuple[int, int, Reason]])
    unexplained_ns: dict[int, int] = field(default_factory=dict[int, int])

    def notes(
        self, rows: GpuRows, strings: StringTable, first: int, *, replayed: bool
    ) -> list[Note]:
        """Return notes on explained and unexplained gaps.

        Args:
            rows: the GPU operations that are nodes, by number.
            strings: table that their names point into.
            first: number of the first of them among the future nodes.
            replayed: whether the graph keeps the waits that nothing explains.
        """
        notes: list[Note] = []
        if self.explained:
            count = len(self.explained)
            room = sum(reason is Reason.ROOM for _, _, reason in self.explained)
            notes.append(
                Note(
                    f"{count} GPU operations began late, although they were launched and their "
                    f"stream was free: {count - room} began as an operation of another stream "
                    f"ended, {room} as one ran its last blocks. The graph makes each wait for "
                    "that operation",
                    code="gaps-explained",
                )
            )
        if self.unexplained_ns:
            order = sorted(self.unexplained_ns, key=self.unexplained_ns.__getitem__, reverse=True)
            since = int(rows.start_ns.min())
            longest = ", ".join(
                f"{self.unexplained_ns[number] / 1e6:.3f} ms before "
                f"{strings[int(rows.name[row])][:_NAME_LENGTH]!r} at "
                f"{(int(rows.start_ns[row]) - since) / 1e6:.3f} ms"
                for number in order[:_NAMED_GAPS]
                for row in [number - first]
            )
            notes.append(
                Note(
                    f"{len(order)} GPU operations began "
                    f"{sum(self.unexplained_ns.values()) / 1e6:.3f} ms in all later than the "
                    "trace explains: the GPU ran or awaited work outside the trace. A replay "
                    f"{'keeps' if replayed else 'lacks'} that time (longest: {longest}, counted "
                    "from the first GPU operation)",
                    code="gaps-unexplained",
                )
            )
        return notes


@dataclass(frozen=True, slots=True)
class _DeviceOperations:
    """The operations of a device's streams, stream by stream in the order of their starts.

    Attributes:
        number: numbers of the future nodes, int64[n].
        stream: place of each operation's stream among the device's, int64[n].
        start: int64[n].
        end: int64[n].
        next_start: start of the next operation of the stream, int64[n].
        last_end: latest end up to each operation within its stream, int64[n].
        latest: number of the operation with that end, int64[n].
    """

    number: I64
    stream: I64
    start: I64
    end: I64
    next_start: I64
    last_end: I64
    latest: I64

    @classmethod
    def of(cls, sequences: Iterable[NodeSequence]) -> "_DeviceOperations":
        streams: list[tuple[I64, ...]] = []
        for place, sequence in enumerate(sequences):
            times, number = sequence.times, np.array(sequence.members, dtype=np.int64)
            start = np.array([times.start[member] for member in sequence.members], dtype=np.int64)
            end = np.array([times.end[member] for member in sequence.members], dtype=np.int64)
            last_end = np.maximum.accumulate(end)
            latest = np.maximum.accumulate(np.where(end == last_end, np.arange(len(end)), 0))
            next_start = np.append(start[1:], np.iinfo(np.int64).max)
            stream = np.full(len(number), place)
            streams.append((number, stream, start, end, next_start, last_end, number[latest]))
        return cls(*(np.concatenate(columns) for columns in zip(*streams, strict=True)))


def _ended_before(operations: _DeviceOperations, late: I64) -> list[tuple[int, int] | None]:
    """Return end and number of the operation of another stream that ended last, for each of `late`.

    An operation that ended after the start of the late one, by less than the times' unit, counts.
    """
    order = np.lexsort((operations.latest, operations.last_end))
    end, number = operations.last_end[order], operations.latest[order]
    stream = operations.stream[order]
    # The last earlier place with another stream: the place before the run of equal streams.
    runs = np.append(0, np.flatnonzero(np.diff(stream)) + 1)
    before_run = runs[np.searchsorted(runs, np.arange(len(stream)), side="right") - 1] - 1
    places = np.searchsorted(end, operations.start[late] + ROUNDING_NS, side="right") - 1
    ended: list[tuple[int, int] | None] = []
    for place, waiting in zip(places.tolist(), operations.stream[late].tolist(), strict=True):
        other = int(before_run[place]) if place >= 0 and stream[place] == waiting else place
        ended.append((int(end[other]), int(number[other])) if other >= 0 else None)
    return ended


def _ending_at(operations: _DeviceOperations, late: I64) -> list[tuple[int, int] | None]:
    """Return, for each of `late`, end and number of an operation in its last blocks.

    It runs on another stream, and is in its last blocks when the late operation starts. Of several
    operations, the first to end is returned. Only the last operation that a stream started can run
    its last blocks.
    """
    # The late operations are visited by time, and a heap holds what runs its last blocks: asking
    # every stream for each late operation would take streams x late steps.
    lasted = operations.end - operations.start
    blocks = np.maximum(RELEASE_NS, (LAST_BLOCKS * lasted).astype(np.int64))
    begin = np.maximum(operations.start + 1, operations.end - blocks)
    until = np.minimum(operations.end - 1, operations.next_start)
    candidates = np.flatnonzero(begin <= until)
    waiting = iter(candidates[np.argsort(begin[candidates], kind="stable")].tolist())
    upcoming = next(waiting, None)
    running: list[tuple[int, int, int]] = []  # end, number, place
    ending: list[tuple[int, int] | None] = [None] * len(late)
    for position in np.argsort(operations.start[late], kind="stable").tolist():
        time_ns, stream = int(operations.start[late[position]]), operations.stream[late[position]]
        while upcoming is not None and begin[upcoming] <= time_ns:
            entry = int(operations.end[upcoming]), int(operations.number[upcoming]), upcoming
            heappush(running, entry)
            upcoming = next(waiting, None)
        skipped: list[tuple[int, int, int]] = []
        while running:
            end, number, place = running[0]
            if until[place] >= time_ns and operations.stream[place] != stream:
                ending[position] = end, number
                break
            heappop(running)
            if until[place] >= time_ns:  # of the late operation's stream
                skipped.append((end, number, place))
        for entry in skipped:
            heappush(running, entry)
    return ending


def find_unexplained_gaps(sequences: Iterable[NodeSequence], ready_ns: I64) -> UnexplainedGaps:
    """Find the cause of operations that started late.

    Args:
        sequences: the streams of a device.
        ready_ns: earliest start of each future node by all known dependencies, NEVER_LATE without
            any, int64[n].
    """
    gaps = UnexplainedGaps()
    operations = _DeviceOperations.of(sequences)
    ready = ready_ns[operations.number]
    late = np.flatnonzero(operations.start - ready > LATE_NS)
    if not len(late):
        return gaps
    ended_before, ending_at = _ended_before(operations, late), _ending_at(operations, late)
    for place, ended, ending in zip(late.tolist(), ended_before, ending_at, strict=True):
        target, start = int(operations.number[place]), int(operations.start[place])
        # A full stop on another stream explains more than free SMs do: check it first.
        if ended and ended[0] >= start - RELEASE_NS:
            gaps.explained.append((ended[1], target, Reason.SYNC))
        elif ending:
            gaps.explained.append((ending[1], target, Reason.ROOM))
        else:
            gaps.unexplained_ns[target] = start - int(ready[place])
    return gaps


# Streams from which device-wide waits are followed stream by stream only where they changed.
_MANY_STREAMS = 64


class _DeviceWideWaits:
    """The operations that each device-wide wait of one thread awaits, in the order of the waits.

    A wait needs no edge from an operation that an earlier wait of the thread awaited: the thread's
    order implies it. Without this, w waits on s streams would have w x s edges.
    """

    def __init__(self, streams: StreamSequences) -> None:
        launches = sorted(
            (sequence.times.launch[number], key)
            for key, sequence in streams.items()
            for number in sequence.members
        )
        self._streams = streams
        self._launch_ns = [launch_ns for launch_ns, _ in launches]
        self._keys = [key for _, key in launches]
        self._seen = 0
        self._last: dict[tuple[int, int], int] = {}
        self._ends: list[tuple[int, int, tuple[int, int]]] = []  # a heap: -end, number, stream

    def advance(self, horizon_ns: int) -> list[int]:
        """Return the last operations by that time of streams that launched since the last wait."""
        until = bisect_right(self._launch_ns, horizon_ns, lo=self._seen)
        changed: list[int] = []
        for key in dict.fromkeys(self._keys[self._seen : until]):
            sequence = self._streams[key]
            number = sequence.last_launched(horizon_ns)
            if number is not None and self._last.get(key) != number:
                self._last[key] = number
                heappush(self._ends, (-sequence.times.end[number], number, key))
                changed.append(number)
        self._seen = until
        return changed

    @property
    def count(self) -> int:
        """Number of streams that a wait waits for."""
        return len(self._last)

    @property
    def last_end_ns(self) -> int:
        """End of the last operation that a wait waits for."""
        while self._last[self._ends[0][2]] != self._ends[0][1]:
            # Its stream has launched another operation since.
            heappop(self._ends)
        return -self._ends[0][0]


_StreamKey = tuple[int, int]
"""Device and number of a stream."""

_NEVER_NS = np.iinfo(np.int64).min
"""Earlier than every launch."""


class _StreamWaits:
    """The waits of a stream for others, in the order of their calls.

    An event that is recorded on the stream after such a wait includes what it waits for, even if
    the stream launched nothing in between. Asynchronous tensor parallelism needs this: its copies
    run on a third stream, which waits for the second, which waits for the first.
    """

    def __init__(self) -> None:
        self._start_ns: list[int] = []
        self._awaited: list[dict[_StreamKey, int]] = []
        self._keys: set[_StreamKey] = set()

    def add(self, start_ns: int, awaited: dict[_StreamKey, int]) -> None:
        """Add the last operation of each stream that a wait awaits."""
        self._start_ns.append(start_ns)
        self._awaited.append(awaited)
        self._keys.update(awaited)

    def between(self, after_ns: int, until_ns: int) -> dict[_StreamKey, int]:
        """Return, for each stream, the last operation that waits in (after_ns, until_ns] await."""
        first = bisect_right(self._start_ns, after_ns)
        last = bisect_right(self._start_ns, until_ns)
        found: dict[_StreamKey, int] = {}
        for place in range(last - 1, first - 1, -1):
            found = {**self._awaited[place], **found}
            if len(found) == len(self._keys):
                break  # earlier waits name earlier operations of the same streams
        return found


class SyncEdges:
    """Adds the edges of waits and keeps how long calls and operations waited.

    Attributes:
        blocked: thread and start of each call that waited for the GPU -> how long, nanoseconds.
        queued: launches that waited for queue room, not for a copy that they launched.
        blocked_ns: how long each operator's thread was blocked by the GPU before it, int64[kept].
    """

    def __init__(
        self, builder: DependencyEdges, streams: StreamSequences, threads: ThreadSequences
    ) -> None:
        self._edges, self._times = builder.edges, builder.times
        self._streams, self._threads = streams, threads
        self._gpu, self._gpu_rows, self._operators = (
            builder.gpu,
            builder.gpu_rows,
            len(builder.kept),
        )
        self._by_stream: defaultdict[int, dict[_StreamKey, NodeSequence]] = defaultdict(dict)
        self._calls: NodeSequence | None = None
        """Without a device: the operators that the host called, in order."""
        if not len(self._gpu_rows):
            called = (number for sequence in threads.values() for number in sequence.members)
            members = sorted(
                (number for number in called if number < self._operators),
                key=builder.times.launch.__getitem__,
            )
            self._calls = NodeSequence(builder.times, array("q", members))
            # Operators on the default stream alone have no sequence of a stream.
            self._streams = streams or {(0, 0): self._calls}
        for key, sequence in self._streams.items():
            self._by_stream[key[1]][key] = sequence
        self._device_wide: dict[int, _DeviceWideWaits] = {}
        self._stream_waits: defaultdict[int, _StreamWaits] = defaultdict(_StreamWaits)
        self.blocked: dict[tuple[int, int], int] = {}
        self.queued: list[QueueWait] = []
        self.blocked_ns = np.zeros(len(builder.kept), dtype=np.int64)

    def add_waits(
        self, waits: Synchronizations, queue: Sequence[QueueWait], of_calls: Sequence[Wait] = ()
    ) -> tuple[int, Counter[str]]:
        """Add edges of synchronisations; return their number, and waits without edges by reason.

        Args:
            waits: the synchronisations of the trace.
            queue: waits for room in the launch queue.
            of_calls: waits of and for communication calls, which do not count in the result.
        """
        added = 0
        without_edge = Counter[str]()
        uncounted = set(map(id, of_calls))
        for wait in sorted([*waits.used, *of_calls], key=lambda wait: wait.start_ns):
            # `count` exceeds the number of sources where earlier waits already imply some edges.
            awaited, count, last_end_ns = self._awaited(wait)
            waiters = self._waiters(wait)
            # A stream's wait delays no call; a host's wait without earlier launches waits for
            # nothing.
            if wait.waiting_stream is None and count:
                waited_ns = last_end_ns - wait.start_ns
                if self._calls is not None:
                    # Ticks show that the host waits, not for how long.
                    waited_ns = wait.end_ns - wait.start_ns
                self._block(wait.thread, wait.start_ns, wait.end_ns, waited_ns, waiters)
            for source in awaited:
                for waiter in waiters:
                    if waiter != source:
                        self._edges.add(source, waiter, Reason.SYNC)
            if id(wait) in uncounted:
                continue
            if not waiters:
                without_edge["no node follows the wait"] += 1
                continue
            added += count
            if not count:
                without_edge["the awaited stream had no earlier launch"] += 1
        added += self._add_inferred(waits.inferred_waits, without_edge)
        self._add_queue_waits(queue)
        return added, without_edge

    def _block(
        self, thread: int, start_ns: int, end_ns: int, waited_ns: int, waiters: list[int]
    ) -> None:
        """Record how long a thread's call waited; of a call's several waits the longest counts."""
        known_ns = self.blocked.get((thread, start_ns), 0)
        # Clocks of GPU and host differ, so an operation may seem to end after the call that awaited
        # it.
        waited_ns = min(waited_ns, end_ns - start_ns)
        if waited_ns <= known_ns:
            return
        self.blocked[thread, start_ns] = waited_ns
        for waiter in waiters:
            if waiter < self._operators:
                self.blocked_ns[waiter] += waited_ns - known_ns

    def _add_inferred(self, inferred: Sequence[InferredWait], without_edge: Counter[str]) -> int:
        """Let operations wait for those of other streams that delayed them; return how many."""
        by_number = {stream: sequence for (_, stream), sequence in self._streams.items()}
        added = 0
        for wait in inferred:
            waiter = by_number[wait.stream].starting_at(wait.start_ns)
            source = by_number[wait.waited_for].last_ended(wait.ended_ns)
            if waiter is not None and source is not None:
                self._edges.add(source, waiter, Reason.SYNC)
                added += 1
            else:
                without_edge["the awaited or the delayed operation is no node"] += 1
        return added

    def _add_queue_waits(self, waits: Sequence[QueueWait]) -> None:
        """Let the thread's next operator wait for the operation that freed a place in the queue."""
        for wait in waits:
            if (wait.thread, wait.start_ns) in self.blocked:
                # The call waited for a copy that it launched, longer than for queue room.
                continue
            self.queued.append(wait)
            stream, thread = self._streams.get(wait.stream_key), self._threads.get(wait.thread)
            source = stream.last_ended(wait.freed_ns) if stream else None
            target = thread.first_launched(wait.end_ns) if thread else None
            if source is not None and target is not None:
                self._edges.add(source, target, Reason.LAUNCH_QUEUE)
            waiters = [] if source is None or target is None else [target]
            self._block(wait.thread, wait.start_ns, wait.end_ns, wait.waited_ns, waiters)

    def explain_gaps(self) -> UnexplainedGaps:
        """Let late operations wait for their inferred cause; return the causes."""
        end = np.array(self._times.end, dtype=np.int64)
        known = np.full(len(end), np.iinfo(np.int64).min)
        gpu_numbers = self._operators + np.arange(len(self._gpu_rows))
        returned = self._gpu.returned_ns[self._gpu_rows]
        known[gpu_numbers[returned >= 0]] = returned[returned >= 0]
        # Launch and program order do not bound the start here: the return of the launch call does,
        # and it is in `known` already.
        waits = tuple(set(Reason) - {Reason.LAUNCH, Reason.PROGRAM_ORDER})
        known = self._edges.latest(end, known, of=waits)
        ready = np.full(len(end), NEVER_LATE)
        bounded = gpu_numbers[known[gpu_numbers] > np.iinfo(np.int64).min]
        ready[bounded] = known[bounded]
        gaps = UnexplainedGaps()
        for device in {device for device, _ in self._streams}:
            late = find_unexplained_gaps(
                [sequence for (other, _), sequence in self._streams.items() if other == device],
                ready,
            )
            gaps.explained.extend(late.explained)
            gaps.unexplained_ns.update(late.unexplained_ns)
        for source, target, reason in gaps.explained:
            self._edges.add(source, target, reason)
        return gaps

    def gpu_waits(self, late: UnexplainedGaps) -> I64:
        """Return the unexplained wait of each GPU operation, int64[gpu_numbers].

        Negative: the overlap with the previous operation of its stream, or with an operation that
        left it free SMs.
        """
        start, end = (
            np.array(times, dtype=np.int64) for times in (self._times.start, self._times.end)
        )
        before = self._edges.latest(end, start, of=(Reason.STREAM_ORDER, Reason.ROOM))
        lead = before - start
        waited = np.where(lead > ROUNDING_NS, -lead, 0)
        for number, unexplained_ns in late.unexplained_ns.items():
            waited[number] = unexplained_ns
        return waited[self._operators :][: len(self._gpu_rows)]

    def _awaited(self, wait: Wait) -> tuple[list[int], int, int]:
        """Return the sources of a wait's edges, the number of streams awaited, and their last end.

        A stream is awaited by the last operation launched on it before the wait's horizon, and by
        the operations of other streams that it has waited for since.
        """
        if (
            wait.stream is None
            and wait.waiting_stream is None
            and len(self._streams) > _MANY_STREAMS
            and wait.horizon_ns == wait.start_ns
        ):
            waits = self._device_wide.get(wait.thread)
            if waits is None:
                waits = self._device_wide[wait.thread] = _DeviceWideWaits(self._streams)
            sources = waits.advance(wait.horizon_ns)
            return sources, waits.count, waits.last_end_ns if waits.count else 0
        awaited: dict[_StreamKey, int] = {}
        if wait.stream is None or wait.stream != wait.waiting_stream:
            streams = self._streams if wait.stream is None else self._by_stream[wait.stream]
            for key, sequence in streams.items():
                number = sequence.last_launched(wait.horizon_ns)
                if number is not None and key[1] != wait.waiting_stream:
                    awaited[key] = number
        if wait.stream is not None and wait.stream in self._stream_waits:
            launched = (self._times.launch[number] for number in awaited.values())
            since_ns = max(launched, default=_NEVER_NS)
            earlier = self._stream_waits[wait.stream].between(since_ns, wait.horizon_ns)
            earlier = {key: earlier[key] for key in earlier if key[1] != wait.waiting_stream}
            awaited = {**earlier, **awaited}
        if wait.waiting_stream is not None:
            self._stream_waits[wait.waiting_stream].add(wait.start_ns, awaited)
        sources = list(awaited.values())
        return sources, len(sources), max((self._times.end[n] for n in sources), default=0)

    def _waiters(self, wait: Wait) -> list[int]:
        """Return the first nodes that a synchronisation delays.

        A host wait delays its thread; without operators it delays the next launch on every stream,
        and without a device the next call of any thread, since one thread runs at a time.
        """
        if wait.waiting_stream is not None:
            waiting = list(self._by_stream[wait.waiting_stream].values())
            first = [sequence.first_launched(wait.start_ns) for sequence in waiting[:1]]
        elif self._calls is not None:
            first = [self._calls.first_launched(wait.end_ns)]
        elif self._operators:
            sequence = self._threads.get(wait.thread)
            first = [sequence.first_launched(wait.end_ns)] if sequence else []
        else:
            first = [sequence.first_launched(wait.end_ns) for sequence in self._streams.values()]
        return [number for number in first if number is not None]
