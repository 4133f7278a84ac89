"""Which event record a wait refers to, where CUPTI does not tell.

Drivers from CUDA 13 on leave stream and record of a `cuda_sync` event open; what remains is the
event's id, and the runtime calls by time. torch creates an event when it first records it, and ids
ascend as events are created: so of the events made within the trace, the records come in the order
of the ids. An event older than the trace is taken to be the one recorded just before the wait, on
the same thread. The stream recorded is the one on which that thread launched last.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from onerank.converters.kineto.load import GPU_CATEGORIES, LAUNCH_CATEGORIES, Event

RECORDS = frozenset({"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord"})
QUERIES = frozenset({"cudaEventQuery", "hipEventQuery"})
_WAITS = frozenset({"cudaStreamWaitEvent", "hipStreamWaitEvent"})


class Records:
    """The event records of a trace, and the streams that threads launched on."""

    def __init__(self, events: Iterable[Event]) -> None:
        calls: dict[int, Event] = {}
        gpu: list[Event] = []
        self._calls: list[Event] = []
        self._by_thread: dict[int | str, list[Event]] = defaultdict(list)
        syncs: list[Event] = []
        for event in events:
            if event.cat in LAUNCH_CATEGORIES and event.args.correlation:
                calls[event.args.correlation] = event
                if event.name in RECORDS:
                    self._calls.append(event)
                if event.name in RECORDS or event.name in _WAITS:
                    self._by_thread[event.tid].append(event)
            elif event.cat in GPU_CATEGORIES:
                gpu.append(event)
            elif event.cat == "cuda_sync":
                syncs.append(event)
        self._calls.sort(key=lambda call: call.start_ns)
        for members in self._by_thread.values():
            members.sort(key=lambda call: call.start_ns)
        self._launches: dict[int | str, list[tuple[int, int]]] = defaultdict(list)
        for event in gpu:
            if launch := calls.get(event.args.correlation):
                self._launches[launch.tid].append((launch.start_ns, event.args.stream))
        for launched in self._launches.values():
            launched.sort()
        self._of_event = self._in_order(syncs, calls)

    def _in_order(self, syncs: list[Event], calls: dict[int, Event]) -> dict[int, int]:
        """Return event id -> position of its record, the latest that order and waits allow.

        From the highest id down: a record lies before the event's first wait, and as many records
        before that of the next id as the ids are apart.
        """
        first: dict[int, int] = {}
        for sync in syncs:
            call = calls.get(sync.args.correlation)
            if call is None or call.name in QUERIES:
                continue
            if sync.args.wait_on_event >= 0:
                event = sync.args.wait_on_event
                first[event] = min(first.get(event, call.start_ns), call.start_ns)
        starts = [call.start_ns for call in self._calls]
        positions: dict[int, int] = {}
        ceiling, above = len(starts), max(first, default=0) + 1
        for event in sorted(first, reverse=True):
            position = min(bisect_right(starts, first[event]) - 1, ceiling - (above - event))
            if position < 0:
                break  # this event and the older ones were there before the trace began
            positions[event] = position
            ceiling, above = position, event
        return positions

    def record(self, event: int, wait: Event) -> Event | None:
        """Return the call that recorded the event waited for, or None where it cannot be told."""
        position = self._of_event.get(event)
        if position is not None:
            return self._calls[position]
        members = self._by_thread.get(wait.tid, [])
        place = bisect_right(members, wait.start_ns, key=lambda call: call.start_ns) - 1
        while place >= 0 and members[place] is wait:
            place -= 1
        before = members[place] if place >= 0 else None
        return before if before is not None and before.name in RECORDS else None

    def stream(self, record: Event, *, besides: int | None) -> int | None:
        """Return the stream that `record` was called on, None where nothing tells.

        Args:
            record: the call.
            besides: a stream that it cannot be: the one that waits.
        """
        launched = self._launches.get(record.tid, [])
        place = bisect_right(launched, record.start_ns, key=lambda launch: launch[0])
        for _, stream in reversed(launched[:place]):
            if stream != besides:
                return stream
        return None
