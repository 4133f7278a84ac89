"""What some ranks of a GOAL schedule have in common: a step, and which cpu runs what of it."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from onerank.converters.astra_sim.expand import Layout, Place, place
from onerank.converters.astra_sim.lower import Step, lower
from onerank.converters.astra_sim.notes import count_left_out, timed_compute
from onerank.converters.astra_sim.peers import tag_of
from onerank.converters.goal.decompose import SUPPORTED
from onerank.converters.gpu_time import require_gpu_work
from onerank.converters.host_time import NAME
from onerank.converters.storage import storage_delays
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError

CPUS = 256
"""txt2bin holds the number of a cpu in a byte."""
SENDS, RECEIVES, HOST, STORAGE = "sends", "receives", "host", "storage"


@dataclass(frozen=True, slots=True)
class Part:
    """A step, the ranks that run it, where its communication goes, and each node's cpu."""

    graph: Graph
    ranks: Sequence[int]
    layout: Layout
    places: dict[int, Place]
    step: Step
    cpu: dict[int, int]
    left_out: Counter[str]


def part_of(graph: Graph, layout: Layout, ranks: Sequence[int], *, along: str = "") -> Part:
    """Lower a graph for the ranks that run it; `along` is as for `place`.

    Raises:
        ExportError: it cannot be run, or has more streams and groups than GOAL has cpus.
    """
    require_gpu_work(graph)
    places, dropped = place(graph, layout, along=along, supported=SUPPORTED)
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        node = graph.node(index)
        lanes[index] = HOST if node.name == NAME else ("compute", node.value("stream"))
    for index in storage_delays(graph).nonzero()[0].tolist():
        lanes[index] = STORAGE
    for index in places:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        elif node.kind is Kind.SEND:
            lanes[index] = SENDS
        else:
            lanes[index] = ("collectives", node.text("group"))
    step = lower(graph, lanes)
    if not step.index:
        raise ExportError(f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes")
    cpus: dict[Hashable, int] = {}
    cpu: dict[int, int] = {}
    for index in step.index:
        lane = RECEIVES if graph.node(index).kind is Kind.RECV else lanes[index]
        cpu[index] = cpus.setdefault(lane, len(cpus))
    if len(cpus) > CPUS:
        raise ExportError(f"the graph has {len(cpus)} streams and groups; GOAL has {CPUS} cpus")
    left_out = Counter(count_left_out(graph) | dropped)
    return Part(graph, ranks, layout, places, step, cpu, left_out)
