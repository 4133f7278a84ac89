"""A prefill and a decode on separate GPUs, as one workload.

The prefill's ranks come first, then the decode's. At the end of its step, each rank of the prefill
sends its part of the KV cache; a rank of the decode starts its step once it has received its part.
Both groups are a world without axes, so each rank has a graph, and its groups name their ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from onerank.converters.expand.ranks import (
    RankGraph,
    check_all_equal,
    expand_ranks,
    with_peers,
    with_roots,
)
from onerank.converters.targets.communication_placement import (
    group_placement,
    shift_between,
    shift_rank,
    unequal_axis,
)
from onerank.ir import UNKNOWN, Edges, Graph, Kind, Nodes, ProcessGroup, Reason, World
from onerank.ir.errors import ExportError
from onerank.ir.world import WORLD

_NAME = "KV cache"


def disaggregated_pair(
    prefill: Sequence[Graph], decode: Sequence[Graph], kv_bytes: int
) -> list[RankGraph]:
    """Return the graph of each rank of a prefill and of the decode that follows it.

    Args:
        prefill: the step of the prefill: one graph that represents all its ranks, or one for each
            class of equivalent ranks.
        decode: the same of the decode.
        kv_bytes: bytes of the KV cache that all ranks of the prefill send together.

    Raises:
        ExportError: the graphs do not represent all ranks, neither number of ranks divides the
            other, or the bytes are not divisible among the messages.
    """
    sides = _ranks_of(prefill), _ranks_of(decode)
    senders, receivers = (_size(side) for side in sides)
    messages = max(senders, receivers)
    if messages % min(senders, receivers) or kv_bytes % messages or kv_bytes < messages:
        raise ExportError(
            f"a KV cache of {kv_bytes} bytes cannot be sent from {senders} ranks to {receivers} in "
            "equal messages\n  one number of ranks must divide the other, and the larger one the "
            "bytes",
            code="disaggregated-indivisible",
        )
    pairs = [(at * senders // messages, senders + at * receivers // messages)
             for at in range(messages)]  # fmt: skip
    total, size = senders + receivers, kv_bytes // messages
    ranks: list[RankGraph] = []
    for side, offset in zip(sides, (0, senders), strict=True):
        axis = unequal_axis(side) if len(side) > 1 else ""
        for entry in side:
            for rank in entry.ranks:
                graph = _placed(entry.graph, rank, offset, total, axis)
                own = offset + rank
                peers = [other for pair in pairs if own in pair for other in pair if other != own]
                ranks.append(RankGraph(_with_messages(graph, peers, size), (own,), (), 0))
    return sorted(ranks, key=lambda entry: entry.ranks[0])


def _ranks_of(graphs: Sequence[Graph]) -> list[RankGraph]:
    if len(graphs) > 1:
        return expand_ranks(graphs)
    check_all_equal(graphs[0].job)
    return [RankGraph(graphs[0], tuple(range(max(1, graphs[0].job.world.size))), (), 0)]


def _size(side: Sequence[RankGraph]) -> int:
    return sum(len(entry.ranks) for entry in side)


def _placed(graph: Graph, rank: int, offset: int, total: int, axis: str) -> Graph:
    """Return a graph as that of another rank of its side, in the world of both.

    Args:
        graph: the graph of a rank.
        rank: the rank in its own world.
        offset: the first rank of the side.
        total: ranks of both sides.
        axis: axis along which the ranks of the side differ; "" if they are equal.
    """
    graph = _with_named_world(graph, f"ranks from {offset}")
    job, world = graph.job, graph.job.world
    members: dict[str, tuple[int, ...]] = {}
    for group in job.groups:
        placement = group_placement(group.name, job, world, axis)
        own = (rank,) if placement is None else placement.group_ranks(world, rank)
        members[group.name] = tuple(offset + member for member in own)
    groups = tuple(
        msgspec.structs.replace(group, ranks=members[group.name], axis="") for group in job.groups
    )
    graph = with_roots(graph, lambda group, root: members[group.name][group.ranks.index(root)])
    graph = with_peers(
        graph, lambda peer: offset + shift_rank(world, rank, shift_between(world, job.rank, peer))
    )
    placed = msgspec.structs.replace(
        job, world=World({WORLD: total}), rank=offset + rank, groups=groups, classes=(),
        pipeline=None,
    )  # fmt: skip
    return replace(graph, job=placed)


def _with_named_world(graph: Graph, name: str) -> Graph:
    """Return a graph whose collectives of the default group are of one with a name.

    The default group of both sides together would contain the ranks of the other side, too.
    """
    of_world = graph.mask(Kind.COLLECTIVE) & (np.array(graph.text("group")) == "")
    if not of_world.any():
        return graph
    strings, job = graph.strings.copy(), graph.job
    group = np.where(of_world, strings.intern(name), graph.nodes.group)
    ranks = tuple(range(max(1, job.world.size)))
    groups = (*job.groups, ProcessGroup(name, ranks, WORLD))
    job = msgspec.structs.replace(job, groups=groups)
    nodes = replace(graph.nodes, group=group.astype(graph.nodes.group.dtype))
    return replace(graph, nodes=nodes, strings=strings, job=job)


def _with_messages(graph: Graph, peers: Sequence[int], size: int) -> Graph:
    """Return the graph with a message to or from each peer, of `size` bytes.

    Peers with a higher rank receive after the step; those with a lower one send before it.
    """
    own, count, added = graph.job.rank, len(graph), len(peers)
    sends = peers[0] > own
    nodes, edges = graph.nodes, graph.edges
    strings = graph.strings.copy()
    at_ns = int((nodes.start_ns + nodes.duration_ns).max() if sends else nodes.start_ns.min())
    first_id = int(nodes.id.max()) + 1
    ends = np.array(peers), np.full(added, own)
    messages = Nodes.of(
        added,
        id=np.arange(first_id, first_id + added, dtype=np.uint64),
        name=np.full(added, strings.intern(_NAME)),
        kind=np.full(added, Kind.SEND if sends else Kind.RECV),
        stream=np.full(added, int(nodes.stream.max())),
        thread=np.full(added, UNKNOWN),
        start_ns=np.full(added, at_ns),
        duration_ns=np.zeros(added, dtype=np.int64),
        comm_bytes=np.full(added, size),
        comm_src=ends[1] if sends else ends[0],
        comm_dst=ends[0] if sends else ends[1],
        comm_tag=np.zeros(added, dtype=np.int64),
    )
    if sends:
        last = np.setdiff1d(np.arange(count), edges.source)
        old, new = np.arange(count), np.arange(count, count + added)
        source, target = np.tile(last, added), np.repeat(new, len(last))
        joined = [nodes, messages]
    else:
        first = np.setdiff1d(np.arange(count), edges.target)
        old, new = np.arange(added, added + count), np.arange(added)
        source, target = np.repeat(new, len(first)), np.tile(old[first], added)
        joined = [messages, nodes]
    reasons = np.full(len(source), Reason.SYNC, dtype=np.uint8)
    return replace(
        graph,
        nodes=Nodes.joined(joined),
        edges=Edges.from_pairs(
            count + added,
            np.concatenate([old[edges.source], source]),
            np.concatenate([old[edges.target], target]),
            np.concatenate([edges.reason, reasons]),
        ),
        strings=strings,
    )
