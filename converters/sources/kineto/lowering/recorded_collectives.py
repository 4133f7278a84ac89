"""Place recorded communication calls on streams and threads, with the nodes that await them.

Covers calls recorded by the capture and calls that Gloo ran. Their node numbers follow those of
operators and GPU operations in `DependencyEdges`.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.collectives.communication import (
    Communication,
    awaited,
    from_mark,
)
from onerank.converters.sources.kineto.collectives.gloo import GlooCall, first_operator_after
from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.lowering.dependency_edges import (
    Columns,
    DependencyEdges,
    NodeSequence,
    StreamSequences,
    ThreadSequences,
    sequence_at,
)
from onerank.converters.sources.kineto.read.schema import ExecutionTrace
from onerank.ir import UNKNOWN, Evidence, Reason
from onerank.ir.arrays import I64


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A recorded call.

    Attributes:
        op: index of its mark.
        communication: the request.
        stand_ins: rows of the kernels that emulate it, by start; none on a CPU.
        waits: indices of the marks of its waits, in order; torch's C++ code may wait without a
            mark.
    """

    op: int
    communication: Communication
    stand_ins: list[int] = field(default_factory=list[int])
    waits: list[int] = field(default_factory=list[int])


def recorded_calls(timeline: HostTimeline, gpu: GpuOps, et: ExecutionTrace) -> list[RecordedCall]:
    """Return the recorded calls in the order of their marks.

    Raises:
        TraceError: a mark does not hold what it should.
    """
    by_mark: dict[int, list[int]] = defaultdict(list)
    standing = np.flatnonzero(gpu.stands_in)
    standing = standing[np.argsort(gpu.rows.start_ns[standing], kind="stable")]
    for row, mark in zip(standing.tolist(), gpu.in_mark[standing].tolist(), strict=True):
        by_mark[mark].append(row)
    calls: list[RecordedCall] = []
    by_sequence: dict[int, RecordedCall] = {}
    for op in np.flatnonzero(timeline.is_mark).tolist():
        call = RecordedCall(op, from_mark(timeline, op, et), by_mark[op])
        calls.append(call)
        by_sequence[call.communication.sequence] = call
    waits = np.flatnonzero(timeline.is_wait)
    for op in waits[np.argsort(timeline.rows.start_ns[waits], kind="stable")].tolist():
        if call := by_sequence.get(awaited(timeline, op, et)):
            call.waits.append(op)
    return calls


def end_of_wait(call: RecordedCall, timeline: HostTimeline, kept: npt.NDArray[np.int64]) -> int:
    """Return the first kept operator that runs behind the wait for a call, -1 for no such.

    Where the wait left no mark, the call was issued by DDP's reducer, which waits for all its calls
    when backward ends: behind it lies the first operator that is not backward's.

    Args:
        call: an asynchronous call.
        timeline: the host events.
        kept: indices of the operators that are nodes, by start.
    """
    rows = timeline.rows
    if call.waits:
        wait = call.waits[0]
        after = kept[np.searchsorted(rows.start_ns[kept], rows.start_ns[wait]) :]
        found = np.flatnonzero(rows.thread[after] == rows.thread[wait])
    else:
        after = kept[np.searchsorted(rows.start_ns[kept], rows.end_ns[call.op]) :]
        found = np.flatnonzero(~timeline.in_functions[after])
    return int(after[found[0]]) if len(found) else -1


def wait_is_known(call: RecordedCall, timeline: HostTimeline) -> bool:
    """Whether the wait of an asynchronous call is known, on a CPU."""
    return bool(call.waits) or bool(timeline.in_functions[call.op])


@dataclass(slots=True)
class _Placed:
    """Where and for how long a recorded call runs."""

    stream: int
    thread: int
    duration_ns: int
    evidence: Evidence
    waited_ns: int = 0


