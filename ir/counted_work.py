"""Work that another tool counted for nodes without a time, as ASTRA-sim's roofline reads it."""

from dataclasses import replace

import numpy as np

from onerank.ir.chakra.et_def_pb2 import Node
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

NUM_OPS, TENSOR_SIZE = "num_ops", "tensor_size"


def with_counted_work(graph: Graph) -> Graph:
    """Return the graph with the FLOPs and bytes of compute nodes that have no duration.

    Generators (STAGE) write no durations, but `num_ops` and `tensor_size`, of which ASTRA-sim's
    roofline makes one (Workload.cc, `issue_comp`). All of `tensor_size` counts as read.
    """
    nodes = graph.nodes
    wanted = graph.gpu_compute & (nodes.duration_ns == 0) & (nodes.flops == UNKNOWN)
    columns = {name: getattr(nodes, name).copy() for name in ("flops", "bytes_read")}
    columns["bytes_written"] = nodes.bytes_written.copy()
    found = False
    for index in np.flatnonzero(wanted).tolist():
        message = nodes.foreign[index]
        if message is None:
            continue
        told = {
            one.name: getattr(one, one.WhichOneof("value") or "name")
            for one in Node.FromString(message).attr
            if one.name in (NUM_OPS, TENSOR_SIZE)
        }
        flops, size = told.get(NUM_OPS), told.get(TENSOR_SIZE)
        if not isinstance(flops, int) or not isinstance(size, int) or min(flops, size) < 0:
            continue
        columns["flops"][index], columns["bytes_read"][index] = flops, size
        columns["bytes_written"][index] = 0
        found = True
    return replace(graph, nodes=replace(nodes, **columns)) if found else graph
