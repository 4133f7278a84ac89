"""Place recorded communication calls on streams and threads, with the nodes that await them.

Covers calls recorded by the capture and calls that Gloo ran. Their node numbers follow those of
operators and GPU operations in `DependencyEdges`.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from onerank.converters.sources.kineto.collectives import (
    Communication,
    awaited_call,
    from_mark,
)
from onerank.converters.sources.kineto.gloo import (
    GlooCall,
    OperatorsByStart,
    first_operator_after,
)
from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.link.sync_events import NO_THREAD, Wait
from onerank.converters.sources.kineto.lowering.dependency_edges import (
    Columns,
    DependencyEdges,
    NodeSequence,
    StreamSequences,
    ThreadSequences,
    sequence_at,
)
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace
from onerank.ir import UNKNOWN, Evidence, Reason
from onerank.ir.arrays import I64


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A recorded call.

    Attributes:
        op: index of its mark.
        communication: the request.
        kernels: rows of the kernels that emulate it, by start; none on a CPU.
        waits: indices of the marks of its waits, in order; torch's C++ code may wait without a
            mark.
    """

    op: int
    communication: Communication
    kernels: list[int] = field(default_factory=list[int])
    waits: list[int] = field(default_factory=list[int])


def recorded_calls(timeline: HostTimeline, gpu: GpuOps, et: ExecutionTrace) -> list[RecordedCall]:
    """Return the recorded calls in the order in which they were issued.

    Raises:
        TraceError: a mark holds no valid record of a call.
    """
    by_mark: dict[int, list[int]] = defaultdict(list)
    emulating = np.flatnonzero(gpu.emulates)
    emulating = emulating[np.argsort(gpu.rows.start_ns[emulating], kind="stable")]
    for row, mark in zip(emulating.tolist(), gpu.in_mark[emulating].tolist(), strict=True):
        by_mark[mark].append(row)
    calls: list[RecordedCall] = []
    by_sequence: dict[int, RecordedCall] = {}
    # Events are sorted by thread, and autograd's thread issues calls between those of the script's.
    marks = np.flatnonzero(timeline.is_mark)
    for op in marks[np.argsort(timeline.rows.start_ns[marks], kind="stable")].tolist():
        call = RecordedCall(op, from_mark(timeline, op, et), by_mark[op])
        calls.append(call)
        by_sequence[call.communication.sequence] = call
    waits = np.flatnonzero(timeline.is_wait)
    for op in waits[np.argsort(timeline.rows.start_ns[waits], kind="stable")].tolist():
        if call := by_sequence.get(awaited_call(timeline, op, et)):
            call.waits.append(op)
    return calls


def end_of_wait(call: RecordedCall, operators: OperatorsByStart) -> int:
    """Return the first kept operator that runs after the wait for a call, -1 if there is none.

    A wait without a mark belongs to a call of DDP's reducer, which waits for all its calls when
    backward ends. The first operator after it is then the first one outside backward.

    Args:
        call: an asynchronous call.
        operators: the operators that are nodes.
    """
    rows = operators.timeline.rows
    if call.waits:
        wait = call.waits[0]
        return operators.first_on_thread(int(rows.thread[wait]), int(rows.start_ns[wait]))
    return operators.first_outside_functions(int(rows.end_ns[call.op]))


def wait_is_known(call: RecordedCall, timeline: HostTimeline) -> bool:
    """Return whether the wait of an asynchronous call is known, on a CPU."""
    return bool(call.waits) or bool(timeline.in_functions[call.op])


