"""Expand captured stages to every rank of the pipeline, with each rank's peak memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onerank.converters.expand.pipeline.build_rank import RankBuilder
from onerank.converters.expand.pipeline.schedules import Action, Schedule, most_in_flight
from onerank.converters.expand.pipeline.stage_assignment import AXIS, StagePosition, group_stages
from onerank.ir import Graph, Job, World
from onerank.ir.errors import ExportError


class Peak(NamedTuple):
    """Peak memory of a stage under a schedule; 0 bytes when a figure is not known."""

    schedule: str
    micro_batches: int
    in_flight: int
    bytes: int


def peak_memory(jobs: Sequence[Job], actions: Sequence[Action]) -> int:
    """Return the peak of a rank that holds the stages `jobs` by chunk and does `actions`.

    Each capture had one micro-batch in flight. What its peak has above what it starts with and
    above that micro-batch is needed once, by one chunk at a time. 0 when a figure is not known.
    """
    measured = [job.measurement for job in jobs]
    if not all(one.peak_memory_bytes and one.activation_bytes for one in measured):
        return 0
    held = {chunk: max(one.activation_bytes) for chunk, one in enumerate(measured)}
    passing = max(
        one.peak_memory_bytes - one.start_memory_bytes - held[chunk]
        for chunk, one in enumerate(measured)
    )
    start = sum(one.start_memory_bytes for one in measured)
    return start + passing + most_in_flight(actions, held)


def peaks(job: Job) -> list[Peak]:
    """Return the peaks of a captured stage for as many micro-batches as stages, twice and 4 times.

    Of the schedules with one stage per rank; the others need the other stages' graphs.
    """
    if job.pipeline is None:
        return []
    stages = len(job.pipeline.layers)
    found: list[Peak] = []
    for kind in ("gpipe", "1f1b"):
        for micro_batches in (stages, 2 * stages, 4 * stages):
            actions = Schedule(kind).actions(stages, micro_batches)[job.pipeline.stage]
            flying = most_in_flight(actions, {0: 1})
            found.append(Peak(kind, micro_batches, flying, peak_memory([job], actions)))
    return found


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
    columns = group_stages(graphs)
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
        line = StagePosition(schedule, ranks, rank, micro_batches, captured, world)
        for column in columns:
            here = [column.stages[stage] for stage in own]
            graph = RankBuilder(dict(enumerate(here)), own, line).graph(actions)
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
