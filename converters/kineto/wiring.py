"""What follows what: the lanes of streams and threads, launches, calls, hand-overs."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onerank.converters.kineto.calls import Recorded, end_of_wait, wait_is_known
from onerank.converters.kineto.columns import I64
from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.edges import EdgeList
from onerank.converters.kineto.gloo import Run, end_of_run
from onerank.converters.kineto.host import NONE, HostTimeline
from onerank.converters.kineto.lanes import Lane, Times, lane_at, numbers
from onerank.converters.kineto.memory import Memory
from onerank.converters.kineto.nodes import Columns
from onerank.ir import UNKNOWN, Evidence, Phase, Reason
from onerank.ir.kinds import LAUNCH_NS

Streams = dict[tuple[int, int], Lane]
"""Device and stream -> lane."""
Threads = dict[int, Lane]
"""Place in the trace's `threads` -> lane."""


@dataclass(slots=True)
class _Placed:
    """Where and for how long a recorded call runs."""

    stream: int
    thread: int
    duration_ns: int
    evidence: Evidence
    waited_ns: int = 0


class Wiring:
    """Numbers the nodes to be and collects edges; each method adds one sort of them.

    Operators come first, then GPU operations by start, then recorded calls.
    """

    def __init__(self, timeline: HostTimeline, gpu: GpuOps, kept: I64, own: I64) -> None:
        self._timeline, self._gpu = timeline, gpu
        self._kept, self._own = kept, own
        self.edges = EdgeList()
        rows, kernels = timeline.rows, gpu.rows
        ends = kernels.start_ns[own] + kernels.duration_ns[own]
        self.times = Times(
            numbers(rows.start_ns[kept], kernels.start_ns[own]),
            numbers(rows.end_ns[kept], ends),
            numbers(rows.start_ns[kept], gpu.launch_ns[own]),
        )
        is_kept = np.zeros(len(timeline), dtype=bool)
        is_kept[kept] = True
        self._is_kept = is_kept
        self._node = np.full(len(timeline), NONE)
        self._node[kept] = np.arange(len(kept))
        self.memory_node: dict[int, int] = {}
        """Host event that allocates or frees -> the node that answers for it."""
        self._enclosing = timeline.nearest(is_kept)
        self._asynchronous: dict[str, int] = {}
        self._placed: list[_Placed] = []

    def streams(self) -> Streams:
        """Return one lane per stream, of GPU operations in the order of their start."""
        rows = self._gpu.rows
        lanes: Streams = {}
        keys = zip(rows.device[self._own].tolist(), rows.stream[self._own].tolist(), strict=True)
        for number, key in enumerate(keys, start=len(self._kept)):
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = Lane(self.times)
            lane.members.append(number)
        return lanes

    def threads(self) -> Threads:
        """Return one lane of operators per thread, in call order."""
        lanes: Threads = {}
        threads = self._timeline.rows.thread[self._kept].tolist()
        for number, thread in enumerate(threads):
            lane = lanes.get(thread)
            if lane is None:
                lane = lanes[thread] = Lane(self.times)
            lane.members.append(number)
        return lanes

    def own_time(self, blocked: Mapping[tuple[int, int], int]) -> I64:
        """Return every operator's duration without what it calls, and what blocked it.

        Args:
            blocked: thread and start of calls that waited for the GPU -> how long.
        """
        rows = self._timeline.rows
        whole = rows.end_ns - rows.start_ns
        called = np.flatnonzero((self._is_kept | self._timeline.is_mark) & (self._enclosing >= 0))
        taken = np.zeros(len(self._timeline), dtype=np.int64)
        np.add.at(taken, self._enclosing[called], whole[called])
        threads, begun = np.array(list(blocked), dtype=np.int64).reshape(-1, 2).T
        around = self._timeline.innermost(threads, begun)
        for waited_ns, within in zip(blocked.values(), around, strict=True):
            operator = within if within < 0 or self._is_kept[within] else self._enclosing[within]
            if operator >= 0 and self._timeline.in_mark[within] < 0:
                taken[operator] += waited_ns
        return np.maximum((whole - taken)[self._kept], 0)

    def _launches(self) -> None:
        """Let every GPU operation wait for the operator that launched it."""
        if not len(self._kept):
            return
        operator = self._gpu.operator[self._own]
        launcher = np.where(operator >= 0, self._node[operator], NONE)
        linked = np.flatnonzero(launcher >= 0)
        self.edges.extend(launcher[linked], linked + len(self._kept), Reason.LAUNCH)

    def launch_order(self, own_time_ns: I64, threads: Threads) -> None:
        """Let operations wait for what their operator called before it launched them.

        Where it called nothing for longer than its own time, the edge of the launch tells.
        """
        gpu, kept = self._gpu, self._kept
        operator = gpu.operator[self._own]
        launcher = np.where(operator >= 0, self._node[operator], NONE)
        asked = np.flatnonzero((launcher >= 0) & (gpu.returned_ns[self._own] >= 0))
        launcher, launch_ns = launcher[asked], gpu.launch_ns[self._own][asked]
        begun = self._timeline.rows.start_ns[kept[launcher]]
        within = launch_ns - begun > own_time_ns[launcher] + LAUNCH_NS
        thread = self._timeline.rows.thread[kept[launcher]]
        for place in np.flatnonzero(within).tolist():
            last = threads[int(thread[place])].last_launched(int(launch_ns[place]))
            if last is not None and last != launcher[place]:
                self.edges.add(last, int(asked[place]) + len(kept), Reason.PROGRAM_ORDER)

    def calls_on_streams(self, calls: list[Recorded], streams: Streams) -> list[Recorded]:
        """Add launches, and recorded calls where their stand-ins ran; return those without.

        The latter are put behind what was launched before them, as if they blocked.
        """
        self._launches()
        unplaced: list[Recorded] = []
        rows = self._gpu.rows
        for call in calls:
            number = self._communication(call)
            if call.stand_ins:
                first = call.stand_ins[0]
                key = int(rows.device[first]), int(rows.stream[first])
                if key not in streams:
                    streams[key] = Lane(self.times)
                streams[key].insert_by_start(number)
            else:
                self._put(number, lane_at(streams, self.times.launch[number]))
                unplaced.append(call)
            launcher = int(self._enclosing[call.op])
            if launcher >= 0 and self._node[launcher] >= 0:
                self.edges.add(int(self._node[launcher]), number, Reason.LAUNCH)
        return unplaced

    def calls_on_threads(
        self, calls: list[Recorded], runs: list[Run], threads: Threads
    ) -> list[Recorded]:
        """Add the calls recorded on a CPU, and what Gloo ran; return those taken as blocking."""
        timeline = self._timeline
        starts = timeline.rows.start_ns[self._kept]
        by_start = self._kept[np.argsort(starts, kind="stable")]
        unplaced: list[Recorded] = []
        for call in calls:
            number = self._communication(call)
            thread = int(timeline.rows.thread[call.op])
            if call.communication.asynchronous and wait_is_known(call, timeline):
                self._beside(call, number, threads)
                behind = end_of_wait(call, timeline, by_start)
                if behind >= 0:
                    self.edges.add(number, int(self._node[behind]), Reason.SYNC)
            else:
                if thread not in threads:
                    threads[thread] = Lane(self.times)
                self._put(number, threads[thread])
                unplaced.append(call)
        self._runs_on_threads(runs)
        return unplaced

    def _runs_on_threads(self, runs: list[Run]) -> None:
        """Add what Gloo carried out, behind what asked for it, and what its thread did before."""
        rows = self._timeline.rows
        by_start = self._kept[np.argsort(rows.start_ns[self._kept], kind="stable")]
        lanes: Threads = {}
        starts = [*self.times.start, *rows.start_ns[[run.op for run in runs]].tolist()]
        since = min(starts, default=0)
        for run in runs:
            start, end = int(rows.start_ns[run.op]), int(rows.end_ns[run.op])
            thread = int(rows.thread[run.op])
            placed = _Placed(UNKNOWN, thread, end - start, Evidence.MEASURED)
            self._placed.append(placed)
            number = self.times.add(start, end, start)
            if run.caller == NONE or thread != rows.thread[run.caller]:
                lane = lanes.setdefault(thread, Lane(self.times))
                if run.caller == NONE:
                    before = self.times.end[lane.members[-1]] if len(lane.members) else since
                    placed.waited_ns = max(start - before, 0)
                lane.members.append(number)
            if run.caller != NONE:
                self.edges.add(int(self._node[run.caller]), number, Reason.LAUNCH)
            behind = end_of_run(run, self._timeline, by_start)
            if behind != NONE:
                self.edges.add(number, int(self._node[behind]), Reason.SYNC)
        for lane in lanes.values():
            self.edges.chain(lane.members, Reason.PROGRAM_ORDER)

    def _communication(self, call: Recorded) -> int:
        """Add a recorded call.

        It takes the time of what stood in for it on the network it was captured for; without one
        it takes none, since nobody was there to talk to.
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
        return self.times.add(start, end, launch)

    def _put(self, number: int, lane: Lane) -> None:
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

    def _beside(self, call: Recorded, number: int, threads: Threads) -> None:
        """Let an asynchronous call on a CPU start behind what its thread and group did before."""
        thread = int(self._timeline.rows.thread[call.op])
        self._placed[-1].thread = thread
        lane = threads.get(thread)
        before = lane.last_launched(self.times.launch[number]) if lane else None
        if before is not None:
            self.edges.add(before, number, Reason.PROGRAM_ORDER)
        earlier = self._asynchronous.get(call.communication.group)
        if earlier is not None:
            self.edges.add(earlier, number, Reason.STREAM_ORDER)
        self._asynchronous[call.communication.group] = number

    def placed(self, threads: I64, begin: int = 0, to: int | None = None) -> Columns:
        """Return stream, thread, duration and evidence of recorded calls, and what Gloo ran."""
        placed = self._placed[begin:to]
        thread = np.array([one.thread for one in placed], dtype=np.int64)
        return {
            "stream": np.array([one.stream for one in placed], dtype=np.int64),
            "thread": np.where(thread >= 0, threads[thread], UNKNOWN),
            "duration_ns": np.array([one.duration_ns for one in placed], dtype=np.int64),
            "evidence": np.array([one.evidence for one in placed], dtype=np.uint8),
            "queued_ns": np.array([one.waited_ns for one in placed], dtype=np.int64),
        }

    def order(self, streams: Streams, threads: Threads) -> None:
        """Let what runs on a stream or a thread wait for what is before it there, or hands over."""
        for lane in streams.values():
            self.edges.chain(lane.members, Reason.STREAM_ORDER)
            for source, target in lane.outlasting():
                self.edges.add(source, target, Reason.STREAM_ORDER)
        for lane in threads.values():
            self.edges.chain(lane.members, Reason.PROGRAM_ORDER)
        self._handovers()
        for lane in threads.values():
            self._begin_behind(lane.members[0])

    def _begin_behind(self, first: int) -> None:
        """Let a thread begin as long as measured after what began last before it on another."""
        begun = self._timeline.rows.start_ns[self._kept]
        order = np.argsort(begun, kind="stable")
        place = int(np.searchsorted(begun[order], self.times.start[first])) - 1
        if place >= 0:
            self.edges.add(int(order[place]), first, Reason.PROGRAM_ORDER)

    def _handovers(self) -> None:
        """Let autograd's thread wait for the one that called backward, and the other way round.

        What DDP does when backward is through runs in autograd's thread, and belongs to no
        operator of it. Without operators every thread that begins as another ends is handed over.
        """
        rows, phase = self._timeline.rows, self._timeline.phase
        backward = (phase == Phase.BACKWARD) | (not rows.is_operator.any())
        others = rows.thread[(phase == Phase.FORWARD) | (phase == Phase.OPTIMIZER)]
        autograd = np.setdiff1d(rows.thread[backward], others)
        backward |= np.isin(rows.thread, autograd)
        order = np.argsort(rows.start_ns[self._kept], kind="stable")
        ordered = self._kept[order]
        before, after = ordered[:-1], ordered[1:]
        chosen = np.flatnonzero(
            (rows.thread[before] != rows.thread[after])
            & (rows.end_ns[before] <= rows.start_ns[after])
            & (backward[before] | backward[after])
        )
        self.edges.extend(order[:-1][chosen], order[1:][chosen], Reason.SYNC)

    def memory(self, memory: Memory, host: Columns, *, cpu_only: bool) -> int:
        """Add bytes allocated and freed to the operators; return the bytes that found none.

        Outside any node, a free belongs to the node before it, an allocation too; on a CPU, where
        only leaves are nodes, an allocation belongs to the leaf that it precedes.
        """
        kept: list[int] = self._kept.tolist()
        thread, threads = self._timeline.rows.thread, self._timeline.threads
        lost = 0
        for account, column, onward in (
            (memory.allocated, "bytes_allocated", cpu_only),
            (memory.freed, "bytes_freed", False),
        ):
            host[column] = np.zeros(len(kept), dtype=np.int64)
            for index, size in account.items():
                found = index if self._is_kept[index] else int(self._enclosing[index])
                if found < 0:
                    found = _nearest(kept, index, threads[int(thread[index])], onward=onward)
                if found < 0:
                    lost += size
                else:
                    host[column][self._node[found]] += size
                    self.memory_node.setdefault(index, int(self._node[found]))
        return lost

    @property
    def span_ns(self) -> int:
        """Time from the first start to the last end."""
        return max(self.times.end, default=0) - min(self.times.start, default=0)

    @property
    def start_ns(self) -> I64:
        """Start of every node to be, since the trace's base time."""
        return np.array(self.times.start, dtype=np.int64)


def _nearest(kept: list[int], index: int, span: range, *, onward: bool) -> int:
    """Return the kept index before `index` (after it when `onward`) within its thread's span."""
    low, high = bisect_left(kept, span.start), bisect_left(kept, span.stop)
    if low == high:
        return NONE
    position = bisect_left(kept, index, low, high) - (not onward)
    return kept[min(max(position, low), high - 1)]
