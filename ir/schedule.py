"""When does each node of a graph run, if its own durations and its edges alone hold it back?

A host thread takes the time between two starts as measured, less what it spent blocked on the
GPU; that is its own work, Python's included. A GPU operation starts when those before it on its
stream (and the gap between two, 20 us at most) and those it must wait for have ended, and its
launch has reached the GPU; it is never told when it started in the measurement, but how long it
waited for what the trace does not tell. So a graph with a missing edge replays too fast, and one
with a false edge too slow.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.ir.delays import begins, edge_delays, launches
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import UNKNOWN

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Start and end of every node as replayed, and what held it back.

    Attributes:
        start_ns: int64[n].
        end_ns: int64[n].
        held_by: node that each one waited for last, UNKNOWN for none, int64[n].
        by_launch: whether that was its launch, bool[n].
    """

    start_ns: I64
    end_ns: I64
    held_by: I64
    by_launch: Mask


def schedule(graph: Graph) -> Schedule:
    """Return when each node runs.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    if not graph.nodes.duration_ns.any():
        raise GraphError(
            f"none of the graph's {len(graph)} nodes takes time, so there is nothing to replay; "
            "annotate it for a GPU first: annotate --target H100 ..."
        )
    nodes, edges = graph.nodes, graph.edges
    delay, from_start = edge_delays(graph)
    offsets: list[int] = edges.offsets.tolist()
    sources: list[int] = edges.source.tolist()
    duration: list[int] = nodes.duration_ns.tolist()
    start: list[int] = [0] * len(graph)
    end: list[int] = [0] * len(graph)
    held: list[int] = [UNKNOWN] * len(graph)
    launched: list[bool] = [False] * len(graph)
    is_launch: list[bool] = launches(graph).tolist()
    least: list[int] = begins(graph).tolist()
    order: list[int] = graph.topological_order().tolist()
    for node in order:
        ready, holder, by_launch = least[node], UNKNOWN, False
        for edge in range(offsets[node], offsets[node + 1]):
            source = sources[edge]
            at = (start if from_start[edge] else end)[source] + delay[edge]
            at = max(at, start[source])  # one that overlaps it begins behind it all the same
            if at > ready or holder == UNKNOWN:
                ready, holder, by_launch = at, source, is_launch[edge]
        start[node], end[node] = ready, ready + duration[node]
        held[node], launched[node] = holder, by_launch
    return Schedule(np.array(start), np.array(end), np.array(held), np.array(launched))
