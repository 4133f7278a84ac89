"""Check that sends and receives still meet when every rank does what the captured rank does."""

from collections import defaultdict

import numpy as np

from onerank.converters.astra_sim.expand import Layout, Place
from onerank.converters.astra_sim.lower import Step
from onerank.converters.messages import check_messages
from onerank.converters.pipeline import RankGraph
from onerank.ir import Edges, Graph, Kind, Node
from onerank.ir.edges import topological_order
from onerank.ir.errors import ExportError

SEVERAL = (
    "capture one rank of each sort (capture run --ranks 0,1,... -o ranks/trace.et), and export the "
    "directory"
)
Message = tuple[tuple[int, ...], int, int]


def check_peers(graph: Graph, step: Step, places: dict[int, Place], layout: Layout) -> None:
    """Check that each send meets a receive, and that no ring of ranks waits for itself.

    Ranks are alike: what this rank receives from `shift` away, its peer sends with the shift
    that leads back. So the k-th receive of a message waits for the k-th such send of its own
    graph, and a cycle through these edges is a cycle of ranks.

    Raises:
        ExportError: a message has no counterpart, or one of another phase, or the ranks would wait
            for each other.
    """
    check_messages([RankGraph(graph, tuple(range(layout.ranks)), (), 0)])
    sends: defaultdict[Message, list[int]] = defaultdict(list)
    receives: defaultdict[Message, list[int]] = defaultdict(list)
    for number, index in enumerate(step.index):
        node = graph.node(index)
        if node.kind not in (Kind.SEND, Kind.RECV):
            continue
        shift, tag, size = places[index].shift, tag_of(node), node.value("comm_bytes")
        if node.kind is Kind.SEND:
            sends[layout.opposite(shift), tag, size].append(number)
        else:
            receives[shift, tag, size].append(number)
    for message in [*sends, *receives]:
        if len(sends[message]) != len(receives[message]):
            raise ExportError(_unmatched(graph, step, sends[message], receives[message]))
    pairs = [
        pair for message in receives for pair in zip(sends[message], receives[message], strict=True)
    ]
    if pairs:
        _check_progress(graph, step, pairs)


def tag_of(node: Node) -> int:
    """Return the tag of a send or receive; 0 when it has none."""
    return max(node.value("comm_tag"), 0)


def _unmatched(graph: Graph, step: Step, sends: list[int], receives: list[int]) -> str:
    node = graph.node(step.index[[*sends, *receives][0]])
    return (
        f"node {node.id} ({node.name!r}) moves {node.value('comm_bytes')} bytes; if every rank did "
        f"what rank {graph.job.rank} does, its message would be sent {len(sends)} times and "
        f"received {len(receives)} times. The ranks are not alike (a pipeline's stages, for "
        f"example), so one rank's graph cannot stand for all of them: {SEVERAL}"
    )


def _check_progress(graph: Graph, step: Step, pairs: list[tuple[int, int]]) -> None:
    edges = [(other, number) for number, awaited in enumerate(step.waits_for) for other in awaited]
    ends = np.array([*edges, *pairs], dtype=np.int64).reshape(-1, 2)
    reasons = np.zeros(len(ends), dtype=np.uint8)
    _, stuck = topological_order(Edges.from_pairs(len(step), ends[:, 0], ends[:, 1], reasons))
    if len(stuck):
        waiting = min(receive for _, receive in pairs if receive in stuck)
        node = graph.node(step.index[waiting])
        raise ExportError(
            f"node {node.id} ({node.name!r}) receives what its peer sends only after its own such "
            f"receive: if every rank did what rank {graph.job.rank} does, all would wait for each "
            "other. The ranks are not alike (a pipeline's stages, for example), so one rank's "
            f"graph cannot stand for all of them: {SEVERAL}"
        )
