"""Dependencies of a graph's nodes as columns: their order, and what remains when nodes leave."""

import heapq
from dataclasses import dataclass
from typing import Self

import numpy as np

from onerank.ir.arrays import I64, U8, Mask
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
        # The order of a node's dependencies reaches files and golden texts, so the sort is stable.
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
    count = len(edges.offsets) - 1
    waiting = np.diff(edges.offsets).tolist()
    # Stored edges are by target; followers need them by source.
    by_source = np.argsort(edges.source, kind="stable")
    followers = edges.target[by_source].tolist()
    starts = np.searchsorted(edges.source[by_source], np.arange(count + 1)).tolist()
    # A heap, not a queue: the order must not depend on the order of edges, so that equal graphs
    # give equal files.
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


def edges_without(edges: Edges, dropped: Mask) -> tuple[I64, I64, U8]:
    """Return (source, target, reason) of the edges among the nodes that stay, by old index.

    An edge that bridges dropped nodes is PROGRAM_ORDER if it replaces a PROGRAM_ORDER edge;
    otherwise it has the reason of the last edge it replaces. One edge per pair stays. The graph
    must be acyclic.
    """
    source, target, reason = edges.source, edges.target, edges.reason
    keep = ~dropped[target]
    source, target, reason = source[keep], target[keep], reason[keep]
    # Each round replaces the dropped sources of edges by their predecessors, so the number of
    # rounds is the length of the longest chain of dropped nodes.
    while (bridges := dropped[source]).any():
        removed = source[bridges]
        counts = edges.offsets[removed + 1] - edges.offsets[removed]
        first = np.repeat(edges.offsets[removed] - (np.cumsum(counts) - counts), counts)
        incoming = first + np.arange(int(counts.sum()))
        outer = np.repeat(reason[bridges], counts)
        ordered = edges.reason[incoming] == Reason.PROGRAM_ORDER
        bridged = np.where(ordered, np.uint8(Reason.PROGRAM_ORDER), outer)
        source = np.concatenate([source[~bridges], edges.source[incoming]])
        target = np.concatenate([target[~bridges], np.repeat(target[bridges], counts)])
        reason = np.concatenate([reason[~bridges], bridged])
        source, target, reason = one_per_pair(source, target, reason)
    return one_per_pair(source, target, reason)


def one_per_pair(source: I64, target: I64, reason: U8) -> tuple[I64, I64, U8]:
    """Return the edges with only the first of every (source, target) pair."""
    # One integer per pair, since `np.unique` sorts integers faster than rows of two columns.
    size = int(max(source.max(initial=0), target.max(initial=0))) + 1
    _, first = np.unique(target * size + source, return_index=True)
    # In the order of the edges, so that of several reasons for one pair the first stays.
    first = np.sort(first)
    return source[first], target[first], reason[first]
