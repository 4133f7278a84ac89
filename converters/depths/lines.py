"""Figures of a step at several depths, and the lines through them."""

from collections.abc import Sequence

import numpy as np

from onerank.ir import UNKNOWN, Graph, Kind, Line


def line(depths: Sequence[int], values: Sequence[int], depth: int) -> Line:
    """Fit a line by least squares; `depth` is where it is read."""
    slope, intercept = np.polyfit(depths, values, 1).tolist()
    residual = None
    if len(depths) > 2:
        residual = max(
            abs(intercept + slope * at - value) / value if value else 0.0
            for at, value in zip(depths, values, strict=True)
        )
    return Line(tuple(values), intercept, slope, residual, round(intercept + slope * depth))


def compute_ns(graph: Graph, members: Sequence[int] | None = None) -> int:
    """Return the summed durations of kernels (on a CPU of operators), all or those of `members`."""
    on_gpu = bool(graph.gpu_compute.any())
    mask = graph.gpu_compute if on_gpu else graph.mask(Kind.HOST_OP)
    index = np.flatnonzero(mask) if members is None else np.array(members, dtype=np.int64)
    return int(graph.nodes.duration_ns[index[mask[index]]].sum())


def comm_bytes(graph: Graph) -> int:
    """Return the summed per-rank input of the communication calls, those that are known."""
    sizes = graph.nodes.comm_bytes[graph.communication]
    return int(sizes[sizes != UNKNOWN].sum())


def replayed_peak_bytes(graph: Graph, start_bytes: int) -> int:
    """Return the highest level of memory when the operators allocate and free in order.

    Within an operator all is allocated before anything is freed.

    Args:
        graph: the step.
        start_bytes: level when it begins.
    """
    nodes = graph.nodes
    order = np.argsort(nodes.start_ns, kind="stable")
    allocated, freed = nodes.bytes_allocated[order], nodes.bytes_freed[order]
    before = np.cumsum(allocated - freed) - (allocated - freed)
    return start_bytes + int((before + allocated).max(initial=0))
