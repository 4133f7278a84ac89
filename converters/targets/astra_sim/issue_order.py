"""The nodes ASTRA-sim runs, and the order in which each rank issues them."""

from collections.abc import Hashable

from onerank.converters.expand.preconditions import beside_the_step, storage_delays
from onerank.converters.targets.astra_sim.expand_symmetry import Place
from onerank.converters.targets.astra_sim.limitations import timed_compute
from onerank.converters.targets.astra_sim.lower import Step, hold_back, lower, tag_of
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError

_READY = 32
"""Receives up to which all may be ready from the start."""


def lowered(graph: Graph, places: dict[int, Place]) -> Step:
    """Return the nodes that ASTRA-sim runs, in the order every rank issues them.

    Args:
        graph: one rank's step.
        places: communication node -> its place on all ranks; what is not among them is left out.

    Raises:
        ExportError: no node takes GPU time or moves bytes.
    """
    step = lower(graph, _lanes(graph, set(places)))
    if not step.index:
        raise ExportError(f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes")
    receives = graph.mask(Kind.RECV)[step.index].nonzero()[0].tolist()
    if len(receives) > _READY:
        hold_back(step, receives)
    return step


def _lanes(graph: Graph, communications: set[int]) -> list[Hashable | None]:
    """Return what each node runs in line with; None for nodes that do not reach ASTRA-sim.

    A rank of ASTRA-sim runs one collective or send at a time. In one fixed order, the same on
    all ranks, they cannot lock each other out. Reads and writes of storage are delays among the
    compute: memory nodes and what is no GPU's cost a run its statistics.
    """
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        lanes[index] = ("stream", int(graph.nodes.stream[index]))
    for index in (storage_delays(graph) & ~beside_the_step(graph)).nonzero()[0].tolist():
        lanes[index] = "storage"
    for index in communications:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        else:
            lanes[index] = "communication"
    return lanes
