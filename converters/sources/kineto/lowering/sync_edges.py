"""Turn synchronisations into edges: waits of streams and host for events, copies and queue room.

Lanes (streams and threads) and node numbers are those of `DependencyEdges`.
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
    """Adds the edges of waits to a graph to be, and keeps how long calls and operations waited.

    Attributes:
        blocked: thread and start of each call that waited for the GPU -> how long, nanoseconds.
        queued: launches that waited for room, and not for a copy of their own.
        blocked_ns: how long each operator's thread was blocked by the GPU before it, int64[kept].
    """

    def __init__(
        self, work: DependencyEdges, streams: StreamSequences, threads: ThreadSequences
    ) -> None:
        self._edges, self._times = work.edges, work.times
        self._streams, self._threads = streams, threads
        self._gpu, self._own, self._operators = work.gpu, work.own, len(work.kept)
        self.blocked: dict[tuple[int, int], int] = {}
        self.queued: list[QueueWait] = []
        self.blocked_ns = np.zeros(len(work.kept), dtype=np.int64)

    def synchronise(
        self, waits: Synchronizations, queue: Sequence[QueueWait]
    ) -> tuple[int, Counter[str]]:
        """Add the edges of the synchronisations; return how many, and those that gave none."""
        made = 0
        idle = Counter[str]()
        for wait in waits.found:
            awaited = _awaited(wait, self._streams)
            waiters = self._waiters(wait)
            if wait.waiting_stream is None and awaited:
                done = max(self._times.end[source] for source in awaited)
                self._block(wait.thread, wait.start_ns, wait.end_ns, done - wait.start_ns, waiters)
            if not waiters:
                idle["nothing follows that waits"] += 1
                continue
            for source in awaited:
                for waiter in waiters:
                    if waiter != source:
                        self._edges.add(source, waiter, Reason.SYNC)
            made += len(awaited)
            if not awaited:
                idle["nothing was launched before on the stream waited for"] += 1
        made += self._held(waits.held, idle)
        self._queue(queue)
        return made, idle

    def _block(
        self, thread: int, start_ns: int, end_ns: int, waited_ns: int, waiters: list[int]
    ) -> None:
        """Note that a thread's call waited so long; a call waits once, whatever it waits for."""
        known_ns = self.blocked.get((thread, start_ns), 0)
        waited_ns = min(waited_ns, end_ns - start_ns)
        if waited_ns <= known_ns:
            return
        self.blocked[thread, start_ns] = waited_ns
        for waiter in waiters:
            if waiter < self._operators:
                self.blocked_ns[waiter] += waited_ns - known_ns

    def _held(self, held: Sequence[InferredWait], idle: Counter[str]) -> int:
        """Let operations wait for those of other streams that delayed them; return how many."""
        by_number = {stream: lane for (_, stream), lane in self._streams.items()}
        made = 0
        for one in held:
            waiter = by_number[one.stream].starting_at(one.start_ns)
            source = by_number[one.waited_for].last_ended(one.ended_ns)
            if waiter is not None and source is not None:
                self._edges.add(source, waiter, Reason.SYNC)
                made += 1
            else:
                idle["what held it, or was held, is no node"] += 1
        return made

    def _queue(self, waits: Sequence[QueueWait]) -> None:
        """Let what follows a launch that waited for room wait for the operation that made it."""
        for wait in waits:
            if (wait.thread, wait.start_ns) in self.blocked:
                continue  # it waited for its own copy, longer than for room
            self.queued.append(wait)
            stream, thread = self._streams.get(wait.lane), self._threads.get(wait.thread)
            source = stream.last_ended(wait.freed_ns) if stream else None
            target = thread.first_launched(wait.end_ns) if thread else None
            if source is not None and target is not None:
                self._edges.add(source, target, Reason.LAUNCH_QUEUE)
            waiters = [] if source is None or target is None else [target]
            self._block(wait.thread, wait.start_ns, wait.end_ns, wait.waited_ns, waiters)

    def late(self) -> UnexplainedGaps:
        """Let late operations wait for their inferred cause; return the causes."""
        end = np.array(self._times.end, dtype=np.int64)
        known = np.full(len(end), np.iinfo(np.int64).min)
        own = self._operators + np.arange(len(self._own))
        returned = self._gpu.returned_ns[self._own]
        known[own[returned >= 0]] = returned[returned >= 0]
        waits = tuple(set(Reason) - {Reason.LAUNCH, Reason.PROGRAM_ORDER})
        known = self._edges.latest(end, known, of=waits)
        ready = np.full(len(end), NEVER_LATE)
        told = own[known[own] > np.iinfo(np.int64).min]
        ready[told] = known[told]
        found = UnexplainedGaps()
        for device in {device for device, _ in self._streams}:
            late = find_unexplained_gaps(
                [lane for (one, _), lane in self._streams.items() if one == device], ready
            )
            found.held.extend(late.held)
            found.unexplained_ns.update(late.unexplained_ns)
        for source, target, reason in found.held:
            self._edges.add(source, target, reason)
        return found

    def gpu_waits(self, late: UnexplainedGaps) -> I64:
        """Return the unexplained wait of each GPU operation, int64[own].

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
        return waited[self._operators :][: len(self._own)]

    def _waiters(self, wait: Wait) -> list[int]:
        """Return what a synchronisation holds back: without operators all that follows."""
        if wait.waiting_stream is not None:
            waiting = [lane for (_, s), lane in self._streams.items() if s == wait.waiting_stream]
            first = [lane.first_launched(wait.start_ns) for lane in waiting[:1]]
        elif self._operators:
            lane = self._threads.get(wait.thread)
            first = [lane.first_launched(wait.end_ns)] if lane else []
        else:
            first = [lane.first_launched(wait.end_ns) for lane in self._streams.values()]
        return [number for number in first if number is not None]


def _awaited(wait: Wait, streams: StreamSequences) -> list[int]:
    """Return what a synchronisation waits for: of each stream that it is of, the last launched."""
    found = [
        lane.last_launched(wait.horizon_ns)
        for (_, stream), lane in streams.items()
        if wait.stream in (None, stream) and stream != wait.waiting_stream
    ]
    return [number for number in found if number is not None]
