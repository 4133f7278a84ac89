"""From the graphs of captured stages to the graph of every rank of the pipeline, by a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from onerank.converters.pipeline.columns import AXIS, columns_of
from onerank.converters.pipeline.expanded import Expanded
from onerank.converters.pipeline.memory import peak_memory
from onerank.converters.pipeline.schedule import Schedule
from onerank.converters.pipeline.weave import Weaving
from onerank.ir import Graph, World
from onerank.ir.errors import ExportError


@dataclass(frozen=True, slots=True)
class RankGraph:
    """The graph of some ranks of the expanded job.

    Attributes:
        graph: the step; its job's rank is one of `ranks`.
        ranks: ranks that it holds for.
        stages: pipeline stages that they run.
        peak_memory_bytes: with the schedule's micro-batches in flight, 0 when not known.
    """

    graph: Graph
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    peak_memory_bytes: int


def expand(graphs: Sequence[Graph], schedule: Schedule, micro_batches: int) -> list[RankGraph]:
    """Return a graph for each rank of the pipeline, in the order of its axis.

    Where the ranks of a stage are not all alike, there are as many for each.

    The captured pipeline has `schedule.chunks` stages for each rank of the expanded one: eight
    captured stages make four ranks of interleaved:2.

    Args:
        graphs: one per class of equal ranks, in any order.
        schedule: the order of forwards and backwards.
        micro_batches: how many a step has; captured ones are repeated, see `Stage.source`.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or cannot be scheduled so.
        GraphError: a graph has a cycle.
    """
    columns = columns_of(graphs)
    captured = graphs[0].job.world
    stages = captured.sizes[AXIS]
    if stages % schedule.chunks:
        raise ExportError(
            f"--schedule {schedule} puts {schedule.chunks} stages on each rank, and the pipeline "
            f"has {stages} ({stages} = {schedule.chunks} x "
            f"{stages // schedule.chunks} + {stages % schedule.chunks}); capture it with "
            f"--pp a multiple of {schedule.chunks}"
        )
    if schedule.chunks > 1 and (shared := _shared_otherwise(graphs)):
        raise ExportError(
            f"--schedule {schedule}: stages sum gradients of what they share over the groups "
            f"{', '.join(shared)}, as those of an encoder and its decoder do, and with "
            f"{schedule.chunks} stages on a rank these are no longer the same calls on each rank: "
            "use gpipe or 1f1b, as Megatron-LM does"
        )
    ranks = stages // schedule.chunks
    sizes = {axis: ranks if axis == AXIS else size for axis, size in captured.sizes.items()}
    world = World(sizes, captured.ep)
    made: list[RankGraph] = []
    for rank, actions in enumerate(schedule.actions(ranks, micro_batches)):
        own = [schedule.stage(ranks, rank, chunk) for chunk in range(schedule.chunks)]
        line = Expanded(schedule, ranks, rank, micro_batches, captured, world)
        for column in columns:
            here = [column.stages[stage] for stage in own]
            graph = Weaving(dict(enumerate(here)), own, line).graph(actions)
            peak = peak_memory([stage.graph.job for stage in here], actions)
            made.append(RankGraph(graph, column.ranks(world, rank), tuple(own), peak))
    return made


def _shared_otherwise(graphs: Sequence[Graph]) -> list[str]:
    """Name the groups of stages that share weights, unless only the first and the last do."""
    shared: set[tuple[str, int]] = set()
    for job in (graph.job for graph in graphs):
        for group in job.groups:
            places = [job.world.point(rank) for rank in group.ranks]
            others = [{**place, AXIS: 0} for place in places]
            alike = all(other == others[0] for other in others)
            if alike and group.name not in job.world.sizes and len(group.ranks) > 1:
                shared.add((group.name, len(group.ranks)))
    plain = len(shared) < 2 and all(size == 2 for _, size in shared)
    return [] if plain else sorted({name for name, _ in shared})
