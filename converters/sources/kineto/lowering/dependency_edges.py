"""Dependency edges: order within streams and threads, launches, hand-overs between threads."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.memory_events import MemoryHistory
from onerank.ir import Edges, Phase, Reason
from onerank.ir.arrays import I64, U8
from onerank.ir.edges import topological_order
from onerank.ir.enums import LAUNCH_NS


# Not lists: 8 bytes per time lower the peak. With texts interned in bulk, a call stack of 500,000
# operators takes 352 MB in place of 410.
def numbers(*parts: I64) -> "array[int]":
    """Return the integers as one appendable array of 8 bytes each."""
    return array("q", np.concatenate(parts).tobytes())


@dataclass(slots=True)
class Times:
    """Start, end and issue time of each future node; nanoseconds."""

    start: "array[int]"
    end: "array[int]"
    launch: "array[int]"

    def add(self, start_ns: int, end_ns: int, launch_ns: int) -> int:
        """Add a future node; return its number."""
        self.start.append(start_ns)
        self.end.append(end_ns)
        self.launch.append(launch_ns)
        return len(self.start) - 1


@dataclass(slots=True)
class NodeSequence:
    """Numbers of the future nodes of one stream or thread, in order."""

    times: Times
    members: "array[int]" = field(default_factory=lambda: array("q"))

    def last_launched(self, horizon_ns: int) -> int | None:
        """Return the last operation issued at or before `horizon_ns`."""
        position = bisect_right(self.members, horizon_ns, key=self.times.launch.__getitem__)
        return self.members[position - 1] if position else None

    def last_ended(self, time_ns: int) -> int | None:
        """Return the last operation that had ended by `time_ns`."""
        position = bisect_right(self.members, time_ns, key=self.times.end.__getitem__)
        return self.members[position - 1] if position else None

    def starting_at(self, time_ns: int) -> int | None:
        """Return the first operation that starts at `time_ns`."""
        position = bisect_left(self.members, time_ns, key=self.times.start.__getitem__)
        number = self.members[position] if position < len(self.members) else None
        return number if number is not None and self.times.start[number] == time_ns else None

    def first_launched(self, after_ns: int) -> int | None:
        """Return the first operation issued at or after `after_ns`."""
        position = bisect_left(self.members, after_ns, key=self.times.launch.__getitem__)
        return self.members[position] if position < len(self.members) else None

    def overlapping_pairs(self) -> list[tuple[int, int]]:
        """Return pairs of an operation that outlasts its successors and the first start after it.

        Where operations overlap, an edge from the previous operation is not enough: an earlier
        operation may end last.
        """
        start, end = self.times.start, self.times.end
        pairs: list[tuple[int, int]] = []
        # Hundreds of operations may be running at once, so a heap gives the first end: scanning
        # them at every start would make a stream of n overlapping operations take n^2 steps.
        running: list[tuple[int, int, int]] = []
        for position, (previous, number) in enumerate(pairwise(self.members)):
            ended: list[tuple[int, int]] = []
            while running and running[0][0] <= start[number]:
                _, order, earlier = heappop(running)
                ended.append((order, earlier))
            pairs.extend((earlier, number) for _, earlier in sorted(ended))
            if end[previous] > start[number]:
                heappush(running, (end[previous], position, previous))
        return pairs

    def insert_by_start(self, number: int) -> None:
        """Insert an operation of this sequence after those that started before it."""
        start = self.times.start
        position = bisect_right(self.members, start[number], key=start.__getitem__)
        self.members.insert(position, number)

    def insert_by_launch(self, number: int) -> int | None:
        """Insert an operation without a measured time after all operations issued before it.

        Returns:
            A neighbour in the sequence, None if the sequence was empty.
        """
        times = self.times
        position = bisect_right(self.members, times.launch[number], key=times.launch.__getitem__)
        if position:
            # It cannot start before the work queued ahead of it on the stream ends.
            times.start[number] = max(times.start[number], times.end[self.members[position - 1]])
            times.end[number] = max(times.end[number], times.start[number])
        neighbour = self.members[position - 1 if position else 0] if self.members else None
        self.members.insert(position, number)
        return neighbour


def sequence_at(streams: dict[tuple[int, int], NodeSequence], time_ns: int) -> NodeSequence:
    """Return the sequence of the last operation issued before `time_ns`, else of the first."""
    latest: tuple[int, NodeSequence] | None = None
    for sequence in streams.values():
        last = sequence.last_launched(time_ns)
        if last is not None:
            launch = sequence.times.launch[last]
            if latest is None or launch > latest[0]:
                latest = launch, sequence
    if latest is not None:
        return latest[1]
    return min(streams.values(), key=lambda sequence: sequence.times.launch[sequence.members[0]])


Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class EdgeList:
    """Edges in the order in which they were added; a pair keeps its first reason."""

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
        """Let each member wait for the previous member."""
        if len(members) > 1:
            sequence = np.array(members)
            self.extend(sequence[:-1], sequence[1:], reason)

    def latest(self, end_ns: I64, at_least: I64, *, of: tuple[Reason, ...]) -> I64:
        """Return the end of the last source of each node, int64[n].

        Args:
            end_ns: end of each node, int64[n].
            at_least: lower bound for each node, int64[n].
            of: reasons whose edges count.
        """
        latest_ns = at_least.copy()
        if self._sources:
            chosen = np.isin(np.concatenate(self._reasons), of)
            source, target = (np.concatenate(x)[chosen] for x in (self._sources, self._targets))
            np.maximum.at(latest_ns, target, end_ns[source])
        return latest_ns

    def build(self, place: I64) -> tuple[Edges, Counter[Reason], tuple[int, int] | None]:
        """Return the edges of the graph, without contradictory ones.

        In a cycle, edges to a node that started earlier are dropped.

        Args:
            place: index in the graph of each number; ascending by start, int64[n].

        Returns:
            The edges, the number of dropped edges by reason, and source and target of one of them.
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
        edges = Edges.from_pairs(count, source, target, reason)
        backward = source > target
        if not backward.any():
            return edges, Counter(), None
        _, leftover = topological_order(edges)
        circular = np.zeros(count, dtype=bool)
        circular[leftover] = True
        # Recorded times contradict each other only by the error of two clocks, so in a cycle the
        # edges that point back in time are the wrong ones.
        # Outside cycles such edges stay: an overlap on a stream points back in time and still
        # orders.
        out = backward & circular[source] & circular[target]
        if not out.any():
            return edges, Counter(), None
        dropped = Counter(Reason(value) for value in reason[out].tolist())
        example = int(source[out][0]), int(target[out][0])
        return Edges.from_pairs(count, source[~out], target[~out], reason[~out]), dropped, example


