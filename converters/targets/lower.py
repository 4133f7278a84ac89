"""Lower a graph to the nodes ASTRA-sim runs; paths through other nodes become edges."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.expand.p2p_checks import check_messages
from onerank.converters.expand.pipeline import RankGraph
from onerank.converters.targets.expand_symmetry import Layout, Place
from onerank.ir import Edges, Graph, Kind, Node
from onerank.ir.edges import topological_order
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

HOST = "host operations"
NO_TIME = "GPU nodes of 0 ns"
METADATA = "metadata nodes"
INVALID = "invalid nodes"
NO_IDLE_TIME = "Host time and GPU idle time are not in the workload"


def timed_compute(graph: Graph) -> Mask:
    """Return which nodes are GPU compute that takes time, bool[n]."""
    return graph.gpu_compute & (graph.nodes.duration_ns > 0)


def count_left_out(graph: Graph) -> dict[str, int]:
    """Return how many nodes do not reach ASTRA-sim, besides communications."""
    no_time = graph.gpu_compute & ~timed_compute(graph)
    return {
        HOST: int(graph.mask(Kind.HOST_OP).sum()),
        NO_TIME: int(no_time.sum()),
        METADATA: int(graph.mask(Kind.METADATA).sum()),
        INVALID: int(graph.mask(Kind.INVALID).sum()),
    }


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's nodes, numbered 0.. in the order in which every rank issues them.

    Attributes:
        index: graph index of each node.
        waits_for: numbers of the nodes each one waits for, ascending, none implied by another.
    """

    index: list[int]
    waits_for: list[list[int]]

    def __len__(self) -> int:
        return len(self.index)


def lower(graph: Graph, lanes: Sequence[Hashable | None]) -> Step:
    """Return the nodes that have a lane, and what each one waits for.

    The nodes of a lane run one after another, in topological order (the lowest graph index
    first). A node without a lane is contracted: what waits for it waits for all it waits for.
    So of each lane only the newest node counts, and a node's past is one number per lane.

    Args:
        graph: the graph to lower.
        lanes: lane of each node, None for a node to contract.

    Raises:
        GraphError: the graph has a cycle.
    """
    starts, source = graph.edges.offsets.tolist(), graph.edges.source.tolist()
    step = Step([], [])
    newest: dict[Hashable, int] = {}
    pasts: list[dict[Hashable, int]] = []
    frontiers: list[dict[Hashable, int]] = [{}] * len(graph)
    for node in graph.topological_order().tolist():
        awaited = source[starts[node] : starts[node + 1]]
        frontier = _newest_of_each([frontiers[dependency] for dependency in awaited])
        lane = lanes[node]
        if lane is None:
            frontiers[node] = frontier
            continue
        if lane in newest:
            frontier = {**frontier, lane: newest[lane]}
        waits_for = sorted(
            number
            for past, number in frontier.items()
            if not any(
                other != number and pasts[other].get(past, -1) >= number
                for other in frontier.values()
            )
        )
        number = len(step)
        newest[lane] = number
        pasts.append({**_newest_of_each([pasts[other] for other in waits_for]), lane: number})
        frontiers[node] = {lane: number}
        step.index.append(node)
        step.waits_for.append(waits_for)
    return step


def _newest_of_each(parts: list[dict[Hashable, int]]) -> dict[Hashable, int]:
    if len(parts) == 1:
        return parts[0]
    merged: dict[Hashable, int] = {}
    for part in parts:
        for lane, number in part.items():
            if merged.get(lane, -1) < number:
                merged[lane] = number
    return merged


SEVERAL = (
    "capture one rank of each sort (capture run --ranks 0,1,... -o ranks/trace.et), and export the "
    "directory"
)

Message = tuple[tuple[int, ...], int, int]


def check_peers(graph: Graph, step: Step, places: dict[int, Place], layout: Layout) -> None:
    """Check that each send has a receive, and that no ring of ranks deadlocks.

    Ranks are equal: what this rank receives from `shift` away, its peer sends with the opposite
    shift. So the k-th receive of a message waits for the k-th such send of its own graph, and a
    cycle through these edges is a cycle of ranks.

    Raises:
        ExportError: a message has no counterpart, or one of another phase, or the ranks would
            deadlock.
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
            raise ExportError(
                _unmatched(graph, step, sends[message], receives[message]),
                code="export-unmatched-p2p",
            )
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
            f"graph cannot stand for all of them: {SEVERAL}",
            code="export-p2p-cycle",
        )
