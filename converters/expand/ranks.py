"""Expand the graphs of one rank per class to all ranks of the job.

`check_messages` checks that ranks represented by one graph send what their peers receive.

Roots of collectives and peers of messages are global ranks. When a graph is reused for another rank
or another world, `with_roots` and `with_peers` map them to the ranks of its groups there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.ir import UNKNOWN, Graph, InferenceStep, Job, Kind, Phase, ProcessGroup, RankClass
from onerank.ir.errors import ExportError
from onerank.ir.nodes import ROOT_COLUMNS

_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class RankGraph:
    """A graph and the ranks of the expanded job that it represents.

    Attributes:
        graph: the step; its job's rank is one of `ranks`.
        ranks: the ranks that it represents.
        stages: pipeline stages that these ranks run.
        peak_memory_bytes: with the schedule's micro-batches in flight; 0 if unknown.
    """

    graph: Graph
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    peak_memory_bytes: int


def expand_ranks(graphs: Sequence[Graph]) -> list[RankGraph]:
    """Return each graph with the ranks that it represents, ordered by their lowest rank.

    Args:
        graphs: one per class of equivalent ranks of one job, in any order; one per rank if no graph
            names classes.

    Raises:
        ExportError: a class or rank is missing or given twice, or the graphs are of several jobs.
    """
    first = graphs[0].job
    # Recordings of a real run have neither classes nor stages; each rank was recorded itself.
    if not any(graph.job.classes or graph.job.pipeline for graph in graphs):
        return _one_graph_per_rank(graphs)
    by_class: dict[int, Graph] = {}
    for graph in graphs:
        # By the class and not the rank: any member of a class may have been captured.
        number = first.classes.index(_rank_class(graph.job, first))
        if number in by_class:
            rank, other = by_class[number].job.rank, graph.job.rank
            duplicate = (
                f"two traces are of rank {rank}, perhaps for two GPUs"
                if rank == other
                else f"the traces of ranks {rank} and {other} represent the same ranks"
            )
            raise ExportError(f"{duplicate}\n  give only one of them", code="ranks-duplicate-class")
        by_class[number] = graph
    missing = [
        str(rank_class.representative)
        for number, rank_class in enumerate(first.classes)
        if number not in by_class
    ]
    if missing:
        raise ExportError(
            f"the job has {len(first.classes)} classes of equivalent ranks; the classes of ranks "
            f"{', '.join(missing)} have no trace\n"
            "  give the traces of all, as `capture run --ranks distinct` writes them",
            code="ranks-missing-class",
        )
    rank_graphs = [
        RankGraph(graph, first.classes[number].members(first.world), _stages(graph.job), 0)
        for number, graph in by_class.items()
    ]
    _check_complete(rank_graphs, first, "capture one rank of each class with `capture run --ranks`")
    check_messages(rank_graphs)
    return sorted(rank_graphs, key=lambda entry: entry.ranks[0])


def _stages(job: Job) -> tuple[int, ...]:
    return () if job.pipeline is None else (job.pipeline.stage,)


def _one_graph_per_rank(graphs: Sequence[Graph]) -> list[RankGraph]:
    """Return graphs that represent only their own rank, as recordings of real runs do."""
    first = graphs[0].job
    by_rank: dict[int, RankGraph] = {}
    for graph in graphs:
        job = graph.job
        if job.world != first.world:
            raise ExportError(
                f"the traces of ranks {first.rank} and {job.rank} have different worlds "
                f"({first.world} and {job.world})\n  give the traces of one run",
                code="ranks-different-worlds",
            )
        if job.rank in by_rank:
            raise ExportError(
                f"two traces are of rank {job.rank}\n  give only one of them",
                code="ranks-duplicate-rank",
            )
        by_rank[job.rank] = RankGraph(graph, (job.rank,), (), 0)
    remedy = (
        f"the trace of rank {first.rank} names no other ranks that it represents; give the traces "
        "of all ranks, a single trace for all, or those of `capture run --ranks R,R`"
    )
    _check_complete([*by_rank.values()], first, remedy)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _check_complete(rank_graphs: Sequence[RankGraph], first: Job, remedy: str) -> None:
    represented = {rank for entry in rank_graphs for rank in entry.ranks}
    missing = [rank for rank in range(first.world.size) if rank not in represented]
    if missing:
        listed = ", ".join(map(str, missing[:_MOST_LISTED]))
        listed += ", ..." if len(missing) > _MOST_LISTED else ""
        raise ExportError(
            f"{len(missing)} of the {first.world.size} ranks have no trace ({listed})\n  {remedy}",
            code="ranks-incomplete",
        )


def check_all_equal(job: Job) -> None:
    """Check that one rank's graph represents all ranks.

    Raises:
        ExportError: it is a pipeline's stage, or the job has several classes of equivalent ranks.
    """
    if job.pipeline is not None:
        raise ExportError(
            f"the graph is of stage {job.pipeline.stage} of {len(job.pipeline.layers)}, and the "
            "stages of a pipeline differ\n"
            "  give the traces of all stages (one per class of equivalent stages) and a --schedule",
            code="ranks-single-stage",
        )
    if len(job.classes) > 1:
        representatives = ", ".join(str(rank_class.representative) for rank_class in job.classes)
        raise ExportError(
            f"the graph is of rank {job.rank}, and the job has {len(job.classes)} classes of "
            f"equivalent ranks\n  give a trace for each class (ranks {representatives}), as "
            "`capture run --ranks distinct` writes them",
            code="ranks-single-class",
        )


def _rank_class(job: Job, first: Job) -> RankClass:
    """Return the class that a job's rank represents; check that the job is `first`."""
    # A stage computes one forward of a script that infers, so it needs no schedule.
    if job.pipeline is not None and job.inference is None:
        raise ExportError(
            f"the trace of rank {job.rank} is of stage {job.pipeline.stage} of a pipeline, whose "
            "ranks wait for each other by a schedule\n  give --schedule and --micro-batches",
            code="ranks-need-schedule",
        )
    check_same_step(job, first)
    if job.world != first.world or job.classes != first.classes:
        raise ExportError(
            f"the traces of ranks {first.rank} and {job.rank} differ in the world or the captured "
            f"ranks ({first.world}, {len(first.classes)} classes of equivalent ranks; "
            f"{job.world}, {len(job.classes)})\n  give the traces of one `capture run --ranks`",
            code="ranks-different-jobs",
        )
    if job.rank_class is None:
        raise ExportError(
            f"the trace of rank {job.rank} does not name the ranks that it represents\n"
            "  capture with `capture run --ranks R,R`",
            code="ranks-no-class",
        )
    return job.rank_class


