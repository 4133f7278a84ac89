"""FLOPs and bytes that other tools' generators (STAGE) store for nodes without durations."""

from dataclasses import replace

import numpy as np

from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

MOST = 1 << 58
"""Largest number of operations or bytes of a node; no figure derived from it exceeds 64 bits."""
NUM_OPS, TENSOR_SIZE, OP_TYPE = "num_ops", "tensor_size", "op_type"
_STAGE, _EINSUM = "symbolic_tensor_network", "M"
"""STAGE's values of a file's `schema`, and of `op_type` for a matrix product."""


def is_counted(graph: Graph) -> bool:
    """Return whether no compute node of the graph has a time, and some have FLOPs."""
    compute = graph.gpu_compute
    times, flops = graph.nodes.duration_ns[compute], graph.nodes.flops[compute]
    return len(times) > 0 and not times.any() and bool((flops > 0).any())


def counts_elements(graph: Graph) -> bool:
    """Return whether tensor and communication sizes of the graph count elements, not bytes.

    STAGE counts elements (`Tensor.eval_size` in its tensor.py), whatever its `--mixed_precision`.
    """
    if graph.foreign is None:
        return False
    attributes = GlobalMetadata.FromString(graph.foreign).attr
    return any(
        attribute.name == "schema" and attribute.string_val == _STAGE for attribute in attributes
    )


def with_counted_work(graph: Graph) -> Graph:
    """Return the graph with FLOPs and bytes set for compute nodes that have no duration.

    STAGE writes `num_ops` and `tensor_size` instead of durations; ASTRA-sim's roofline derives a
    duration from them (Workload.cc, `issue_comp`). All of `tensor_size` counts as read. STAGE
    counts a multiplication and its addition as one operation (ops/einsum.py); these are two FLOPs.

    Raises:
        GraphError: a count is out of range.
    """
    nodes = graph.nodes
    is_uncounted = graph.gpu_compute & (nodes.duration_ns == 0) & (nodes.flops == UNKNOWN)
    columns = {name: getattr(nodes, name).copy() for name in ("flops", "bytes_read")}
    columns["bytes_written"] = nodes.bytes_written.copy()
    any_counted, stage = False, counts_elements(graph)
    for index in np.flatnonzero(is_uncounted).tolist():
        message = nodes.foreign[index]
        if message is None:
            continue
        counts = {
            attribute.name: getattr(attribute, attribute.WhichOneof("value") or "name")
            for attribute in Node.FromString(message).attr
            if attribute.name in (NUM_OPS, TENSOR_SIZE, OP_TYPE)
        }
        flops, size = counts.get(NUM_OPS), counts.get(TENSOR_SIZE)
        if not isinstance(flops, int) or not isinstance(size, int) or min(flops, size) < 0:
            continue
        if max(flops, size) > MOST:
            node = graph.node(index)
            raise GraphError(
                f"node {node.id} ({node.name!r}) counts {flops} operations and a size of {size}: "
                f"expected {MOST} at most",
                code="graph-counts-too-large",
            )
        per_count = 2 if stage and counts.get(OP_TYPE) == _EINSUM else 1
        columns["flops"][index], columns["bytes_read"][index] = per_count * flops, size
        columns["bytes_written"][index] = 0
        any_counted = True
    return replace(graph, nodes=replace(nodes, **columns)) if any_counted else graph
