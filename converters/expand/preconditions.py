"""Preconditions of an export: GPU times must be present; storage nodes become delays."""

import numpy as np

from onerank.ir import Graph, Kind
from onerank.ir.chakra.third_party_traces import is_counted
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

REMEDY = "If it was captured on a CPU, annotate it for a GPU first: annotate --target H100 ..."


def require_gpu_work(graph: Graph) -> None:
    """Check that a graph has timed work on a GPU.

    Raises:
        ExportError: it has host operations and no GPU node, or workload counts instead of times.
    """
    if graph.mask(Kind.HOST_OP).any() and not graph.gpu_compute.any():
        raise ExportError(
            f"the graph has host operations and no GPU node\n  {REMEDY}", code="graph-no-gpu-time"
        )
    if is_counted(graph):
        raise ExportError(
            "the graph's nodes have workload counts (num_ops, tensor_size) and no times\n"
            "  annotate it for a GPU first: annotate --target H100 ...",
            code="graph-counts-no-times",
        )


def storage_delays(graph: Graph) -> Mask:
    """Return which nodes read or write storage, bool[n].

    Raises:
        ExportError: such a node has no time.
    """
    storage = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    for index in np.flatnonzero(storage & (graph.nodes.duration_ns <= 0)).tolist():
        node = graph.node(index)
        # The simulators model no remote memory, so the duration is all they can use.
        raise ExportError(
            f"node {node.id} ({node.name!r}) is a {node.kind.name} without a duration\n"
            "  remove such nodes from the graph, or add storage with `onerank storage`",
            code="storage-no-duration",
        )
    return storage


def prefetched_storage(graph: Graph) -> Mask:
    """Return which storage nodes have no edge to any other node, bool[n].

    A batch that is read ahead for the next step is such a node.
    """
    connected = np.diff(graph.edges.offsets) > 0
    connected[graph.edges.source] = True
    return storage_delays(graph) & ~connected
