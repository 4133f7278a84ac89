"""Durations in whole microseconds, as Chakra's nodes have them."""

import numpy as np

from onerank.ir.edges import I64
from onerank.ir.nodes import Nodes


def whole_micros(nodes: Nodes) -> I64:
    """Return `duration_micros`, int64[n]: rounded so that no lane's sum drifts.

    Within a (stream, thread) lane, in node order, the durations up to and with each node add up
    to the exact sum rounded to the nearest microsecond (halves up). Whole ones stay as they are.
    """
    whole, rest = np.divmod(nodes.duration_ns, 1000)
    if not rest.any():
        return whole
    order = np.lexsort((nodes.thread, nodes.stream))  # stable: node order within a lane
    stream, thread = nodes.stream[order], nodes.thread[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
    until = np.cumsum(rest[order])
    before = until - rest[order]
    base = before[first][np.cumsum(first) - 1]
    whole[order] += (until - base + 500) // 1000 - (before - base + 500) // 1000
    return whole
