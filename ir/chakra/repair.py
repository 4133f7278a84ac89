"""Read a trace whose dependencies are broken: drop those that no order of the nodes can satisfy."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra.dependencies import Dependencies
from onerank.ir.chakra.reader import read_with
from onerank.ir.edges import Edges, topological_order
from onerank.ir.graph import Graph
from onerank.ir.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Repairs:
    """Dependencies that were dropped, by kind.

    Attributes:
        dangling: on a node that is not in the file.
        self_dependencies: of a node on itself.
        cyclic: that closed a cycle of two nodes or more.
    """

    dangling: int = 0
    self_dependencies: int = 0
    cyclic: int = 0

    @property
    def total(self) -> int:
        """Number of dropped dependencies."""
        return self.dangling + self.self_dependencies + self.cyclic

    @property
    def note(self) -> str:
        """A sentence for the notes of the trace."""
        return (
            f"{self.total} broken dependencies were dropped: {self.dangling} on nodes that are "
            f"not in the file, {self.self_dependencies} of nodes on themselves, {self.cyclic} "
            "that closed a cycle; start times in replay may be too early"
        )


def read_repaired(path: str | Path) -> tuple[Graph, Repairs]:
    """Read a Chakra `.et` file without the dependencies that make it no acyclic graph.

    The graph's notes say what was dropped. An intact file gives the same graph as `read`.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        GraphError: two nodes share an id, so that a dependency on it is ambiguous.
        OSError: the file cannot be read.
    """
    found: list[Repairs] = []

    def resolve(nodes: Nodes, dependencies: Dependencies, sources: I64) -> Edges:
        edges, repairs = _repaired(nodes, dependencies, sources)
        found.append(repairs)
        return edges

    graph = read_with(path, resolve)
    (repairs,) = found
    if repairs.total:
        measurement = graph.job.measurement
        notes = (*measurement.notes, repairs.note)
        measurement = msgspec.structs.replace(measurement, notes=notes)
        graph = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    return graph, repairs


def _repaired(nodes: Nodes, dependencies: Dependencies, sources: I64) -> tuple[Edges, Repairs]:
    """Return the edges that are kept, and the number of dropped ones.

    Args:
        nodes: columns of the n nodes.
        dependencies: ids that each node waits for, m in all.
        sources: index of each of these nodes, int64[m]; -1 where the file has no such node.
    """
    targets: I64 = np.repeat(np.arange(len(nodes)), np.diff(dependencies.offsets))
    dangling, on_itself = sources < 0, sources == targets
    kept = ~(dangling | on_itself)
    edges = _edges(len(nodes), sources, targets, dependencies, kept)
    leftover = topological_order(edges)[1]
    cyclic = 0
    if len(leftover):
        closes = np.zeros(len(kept), dtype=bool)
        closes[np.flatnonzero(kept)] = _closing_edges(nodes, edges, leftover)
        cyclic = int(closes.sum())
        kept &= ~closes
        edges = _edges(len(nodes), sources, targets, dependencies, kept)
    return edges, Repairs(int(dangling.sum()), int(on_itself.sum()), cyclic)


def _edges(count: int, sources: I64, targets: I64, dependencies: Dependencies, kept: Mask) -> Edges:
    return Edges.from_pairs(count, sources[kept], targets[kept], dependencies.reason[kept])


def _closing_edges(nodes: Nodes, edges: Edges, leftover: I64) -> Mask:
    """Return which edges lead back to a node that the search is still within, bool[m].

    A depth-first search walks from each node to the nodes it waits for. The latest nodes go first:
    an edge that closes a cycle is then one on which an earlier node waits for a later one.
    """
    by_time = np.lexsort((leftover, nodes.start_ns[leftover]))
    unvisited, within, done = 0, 1, 2
    state = np.full(len(nodes), done, dtype=np.uint8)
    state[leftover] = unvisited
    closing = np.zeros(len(edges), dtype=bool)
    sources, offsets = edges.source.tolist(), edges.offsets.tolist()
    for root in leftover[by_time][::-1].tolist():
        if state[root] != unvisited:
            continue
        state[root] = within
        stack = [(root, offsets[root])]
        while stack:
            node, edge = stack.pop()
            if edge == offsets[node + 1]:
                state[node] = done
                continue
            stack.append((node, edge + 1))
            source = sources[edge]
            if state[source] == within:
                closing[edge] = True
            elif state[source] == unvisited:
                state[source] = within
                stack.append((source, offsets[source]))
    return closing
