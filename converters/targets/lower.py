"""Lower a graph to the nodes that a simulator runs; paths through other nodes become edges."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.expand.ranks import RankGraph, check_messages
from onerank.converters.targets.expand_symmetry import Placement, Shift, opposite_shift
from onerank.ir import Edges, Graph, Kind, Node, World
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask, topological_order

HOST = "host operations"
NO_TIME = "GPU nodes of 0 ns"
METADATA = "metadata nodes"
INVALID = "invalid nodes"
NO_IDLE_TIME = "Host time and GPU idle time are not in the workload"


def timed_compute(graph: Graph) -> Mask:
    """Return which nodes are GPU compute that takes time, bool[n]."""
    return graph.gpu_compute & (graph.nodes.duration_ns > 0)


def count_dropped(graph: Graph) -> dict[str, int]:
    """Return how many nodes other than communication do not reach the simulator, by reason."""
    no_time = graph.gpu_compute & ~timed_compute(graph)
    return {
        HOST: int(graph.mask(Kind.HOST_OP).sum()),
        NO_TIME: int(no_time.sum()),
        METADATA: int(graph.mask(Kind.METADATA).sum()),
        INVALID: int(graph.mask(Kind.INVALID).sum()),
    }


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """The simulated nodes of one rank, numbered from 0 in the order in which all ranks issue them.

    Attributes:
        index: graph index of each node.
        waits_for: numbers of the nodes that each node waits for, ascending, without those that
            another one implies.
    """

    index: list[int]
    waits_for: list[list[int]]

    def __len__(self) -> int:
        return len(self.index)


def lower(graph: Graph, lanes: Sequence[Hashable | None]) -> LoweredStep:
    """Return the nodes that have a lane, and the dependencies between them.

    The nodes of a lane run one after another, in topological order (the lowest graph index
    first). A node without a lane is contracted: its successors depend on its predecessors.

    Args:
        graph: the graph to lower.
        lanes: lane of each node; None for a node to contract.

    Raises:
        GraphError: the graph has a cycle.
    """
    starts, source = graph.edges.offsets.tolist(), graph.edges.source.tolist()
    step = LoweredStep([], [])
    # A lane is a chain, so its newest node implies all earlier ones. A set of ancestors is
    # therefore one number per lane.
    newest: dict[Hashable, int] = {}
    ancestors: list[dict[Hashable, int]] = []
    frontiers: list[dict[Hashable, int]] = [{}] * len(graph)
    for node in graph.topological_order().tolist():
        predecessors = source[starts[node] : starts[node + 1]]
        frontier = _newest_by_lane([frontiers[predecessor] for predecessor in predecessors])
        lane = lanes[node]
        if lane is None:
            frontiers[node] = frontier
            continue
        if lane in newest:
            frontier = {**frontier, lane: newest[lane]}
        waits_for = sorted(
            number
            for ancestor_lane, number in frontier.items()
            if not any(
                other != number and ancestors[other].get(ancestor_lane, -1) >= number
                for other in frontier.values()
            )
        )
        number = len(step)
        newest[lane] = number
        ancestors.append(
            {**_newest_by_lane([ancestors[other] for other in waits_for]), lane: number}
        )
        frontiers[node] = {lane: number}
        step.index.append(node)
        step.waits_for.append(waits_for)
    return step


def lower_workload(graph: Graph, lanes: Sequence[Hashable | None]) -> LoweredStep:
    """Return the lowered step; check that it has nodes.

    Raises:
        ExportError: no node has a lane.
        GraphError: the graph has a cycle.
    """
    step = lower(graph, lanes)
    if not step.index:
        raise ExportError(
            f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes",
            code="export-empty-graph",
        )
    return step


def _newest_by_lane(frontiers: list[dict[Hashable, int]]) -> dict[Hashable, int]:
    """Return the highest number of each lane."""
    if len(frontiers) == 1:
        return frontiers[0]
    merged: dict[Hashable, int] = {}
    for frontier in frontiers:
        for lane, number in frontier.items():
            if merged.get(lane, -1) < number:
                merged[lane] = number
    return merged


_CAPTURE_EACH_CLASS = (
    "capture a rank of each stage (capture run --ranks 0,1,... -o ranks/trace.et) and export the "
    "directory"
)

_Message = tuple[Shift, int, int]
"""Distance from the receiver to the sender, tag, bytes."""


def check_peers(
    graph: Graph, step: LoweredStep, placements: dict[int, Placement], world: World
) -> None:
    """Check that each send has a receive and that no cycle of ranks deadlocks.

    Raises:
        ExportError: a message has no counterpart, or one of another phase, or the ranks would
            deadlock.
    """
    # All ranks run the same step. A receive from the distance `shift` is therefore sent by the
    # peer with the opposite shift, and the k-th receive of a message waits for the k-th such send
    # of its own graph. A cycle through these edges is a cycle of ranks.
    check_messages([RankGraph(graph, tuple(range(world.size)), (), 0)])
    sends: defaultdict[_Message, list[int]] = defaultdict(list)
    receives: defaultdict[_Message, list[int]] = defaultdict(list)
    for number, index in enumerate(step.index):
        node = graph.node(index)
        if node.kind not in (Kind.SEND, Kind.RECV):
            continue
        shift, tag, size = placements[index].shift, tag_of(node), node.value("comm_bytes")
        if node.kind is Kind.SEND:
            sends[opposite_shift(world, shift), tag, size].append(number)
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
    """Return the tag of a send or receive; 0 if it has none."""
    return max(node.value("comm_tag"), 0)


def _unmatched(graph: Graph, step: LoweredStep, sends: list[int], receives: list[int]) -> str:
    node = graph.node(step.index[[*sends, *receives][0]])
    return (
        f"node {node.id} ({node.name!r}) moves {node.value('comm_bytes')} bytes; if every rank ran "
        f"the graph of rank {graph.job.rank}, its message would be sent {len(sends)} times and "
        f"received {len(receives)} times: the ranks differ, as stages of a pipeline do\n"
        f"  {_CAPTURE_EACH_CLASS}"
    )


def _check_progress(graph: Graph, step: LoweredStep, pairs: list[tuple[int, int]]) -> None:
    """Check that dependencies and (send, receive) pairs together have no cycle."""
    dependencies = [
        (predecessor, number)
        for number, predecessors in enumerate(step.waits_for)
        for predecessor in predecessors
    ]
    ends = np.array([*dependencies, *pairs], dtype=np.int64).reshape(-1, 2)
    reasons = np.zeros(len(ends), dtype=np.uint8)
    _, stuck = topological_order(Edges.from_pairs(len(step), ends[:, 0], ends[:, 1], reasons))
    if len(stuck):
        blocked = min(receive for _, receive in pairs if receive in stuck)
        node = graph.node(step.index[blocked])
        raise ExportError(
            f"node {node.id} ({node.name!r}) receives a message that its peer sends only after the "
            f"same receive: if every rank ran the graph of rank {graph.job.rank}, all would "
            f"deadlock. The ranks differ, as stages of a pipeline do\n  {_CAPTURE_EACH_CLASS}",
            code="export-p2p-cycle",
        )
