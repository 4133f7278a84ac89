"""The progress of kernels and collectives that compete for one GPU.

Every operation has its time alone on the GPU and progresses at a rate of at most 1 (processor
sharing):

- Communication holds multiprocessors: NCCL's channels are thread blocks that stay until the call
  is done, also while it waits for other ranks. Kernels share the rest. A kernel that needs fewer
  runs at its full rate. A product has whole waves of tiles: one of 128 tiles takes one wave on 132
  multiprocessors, and two on 108. A persistent one has up to two more (`persistent_waves`).
- A call progresses slower next to kernels, which compete for caches, memory and power.
- Copies from other GPUs hold no multiprocessors. Those that run at once share the link.
- A call starts when enough multiprocessors are free. A running kernel frees its multiprocessors
  after each round of its thread blocks; a persistent kernel has one round.

Rates change when an operation starts or ends, so a schedule is computed in the order of time
(`rank_schedule.py`).
"""

import functools
from dataclasses import dataclass
from math import ceil, floor
from typing import Self

import numpy as np

from onerank.ir.arrays import F64, I64, Mask
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
        copies: whether an operation is a copy from another GPU, bool[n].
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
    copies: Mask
    multiprocessors: int
    persistent: bool
    among_kernels: bool

    @classmethod
    def none(cls, count: int) -> Self:
        """Return that of `count` operations that occupy nothing: each takes its duration."""
        zeros, ones = np.zeros(count), np.ones(count)
        whole = np.zeros(count, dtype=np.int64)
        return cls(
            needed=zeros,
            tiles=whole,
            rounds=whole,
            held=zeros,
            headroom=ones,
            call_slowdown=ones,
            copies=zeros > 0,
            multiprocessors=1,
            persistent=False,
            among_kernels=False,
        )

    def matters(self, stream: I64) -> bool:
        """Return whether any operation can slow another one.

        Args:
            stream: of each operation, int64[n].
        """
        kernels = self.needed > 0
        if self.among_kernels and len(np.unique(stream[kernels])) > 1:
            return True
        if len(np.unique(stream[self.copies])) > 1:
            return True
        return bool(kernels.any()) and bool((self.held > 0).any())


@dataclass(slots=True)
class RunningOperation:
    """An operation that runs; times in ns.

    Attributes:
        node: the node.
        left: its remaining time at a rate of 1.
        lead: time before the end at which successors that overlap it are released; 0 after that.
        resumes_ns: time until which it waits for other ranks and makes no progress; infinite if not
            known.
        waits: whether it still waits.
        rate: its rate.
    """

    node: int
    left: float
    lead: float
    resumes_ns: float
    waits: bool
    rate: float = 1.0

    def event_ns(self, now_ns: float) -> float:
        """Return when its wait ends, or when it releases successors or ends, at its rate."""
        if self.waits:
            return self.resumes_ns
        return now_ns + max(self.left - self.lead, 0.0) / self.rate


class SharedGpu:
    """The operations that run on a GPU, and their progress.

    Attributes:
        now_ns: the time.
        running: operations, in the order of their starts.

    Args:
        contention: of a graph of n operations.
        duration_ns: time of each alone, n values.
    """

    def __init__(self, contention: Contention, duration_ns: list[int]) -> None:
        # Lists, because single elements are read, which is slow on numpy arrays.
        self._duration_ns = duration_ns
        self._needed: list[float] = contention.needed.tolist()
        self._tiles: list[int] = contention.tiles.tolist()
        self._multiprocessors = contention.multiprocessors
        self._persistent = contention.persistent
        self._rounds: list[int] = contention.rounds.tolist()
        self._held: list[float] = contention.held.tolist()
        self._headroom: list[float] = contention.headroom.tolist()
        self._call_slowdown: list[float] = contention.call_slowdown.tolist()
        self._copies: list[bool] = contention.copies.tolist()
        self._among_kernels = contention.among_kernels
        self.now_ns = 0.0
        self.running: list[RunningOperation] = []

    def is_occupied_by(self, node: int) -> bool:
        """Return whether an operation occupies multiprocessors or a link while it runs."""
        return bool(self._needed[node] or self._held[node] or self._copies[node])

    def advance(self, now_ns: float) -> None:
        """Advance the time; no operation may have an event before `now_ns`."""
        elapsed, self.now_ns = now_ns - self.now_ns, now_ns
        for entry in self.running:
            if entry.waits:
                continue
            entry.left -= elapsed * entry.rate
            # Rounding leaves less than a thousandth of a nanosecond.
            if entry.left - entry.lead < 1e-3:
                entry.left = min(entry.left, entry.lead)

    def begin(self, operation: RunningOperation) -> None:
        """Start an operation now."""
        self.running.append(operation)
        self.set_rates()

    def until_multiprocessors_free(self, node: int) -> tuple[float, int]:
        """Return the time until a running kernel ends a round of blocks, and the kernel.

        0 and UNKNOWN if a call can start now.

        Args:
            node: the call.
        """
        held = self._held[node]
        if not held:
            return 0.0, UNKNOWN
        used = sum(self._needed[entry.node] + self._held[entry.node] for entry in self.running)
        if used + held <= 1.0:
            return 0.0, UNKNOWN
        waits: list[tuple[float, int]] = []
        for entry in self.running:
            if not self._needed[entry.node]:
                continue
            rounds, length = self._rounds[entry.node], self._duration_ns[entry.node]
            done = length - entry.left
            # What starts at the same moment finds the multiprocessors free.
            if not rounds or done <= 0:
                return 0.0, UNKNOWN
            round_ns = length / rounds
            waits.append(((round_ns - done % round_ns) / entry.rate, entry.node))
        return min(waits, default=(0.0, UNKNOWN))

    def set_rates(self) -> None:
        """Set the rates of all running operations; needed after each start, wait and end."""
        # Most of a step has one operation at a time.
        if len(self.running) < 2:
            for entry in self.running:
                entry.rate = 1.0
            return
        # A call that waits holds multiprocessors as one that moves bytes does.
        held = sum(self._held[entry.node] for entry in self.running)
        needed = [self._needed[entry.node] for entry in self.running]
        free, wanted = max(LEAST_RATE, 1.0 - held), sum(needed)
        copies = sum(self._copies[entry.node] for entry in self.running)
        slowdown = 1.0
        for entry, share in zip(self.running, needed, strict=True):
            slowdown = max(slowdown, 1.0 + (self._call_slowdown[entry.node] - 1.0) * share)
        for entry, share in zip(self.running, needed, strict=True):
            if self._copies[entry.node]:
                entry.rate = 1.0 / copies
            elif self._held[entry.node]:
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
