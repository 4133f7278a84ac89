"""Operators of a CPU capture as kernels of one stream: their columns, their order, their edges."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.contract import contract, one_per_pair
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Nodes, Reason

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


def as_kernels(nodes: Nodes, index: I64) -> Nodes:
    """Return a copy with the nodes at `index` turned into kernels of stream 0."""
    changed = {
        "kind": Kind.KERNEL,
        "stream": 0,
        "thread": UNKNOWN,
        "evidence": Evidence.DATASHEET,
        "duration_ns": 0,
        "flops": UNKNOWN,
        "bytes_read": UNKNOWN,
        "bytes_written": UNKNOWN,
    }
    columns = {
        name: getattr(nodes, name).copy() for name in (*changed, "start_ns", "low_ns", "high_ns")
    }
    for name, value in changed.items():
        columns[name][index] = value
    return replace(nodes, **columns)


def on_one_stream(graph: Graph, nodes: Nodes, kernels: I64, dropped: Mask) -> tuple[Graph, I64]:
    """Return the graph of the nodes that stay, and where each of all is among them, int64[n].

    Args:
        graph: the CPU capture.
        nodes: its nodes, the kernels with their durations; their start times are set.
        kernels: which nodes are kernels now.
        dropped: which nodes go, bool[n].
    """
    order = _program_order(graph)
    order = order[~dropped[order]]
    kernel = np.zeros(len(graph), dtype=bool)
    kernel[kernels] = True
    laid = order[kernel[order] | graph.communication[order]]
    nodes.start_ns[laid] = _end_to_end(nodes.start_ns[laid], nodes.duration_ns[laid])
    source, waiter, reason = _with_stream(
        *contract(graph.edges, dropped), order[kernel[order]], kernel
    )
    kept, place = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    edges = Edges.from_pairs(len(kept), place[source], place[waiter], reason)
    return replace(graph, nodes=nodes.take(kept), edges=edges), place


def _program_order(graph: Graph) -> I64:
    """Return the nodes by start time, or by dependency where times contradict the edges."""
    order = np.argsort(graph.nodes.start_ns, kind="stable").astype(np.int64)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    if (rank[graph.edges.source] < rank[graph.edges.target]).all():
        return order
    return graph.topological_order()


def _end_to_end(start: I64, duration: I64) -> I64:
    """Return start times of nodes in order, each when the one before ends."""
    return start.min(initial=np.iinfo(np.int64).max) + np.cumsum(duration) - duration


def _with_stream(
    source: I64, waiter: I64, reason: U8, chain: I64, kernel: Mask
) -> tuple[I64, I64, U8]:
    """Return the edges with the kernels' program order replaced by a chain of their stream."""
    replaced = (reason == Reason.PROGRAM_ORDER) & kernel[source] & kernel[waiter]
    links = np.full(max(0, len(chain) - 1), Reason.STREAM_ORDER, dtype=np.uint8)
    return one_per_pair(
        np.concatenate([source[~replaced], chain[:-1]]),
        np.concatenate([waiter[~replaced], chain[1:]]),
        np.concatenate([reason[~replaced], links]),
    )
