"""Check that ranks represented by one graph send what their peers receive."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onerank.converters.expand.pipeline import RankGraph
from onerank.ir import Kind, Phase
from onerank.ir.errors import ExportError

_MOST_LISTED = 8
_Route = tuple[int, int]
"""(index of the sender's graph, index of the receiver's)."""


def check_messages(rank_graphs: Sequence[RankGraph]) -> None:
    """Check that the phases of sends match the phases of the receives on each route.

    Neighbouring stages of a pipeline exchange equally many bytes, activations one way and
    gradients the other. If one graph wrongly represents both stages, every send still meets a
    receive, but one of another phase. This happens for a script whose pipeline lies along another
    axis than in the given world, such as picotron's inside its data parallelism.

    Args:
        rank_graphs: graphs that together represent every rank of one world.

    Raises:
        ExportError: the counts per phase differ, and every message has a phase.
    """
    graph_of = {rank: index for index, entry in enumerate(rank_graphs) for rank in entry.ranks}
    sent: dict[_Route, Counter[Phase]] = {}
    received: dict[_Route, Counter[Phase]] = {}
    for index, entry in enumerate(rank_graphs):
        graph, nodes = entry.graph, entry.graph.nodes
        rows = graph.mask(Kind.SEND, Kind.RECV).nonzero()[0]
        sends = nodes.kind[rows] == Kind.SEND
        peers = np.where(sends, nodes.comm_dst[rows], nodes.comm_src[rows])
        messages, counts = np.unique(
            np.stack([sends, peers, nodes.phase[rows]]), axis=1, return_counts=True
        )
        for (is_send, peer, phase), count in zip(messages.T.tolist(), counts.tolist(), strict=True):
            other = graph_of.get(peer, -1)
            route, totals = ((index, other), sent) if is_send else ((other, index), received)
            totals.setdefault(route, Counter())[Phase(phase)] += count * len(entry.ranks)
    for route in sorted(sent.keys() & received.keys()):
        # A graph that represents only its captured rank cannot be the wrong one for it.
        if -1 in route or all(len(rank_graphs[index].ranks) == 1 for index in route):
            continue
        sends, receives = sent[route], received[route]
        if Phase.NONE in sends or Phase.NONE in receives or sends == receives:
            continue
        raise ExportError(_mismatch(rank_graphs, route, sends, receives), code="p2p-phase-mismatch")


def _mismatch(
    rank_graphs: Sequence[RankGraph], route: _Route, sent: Counter[Phase], received: Counter[Phase]
) -> str:
    sender, receiver = (rank_graphs[index] for index in route)
    from_rank, to_rank = sender.graph.job.rank, receiver.graph.job.rank
    ranks = ", ".join(map(str, receiver.ranks[:_MOST_LISTED]))
    ranks += ", ..." if len(receiver.ranks) > _MOST_LISTED else ""
    return (
        f"rank {from_rank} sends {_per_rank(sent, sender)} to ranks {ranks}, but rank {to_rank}, "
        f"which represents them, receives {_per_rank(received, receiver)}: the ranks differ, as "
        f"stages of a pipeline along another axis than in {receiver.graph.job.world} do\n"
        "  capture a rank of each stage (capture run --ranks 0,1,... -o ranks/trace.et) and "
        "export the directory"
    )


def _per_rank(messages: Counter[Phase], entry: RankGraph) -> str:
    """Return the message counts of one rank in words, by phase."""
    return " and ".join(
        f"{count // len(entry.ranks)} of its {phase.name.lower()}"
        for phase, count in sorted(messages.items())
    )
