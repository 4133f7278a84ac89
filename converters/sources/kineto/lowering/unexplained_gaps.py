"""GPU operations that start later than launch, stream order and known waits explain.

Usually an operation of another stream caused the delay: through an event wait that the trace does
not identify, or because it left no free SMs. The delayed operation then starts when that operation
ends, or when its last blocks run. If nothing ended at that time, the cause is not in the trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from onerank.converters.sources.kineto.lowering.dependency_edges import NodeSequence
from onerank.converters.sources.kineto.read.schema import GpuRows
from onerank.converters.sources.kineto.sync.inferred_waits import RELEASE_NS, ROUNDING_NS
from onerank.ir import Reason, StringTable
from onerank.ir.arrays import I64

LATE_NS = 20_000
"""An operation that begins this soon after all that it waits for is not late."""

LAST_BLOCKS = 0.1
"""Share of an operation's time, at its end, in which it leaves room; 2 to 6% were seen."""

_NAMED_GAPS = 3
"""Number of operations that a note names."""

_NAME_LENGTH = 60
"""Characters of a kernel's name in a note."""

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
    ) -> list[str]:
        """Return sentences on explained and unexplained gaps.

        Args:
            rows: the GPU operations that are nodes, by number.
            strings: table that their names point into.
            first: number of the first of them among the future nodes.
            replayed: whether the graph keeps the waits that nothing explains.
        """
        notes: list[str] = []
        if self.explained:
            count = len(self.explained)
            room = sum(reason is Reason.ROOM for _, _, reason in self.explained)
            notes.append(
                f"{count} GPU operations began long after their launch and the end of "
                f"their stream's previous operation: {count - room} as an operation of "
                f"another stream ended, {room} as one ran its last blocks; "
                "they wait for that operation"
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
                f"{len(order)} GPU operations began "
                f"{sum(self.unexplained_ns.values()) / 1e6:.3f} ms in "
                "all later than the trace explains: the GPU ran or awaited work outside the trace. "
                f"A replay {'keeps' if replayed else 'lacks'} that time (longest: {longest}, "
                "counted from the first GPU operation)"
            )
        return notes


@dataclass(frozen=True, slots=True)
class _DeviceOperations:
    """The operations of a device's streams, stream by stream in the order of their starts.

    Attributes:
        number: numbers of the future nodes, int64[n].
        stream: place of each one's stream among the device's, int64[n].
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
    """Return end and number of the operation of another stream that runs its last blocks then.

    Then: when each of `late` starts. Of several, the one that ends first. Only the last operation
    that a stream started can run its last blocks.
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
            if until[place] >= time_ns:  # of the late operation's own stream
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