class _Handovers:
    """Operators at which the host passes between autograd's threads and the thread that waits.

    The thread that calls backward is blocked until the backward ends, so only one of them runs at a
    time. A call comes after the last operator of the other thread, and the next operator of the
    other thread comes after the wait for the call.
    """

    def __init__(self, builder: DependencyEdges) -> None:
        rows = builder.timeline.rows
        self._autograd = {*builder.autograd_threads().tolist()}
        order = np.argsort(rows.start_ns[builder.kept], kind="stable")
        self._numbers = order.tolist()
        self._starts = rows.start_ns[builder.kept][order]
        self._threads: list[int] = rows.thread[builder.kept][order].tolist()

    def before(self, thread: int, time_ns: int) -> int | None:
        """Return the last operator before a time if another thread ran it, else None."""
        place = int(np.searchsorted(self._starts, time_ns))
        return self._of_other(thread, reversed(range(place)))

    def after(self, thread: int, time_ns: int) -> int | None:
        """Return the first operator from a time on if another thread runs it, else None."""
        place = int(np.searchsorted(self._starts, time_ns))
        return self._of_other(thread, range(place, len(self._starts)))

    def _of_other(self, thread: int, places: Iterable[int]) -> int | None:
        if not self._autograd:
            return None
        for place in places:
            other = self._threads[place]
            if other == thread:
                return None
            if thread in self._autograd or other in self._autograd:
                return self._numbers[place]
        return None


@dataclass(slots=True)
class _Placement:
    """Where and for how long a recorded call runs."""

    stream: int
    thread: int
    duration_ns: int
    evidence: Evidence
    waited_ns: int = 0