def check_same_step(job: Job, first: Job) -> None:
    """Refuse traces of different steps of an inference.

    Raises:
        ExportError: the steps have other sequences, or one is a step of training.
    """
    if _sequences(job.inference) != _sequences(first.inference):
        raise ExportError(
            f"the traces of ranks {first.rank} and {job.rank} are of different steps of an "
            f"inference ({_sequences(first.inference)}; {_sequences(job.inference)})\n"
            "  give the same step of each stage",
            code="ranks-different-steps",
        )


def _sequences(step: InferenceStep | None) -> str:
    """Return the sequences of a step as text; "training" for none."""
    if step is None:
        return "training"
    contexts = sorted(set(step.context_lengths)) or ["unknown"]
    return (
        f"{step.kind}, batch {step.batch}, {step.new_tokens} new tokens, context "
        f"{', '.join(map(str, contexts))}"
    )


# (index of the sender's graph, index of the receiver's).
_Route = tuple[int, int]


def check_messages(rank_graphs: Sequence[RankGraph]) -> None:
    """Check that the phases of sends match the phases of the receives on each route.

    Neighbouring stages of a pipeline exchange equally many bytes, activations one way and
    gradients the other. If one graph wrongly represents both stages, every send still meets a
    receive, but of another phase. This happens for a script whose pipeline lies along another
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
            # Each of the represented ranks sends the same messages.
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


def with_roots(graph: Graph, new_root: Callable[[ProcessGroup, int], int]) -> Graph:
    """Return the graph with every root replaced by `new_root(group, root)`.

    A root that is not a member of its group becomes UNKNOWN; files of other tools have such roots.
    """
    nodes, job = graph.nodes, graph.job
    ends = {name: getattr(nodes, name).copy() for name in ("comm_src", "comm_dst")}
    world = ProcessGroup("", tuple(range(job.world.size)), "world")
    for index in np.flatnonzero(np.isin(nodes.collective, list(ROOT_COLUMNS))).tolist():
        node = graph.node(index)
        group = job.group(node.text("group")) or world
        root = new_root(group, node.root) if node.root in group.ranks else UNKNOWN
        ends[ROOT_COLUMNS[node.collective]][index] = root
    return graph.with_columns(**ends)


def with_peers(graph: Graph, new_peer: Callable[[int], int]) -> Graph:
    """Return the graph with the destination of sends and the source of receives replaced."""
    nodes = graph.nodes
    ends = {name: getattr(nodes, name).copy() for name in ("comm_src", "comm_dst")}
    for index in np.flatnonzero(graph.mask(Kind.SEND, Kind.RECV)).tolist():
        column = "comm_dst" if nodes.kind[index] == Kind.SEND else "comm_src"
        ends[column][index] = new_peer(int(ends[column][index]))
    return graph.with_columns(**ends)
