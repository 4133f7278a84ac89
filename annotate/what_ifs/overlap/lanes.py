"""The streams and threads on which nodes follow one another, and what comes before what."""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.work.characters import compute_mask
from onerank.ir import UNKNOWN, Edges, Graph

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_LANE = -1
NEVER = np.iinfo(np.int64).max


class Lanes(NamedTuple):
    """Where n nodes that compute or communicate run one after another.

    Calls have lanes of their own: those of a stream, or of a group on a thread.

    Attributes:
        of: lane of each node, `NO_LANE` for all others, int64[n].
        rank: place of each node in an order in which none comes before what it waits for, int64[n].
        order: the nodes in that order, int64[n].
        compute: which lanes compute, bool[lanes].
    """

    of: I64
    rank: I64
    order: I64
    compute: Mask

    @classmethod
    def from_graph(cls, graph: Graph) -> Self:
        """Return those of a graph as captured.

        Raises:
            GraphError: the graph has a cycle.
        """
        nodes, calls = graph.nodes, graph.communication
        works = np.flatnonzero(compute_mask(graph) | calls)
        on_thread = nodes.stream[works] == UNKNOWN
        keys = np.stack(
            [
                calls[works],
                nodes.stream[works],
                np.where(on_thread, nodes.thread[works], UNKNOWN),
                np.where(on_thread & calls[works], nodes.group[works], UNKNOWN),
            ],
            axis=1,
        )
        distinct, place = np.unique(keys, axis=0, return_inverse=True)
        of = np.full(len(graph), NO_LANE, dtype=np.int64)
        of[works] = place.reshape(-1)
        order, rank = graph.topological_order(), np.empty(len(graph), dtype=np.int64)
        rank[order] = np.arange(len(graph))
        return cls(of, rank, order, distinct[:, 0] == 0)

    def before(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the highest rank of a node there that it waits for, or its own.

        `UNKNOWN` for none. It is a loop over the nodes: what one waits for its sources tell.

        Args:
            edges: of the graph, or of one with other edges among the same nodes.
            order: of the nodes, none before what it waits for, int64[n].
        """
        found = np.full((len(order), len(self.compute)), UNKNOWN, dtype=np.int64)
        offsets, lane = edges.offsets.tolist(), self.of.tolist()
        for node in order.tolist():
            begin, end = offsets[node], offsets[node + 1]
            if begin < end:
                found[node] = found[edges.source[begin:end]].max(axis=0)
            if lane[node] != NO_LANE:
                found[node, lane[node]] = self.rank[node]
        return found

    def after(self, edges: Edges, order: I64) -> I64:
        """Return per node and lane the lowest rank of a node there that waits for it, or its own.

        `NEVER` for none; arguments as for `before`.
        """
        found = np.full((len(order), len(self.compute)), NEVER, dtype=np.int64)
        by_source = np.argsort(edges.source, kind="stable")
        followers = edges.target[by_source]
        starts = np.searchsorted(edges.source[by_source], np.arange(len(order) + 1)).tolist()
        lane = self.of.tolist()
        for node in order[::-1].tolist():
            begin, end = starts[node], starts[node + 1]
            if begin < end:
                found[node] = found[followers[begin:end]].min(axis=0)
            if lane[node] != NO_LANE:
                found[node, lane[node]] = self.rank[node]
        return found

    def beside(self, calls: I64, before: I64, after: I64) -> I64:
        """Return how many nodes that compute may run beside each of `calls`, int64[len(calls)].

        Args:
            calls: indices.
            before: what each node waits for, by `before`.
            after: who waits for each, by `after`.
        """
        count = np.zeros(len(calls), dtype=np.int64)
        for lane in np.flatnonzero(self.compute).tolist():
            on_lane = np.zeros(len(self.rank) + 1, dtype=np.int64)
            on_lane[self.rank[self.of == lane] + 1] = 1
            until = np.cumsum(on_lane)  # how many of the lane have a rank below
            end = np.minimum(after[calls, lane], len(self.rank))
            count += np.maximum(until[end] - until[before[calls, lane] + 1], 0)
        return count
