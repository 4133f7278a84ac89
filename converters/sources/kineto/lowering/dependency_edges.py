"""Dependency edges: order within streams and threads, launches, hand-overs between threads."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.memory_events import Memory
from onerank.ir import Edges, Phase, Reason
from onerank.ir.arrays import I64, U8
from onerank.ir.edges import topological_order
from onerank.ir.enums import LAUNCH_NS


def numbers(*parts: I64) -> "array[int]":
    """Return integers to which more can be added, in 8 bytes each."""
    return array("q", np.concatenate(parts).tobytes())


@dataclass(slots=True)
class Times:
    """Start, end and issue time of each future node; nanoseconds."""

    start: "array[int]"
    end: "array[int]"
    launch: "array[int]"

    def add(self, start_ns: int, end_ns: int, launch_ns: int) -> int:
        """Add a node to be; return its number."""
        self.start.append(start_ns)
        self.end.append(end_ns)
        self.launch.append(launch_ns)
        return len(self.start) - 1


@dataclass(slots=True)
class NodeSequence:
    """Numbers of nodes to be that run one after another."""

    times: Times
    members: "array[int]" = field(default_factory=lambda: array("q"))

    def last_launched(self, horizon_ns: int) -> int | None:
        """Return the last operation issued at or before `horizon_ns`."""
        position = bisect_right(self.members, horizon_ns, key=self.times.launch.__getitem__)
        return self.members[position - 1] if position else None

    def last_ended(self, time_ns: int) -> int | None:
        """Return the last one that had ended by `time_ns`."""
        position = bisect_right(self.members, time_ns, key=self.times.end.__getitem__)
        return self.members[position - 1] if position else None

    def starting_at(self, time_ns: int) -> int | None:
        """Return the first one that began at `time_ns`."""
        position = bisect_left(self.members, time_ns, key=self.times.start.__getitem__)
        found = self.members[position] if position < len(self.members) else None
        return found if found is not None and self.times.start[found] == time_ns else None

    def first_launched(self, after_ns: int) -> int | None:
        """Return the first operation issued at or after `after_ns`."""
        position = bisect_left(self.members, after_ns, key=self.times.launch.__getitem__)
        return self.members[position] if position < len(self.members) else None

    def overlapping_pairs(self) -> list[tuple[int, int]]:
        """Return pairs of one that outlasted those behind it, and the first that began at its end.

        Where operations overlap, the one before is not all that one begins behind.
        """
        times = self.times
        pairs: list[tuple[int, int]] = []
        running: list[int] = []
        for before, number in pairwise(self.members):
            start = times.start[number]
            pairs.extend((one, number) for one in running if times.end[one] <= start)
            running = [one for one in running if times.end[one] > start]
            if times.end[before] > start:
                running.append(before)
        return pairs

    def insert_by_start(self, number: int) -> None:
        """Insert an operation that ran in this lane after those that started before it."""
        start = self.times.start
        position = bisect_right(self.members, start[number], key=start.__getitem__)
        self.members.insert(position, number)

    def insert_by_launch(self, number: int) -> int | None:
        """Insert an operation that ran in no lane after all operations issued before it.

        Returns:
            A neighbour in the lane, None in an empty one.
        """
        times = self.times
        position = bisect_right(self.members, times.launch[number], key=times.launch.__getitem__)
        if position:
            times.start[number] = max(times.start[number], times.end[self.members[position - 1]])
            times.end[number] = max(times.end[number], times.start[number])
        neighbour = self.members[position - 1 if position else 0] if self.members else None
        self.members.insert(position, number)
        return neighbour


def sequence_at(streams: dict[tuple[int, int], NodeSequence], time_ns: int) -> NodeSequence:
    """Return the lane of the last operation issued before `time_ns`, else of the first."""
    latest: tuple[int, NodeSequence] | None = None
    for lane in streams.values():
        last = lane.last_launched(time_ns)
        if last is not None:
            launch = lane.times.launch[last]
            if latest is None or launch > latest[0]:
                latest = launch, lane
    if latest is not None:
        return latest[1]
    return min(streams.values(), key=lambda lane: lane.times.launch[lane.members[0]])


Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class EdgeList:
    """Edges in the order in which they were found; the first reason given for a pair stands."""

    _sources: list[I64] = field(default_factory=list[I64])
    _targets: list[I64] = field(default_factory=list[I64])
    _reasons: list[U8] = field(default_factory=list[U8])

    def add(self, source: int, target: int, reason: Reason) -> None:
        """Let `target` wait for `source`."""
        self.extend(np.array([source]), np.array([target]), reason)

    def extend(self, source: I64, target: I64, reason: Reason) -> None:
        """Let each of `target` wait for its `source`."""
        self._sources.append(source)
        self._targets.append(target)
        self._reasons.append(np.full(len(source), reason, dtype=np.uint8))

    def chain(self, members: Sequence[int], reason: Reason) -> None:
        """Let each member wait for the one before."""
        if len(members) > 1:
            lane = np.array(members)
            self.extend(lane[:-1], lane[1:], reason)

    def latest(self, end_ns: I64, at_least: I64, *, of: tuple[Reason, ...]) -> I64:
        """Return when the last of the sources of each node had ended, int64[n].

        Args:
            end_ns: of each node, int64[n].
            at_least: what to return of a node of which no source ended later, int64[n].
            of: reasons whose edges count.
        """
        found = at_least.copy()
        if self._sources:
            counts = np.isin(np.concatenate(self._reasons), of)
            source, target = (np.concatenate(x)[counts] for x in (self._sources, self._targets))
            np.maximum.at(found, target, end_ns[source])
        return found

    def build(self, place: I64) -> tuple[Edges, Counter[Reason], tuple[int, int] | None]:
        """Return the edges of the graph, without contradictory ones.

        In a cycle, edges to a node that started earlier are dropped.

        Args:
            place: index in the graph of each number; ascending by start, int64[n].

        Returns:
            The edges, the number of dropped ones by reason, and source and target of one.
        """
        count = len(place)
        empty = np.zeros(0, dtype=np.int64)
        source = place[np.concatenate([empty, *self._sources])]
        target = place[np.concatenate([empty, *self._targets])]
        reason = np.concatenate([empty.astype(np.uint8), *self._reasons])
        _, first = np.unique(source * count + target, return_index=True)
        first = np.sort(first)
        first = first[source[first] != target[first]]
        source, target, reason = source[first], target[first], reason[first]
        made = Edges.from_pairs(count, source, target, reason)
        backward = source > target
        if not backward.any():
            return made, Counter(), None
        _, leftover = topological_order(made)
        circular = np.zeros(count, dtype=bool)
        circular[leftover] = True
        out = backward & circular[source] & circular[target]
        if not out.any():
            return made, Counter(), None
        lost = Counter(Reason(value) for value in reason[out].tolist())
        example = int(source[out][0]), int(target[out][0])
        return Edges.from_pairs(count, source[~out], target[~out], reason[~out]), lost, example


StreamSequences = dict[tuple[int, int], NodeSequence]

"""Device and stream -> lane."""

ThreadSequences = dict[int, NodeSequence]

"""Place in the trace's `threads` -> lane."""


