"""GPU operations that start later than launch, stream order and known waits explain.

Usually an operation of another stream caused the delay: through an event wait that the trace does
not identify, or because it left no free SMs. The delayed operation then starts when that operation
ends, or when its last blocks run. If nothing ended at that time, the cause is not in the trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

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
class _StreamIntervals:
    """A stream's operations in the order of their starts.

    Attributes:
        number: numbers of the future nodes, int64[n].
        start: int64[n].
        end: int64[n].
        last_end: latest end up to each operation; kept, because computing it for every query would
            take n steps each, int64[n].
        latest: position of the operation that ended last, up to each one, int64[n].
    """

    number: I64
    start: I64
    end: I64
    last_end: I64
    latest: I64

    @classmethod
    def of(cls, sequence: NodeSequence) -> "_StreamIntervals":
        number = np.array(sequence.members, dtype=np.int64)
        start = np.array(
            [sequence.times.start[member] for member in sequence.members], dtype=np.int64
        )
        end = np.array([sequence.times.end[member] for member in sequence.members], dtype=np.int64)
        last_end = np.maximum.accumulate(end)
        latest = np.maximum.accumulate(np.where(end == last_end, np.arange(len(end)), 0))
        return cls(number, start, end, last_end, latest)

    def ended(self, time_ns: int) -> tuple[int, int] | None:
        """Return end and number of the operation that ended last by that time, or None."""
        place = int(np.searchsorted(self.last_end, time_ns + ROUNDING_NS, side="right")) - 1
        if place < 0:
            return None
        latest = int(self.latest[place])
        return int(self.end[latest]), int(self.number[latest])

    def ending(self, time_ns: int) -> tuple[int, int] | None:
        """Return end and number of the operation that runs its last blocks then, or None."""
        place = int(np.searchsorted(self.start, time_ns)) - 1
        if place < 0:
            return None
        remaining_ns = int(self.end[place]) - time_ns
        lasted_ns = int(self.end[place] - self.start[place])
        if (
            0 < remaining_ns <= max(RELEASE_NS, LAST_BLOCKS * lasted_ns)
            and remaining_ns < lasted_ns
        ):
            return int(self.end[place]), int(self.number[place])
        return None


def find_unexplained_gaps(sequences: Iterable[NodeSequence], ready_ns: I64) -> UnexplainedGaps:
    """Find the cause of operations that started late.

    Args:
        sequences: the streams of a device.
        ready_ns: earliest start of each future node by all known dependencies, NEVER_LATE without
            any, int64[n].
    """
    streams = [_StreamIntervals.of(sequence) for sequence in sequences]
    gaps = UnexplainedGaps()
    for waiting in streams:
        others = [stream for stream in streams if stream is not waiting]
        ready = ready_ns[waiting.number]
        for place in np.flatnonzero(waiting.start - ready > LATE_NS).tolist():
            target, start = int(waiting.number[place]), int(waiting.start[place])
            ended = [end for end in (stream.ended(start) for stream in others) if end]
            ending = [end for end in (stream.ending(start) for stream in others) if end]
            # A full stop on another stream explains more than free SMs do: check it first.
            if ended and max(ended)[0] >= start - RELEASE_NS:
                gaps.explained.append((max(ended)[1], target, Reason.SYNC))
            elif ending:
                gaps.explained.append((min(ending)[1], target, Reason.ROOM))
            else:
                gaps.unexplained_ns[target] = start - int(ready[place])
    return gaps
