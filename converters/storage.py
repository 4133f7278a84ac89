"""Reads and writes of storage (`onerank storage`): delays, where a simulator has no such nodes."""

import numpy as np

from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask


def storage_delays(graph: Graph) -> Mask:
    """Return which nodes read or write storage, bool[n].

    Raises:
        ExportError: such a node has no time.
    """
    found = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    for index in np.flatnonzero(found & (graph.nodes.duration_ns <= 0)).tolist():
        node = graph.node(index)
        raise ExportError(
            f"node {node.id} ({node.name!r}) is a {node.kind.name} without a time, and the "
            "simulator has no memory to time it by: leave such nodes out of the graph, or add "
            "storage with `onerank storage`"
        )
    return found


def beside_the_step(graph: Graph) -> Mask:
    """Return which of them are tied to no other node, as a batch that is read ahead, bool[n]."""
    tied = np.diff(graph.edges.offsets) > 0
    tied[graph.edges.source] = True
    return storage_delays(graph) & ~tied
