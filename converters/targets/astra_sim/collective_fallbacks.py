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
"""Bytes that NCCL reduces for a barrier: one float (torch's ProcessGroupNCCL.cpp)."""


@dataclass(frozen=True, slots=True)
class _Fallback:
    """The replacement of a collective of n ranks and B bytes per rank.

    Attributes:
        collective: a collective that ASTRA-sim has.
        share: bytes per rank, "1" for B or "1/n" for B / n.
        reason: why the replacement is equivalent, as a clause.
    """

    collective: Collective
    share: str
    reason: str


_FALLBACKS = {
    # With a ring, both pass B bytes on n - 1 times in total, in chunks.
    Collective.BROADCAST: _Fallback(
        Collective.ALL_GATHER, "1/n", "of 1/n of the bytes per rank: the same bytes in all"
    ),
    Collective.REDUCE: _Fallback(
        Collective.REDUCE_SCATTER, "1", "of the same bytes per rank: the same bytes in all"
    ),
    # The root's link carries (n - 1) B bytes in both; in the replacement every rank's link does.
    Collective.GATHER: _Fallback(
        Collective.ALL_GATHER, "1", "of the same shards: the root's bytes on every rank"
    ),
    Collective.SCATTER: _Fallback(
        Collective.REDUCE_SCATTER, "1", "of the same parts: the root's bytes on every rank"
    ),
    Collective.REDUCE_SCATTER_BLOCK: _Fallback(Collective.REDUCE_SCATTER, "1", "which is the same"),
    Collective.BARRIER: _Fallback(
        Collective.ALL_REDUCE, "1", f"of {BARRIER_BYTES} bytes, as NCCL does"
    ),
}


def substitute(graph: Graph, ranks: int) -> tuple[Graph, list[str]]:
    """Return the graph without collectives that ASTRA-sim lacks, and a note on each replacement.

    Args:
        graph: one rank's step.
        ranks: number of ranks of the world, the size of a group that the job does not define.
    """
    collective, size = graph.nodes.collective.copy(), graph.nodes.comm_bytes.copy()
    counts: Counter[Collective] = Counter()
    for index in graph.mask(Kind.COLLECTIVE).nonzero()[0].tolist():
        node = graph.node(index)
        fallback = _FALLBACKS.get(node.collective)
        if fallback is None:
            continue
        group = graph.job.group(node.text("group"))
        members = ranks if group is None else len(group.ranks)
        size_bytes = node.value("comm_bytes")
        if node.collective is Collective.BARRIER:
            size_bytes = BARRIER_BYTES
        elif size_bytes > 0 and fallback.share == "1/n":
            size_bytes = -(-size_bytes // members)
        collective[index], size[index] = fallback.collective, size_bytes
        counts[node.collective] += 1
    if not counts:
        return graph, []
    notes = [_note(kind, count) for kind, count in counts.items()]
    return graph.with_columns(collective=collective, comm_bytes=size), notes


def _note(kind: Collective, count: int) -> str:
    fallback = _FALLBACKS[kind]
    became = f"{count} became {_spelled(fallback.collective)} {fallback.reason}"
    return f"ASTRA-sim has no {_spelled(kind)}: {became}."


def _spelled(collective: Collective) -> str:
    return collective.name.lower().replace("_", "-")