class DependencyEdges:
    """Numbers the future nodes and collects edges; each method adds one kind of edge.

    Operators come first, then GPU operations by start, then recorded calls (see `PlacedCalls`).

    Attributes:
        timeline: the host events.
        gpu: the GPU operations.
        kept: host events that are nodes, int64[n].
        own: rows of the GPU operations that are nodes, by start, int64[m].
        times: start, end and issue time of each future node.
        edges: the edges so far.
        node: number of each host event's node, NONE for none.
        enclosing: the innermost such event around each host event, NONE for none.
        memory_node: host event that allocates or frees -> the node responsible for it.
    """

    def __init__(self, timeline: HostTimeline, gpu: GpuOps, kept: I64, own: I64) -> None:
        self.timeline, self.gpu = timeline, gpu
        self.kept, self.own = kept, own
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
        self.node = np.full(len(timeline), NONE)
        self.node[kept] = np.arange(len(kept))
        self.memory_node: dict[int, int] = {}
        self.enclosing = timeline.nearest(is_kept)

    def streams(self) -> StreamSequences:
        """Return one lane per stream, of GPU operations in the order of their start."""
        rows = self.gpu.rows
        lanes: StreamSequences = {}
        keys = zip(rows.device[self.own].tolist(), rows.stream[self.own].tolist(), strict=True)
        for number, key in enumerate(keys, start=len(self.kept)):
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = NodeSequence(self.times)
            lane.members.append(number)
        return lanes

    def threads(self) -> ThreadSequences:
        """Return one lane of operators per thread, in call order."""
        lanes: ThreadSequences = {}
        threads = self.timeline.rows.thread[self.kept].tolist()
        for number, thread in enumerate(threads):
            lane = lanes.get(thread)
            if lane is None:
                lane = lanes[thread] = NodeSequence(self.times)
            lane.members.append(number)
        return lanes

    def own_time(self, blocked: Mapping[tuple[int, int], int]) -> I64:
        """Return every operator's duration without what it calls, and what blocked it.

        Args:
            blocked: thread and start of calls that waited for the GPU -> how long.
        """
        rows = self.timeline.rows
        whole = rows.end_ns - rows.start_ns
        called = np.flatnonzero((self._is_kept | self.timeline.is_mark) & (self.enclosing >= 0))
        taken = np.zeros(len(self.timeline), dtype=np.int64)
        np.add.at(taken, self.enclosing[called], whole[called])
        threads, begun = np.array(list(blocked), dtype=np.int64).reshape(-1, 2).T
        around = self.timeline.innermost(threads, begun)
        for waited_ns, within in zip(blocked.values(), around, strict=True):
            operator = within if within < 0 or self._is_kept[within] else self.enclosing[within]
            if operator >= 0 and self.timeline.in_mark[within] < 0:
                taken[operator] += waited_ns
        return np.maximum((whole - taken)[self.kept], 0)

    def launches(self) -> None:
        """Let every GPU operation wait for the operator that launched it."""
        if not len(self.kept):
            return
        operator = self.gpu.operator[self.own]
        launcher = np.where(operator >= 0, self.node[operator], NONE)
        linked = np.flatnonzero(launcher >= 0)
        self.edges.extend(launcher[linked], linked + len(self.kept), Reason.LAUNCH)

    def launch_order(self, own_time_ns: I64, threads: ThreadSequences) -> None:
        """Let operations wait for what their operator called before it launched them.

        If it called nothing that took longer than its own time, the launch edge suffices.
        """
        gpu, kept = self.gpu, self.kept
        operator = gpu.operator[self.own]
        launcher = np.where(operator >= 0, self.node[operator], NONE)
        asked = np.flatnonzero((launcher >= 0) & (gpu.returned_ns[self.own] >= 0))
        launcher, launch_ns = launcher[asked], gpu.launch_ns[self.own][asked]
        begun = self.timeline.rows.start_ns[kept[launcher]]
        within = launch_ns - begun > own_time_ns[launcher] + LAUNCH_NS
        thread = self.timeline.rows.thread[kept[launcher]]
        for place in np.flatnonzero(within).tolist():
            last = threads[int(thread[place])].last_launched(int(launch_ns[place]))
            if last is not None and last != launcher[place]:
                self.edges.add(last, int(asked[place]) + len(kept), Reason.PROGRAM_ORDER)

    def order(self, streams: StreamSequences, threads: ThreadSequences) -> None:
        """Let what runs on a stream or a thread wait for what is before it there, or hands over."""
        for lane in streams.values():
            self.edges.chain(lane.members, Reason.STREAM_ORDER)
            for source, target in lane.overlapping_pairs():
                self.edges.add(source, target, Reason.STREAM_ORDER)
        for lane in threads.values():
            self.edges.chain(lane.members, Reason.PROGRAM_ORDER)
        self._handovers()
        for lane in threads.values():
            self._begin_behind(lane.members[0])

    def _begin_behind(self, first: int) -> None:
        """Let a thread begin as long as measured after what began last before it on another."""
        begun = self.timeline.rows.start_ns[self.kept]
        order = np.argsort(begun, kind="stable")
        place = int(np.searchsorted(begun[order], self.times.start[first])) - 1
        if place >= 0:
            self.edges.add(int(order[place]), first, Reason.PROGRAM_ORDER)

    def _handovers(self) -> None:
        """Let autograd's thread wait for the one that called backward, and the other way round.

        What DDP does when backward is through runs in autograd's thread, and belongs to no
        operator of it. Without operators every thread that begins as another ends is handed over.
        """
        rows, phase = self.timeline.rows, self.timeline.phase
        backward = (phase == Phase.BACKWARD) | (not rows.is_operator.any())
        others = rows.thread[(phase == Phase.FORWARD) | (phase == Phase.OPTIMIZER)]
        autograd = np.setdiff1d(rows.thread[backward], others)
        backward |= np.isin(rows.thread, autograd)
        order = np.argsort(rows.start_ns[self.kept], kind="stable")
        ordered = self.kept[order]
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
        kept: list[int] = self.kept.tolist()
        thread, threads = self.timeline.rows.thread, self.timeline.threads
        lost = 0
        for account, column, onward in (
            (memory.allocated, "bytes_allocated", cpu_only),
            (memory.freed, "bytes_freed", False),
        ):
            host[column] = np.zeros(len(kept), dtype=np.int64)
            for index, size in account.items():
                found = index if self._is_kept[index] else int(self.enclosing[index])
                if found < 0:
                    found = _nearest(kept, index, threads[int(thread[index])], onward=onward)
                if found < 0:
                    lost += size
                else:
                    host[column][self.node[found]] += size
                    self.memory_node.setdefault(index, int(self.node[found]))
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
