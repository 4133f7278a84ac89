"""Replace collectives that ASTRA-sim lacks by equivalents with the same bytes."""

from collections import Counter
from dataclasses import dataclass

from onerank.ir import Collective, Graph, Kind

SUPPORTED = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.REDUCE_SCATTER,
)
BARRIER_BYTES = 4
"""What NCCL reduces for a barrier: one float (torch's ProcessGroupNCCL.cpp)."""


@dataclass(frozen=True, slots=True)
class _Substitute:
    """What a collective of n ranks and B bytes per rank becomes.

    Attributes:
        collective: the supported one.
        share: "1" for B, "1/n" for B / n bytes per rank.
        why: what is the same.
    """

    collective: Collective
    share: str
    why: str


_SUBSTITUTES = {
    # A ring passes the B bytes on n - 1 times in all, in chunks, either way.
    Collective.BROADCAST: _Substitute(
        Collective.ALL_GATHER, "1/n", "of 1/n of the bytes per rank: the same bytes in all"
    ),
    Collective.REDUCE: _Substitute(
        Collective.REDUCE_SCATTER, "1", "of the same bytes per rank: the same bytes in all"
    ),
    # The root's link carries (n - 1) B either way; here every rank's does.
    Collective.GATHER: _Substitute(
        Collective.ALL_GATHER, "1", "of the same shards: the root's bytes on every rank"
    ),
    Collective.SCATTER: _Substitute(
        Collective.REDUCE_SCATTER, "1", "of the same parts: the root's bytes on every rank"
    ),
    Collective.REDUCE_SCATTER_BLOCK: _Substitute(
        Collective.REDUCE_SCATTER, "1", "which is the same"
    ),
    Collective.BARRIER: _Substitute(
        Collective.ALL_REDUCE, "1", f"of {BARRIER_BYTES} bytes, as NCCL does"
    ),
}


def substitute(graph: Graph, ranks: int) -> tuple[Graph, list[str]]:
    """Return the graph without collectives that ASTRA-sim lacks, and notes on what they became.

    Args:
        graph: one rank's step.
        ranks: number of ranks, those of a group that the job does not name.
    """
    collective, size = graph.nodes.collective.copy(), graph.nodes.comm_bytes.copy()
    counts: Counter[Collective] = Counter()
    for index in graph.mask(Kind.COLLECTIVE).nonzero()[0].tolist():
        node = graph.node(index)
        made = _SUBSTITUTES.get(node.collective)
        if made is None:
            continue
        group = graph.job.group(node.text("group"))
        members = ranks if group is None else len(group.ranks)
        given = node.value("comm_bytes")
        if node.collective is Collective.BARRIER:
            given = BARRIER_BYTES
        elif given > 0:
            given = {"1": given, "1/n": -(-given // members)}[made.share]
        collective[index], size[index] = made.collective, given
        counts[node.collective] += 1
    if not counts:
        return graph, []
    notes = [_note(kind, count) for kind, count in counts.items()]
    return graph.with_columns(collective=collective, comm_bytes=size), notes


def _note(kind: Collective, count: int) -> str:
    made = _SUBSTITUTES[kind]
    became = f"{count} became {_spelled(made.collective)} {made.why}"
    return f"ASTRA-sim has no {_spelled(kind)}: {became}."


def _spelled(collective: Collective) -> str:
    return collective.name.lower().replace("_", "-")
