"""Edges in compressed sparse rows: for each node, the nodes it waits for and why."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, U8
from onerank.ir.enums import Reason


@dataclass(frozen=True, slots=True)
class Edges:
    """Dependencies by node index: those of node i are `source[offsets[i]:offsets[i + 1]]`.

    Attributes:
        offsets: int64[n + 1].
        source: int64[m], indices of the nodes waited for.
        reason: uint8[m], a `Reason` per edge.
    """

    offsets: I64
    source: I64
    reason: U8

    @classmethod
    def from_pairs(cls, count: int, source: I64, target: I64, reason: U8) -> Self:
        """Build from one (source, target, reason) per edge; order within a target is kept."""
        order = np.argsort(target, kind="stable")
        offsets = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(target, minlength=count), out=offsets[1:])
        return cls(offsets, source[order], reason[order])

    def __len__(self) -> int:
        return len(self.source)

    @property
    def target(self) -> I64:
        """Index of the waiting node, int64[m]."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def of(self, node: int) -> list[tuple[int, Reason]]:
        """Return (index, reason) of each node that `node` waits for."""
        span = slice(self.offsets[node], self.offsets[node + 1])
        pairs = zip(self.source[span].tolist(), self.reason[span].tolist(), strict=True)
        return [(source, Reason(reason)) for source, reason in pairs]


def topological_order(edges: Edges) -> tuple[I64, I64]:
    """Return (order, leftover): a topological order, and the nodes on or after a cycle.

    Of the ready nodes, the one with the lowest index comes first, so equal graphs have equal
    orders. `leftover` is empty for an acyclic graph.
    """
    import heapq

    count = len(edges.offsets) - 1
    waiting = np.diff(edges.offsets).tolist()
    by_source = np.argsort(edges.source, kind="stable")
    followers = edges.target[by_source].tolist()
    starts = np.searchsorted(edges.source[by_source], np.arange(count + 1)).tolist()
    ready = [node for node in range(count) if waiting[node] == 0]
    order: list[int] = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[starts[node] : starts[node + 1]]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, follower)
    done = np.zeros(count, dtype=bool)
    done[order] = True
    return np.array(order, dtype=np.int64), np.flatnonzero(~done)