class CallPlacement:
    """Puts calls into the lanes of streams and threads, and adds their edges."""

    def __init__(
        self, work: DependencyEdges, streams: StreamSequences, threads: ThreadSequences
    ) -> None:
        self._timeline, self._gpu = work.timeline, work.gpu
        self._kept, self._own = work.kept, work.own
        self._node, self._enclosing = work.node, work.enclosing
        self._edges, self._times = work.edges, work.times
        self._streams, self._threads = streams, threads
        self._asynchronous: dict[str, int] = {}
        self._placed: list[_Placed] = []

    def on_streams(self, calls: list[RecordedCall]) -> list[RecordedCall]:
        """Add recorded calls where their stand-ins ran; return those without.

        The latter are put behind what was launched before them, as if they blocked.
        """
        unplaced: list[RecordedCall] = []
        rows = self._gpu.rows
        for call in calls:
            number = self._communication(call)
            if call.stand_ins:
                first = call.stand_ins[0]
                key = int(rows.device[first]), int(rows.stream[first])
                if key not in self._streams:
                    self._streams[key] = NodeSequence(self._times)
                self._streams[key].insert_by_start(number)
            else:
                self._put(number, sequence_at(self._streams, self._times.launch[number]))
                unplaced.append(call)
            launcher = int(self._enclosing[call.op])
            if launcher >= 0 and self._node[launcher] >= 0:
                self._edges.add(int(self._node[launcher]), number, Reason.LAUNCH)
        return unplaced

    def on_threads(self, calls: list[RecordedCall], runs: list[GlooCall]) -> list[RecordedCall]:
        """Add the calls recorded on a CPU, and what Gloo ran; return those taken as blocking."""
        timeline = self._timeline
        starts = timeline.rows.start_ns[self._kept]
        by_start = self._kept[np.argsort(starts, kind="stable")]
        unplaced: list[RecordedCall] = []
        for call in calls:
            number = self._communication(call)
            thread = int(timeline.rows.thread[call.op])
            if call.communication.asynchronous and wait_is_known(call, timeline):
                self._beside(call, number)
                behind = end_of_wait(call, timeline, by_start)
                if behind >= 0:
                    self._edges.add(number, int(self._node[behind]), Reason.SYNC)
            else:
                if thread not in self._threads:
                    self._threads[thread] = NodeSequence(self._times)
                self._put(number, self._threads[thread])
                unplaced.append(call)
        self._runs_on_threads(runs)
        return unplaced

    def _runs_on_threads(self, runs: list[GlooCall]) -> None:
        """Add the calls that Gloo ran, after their issuers and earlier work of their threads."""
        rows = self._timeline.rows
        by_start = self._kept[np.argsort(rows.start_ns[self._kept], kind="stable")]
        lanes: ThreadSequences = {}
        starts = [*self._times.start, *rows.start_ns[[run.op for run in runs]].tolist()]
        since = min(starts, default=0)
        for run in runs:
            start, end = int(rows.start_ns[run.op]), int(rows.end_ns[run.op])
            thread = int(rows.thread[run.op])
            placed = _Placed(UNKNOWN, thread, end - start, Evidence.MEASURED)
            self._placed.append(placed)
            number = self._times.add(start, end, start)
            if run.caller == NONE or thread != rows.thread[run.caller]:
                lane = lanes.setdefault(thread, NodeSequence(self._times))
                if run.caller == NONE:
                    before = self._times.end[lane.members[-1]] if len(lane.members) else since
                    placed.waited_ns = max(start - before, 0)
                lane.members.append(number)
            if run.caller != NONE:
                self._edges.add(int(self._node[run.caller]), number, Reason.LAUNCH)
            behind = first_operator_after(run, self._timeline, by_start)
            if behind != NONE:
                self._edges.add(number, int(self._node[behind]), Reason.SYNC)
        for lane in lanes.values():
            self._edges.chain(lane.members, Reason.PROGRAM_ORDER)

    def _communication(self, call: RecordedCall) -> int:
        """Add a recorded call.

        Its duration is that of the paced kernel that emulates it. Without one it is 0, because no
        peer existed.
        """
        rows = self._gpu.rows
        start = end = launch = int(self._timeline.rows.start_ns[call.op])
        stream, evidence = UNKNOWN, Evidence.NONE
        if call.stand_ins:
            first, last = call.stand_ins[0], call.stand_ins[-1]
            start = end = int(rows.start_ns[first])
            launch, stream = int(self._gpu.launch_ns[first]), int(rows.stream[first])
            if self._gpu.paced[call.stand_ins].any():
                end = int(rows.start_ns[last] + rows.duration_ns[last])
                evidence = Evidence.SCALED
        self._placed.append(_Placed(stream, UNKNOWN, end - start, evidence))
        return self._times.add(start, end, launch)

    def _put(self, number: int, lane: NodeSequence) -> None:
        """Put a call into a lane, on the stream or thread of its neighbours."""
        neighbour = lane.insert_by_launch(number)
        if neighbour is None:
            return
        calls = len(self._kept) + len(self._own)
        placed = self._placed[number - calls]
        if neighbour >= calls:
            beside = self._placed[neighbour - calls]
            placed.stream, placed.thread = beside.stream, beside.thread
        elif neighbour >= len(self._kept):
            row = self._own[neighbour - len(self._kept)]
            placed.stream = int(self._gpu.rows.stream[row])
        else:
            placed.thread = int(self._timeline.rows.thread[self._kept[neighbour]])

    def _beside(self, call: RecordedCall, number: int) -> None:
        """Let an asynchronous call on a CPU start behind what its thread and group did before."""
        thread = int(self._timeline.rows.thread[call.op])
        self._placed[-1].thread = thread
        lane = self._threads.get(thread)
        before = lane.last_launched(self._times.launch[number]) if lane else None
        if before is not None:
            self._edges.add(before, number, Reason.PROGRAM_ORDER)
        earlier = self._asynchronous.get(call.communication.group)
        if earlier is not None:
            self._edges.add(earlier, number, Reason.STREAM_ORDER)
        self._asynchronous[call.communication.group] = number

    def columns(self, threads: I64, begin: int = 0, to: int | None = None) -> Columns:
        """Return stream, thread, duration and evidence of recorded calls, and what Gloo ran."""
        placed = self._placed[begin:to]
        thread = np.array([one.thread for one in placed], dtype=np.int64)
        return {
            "stream": np.array([one.stream for one in placed], dtype=np.int64),
            "thread": np.where(thread >= 0, threads[thread], UNKNOWN),
            "duration_ns": np.array([one.duration_ns for one in placed], dtype=np.int64),
            "evidence": np.array([one.evidence for one in placed], dtype=np.uint8),
            "blocked_ns": np.array([one.waited_ns for one in placed], dtype=np.int64),
        }
