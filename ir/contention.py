"""Schedule a graph whose kernels and collectives compete for one GPU.

Every operation has its time alone on the GPU and progresses at a rate of at most 1 (processor
sharing):

- Communication holds multiprocessors: NCCL's channels are thread blocks that stay until the call
  is done, also while it waits for other ranks. Kernels share the rest. A kernel that needs fewer
  runs at its full rate. A product has whole waves of tiles: one of 128 tiles takes one wave on 132
  multiprocessors, and two on 108. A persistent one has up to two more (`persistent_waves`).
- A call progresses slower next to kernels, which compete for caches, memory and power.
- A call starts when enough multiprocessors are free. A running kernel frees its multiprocessors
  after each round of its thread blocks; a persistent kernel has one round.

Rates change when an operation starts or ends, so the schedule is computed in the order of time.
"""

import functools
import heapq
from dataclasses import dataclass
from math import ceil, floor
from typing import Self

import numpy as np

from onerank.ir.arrays import F64, I64, Mask
from onerank.ir.edges import Edges
from onerank.ir.nodes import UNKNOWN

LEAST_RATE = 0.05
"""Rate of a kernel if communication holds all multiprocessors: assumed, not measured. Calls of
several groups may together have more channels than a GPU has multiprocessors. Their blocks then
share some, so that a kernel still makes progress."""

LATE_WAVE = 0.86
"""Time of a wave of the few blocks that begin late, over that of a wave of all: products of 1 to 8
waves next to 8 to 24 waiting blocks of NCCL on an H100, 0.82 to 0.88
(benchmarks/results/2026-11-28-waiting-calls-2xh100.txt)."""


@dataclass(frozen=True, slots=True)
class Contention:
    """The share of a GPU that each operation occupies, and by how much it slows others.

    Attributes:
        needed: share of the multiprocessors that a kernel uses alone, 0 for other operations,
            float64[n].
        tiles: tiles of a product, each of which takes a multiprocessor; 0 if not known, int64[n].
        rounds: rounds of thread blocks in which a kernel uses all of them; 0 if some are free or
            become free often, int64[n].
        held: share that a communication call holds, 0 for other operations, float64[n].
        headroom: rate at which its GPUs could run a call, divided by its uncontended rate. Above 1
            if the network limits the call, 1 within a node, float64[n].
        call_slowdown: how many times as long a call takes next to this kernel if its GPUs limit it;
            1 for other operations, float64[n].
        multiprocessors: how many the GPU has.
        persistent: whether a product is one block for each multiprocessor, which takes tiles until
            none is left.
        among_kernels: whether kernels of different streams share multiprocessors. False if their
            durations were measured in place, because these contain it.
    """

    needed: F64
    tiles: I64
    rounds: I64
    held: F64
    headroom: F64
    call_slowdown: F64
    multiprocessors: int
    persistent: bool
    among_kernels: bool

    def matters(self, stream: I64) -> bool:
        """Return whether any operation can slow another one.

        Args:
            stream: of each operation, int64[n].
        """
        kernels = self.needed > 0
        if self.among_kernels and len(np.unique(stream[kernels])) > 1:
            return True
        return bool(kernels.any()) and bool((self.held > 0).any())


