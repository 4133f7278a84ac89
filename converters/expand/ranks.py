"""Expand the graphs of one rank per class to all ranks of the job."""

from collections.abc import Sequence

from onerank.converters.expand.p2p_checks import check_messages
from onerank.converters.expand.pipeline import RankGraph
from onerank.ir import Graph, Job, RankClass
from onerank.ir.errors import ExportError

_TOLD = 8


def expand_ranks(graphs: Sequence[Graph]) -> list[RankGraph]:
    """Return each graph with the ranks that it holds for, in the order of their lowest ranks.

    Args:
        graphs: one for each class of equal ranks of one job, in any order; where none tells of
            classes, one for each rank.

    Raises:
        ExportError: they are not that.
    """
    first = graphs[0].job
    if not any(graph.job.classes or graph.job.pipeline for graph in graphs):
        return _each(graphs)
    standing: dict[int, Graph] = {}
    for graph in graphs:
        number = first.classes.index(_class(graph.job, first))
        if number in standing:
            one, other = standing[number].job.rank, graph.job.rank
            found = (
                f"two traces are of rank {one}, of two GPUs perhaps"
                if one == other
                else f"the traces of ranks {one} and {other} stand for the same ranks"
            )
            raise ExportError(f"{found}: give one of them")
        standing[number] = graph
    left = [one.representative for at, one in enumerate(first.classes) if at not in standing]
    if left:
        raise ExportError(
            f"the job has {len(first.classes)} classes of equal ranks, and no trace is of rank "
            f"{', '.join(map(str, left))} or one alike: give the traces of all, as `capture run "
            "--ranks distinct` writes them"
        )
    made = [
        RankGraph(graph, first.classes[number].members(first.world), (), 0)
        for number, graph in standing.items()
    ]
    _check_complete(made, first, "capture one of each sort, by `capture run --ranks`")
    check_messages(made)
    return sorted(made, key=lambda one: one.ranks[0])


def _each(graphs: Sequence[Graph]) -> list[RankGraph]:
    """Return graphs of ranks that stand for themselves alone, as recordings of real runs do."""
    first = graphs[0].job
    made: dict[int, RankGraph] = {}
    for graph in graphs:
        job = graph.job
        if job.world != first.world:
            raise ExportError(
                f"the traces of ranks {first.rank} and {job.rank} are of other jobs: their worlds "
                f"are {first.world} and {job.world}; give the traces of one run"
            )
        if job.rank in made:
            raise ExportError(f"two traces are of rank {job.rank}: give one of them")
        made[job.rank] = RankGraph(graph, (job.rank,), (), 0)
    remedy = (
        f"the trace of rank {first.rank} does not tell which ranks it stands for, beside its own; "
        "give the traces of all ranks, one for all, or those of `capture run --ranks R,R`"
    )
    _check_complete([*made.values()], first, remedy)
    return [made[rank] for rank in sorted(made)]


def _check_complete(made: Sequence[RankGraph], first: Job, remedy: str) -> None:
    held = {rank for one in made for rank in one.ranks}
    missing = [rank for rank in range(first.world.size) if rank not in held]
    if missing:
        told = ", ".join(map(str, missing[:_TOLD])) + (", ..." if len(missing) > _TOLD else "")
        raise ExportError(
            f"no trace stands for {len(missing)} of the {first.world.size} ranks ({told}): {remedy}"
        )


def check_all_alike(job: Job) -> None:
    """Check that one rank's graph stands for all.

    Raises:
        ExportError: it is a pipeline's stage, or the job has several classes of equal ranks.
    """
    if job.pipeline is not None:
        raise ExportError(
            f"the graph is of stage {job.pipeline.stage} of {len(job.pipeline.layers)}, and the "
            "stages of a pipeline are not alike: give the traces of all its stages (one per class "
            "of equal ones) and a --schedule"
        )
    if len(job.classes) > 1:
        others = ", ".join(str(one.representative) for one in job.classes)
        raise ExportError(
            f"the graph is of rank {job.rank}, and the job has {len(job.classes)} classes of equal "
            f"ranks: give the traces of one of each (ranks {others}), as `capture run --ranks "
            "distinct` writes them"
        )


def _class(job: Job, first: Job) -> RankClass:
    if job.pipeline is not None:
        raise ExportError(
            f"the trace of rank {job.rank} is of stage {job.pipeline.stage} of a pipeline, whose "
            "ranks wait for each other as a schedule has it: give --schedule and --micro-batches"
        )
    if job.world != first.world or job.classes != first.classes:
        raise ExportError(
            f"the traces of ranks {first.rank} and {job.rank} are of other jobs, or of another "
            f"choice of ranks ({first.world}, {len(first.classes)} classes of equal ranks; "
            f"{job.world}, {len(job.classes)}): give the traces of one `capture run --ranks`"
        )
    if job.rank_class is None:
        raise ExportError(
            f"the trace of rank {job.rank} does not tell which ranks it stands for: capture them "
            "by `capture run --ranks R,R`"
        )
    return job.rank_class
