"""Preconditions of an export: a graph with GPU times, and storage nodes as delays."""

import numpy as np

from onerank.ir import Graph, Kind
from onerank.ir.chakra.workload_counts import is_counted
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

REMEDY = "If it was captured on a CPU, annotate it for a GPU first: annotate --target H100 ..."


def require_gpu_work(graph: Graph) -> None:
    """Refuse a graph whose compute is all on the host.

    Raises:
        ExportError: it has host operations and no GPU node, or counts of work in place of times.
    """
    if graph.mask(Kind.HOST_OP).any() and not graph.gpu_compute.any():
        raise ExportError(
            "the graph holds no GPU time: it has host operations and no GPU node. " + REMEDY
        )
    if is_counted(graph):
        raise ExportError(
            "the graph's nodes have counts of work (num_ops, tensor_size) and no times: "
            "annotate it for a GPU first: annotate --target H100 ..."
        )


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