_Outgoing = list[tuple[int, int, int]]
"""Edges as (target, delay in ns, edge)."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the starts of nodes, by source, as lists for loops over single elements.

    Attributes:
        after_start: per node, the edges whose delay counts from its start.
        before_end: those whose delay is negative and counts from its end.
        after_end: the others.
        lead: how long before its end the first successor may start, in ns.
        count: number of edges to each node.
    """

    after_start: list[_Outgoing]
    before_end: list[_Outgoing]
    after_end: list[_Outgoing]
    lead: list[int]
    count: list[int]

    @classmethod
    def of(cls, edges: Edges, delay: I64, from_start: Mask, ignored: Mask) -> Self:
        """Return the constraints of a graph's edges.

        Args:
            edges: of n nodes.
            delay: delay of each edge in ns.
            from_start: whether it counts from the source's start, not its end.
            ignored: edges that do not constrain their target.
        """
        nodes = len(edges.offsets) - 1
        by_kind: list[list[_Outgoing]] = [[[] for _ in range(nodes)] for _ in range(3)]
        kind = np.where(from_start, 0, np.where(delay < 0, 1, 2))
        kept = np.flatnonzero(~ignored)
        sources: list[int] = edges.source.tolist()
        targets: list[int] = edges.target.tolist()
        delays, kinds = list[int](delay.tolist()), list[int](kind.tolist())
        for edge in kept.tolist():
            by_kind[kinds[edge]][sources[edge]].append((targets[edge], delays[edge], edge))
        lead = np.zeros(nodes, dtype=np.int64)
        overlapping = kept[kind[kept] == 1]
        np.maximum.at(lead, edges.source[overlapping], -delay[overlapping])
        count = np.bincount(edges.target[kept], minlength=nodes)
        after_start, before_end, after_end = by_kind
        return cls(after_start, before_end, after_end, lead.tolist(), count.tolist())


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits on when nodes run, by node, in ns.

    Attributes:
        earliest: start of a node, unless an edge constrains it.
        floors: time before which a node never starts, whatever its edges.
        arrivals: time when the last other rank reaches a node's call. A node may start before, and
            then holds its stream and its multiprocessors, but makes no progress until then.
    """

    earliest: list[int]
    floors: list[int]
    arrivals: list[int]


@dataclass(slots=True)
class _Running:
    """An operation that runs; times in ns.

    Attributes:
        node: the node.
        left: its remaining time at a rate of 1.
        rate: its rate.
        lead: time before the end at which successors that overlap it are released; 0 after that.
        waits: whether it waits for other ranks, so that it makes no progress.
        wait: the rest of that wait.
    """

    node: int
    left: float
    rate: float
    lead: float
    waits: bool
    wait: float

    @property
    def until_event(self) -> float:
        """Time until its wait ends, or until it releases successors or ends, at its rate."""
        return self.wait if self.waits else max(self.left - self.lead, 0.0) / self.rate


class ContendedSchedule:
    """A schedule of nodes that share one GPU, computed on construction.

    Attributes:
        start: start of each node in ns.
        end: end of each node in ns.
        blocker: node that each node waited for last, UNKNOWN for none.
        released_by: edge of that wait; UNKNOWN for none, or if the node waited for
            multiprocessors.

    Args:
        constraints: of the graph.
        limits: of its nodes.
        duration: time of each node alone, in ns.
        contention: of the same graph.
    """

    def __init__(
        self,
        constraints: Constraints,
        limits: TimeLimits,
        duration: list[int],
        contention: Contention,
    ) -> None:
        count = len(duration)
        self._constraints, self._duration = constraints, duration
        self._floors, self._arrivals = limits.floors, limits.arrivals
        self._needed: list[float] = contention.needed.tolist()
        self._tiles: list[int] = contention.tiles.tolist()
        self._multiprocessors = contention.multiprocessors
        self._persistent = contention.persistent
        self._rounds: list[int] = contention.rounds.tolist()
        self._held: list[float] = contention.held.tolist()
        self._headroom: list[float] = contention.headroom.tolist()
        self._call_slowdown: list[float] = contention.call_slowdown.tolist()
        self._among_kernels = contention.among_kernels
        self._open = constraints.count.copy()
        self.start: list[int] = [0] * count
        self.end: list[int] = [0] * count
        self.blocker: list[int] = [UNKNOWN] * count
        self.released_by: list[int] = [UNKNOWN] * count
        self._ready = limits.earliest.copy()
        self._running: list[_Running] = []
        # (time, order, node, whether it waited for multiprocessors)
        self._starts: list[tuple[float, int, int, bool]] = []
        self._pushed = 0
        self._now = 0.0
        self._run()

    def _run(self) -> None:
        self._release([node for node, count in enumerate(self._open) if not count])
        running, starts = self._running, self._starts
        while running or starts:
            event = min((entry.until_event for entry in running), default=np.inf)
            # Operations that end at the same time free their multiprocessors first.
            if starts and starts[0][0] < self._now + event:
                time, _, node, waited = heapq.heappop(starts)
                self._advance(max(time, self._now))
                self._begin(node, waited=waited)
                continue
            self._advance(self._now + event)
            for entry in [entry for entry in running if entry.until_event <= 0]:
                self._handle_event(entry)
            self._set_rates()

    def _advance(self, time: float) -> None:
        elapsed, self._now = time - self._now, time
        for entry in self._running:
            if entry.waits:
                entry.wait = max(0.0, entry.wait - elapsed)
                continue
            entry.left -= elapsed * entry.rate
            # Rounding leaves less than a thousandth of a nanosecond.
            if entry.left - entry.lead < 1e-3:
                entry.left = min(entry.left, entry.lead)

    def _begin(self, node: int, *, waited: bool) -> None:
        if self._held[node] and not waited:
            wait_ns, kernel = self._until_multiprocessors_free(self._held[node])
            if wait_ns:
                self.blocker[node], self.released_by[node] = kernel, UNKNOWN
                self._push(self._now + wait_ns, node, waited=True)
                return
        self.start[node] = round(self._now)
        length, lead = float(self._duration[node]), float(self._constraints.lead[node])
        wait = max(0.0, self._arrivals[node] - self._now)
        self._running.append(_Running(node, length, 1.0, lead, wait > 0, wait))
        self._set_rates()
        self._release(self._satisfy(node, self._constraints.after_start[node], self.start[node]))

    def _until_multiprocessors_free(self, held: float) -> tuple[float, int]:
        """Return the time until a running kernel ends a round of blocks, and the kernel.

        Args:
            held: share of the multiprocessors that is needed.
        """
        used = sum(self._needed[entry.node] + self._held[entry.node] for entry in self._running)
        if used + held <= 1.0:
            return 0.0, UNKNOWN
        waits: list[tuple[float, int]] = []
        for entry in self._running:
            if not self._needed[entry.node]:
                continue
            rounds, length = self._rounds[entry.node], self._duration[entry.node]
            done = length - entry.left
            # What starts at the same moment finds the multiprocessors free.
            if not rounds or done <= 0:
                return 0.0, UNKNOWN
            round_ns = length / rounds
            waits.append(((round_ns - done % round_ns) / entry.rate, entry.node))
        return min(waits, default=(0.0, UNKNOWN))

    def _handle_event(self, entry: _Running) -> None:
        """End an operation's wait, release what may overlap its end, or end it."""
        node = entry.node
        if entry.waits:
            entry.waits = False
            if entry.until_event > 0:
                return
        if entry.left > 0:
            entry.lead = 0.0
            self.end[node] = round(self._now + entry.left / entry.rate)
            self._release(self._satisfy(node, self._constraints.before_end[node], self.end[node]))
            return
        self._running.remove(entry)
        self.end[node] = round(self._now)
        self._release(self._satisfy(node, self._constraints.after_end[node], self.end[node]))

    def _set_rates(self) -> None:
        # Most of a step has one operation at a time.
        if len(self._running) == 1:
            self._running[0].rate = 1.0
            return
        # A call that waits holds multiprocessors as one that moves bytes does.
        held = sum(self._held[entry.node] for entry in self._running)
        needed = [self._needed[entry.node] for entry in self._running]
        free, wanted = max(LEAST_RATE, 1.0 - held), sum(needed)
        slowdown = 1.0
        for entry, share in zip(self._running, needed, strict=True):
            slowdown = max(slowdown, 1.0 + (self._call_slowdown[entry.node] - 1.0) * share)
        for entry, share in zip(self._running, needed, strict=True):
            if self._held[entry.node]:
                entry.rate = min(1.0, self._headroom[entry.node] / slowdown)
            # Tiles of several kernels share waves, whose number is not known: only a product that
            # is the only running kernel, or whose duration contains the others, has its own.
            elif self._tiles[entry.node] and (share == wanted or not self._among_kernels):
                entry.rate = self._rate_of_waves(self._tiles[entry.node], free)
            else:
                entry.rate = min(1.0, free / (wanted if self._among_kernels else share))

    def _rate_of_waves(self, tiles: int, free: float) -> float:
        """Return the waves of a product on all multiprocessors over its waves on the free ones.

        Args:
            tiles: number of tiles of the product.
            free: share of the multiprocessors that no call holds.
        """
        # `free` is a ratio of two integers. Rounding must not cost a multiprocessor.
        usable = max(1, floor(free * self._multiprocessors + 1e-6))
        alone = ceil(tiles / self._multiprocessors)
        if self._persistent:
            return alone / persistent_waves(tiles, self._multiprocessors, usable)
        return alone / ceil(tiles / usable)

    def _satisfy(self, node: int, edges: _Outgoing, time: int) -> list[int]:
        """Satisfy edges from a node; return the targets without open constraints.

        Args:
            node: the node.
            edges: some of its edges.
            time: its start or end, from which their delays count.
        """
        satisfied = list[int]()
        begun = self.start[node]
        for target, delay, edge in edges:
            # A negative delay lets a node overlap its predecessor, never precede its start.
            at = max(time + delay, begun)
            # The first constraint replaces `earliest`, even by an earlier time.
            if at > self._ready[target] or self.released_by[target] == UNKNOWN:
                self._ready[target], self.released_by[target] = at, edge
                self.blocker[target] = node
            self._open[target] -= 1
            if not self._open[target]:
                satisfied.append(target)
        return satisfied

    def _release(self, nodes: list[int]) -> None:
        """Queue the starts of nodes without open constraints, and set the times of others at once.

        Only operations that take time on the GPU are queued. The others end at a known time, so
        the nodes that wait for them follow in the same loop.
        """
        while nodes:
            node = nodes.pop()
            begin = max(self._ready[node], self._floors[node])
            progress = max(begin, self._arrivals[node])
            takes_time = self._duration[node] or progress > begin
            if takes_time and (self._needed[node] or self._held[node]):
                self._push(begin, node, waited=False)
                continue
            self.start[node], self.end[node] = begin, progress + self._duration[node]
            constraints, end = self._constraints, self.end[node]
            for edges, time in (
                (constraints.after_start[node], begin),
                (constraints.before_end[node], end),
                (constraints.after_end[node], end),
            ):
                if edges:
                    nodes += self._satisfy(node, edges, time)

    def _push(self, time: float, node: int, *, waited: bool) -> None:
        heapq.heappush(self._starts, (time, self._pushed, node, waited))
        self._pushed += 1


