"""Lower a rank's step to what simulators run: no untimed nodes, and all-to-alls of even sizes."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onerank.converters.expand.host_delays import has_timed_host
from onerank.converters.expand.ranks import RankGraph, check_messages
from onerank.converters.targets.communication_placement import (
    Placement,
    Shift,
    group_placement,
    opposite_shift,
)
from onerank.ir import Collective, Edges, Graph, Kind, Node, World
from onerank.ir.all_to_all import even_bytes
from onerank.ir.arrays import Mask
from onerank.ir.edges import topological_order
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note

_UNEVEN_BETWEEN_RANKS = Note(
    "All-to-alls of uneven sizes run as even ones: every rank sends as many bytes as the busiest "
    "rank sends or receives.",
    code="uneven-all-to-alls",
)


def even_all_to_alls(graph: Graph, world: World) -> tuple[Graph, list[Note]]:
    """Return the graph with all-to-alls of equal parts, and a note if sizes changed.

    Each takes its rank as long as the captured call (`even_bytes`).

    Args:
        graph: one rank's step.
        world: the ranks to export.

    Raises:
        GraphError: as for `even_bytes`.
    """
    sizes = graph.nodes.comm_bytes.copy()
    for index in np.flatnonzero(graph.nodes.collective == Collective.ALL_TO_ALL).tolist():
        sizes[index] = _even_bytes(graph, index, world)
    changed = int((sizes != graph.nodes.comm_bytes).sum())
    if not changed:
        return graph, []
    note = Note(
        f"{changed} all-to-alls have unequal parts, and became ones of equal parts in which the "
        "captured rank sends or receives as many bytes.",
        code="all-to-all-unequal-parts",
    )
    return graph.with_columns(comm_bytes=sizes), [note]


def _even_bytes(graph: Graph, index: int, world: World) -> int:
    node = graph.node(index)
    group = graph.job.group(node.text("group"))
    return even_bytes(node, len(group.ranks) if group else world.size)


def equalize_all_to_alls(
    rank_graphs: Sequence[RankGraph], world: World, *, unequal_along: str
) -> tuple[list[RankGraph], list[Note]]:
    """Return the graphs with all-to-alls of equal parts and one size on all ranks, and notes.

    The k-th all-to-alls that ranks issue on a group belong together. Each takes the size of its
    busiest rank. Calls that other members lack keep their rank's size; the check of the export
    reports them.

    Args:
        rank_graphs: graphs that together represent every rank of `world`.
        world: the ranks to export.
        unequal_along: as for `place_communications`.

    Raises:
        GraphError: as for `even_bytes`.
    """
    evened = [even_all_to_alls(entry.graph, world) for entry in rank_graphs]
    notes = [*dict.fromkeys(note for _, rank_notes in evened for note in rank_notes)]
    rank_graphs = [
        replace(entry, graph=graph) for entry, (graph, _) in zip(rank_graphs, evened, strict=True)
    ]
    calls = {
        (placement, number): indices
        for number, entry in enumerate(rank_graphs)
        for placement, indices in _all_to_alls(entry.graph, world, unequal_along).items()
    }
    sizes = [entry.graph.nodes.comm_bytes.copy() for entry in rank_graphs]
    differing = False
    for placement in dict.fromkeys(placement for placement, _ in calls):
        users = [number for other, number in calls if other == placement]
        for sharing in _sharing_groups(rank_graphs, world, placement, users):
            for indices in zip(*(calls[placement, number] for number in sharing), strict=False):
                members = [*zip(sharing, indices, strict=True)]
                largest = max(int(sizes[number][index]) for number, index in members)
                for number, index in members:
                    differing |= bool(sizes[number][index] != largest)
                    sizes[number][index] = largest
    equalized = [
        replace(entry, graph=entry.graph.with_columns(comm_bytes=size))
        for entry, size in zip(rank_graphs, sizes, strict=True)
    ]
    # The notes on single ranks hold for the busiest rank alone.
    return equalized, [_UNEVEN_BETWEEN_RANKS] if differing else notes


def _all_to_alls(graph: Graph, world: World, unequal_along: str) -> dict[Placement, list[int]]:
    """Return the indices of the all-to-alls of each placement, in issue order."""
    calls: dict[Placement, list[int]] = {}
    if not (graph.nodes.collective == Collective.ALL_TO_ALL).any():
        return calls
    for index in graph.topological_order().tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE and node.collective is Collective.ALL_TO_ALL:
            placement = group_placement(node.text("group"), graph.job, world, unequal_along)
            if placement is not None:
                calls.setdefault(placement, []).append(index)
    return calls


def _sharing_groups(
    rank_graphs: Sequence[RankGraph], world: World, placement: Placement, users: Sequence[int]
) -> list[list[int]]:
    """Return the sets of two or more graphs whose ranks are members of the same groups."""
    graphs_by_group: dict[tuple[int, ...], set[int]] = {}
    for number in users:
        for rank in rank_graphs[number].ranks:
            members = placement.group_ranks(world, rank)
            graphs_by_group.setdefault(members, set()).add(number)
    sharing: list[set[int]] = []
    for numbers in graphs_by_group.values():
        # A graph has one size per call for all its ranks, so groups with a graph in common share
        # it.
        joined = numbers.union(*(other for other in sharing if other & numbers))
        sharing = [other for other in sharing if not other & joined] + [joined]
    return [sorted(numbers) for numbers in sharing if len(numbers) > 1]


HOST = "host operations"
NO_TIME = "GPU nodes of 0 ns"
METADATA = "metadata nodes"
INVALID = "invalid nodes"


def idle_time_note(graphs: Sequence[Graph], details: str = "") -> Note:
    """Return the note that a workload lacks host time, and how to add it where that is possible.

    Args:
        graphs: the exported graphs.
        details: what follows the first clause, such as ": the median step is 2 ms".
    """
    added = " --include-host-delays adds them." if all(map(has_timed_host, graphs)) else ""
    text = f"Host time and GPU idle time are not in the workload{details}.{added}"
    return Note(text, code="idle-time-not-exported")


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
        waits_for: numbers of the nodes that each node waits for, ascending, without nodes that
            another predecessor waits for.
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
    # Lists, since elements of numpy arrays are several times slower to read.
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
        # Without those that another one implies: every dependency costs the simulators time and
        # memory.
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
        # The node waits for all of its frontier, so it alone stands for them.
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
    # Shared, not copied: no caller changes a frontier in place.
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

# Distance from the receiver to the sender, tag, bytes.
_Message = tuple[Shift, int, int]


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
    # of the same graph. A cycle through these edges is a cycle of ranks.
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
