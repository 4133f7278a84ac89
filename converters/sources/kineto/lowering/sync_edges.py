"""Turn synchronisations into edges: waits of streams and host for events, copies and queue room.

Node sequences (of streams and threads) and node numbers are those of `DependencyEdges`.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onerank.converters.sources.kineto.lowering.dependency_edges import (
    DependencyEdges,
    StreamSequences,
    ThreadSequences,
)
from onerank.converters.sources.kineto.lowering.unexplained_gaps import (
    NEVER_LATE,
    UnexplainedGaps,
    find_unexplained_gaps,
)
from onerank.converters.sources.kineto.sync.inferred_waits import ROUNDING_NS, InferredWait
from onerank.converters.sources.kineto.sync.launch_queue import QueueWait
from onerank.converters.sources.kineto.sync.sync_events import Synchronizations, Wait
from onerank.ir import Reason
from onerank.ir.arrays import I64


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
        self.blocked: dict[tuple[int, int], int] = {}
        self.queued: list[QueueWait] = []
        self.blocked_ns = np.zeros(len(builder.kept), dtype=np.int64)

    def add_waits(
        self, waits: Synchronizations, queue: Sequence[QueueWait]
    ) -> tuple[int, Counter[str]]:
        """Add edges of synchronisations; return their number, and waits without edges by reason."""
        added = 0
        without_edge = Counter[str]()
        for wait in waits.found:
            awaited = _awaited(wait, self._streams)
            waiters = self._waiters(wait)
            if wait.waiting_stream is None and awaited:
                done = max(self._times.end[source] for source in awaited)
                self._block(wait.thread, wait.start_ns, wait.end_ns, done - wait.start_ns, waiters)
            if not waiters:
                without_edge["no node follows the wait"] += 1
                continue
            for source in awaited:
                for waiter in waiters:
                    if waiter != source:
                        self._edges.add(source, waiter, Reason.SYNC)
            added += len(awaited)
            if not awaited:
                without_edge["the awaited stream had no earlier launch"] += 1
        added += self._add_inferred(waits.inferred_waits, without_edge)
        self._add_queue_waits(queue)
        return added, without_edge

    def _block(
        self, thread: int, start_ns: int, end_ns: int, waited_ns: int, waiters: list[int]
    ) -> None:
        """Record how long a thread's call waited; of a call's several waits the longest counts."""
        known_ns = self.blocked.get((thread, start_ns), 0)
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
                continue  # the call waited for a copy that it launched, longer than for queue room
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

        Negative: the overlap with the previous operation of its stream, or of another one that left
        it free SMs.
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

    def _waiters(self, wait: Wait) -> list[int]:
        """Return the first nodes that a synchronisation delays.

        A host wait delays its thread; without operators it delays the next launch on every stream.
        """
        if wait.waiting_stream is not None:
            waiting = [
                sequence for (_, s), sequence in self._streams.items() if s == wait.waiting_stream
            ]
            first = [sequence.first_launched(wait.start_ns) for sequence in waiting[:1]]
        elif self._operators:
            sequence = self._threads.get(wait.thread)
            first = [sequence.first_launched(wait.end_ns)] if sequence else []
        else:
            first = [sequence.first_launched(wait.end_ns) for sequence in self._streams.values()]
        return [number for number in first if number is not None]


def _awaited(wait: Wait, streams: StreamSequences) -> list[int]:
    """Return the last launched operation of each stream that a synchronisation waits for."""
    awaited = [
        sequence.last_launched(wait.horizon_ns)
        for (_, stream), sequence in streams.items()
        if wait.stream in (None, stream) and stream != wait.waiting_stream
    ]
    return [number for number in awaited if number is not None]
