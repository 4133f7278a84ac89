"""Remove nodes and reconnect their successors to their predecessors."""

import numpy as np
import numpy.typing as npt

from onerank.ir import Edges, Reason

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


def contract(edges: Edges, dropped: npt.NDArray[np.bool_]) -> tuple[I64, I64, U8]:
    """Return (source, target, reason) of the edges among the nodes that stay, by old index.

    An edge that bridges dropped nodes is PROGRAM_ORDER if it replaces a PROGRAM_ORDER edge;
    otherwise it has the reason of the last edge it replaces. One edge per pair stays. The graph
    must be acyclic.
    """
    source, target, reason = edges.source, edges.target, edges.reason
    keep = ~dropped[target]
    source, target, reason = source[keep], target[keep], reason[keep]
    # Each round replaces the dropped sources of edges by their predecessors, so the number of
    # rounds is the length of the longest chain of dropped nodes.
    while (bridges := dropped[source]).any():
        removed = source[bridges]
        counts = edges.offsets[removed + 1] - edges.offsets[removed]
        first = np.repeat(edges.offsets[removed] - (np.cumsum(counts) - counts), counts)
        incoming = first + np.arange(int(counts.sum()))
        outer = np.repeat(reason[bridges], counts)
        ordered = edges.reason[incoming] == Reason.PROGRAM_ORDER
        bridged = np.where(ordered, np.uint8(Reason.PROGRAM_ORDER), outer)
        source = np.concatenate([source[~bridges], edges.source[incoming]])
        target = np.concatenate([target[~bridges], np.repeat(target[bridges], counts)])
        reason = np.concatenate([reason[~bridges], bridged])
        source, target, reason = one_per_pair(source, target, reason)
    return one_per_pair(source, target, reason)


def one_per_pair(source: I64, target: I64, reason: U8) -> tuple[I64, I64, U8]:
    """Return the edges with only the first of every (source, target) pair."""
    # One integer per pair, since `np.unique` sorts integers faster than rows of two columns.
    size = int(max(source.max(initial=0), target.max(initial=0))) + 1
    _, first = np.unique(target * size + source, return_index=True)
    # In the order of the edges, so that of several reasons for one pair the first stays.
    first = np.sort(first)
    return source[first], target[first], reason[first]
