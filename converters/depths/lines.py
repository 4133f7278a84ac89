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
    """Return the highest level of memory in the graph's allocations and frees, in order.

    Where it does not tell them apart: when its operators allocate and free in order, and each all
    it allocates before anything is freed.

    Args:
        graph: the step.
        start_bytes: level when it begins.
    """
    nodes, log = graph.nodes, graph.job.measurement.memory
    if log is not None:
        steps = np.zeros(log.events, dtype=np.int64)
        for places, sign in ((log.blocks.allocated_at, 1), (log.blocks.freed_at, -1)):
            place, size = np.array(places, np.int64), np.array(log.blocks.bytes, np.int64)
            steps[place[place >= 0]] = sign * size[place >= 0]
        return start_bytes + max(0, int(np.cumsum(steps).max(initial=0)))
    order = np.argsort(nodes.start_ns, kind="stable")
    allocated, freed = nodes.bytes_allocated[order], nodes.bytes_freed[order]
    before = np.cumsum(allocated - freed) - (allocated - freed)
    return start_bytes + int((before + allocated).max(initial=0))
