"""Which event record a wait refers to, where CUPTI does not tell.

Drivers from CUDA 13 on leave stream and record of a `cuda_sync` event open; what remains is the
event's id, and the runtime calls by time. torch creates an event when it first records it, and ids
ascend as events are created: so of the events made within the trace, the records come in the order
of the ids. An event older than the trace is taken to be the one recorded just before the wait, on
the same thread. The stream recorded is the one on which that thread launched last.
"""

from bisect import bisect_right
from collections import defaultdict

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import named
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace

RECORDS = frozenset({"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord"})
QUERIES = frozenset({"cudaEventQuery", "hipEventQuery"})
STREAM_WAITS = frozenset({"cudaStreamWaitEvent", "hipStreamWaitEvent"})


class Records:
    """The event records of a trace, and the streams that threads launched on.

    Calls are told by their row among the trace's launches.
    """

    def __init__(self, trace: KinetoTrace) -> None:
        calls, strings = trace.launches, trace.strings
        self._thread: list[int] = calls.thread.tolist()
        self._start: list[int] = calls.start_ns.tolist()
        told = calls.correlation != 0
        recording = told & named(calls.name, strings, RECORDS.__contains__)
        waiting = told & named(calls.name, strings, STREAM_WAITS.__contains__)
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
        for launched in self._launches.values():
            launched.sort()
        queries = named(calls.name, strings, QUERIES.__contains__)
        self._of_event = self._in_order(trace, by_correlation, queries.tolist())

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
                break  # this event and the older ones were there before the trace began
            positions[event] = position
            ceiling, above = position, event
        return positions

    def record(self, event: int, wait: int) -> int:
        """Return the call that recorded the event waited for, -1 where it cannot be told."""
        position = self._of_event.get(event)
        if position is not None:
            return self._calls[position]
        members = self._by_thread.get(self._thread[wait], [])
        place = bisect_right(members, self._start[wait], key=self._start.__getitem__) - 1
        while place >= 0 and members[place] == wait:
            place -= 1
        before = members[place] if place >= 0 else -1
        return before if before >= 0 and self._recording[before] else -1

    def stream(self, record: int, *, besides: int | None) -> int | None:
        """Return the stream that `record` was called on, None where nothing tells.

        Args:
            record: the call.
            besides: a stream that it cannot be: the one that waits.
        """
        launched = self._launches.get(self._thread[record], [])
        place = bisect_right(launched, self._start[record], key=lambda launch: launch[0])
        while place > 0:
            place -= 1
            if launched[place][1] != besides:
                return launched[place][1]
        return None
