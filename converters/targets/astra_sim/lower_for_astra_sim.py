"""Lower a step to what ASTRA-sim supports: its collectives, in one order, with few ready nodes."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from onerank.converters.expand.host_delays import prefetched_storage, storage_delays
from onerank.converters.targets.communication_placement import Placement
from onerank.converters.targets.lower_step import LoweredStep, lower_workload, tag_of, timed_compute
from onerank.ir import Collective, Graph, Kind
from onerank.ir.notes import Note

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


def substitute(graph: Graph, ranks: int) -> tuple[Graph, list[Note]]:
    """Return the graph without collectives that ASTRA-sim lacks, and a note on each replacement.

    Args:
        graph: one rank's step.
        ranks: number of ranks of the world, the size of a group that the job does not define.
    """
    collective, size = graph.nodes.collective.copy(), graph.nodes.comm_bytes.copy()
    counts: Counter[Collective] = Counter()
    for index in graph.mask(Kind.COLLECTIVE).nonzero()[0].tolist():
        node = graph.node(index)
        group = graph.job.group(node.text("group"))
        members = ranks if group is None else len(group.ranks)
        fallback = _FALLBACKS.get(node.collective)
        if fallback is None:
            continue
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


def _note(kind: Collective, count: int) -> Note:
    fallback = _FALLBACKS[kind]
    became = f"{count} became {_spelled(fallback.collective)} {fallback.reason}"
    return Note(f"ASTRA-sim has no {_spelled(kind)}: {became}.", code="collective-substituted")


def _spelled(collective: Collective) -> str:
    return collective.name.lower().replace("_", "-")


# Receives that may be ready from the start of a step; ASTRA-sim is fast below 64 ready nodes.
_MOST_READY_RECEIVES = 32


def lower_for_astra_sim(graph: Graph, placements: dict[int, Placement]) -> LoweredStep:
    """Return the nodes that ASTRA-sim runs, in the order in which every rank issues them.

    Args:
        graph: one rank's step.
        placements: communication node -> its placement; other communication is dropped.

    Raises:
        ExportError: no node takes GPU time or moves bytes.
    """
    step = lower_workload(graph, _lanes(graph, set(placements)))
    receives = graph.mask(Kind.RECV)[step.index].nonzero()[0].tolist()
    if len(receives) > _MOST_READY_RECEIVES:
        defer_receives(step, receives)
    return step


def _lanes(graph: Graph, communications: set[int]) -> list[Hashable | None]:
    """Return the lane of each node; None for nodes that do not reach ASTRA-sim."""
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        lanes[index] = ("stream", int(graph.nodes.stream[index]))
    # Storage reads and writes become compute nodes: with memory nodes or CPU operations ASTRA-sim
    # prints no statistics of the run.
    for index in (storage_delays(graph) & ~prefetched_storage(graph)).nonzero()[0].tolist():
        lanes[index] = "storage"
    for index in communications:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        else:
            # A rank of ASTRA-sim runs one collective or send at a time. Two independent
            # collectives that two ranks issue in opposite order would deadlock, so one lane gives
            # all ranks the same order.
            lanes[index] = "communication"
    return lanes


def defer_receives(step: LoweredStep, receives: Sequence[int]) -> None:
    """Make each receive wait for the other dependencies of the one node that needs it.

    The receive completes at the same time as before: a message that was already sent is received
    at once.

    Args:
        step: changed in place; afterwards a node may wait for one of a higher number.
        receives: numbers of the receives.
    """
    # ASTRA-sim scans all ready nodes at every event, and receives are ready from the start of the
    # step: a fan-out of 2000 ready nodes took it 60 s, of 4000 over 300 s.
    successors: dict[int, list[int]] = {number: [] for number in receives}
    for number, predecessors in enumerate(step.waits_for):
        for predecessor in predecessors:
            if predecessor in successors:
                successors[predecessor].append(number)
    original = [*step.waits_for]
    for receive, waiting in successors.items():
        if len(waiting) == 1 and not original[receive]:
            successor = waiting[0]
            moved = [number for number in original[successor] if number not in successors]
            step.waits_for[receive] = moved
            step.waits_for[successor] = [
                number for number in step.waits_for[successor] if number not in moved
            ]