StreamSequences = dict[tuple[int, int], NodeSequence]
"""Device and stream -> sequence."""

ThreadSequences = dict[int, NodeSequence]
"""Place in the trace's `threads` -> sequence."""


class DependencyEdges:
    """Numbers the future nodes and collects edges; each method adds one kind of edge.

    Operators come first, then GPU operations by start, then recorded calls (see `CallPlacement`).

    Attributes:
        timeline: the host events.
        gpu: the GPU operations.
        kept: host events that are nodes, int64[n].
        gpu_rows: rows of the GPU operations that are nodes, by start, int64[m].
        times: start, end and issue time of each future node.
        edges: the edges so far.
        node: number of each host event's node, NONE for none.
        enclosing: the innermost host event with a node around each host event, NONE for none.
        memory_node: host event that allocates or frees -> the node responsible for it.
    """

    def __init__(self, timeline: HostTimeline, gpu: GpuOps, kept: I64, gpu_rows: I64) -> None:
        self.timeline, self.gpu = timeline, gpu
        self.kept, self.gpu_rows = kept, gpu_rows
        self.edges = EdgeList()
        rows, kernels = timeline.rows, gpu.rows
        ends = kernels.start_ns[gpu_rows] + kernels.duration_ns[gpu_rows]
        self.times = Times(
            numbers(rows.start_ns[kept], kernels.start_ns[gpu_rows]),
            numbers(rows.end_ns[kept], ends),
            numbers(rows.start_ns[kept], gpu.launch_ns[gpu_rows]),
        )
        is_kept = np.zeros(len(timeline), dtype=bool)
        is_kept[kept] = True
        self._is_kept = is_kept
        self.node = np.full(len(timeline), NONE)
        self.node[kept] = np.arange(len(kept))
        self.memory_node: dict[int, int] = {}
        self.enclosing = timeline.nearest(is_kept)

    def streams(self) -> StreamSequences:
        """Return one sequence per stream, of GPU operations in the order of their start.

        Without GPU operations: the operators of a capture without a device, if it used several
        streams. They stand for the kernels that they would launch.
        """
        if not len(self.gpu_rows):
            return self._emulated_streams()
        rows = self.gpu.rows
        sequences: StreamSequences = {}
        keys = zip(
            rows.device[self.gpu_rows].tolist(), rows.stream[self.gpu_rows].tolist(), strict=True
        )
        for number, key in enumerate(keys, start=len(self.kept)):
            sequence = sequences.get(key)
            if sequence is None:
                sequence = sequences[key] = NodeSequence(self.times)
            sequence.members.append(number)
        return sequences

    def _emulated_streams(self) -> StreamSequences:
        on_stream = self.timeline.rows.stream[self.kept]
        sequences: StreamSequences = {}
        if on_stream.max(initial=0) <= 0:
            return sequences
        # Autograd's thread issues the backward, so a stream's order is that of all threads.
        for number in np.argsort(self.timeline.rows.start_ns[self.kept], kind="stable").tolist():
            key = 0, int(on_stream[number])
            sequences.setdefault(key, NodeSequence(self.times)).members.append(number)
        return sequences

    def threads(self) -> ThreadSequences:
        """Return one sequence of operators per thread, in call order."""
        sequences: ThreadSequences = {}
        threads = self.timeline.rows.thread[self.kept].tolist()
        for number, thread in enumerate(threads):
            sequence = sequences.get(thread)
            if sequence is None:
                sequence = sequences[thread] = NodeSequence(self.times)
            sequence.members.append(number)
        return sequences

    def self_times(self, blocked: Mapping[tuple[int, int], int]) -> I64:
        """Return every operator's duration without its callees and without time blocked by the GPU.

        Args:
            blocked: thread and start of calls that waited for the GPU -> how long.
        """
        rows = self.timeline.rows
        whole = rows.end_ns - rows.start_ns
        called = np.flatnonzero((self._is_kept | self.timeline.is_mark) & (self.enclosing >= 0))
        excluded_ns = np.zeros(len(self.timeline), dtype=np.int64)
        np.add.at(excluded_ns, self.enclosing[called], whole[called])
        threads, begun = np.array(list(blocked), dtype=np.int64).reshape(-1, 2).T
        around = self.timeline.innermost(threads, begun)
        # The time of a recorder's call is already excluded from the operator around it, so its wait
        # must not be excluded again.
        for waited_ns, within in zip(blocked.values(), around, strict=True):
            operator = within if within < 0 or self._is_kept[within] else self.enclosing[within]
            if operator >= 0 and self.timeline.in_mark[within] < 0:
                excluded_ns[operator] += waited_ns
        return np.maximum((whole - excluded_ns)[self.kept], 0)

    def add_launches(self) -> None:
        """Let every GPU operation wait for the operator that launched it."""
        if not len(self.kept):
            return
        operator = self.gpu.operator[self.gpu_rows]
        launcher = np.where(operator >= 0, self.node[operator], NONE)
        linked = np.flatnonzero(launcher >= 0)
        self.edges.extend(launcher[linked], linked + len(self.kept), Reason.LAUNCH)

    # On a faster GPU the operation may start earlier than measured, but never before what its
    # operator called first.
    def add_launch_order(self, self_times_ns: I64, threads: ThreadSequences) -> None:
        """Let operations wait for what their operator called before it launched them.

        The launch edge suffices if the operator launched within its self time.
        """
        gpu, kept = self.gpu, self.kept
        operator = gpu.operator[self.gpu_rows]
        launcher = np.where(operator >= 0, self.node[operator], NONE)
        recorded = np.flatnonzero((launcher >= 0) & (gpu.returned_ns[self.gpu_rows] >= 0))
        launcher, launch_ns = launcher[recorded], gpu.launch_ns[self.gpu_rows][recorded]
        begun = self.timeline.rows.start_ns[kept[launcher]]
        within = launch_ns - begun > self_times_ns[launcher] + LAUNCH_NS
        thread = self.timeline.rows.thread[kept[launcher]]
        for place in np.flatnonzero(within).tolist():
            last = threads[int(thread[place])].last_launched(int(launch_ns[place]))
            if last is not None and last != launcher[place]:
                self.edges.add(last, int(recorded[place]) + len(kept), Reason.PROGRAM_ORDER)

    def add_order(self, streams: StreamSequences, threads: ThreadSequences) -> None:
        """Add the order within streams and threads, and the hand-overs between threads."""
        for sequence in streams.values():
            self.edges.chain(sequence.members, Reason.STREAM_ORDER)
            for source, target in sequence.overlapping_pairs():
                self.edges.add(source, target, Reason.STREAM_ORDER)
        for sequence in threads.values():
            self.edges.chain(sequence.members, Reason.PROGRAM_ORDER)
        self._add_handovers()
        self._add_thread_starts([sequence.members[0] for sequence in threads.values()])

    def _add_thread_starts(self, firsts: Sequence[int]) -> None:
        """Let each thread start after the last operator that started before it on another thread.

        Args:
            firsts: number of each thread's first operator.
        """
        begun = self.timeline.rows.start_ns[self.kept]
        order = np.argsort(begun, kind="stable")
        ordered = begun[order]
        for first in firsts:
            place = int(np.searchsorted(ordered, self.times.start[first])) - 1
            if place >= 0:
                self.edges.add(int(order[place]), first, Reason.PROGRAM_ORDER)

    def autograd_threads(self) -> I64:
        """Return the threads that run backwards alone.

        On CUDA autograd has a thread per device; on a CPU it runs on the thread that calls it.
        """
        rows, phase = self.timeline.rows, self.timeline.phase
        backward = (phase == Phase.BACKWARD) | (not rows.is_operator.any())
        others = rows.thread[(phase == Phase.FORWARD) | (phase == Phase.OPTIMIZER)]
        return np.setdiff1d(rows.thread[backward], others)

    def _add_handovers(self) -> None:
        """Let autograd's thread wait for the thread that called backward, and the other way round.

        DDP's work after backward runs on autograd's thread outside any autograd operator.
        Without operators, every thread that starts as another ends takes over from that thread.
        """
        rows = self.timeline.rows
        backward = (self.timeline.phase == Phase.BACKWARD) | (not rows.is_operator.any())
        backward |= np.isin(rows.thread, self.autograd_threads())
        order = np.argsort(rows.start_ns[self.kept], kind="stable")
        ordered = self.kept[order]
        before, after = ordered[:-1], ordered[1:]
        chosen = np.flatnonzero(
            (rows.thread[before] != rows.thread[after])
            & (rows.end_ns[before] <= rows.start_ns[after])
            & (backward[before] | backward[after])
        )
        # Threads only issue what runs on streams, so their hand-overs order calls alone.
        on_streams = rows.stream.max(initial=0) > 0
        reason = Reason.PROGRAM_ORDER if on_streams else Reason.SYNC
        self.edges.extend(order[:-1][chosen], order[1:][chosen], reason)

    def add_memory(self, memory: MemoryHistory, host: Columns, *, cpu_only: bool) -> int:
        """Add bytes allocated and freed to the operators; return the bytes without an operator.

        Outside any node, a free belongs to the node before it, an allocation too; on a CPU, where
        only leaves are nodes, an allocation belongs to the leaf that it precedes.
        """
        kept: list[int] = self.kept.tolist()
        thread, threads = self.timeline.rows.thread, self.timeline.threads
        lost_bytes = 0
        for account, column, forward in (
            (memory.allocated, "bytes_allocated", cpu_only),
            (memory.freed, "bytes_freed", False),
        ):
            host[column] = np.zeros(len(kept), dtype=np.int64)
            for index, size in account.items():
                operator = index if self._is_kept[index] else int(self.enclosing[index])
                if operator < 0:
                    operator = _nearest(kept, index, threads[int(thread[index])], forward=forward)
                if operator < 0:
                    lost_bytes += size
                else:
                    host[column][self.node[operator]] += size
                    self.memory_node.setdefault(index, int(self.node[operator]))
        return lost_bytes

    @property
    def span_ns(self) -> int:
        """Time from the first start to the last end."""
        return max(self.times.end, default=0) - min(self.times.start, default=0)

    @property
    def start_ns(self) -> I64:
        """Start of every future node, since the trace's base time."""
        return np.array(self.times.start, dtype=np.int64)


def _nearest(kept: list[int], index: int, span: range, *, forward: bool) -> int:
    """Return the kept index before `index` (after it when `forward`) within its thread's span."""
    low, high = bisect_left(kept, span.start), bisect_left(kept, span.stop)
    if low == high:
        return NONE
    position = bisect_left(kept, index, low, high) - (not forward)
    return kept[min(max(position, low), high - 1)]
