"""Map ranks inside a graph: the roots of rooted collectives and the peers of messages.

Roots and peers are global ranks. When a graph is reused for another rank or another world, they
must follow the ranks of their groups.
"""

from collections.abc import Callable

import numpy as np

from onerank.ir import UNKNOWN, Graph, Kind, ProcessGroup
from onerank.ir.nodes import ROOT_COLUMNS


def with_roots(graph: Graph, new_root: Callable[[ProcessGroup, int], int]) -> Graph:
    """Return the graph with every root replaced by `new_root(group, root)`.

    A root that is not a member of its group becomes UNKNOWN; files of other tools have such roots.
    """
    nodes, job = graph.nodes, graph.job
    ends = {name: getattr(nodes, name).copy() for name in ("comm_src", "comm_dst")}
    world = ProcessGroup("", tuple(range(job.world.size)), "world")
    for index in np.flatnonzero(np.isin(nodes.collective, list(ROOT_COLUMNS))).tolist():
        node = graph.node(index)
        group = job.group(node.text("group")) or world
        root = new_root(group, node.root) if node.root in group.ranks else UNKNOWN
        ends[ROOT_COLUMNS[node.collective]][index] = root
    return graph.with_columns(**ends)


def with_peers(graph: Graph, new_peer: Callable[[int], int]) -> Graph:
    """Return the graph with the destination of sends and the source of receives replaced."""
    nodes = graph.nodes
    ends = {name: getattr(nodes, name).copy() for name in ("comm_src", "comm_dst")}
    for index in np.flatnonzero(graph.mask(Kind.SEND, Kind.RECV)).tolist():
        column = "comm_dst" if nodes.kind[index] == Kind.SEND else "comm_src"
        ends[column][index] = new_peer(int(ends[column][index]))
    return graph.with_columns(**ends)