@functools.lru_cache(maxsize=4096)
def persistent_waves(tiles: int, multiprocessors: int, usable: int) -> float:
    """Return the waves of a product whose blocks take tiles until none is left.

    A product has a block for each multiprocessor. The first two tiles of a block are fixed, the
    others go to whichever block is free. Blocks without a multiprocessor begin when others end,
    which is when no free tile is left, and then do their own tiles: up to two more waves. Two waves
    next to 8 held multiprocessors took 1.9 times as long on an H100, 1.43 by this rule, for no
    known reason (benchmarks/results/2026-11-28-waiting-calls-2xh100.txt).

    Args:
        tiles: of the product.
        multiprocessors: of the GPU.
        usable: those that are free.
    """
    blocks = min(tiles, multiprocessors)
    if usable >= blocks:
        return ceil(tiles / multiprocessors)
    late_blocks = blocks - usable
    late_second_tiles = max(0, min(tiles - blocks, blocks) - usable)
    rounds, in_last_round = divmod(tiles - late_blocks - late_second_tiles, usable)
    late_waves = LATE_WAVE * (2 if late_second_tiles else 1)
    # Blocks without a tile in the last round end one round before the others, and make room.
    after_last_round = max(0, late_blocks - (usable - in_last_round))
    if after_last_round:
        waves = rounds + 1 + late_waves * ceil(after_last_round / usable)
    else:
        waves = rounds + late_waves
    return max(waves, ceil(tiles / multiprocessors))