class CallPlacement:
    """Puts calls into the sequences of streams and threads, and adds their edges.

    Attributes:
        waits: without a device, two waits of each asynchronous call: its group's stream waits for
            the caller's, and the stream that is current at the wait waits for the group's.
    """

    def __init__(
        self, builder: DependencyEdges, streams: StreamSequences, threads: ThreadSequences
    ) -> None:
        self._timeline, self._gpu = builder.timeline, builder.gpu
        self._kept, self._gpu_rows = builder.kept, builder.gpu_rows
        self._node, self._enclosing = builder.node, builder.enclosing
        self._edges, self._times = builder.edges, builder.times
        self._streams, self._threads = streams, threads
        self._handovers = _Handovers(builder)
        self._asynchronous: dict[str, int] = {}
        self._placed: list[_Placement] = []
        self.waits: list[Wait] = []

    def on_streams(self, calls: list[RecordedCall]) -> list[RecordedCall]:
        """Add recorded calls where their emulating kernels ran; return the calls without kernels.

        A call without kernels comes after everything launched before it, as if it blocked.
        """
        unplaced: list[RecordedCall] = []
        rows = self._gpu.rows
        for call in calls:
            number = self._add_call(call)
            if call.kernels:
                # The capture launches the kernel where torch's NCCL backend would run the call: an
                # asynchronous call on its group's stream, a blocking call on the caller's.
                first = call.kernels[0]
                key = int(rows.device[first]), int(rows.stream[first])
                # A stream that ran nothing but emulating kernels has no other node.
                if key not in self._streams:
                    self._streams[key] = NodeSequence(self._times)
                self._streams[key].insert_by_start(number)
            else:
                self._insert(number, sequence_at(self._streams, self._times.launch[number]))
                unplaced.append(call)
            launcher = int(self._enclosing[call.op])
            if launcher >= 0 and self._node[launcher] >= 0:
                self._edges.add(int(self._node[launcher]), number, Reason.LAUNCH)
        return unplaced

    def on_threads(
        self, calls: list[RecordedCall], gloo_calls: list[GlooCall]
    ) -> list[RecordedCall]:
        """Add the calls recorded on a CPU and those of Gloo; return the calls assumed blocking."""
        # In a capture without a device, operators have streams.
        if self._streams:
            return self._on_emulated_streams(calls)
        timeline = self._timeline
        operators = OperatorsByStart(timeline, self._kept)
        unplaced: list[RecordedCall] = []
        for call in calls:
            number = self._add_call(call)
            thread = int(timeline.rows.thread[call.op])
            # Without a known wait, what the call overlaps would be a guess: it then counts as
            # blocking.
            if call.communication.asynchronous and wait_is_known(call, timeline):
                self._add_asynchronous(call, number)
                waiter = end_of_wait(call, operators)
                if waiter >= 0:
                    self._edges.add(number, int(self._node[waiter]), Reason.SYNC)
                ended = call.waits[0] if call.waits else None
            else:
                if thread not in self._threads:
                    self._threads[thread] = NodeSequence(self._times)
                self._insert(number, self._threads[thread])
                unplaced.append(call)
                ended = call.op
            self._hand_over(number, call.op, ended)
        self._add_gloo_calls(gloo_calls, operators)
        return unplaced

    def _hand_over(self, number: int, issued: int, ended: int | None) -> None:
        """Order a call with the operators of other threads that ran before and after it.

        Args:
            number: of the call.
            issued: its mark.
            ended: mark after which other threads wait for the call; None if it is not known.
        """
        rows = self._timeline.rows
        before = self._handovers.before(int(rows.thread[issued]), int(rows.start_ns[issued]))
        if before is not None:
            self._edges.add(before, number, Reason.SYNC)
        if ended is not None:
            after = self._handovers.after(int(rows.thread[ended]), int(rows.start_ns[ended]))
            if after is not None:
                self._edges.add(number, after, Reason.SYNC)

    def _on_emulated_streams(self, calls: list[RecordedCall]) -> list[RecordedCall]:
        """Add the calls of a capture without a device; return the calls assumed blocking.

        As in torch's NCCL backend, a blocking call runs on the caller's stream. An asynchronous
        call runs on its group's stream, after what the caller's stream was given before; the stream
        that is current at the wait waits for it.
        """
        rows = self._timeline.rows
        operators = OperatorsByStart(self._timeline, self._kept)
        # Groups get stream numbers above those of the script. Some of these run blocking calls
        # alone: FSDP2 gathers on one.
        callers = rows.stream[[call.op for call in calls]].tolist()
        last = max([*callers, *(stream for _, stream in self._streams)])
        groups: dict[str, int] = {}
        unplaced: list[RecordedCall] = []
        asynchronous: list[tuple[RecordedCall, int, int]] = []
        for call in calls:
            number = self._add_call(call)
            placed, caller = self._placed[-1], (0, int(rows.stream[call.op]))
            placed.thread = int(rows.thread[call.op])
            sequence = self._streams.get(caller)
            if sequence is None:
                sequence = self._streams[caller] = NodeSequence(self._times)
            if call.communication.asynchronous and wait_is_known(call, self._timeline):
                group = call.communication.group
                placed.stream = groups.setdefault(group, last + 1 + len(groups))
                issued_ns = self._times.launch[number]
                self._wait(placed.stream, caller[1], issued_ns, issued_ns)
                of_group = self._streams.setdefault((0, placed.stream), NodeSequence(self._times))
                of_group.members.append(number)
                asynchronous.append((call, number, placed.stream))
            else:
                placed.stream = caller[1]
                sequence.insert_by_launch(number)
                unplaced.append(call)
        # After all calls are placed: the first node after a wait may be a later call.
        for call, number, stream in asynchronous:
            self._await_on_stream(call, number, stream, operators)
        return unplaced

    def _await_on_stream(
        self, call: RecordedCall, number: int, stream: int, operators: OperatorsByStart
    ) -> None:
        """Let the stream that is current at the wait for an asynchronous call wait for it.

        Args:
            call: an asynchronous call.
            number: the number of its node.
            stream: the stream of its group.
            operators: the operators that are nodes.
        """
        if not call.waits:
            waiter = end_of_wait(call, operators)
            if waiter >= 0:
                self._edges.add(number, int(self._node[waiter]), Reason.SYNC)
            return
        rows, wait = self._timeline.rows, call.waits[0]
        issued_ns = self._times.launch[number]
        self._wait(int(rows.stream[wait]), stream, issued_ns, int(rows.start_ns[wait]))

    def _wait(self, stream: int, awaited: int, horizon_ns: int, start_ns: int) -> None:
        """Let a stream wait for what was launched on another one.

        Args:
            stream: the stream that waits.
            awaited: the stream that it waits for.
            horizon_ns: host time up to which launches are awaited.
            start_ns: host time of the wait.
        """
        self.waits.append(Wait(awaited, horizon_ns, stream, NO_THREAD, start_ns, start_ns))

    def _add_gloo_calls(self, gloo_calls: list[GlooCall], operators: OperatorsByStart) -> None:
        """Add the calls that Gloo ran, after their issuers and earlier work of their threads."""
        rows = self._timeline.rows
        sequences: ThreadSequences = {}
        starts = [*self._times.start, *rows.start_ns[[call.op for call in gloo_calls]].tolist()]
        since = min(starts, default=0)
        for call in gloo_calls:
            start, end = int(rows.start_ns[call.op]), int(rows.end_ns[call.op])
            thread = int(rows.thread[call.op])
            placed = _Placement(UNKNOWN, thread, end - start, Evidence.MEASURED)
            self._placed.append(placed)
            number = self._times.add(start, end, start)
            if call.caller == NONE or thread != rows.thread[call.caller]:
                sequence = sequences.setdefault(thread, NodeSequence(self._times))
                if call.caller == NONE:
                    before = (
                        self._times.end[sequence.members[-1]] if len(sequence.members) else since
                    )
                    placed.waited_ns = max(start - before, 0)
                sequence.members.append(number)
            if call.caller != NONE:
                self._edges.add(int(self._node[call.caller]), number, Reason.LAUNCH)
            waiter = first_operator_after(call, operators)
            if waiter != NONE:
                self._edges.add(number, int(self._node[waiter]), Reason.SYNC)
        for sequence in sequences.values():
            self._edges.chain(sequence.members, Reason.PROGRAM_ORDER)

    def _add_call(self, call: RecordedCall) -> int:
        """Add a recorded call.

        Its duration is that of the paced kernel that emulates it. Without one it is 0, because no
        peer existed.
        """
        rows = self._gpu.rows
        start = end = launch = int(self._timeline.rows.start_ns[call.op])
        stream, evidence = UNKNOWN, Evidence.NONE
        if call.kernels:
            first, last = call.kernels[0], call.kernels[-1]
            start = end = int(rows.start_ns[first])
            launch, stream = int(self._gpu.launch_ns[first]), int(rows.stream[first])
            if self._gpu.paced[call.kernels].any():
                end = int(rows.start_ns[last] + rows.duration_ns[last])
                # The pace of such a kernel follows from the bytes and a given bandwidth: it is no
                # measurement.
                evidence = Evidence.SCALED
        self._placed.append(_Placement(stream, UNKNOWN, end - start, evidence))
        return self._times.add(start, end, launch)

    def _insert(self, number: int, sequence: NodeSequence) -> None:
        """Insert a call into a sequence, on the stream or thread of its neighbours."""
        neighbour = sequence.insert_by_launch(number)
        if neighbour is None:
            return
        calls = len(self._kept) + len(self._gpu_rows)
        placed = self._placed[number - calls]
        if neighbour >= calls:
            neighbour_call = self._placed[neighbour - calls]
            placed.stream, placed.thread = neighbour_call.stream, neighbour_call.thread
        elif neighbour >= len(self._kept):
            row = self._gpu_rows[neighbour - len(self._kept)]
            placed.stream = int(self._gpu.rows.stream[row])
        else:
            placed.thread = int(self._timeline.rows.thread[self._kept[neighbour]])

    def _add_asynchronous(self, call: RecordedCall, number: int) -> None:
        """Let an asynchronous call on a CPU start after earlier work of its thread and group."""
        thread = int(self._timeline.rows.thread[call.op])
        self._placed[-1].thread = thread
        sequence = self._threads.get(thread)
        # Not chained into the thread: a chain would make the thread wait for the call.
        before = sequence.last_launched(self._times.launch[number]) if sequence else None
        if before is not None:
            self._edges.add(before, number, Reason.PROGRAM_ORDER)
        # Calls of one group run in the order in which they were issued.
        earlier = self._asynchronous.get(call.communication.group)
        if earlier is not None:
            self._edges.add(earlier, number, Reason.STREAM_ORDER)
        self._asynchronous[call.communication.group] = number

    def columns(self, threads: I64, begin: int = 0, to: int | None = None) -> Columns:
        """Return stream, thread, duration and evidence of recorded calls and Gloo calls."""
        placed = self._placed[begin:to]
        thread = np.array([call.thread for call in placed], dtype=np.int64)
        return {
            "stream": np.array([call.stream for call in placed], dtype=np.int64),
            "thread": np.where(thread >= 0, threads[thread], UNKNOWN),
            "duration_ns": np.array([call.duration_ns for call in placed], dtype=np.int64),
            "evidence": np.array([call.evidence for call in placed], dtype=np.uint8),
            "blocked_ns": np.array([call.waited_ns for call in placed], dtype=np.int64),
        }
