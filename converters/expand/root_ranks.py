"""The roots of broadcasts, reduces, gathers and scatters, where a graph takes another rank's place.

A root is a global rank, so it moves with the ranks of its group.
"""

from collections.abc import Callable

import numpy as np

from onerank.ir import UNKNOWN, Graph, ProcessGroup
from onerank.ir.nodes import ROOT_COLUMNS


def with_roots(graph: Graph, moved: Callable[[ProcessGroup, int], int]) -> Graph:
    """Return a graph whose roots are `moved`: given a group and its root, the counterpart.

    A root that is not in its group, as a file of another tool may have it, becomes UNKNOWN.
    """
    nodes, job = graph.nodes, graph.job
    ends = {name: getattr(nodes, name).copy() for name in ("comm_src", "comm_dst")}
    world = ProcessGroup("", tuple(range(job.world.size)), "world")
    for index in np.flatnonzero(np.isin(nodes.collective, list(ROOT_COLUMNS))).tolist():
        node = graph.node(index)
        group = job.group(node.text("group")) or world
        root = moved(group, node.root) if node.root in group.ranks else UNKNOWN
        ends[ROOT_COLUMNS[node.collective]][index] = root
    return graph.with_columns(**ends)
