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
    """Peak memory of a stage under a schedule; 0 bytes if a figure is missing."""

    schedule: str
    micro_batches: int
    in_flight: int
    bytes: int


def peak_memory(jobs: Sequence[Job], actions: Sequence[Action]) -> int:
    """Return the peak bytes of a rank that runs `actions` on one stage per chunk.

    Args:
        jobs: the captured job of the stage of each chunk.
        actions: the rank's part of the schedule.

    Returns:
        Start memory of all stages, activations of the micro-batches in flight, and the largest
        temporary memory. 0 if a figure is missing.
    """
    measured = [job.measurement for job in jobs]
    if not all(stage.peak_memory_bytes and stage.activation_bytes for stage in measured):
        return 0
    activations = {chunk: max(stage.activation_bytes) for chunk, stage in enumerate(measured)}
    # Each capture had one micro-batch in flight. The rest of its peak is temporary, and only one
    # chunk runs at a time.
    temporary = max(
        stage.peak_memory_bytes - stage.start_memory_bytes - activations[chunk]
        for chunk, stage in enumerate(measured)
    )
    start = sum(stage.start_memory_bytes for stage in measured)
    return start + temporary + most_in_flight(actions, activations)


def peaks(job: Job) -> list[Peak]:
    """Return the peaks of a captured stage for P, 2P and 4P micro-batches of P stages.

    Covers the schedules with one stage per rank; the others need the graphs of other stages.
    """
    if job.pipeline is None:
        return []
    stages = len(job.pipeline.layers)
    stage_peaks: list[Peak] = []
    for kind in ("gpipe", "1f1b"):
        for micro_batches in (stages, 2 * stages, 4 * stages):
            actions = Schedule(kind).actions(stages, micro_batches)[job.pipeline.stage]
            in_flight = most_in_flight(actions, {0: 1})
            peak = peak_memory([job], actions)
            stage_peaks.append(Peak(kind, micro_batches, in_flight, peak))
    return stage_peaks


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


def expand(graphs: Sequence[Graph], schedule: Schedule, micro_batches: int) -> list[RankGraph]:
    """Return a graph for each rank of the pipeline, in the order of the pipeline axis.

    If the ranks of a stage differ, there is a graph for each of their classes. Each rank runs
    `schedule.chunks` captured stages: eight captured stages make four ranks of interleaved:2.

    Args:
        graphs: one per class of equivalent ranks, in any order.
        schedule: the order of forwards and backwards.
        micro_batches: micro-batches of a step; captured ones are repeated, see `Stage.source`.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or do not fit the schedule.
        GraphError: a graph has a cycle.
    """
    stage_groups = group_stages(graphs)
    captured = graphs[0].job.world
    stages = captured.sizes[AXIS]
    if stages % schedule.chunks:
        raise ExportError(
            f"--schedule {schedule} puts {schedule.chunks} stages on each rank, which does not "
            f"divide the {stages} captured stages ({stages} = {schedule.chunks} x "
            f"{stages // schedule.chunks} + {stages % schedule.chunks})\n"
            f"  capture with --pp a multiple of {schedule.chunks}",
            code="pipeline-indivisible-stages",
        )
    if schedule.chunks > 1 and (shared := _groups_of_shared_weights(graphs)):
        # With several stages on a rank, the ranks of such a group would make different calls.
        raise ExportError(
            f"--schedule {schedule}: stages share weights and sum their gradients over the groups "
            f"{', '.join(shared)}, which {schedule.chunks} stages per rank do not support\n"
            "  use gpipe or 1f1b, as Megatron-LM does for an encoder and its decoder",
            code="pipeline-shared-weights",
        )
    ranks = stages // schedule.chunks
    sizes = {axis: ranks if axis == AXIS else size for axis, size in captured.sizes.items()}
    world = World(sizes, captured.ep)
    rank_graphs: list[RankGraph] = []
    for rank, actions in enumerate(schedule.actions(ranks, micro_batches)):
        numbers = [schedule.stage(ranks, rank, chunk) for chunk in range(schedule.chunks)]
        position = StagePosition(schedule, ranks, rank, micro_batches, captured, world)
        for group in stage_groups:
            chunks = [group.stages[number] for number in numbers]
            graph = RankBuilder(dict(enumerate(chunks)), numbers, position).build(actions)
            peak = peak_memory([stage.graph.job for stage in chunks], actions)
            members = group.ranks(world, rank)
            rank_graphs.append(RankGraph(graph, members, tuple(numbers), peak))
    return rank_graphs


def _groups_of_shared_weights(graphs: Sequence[Graph]) -> list[str]:
    """Return the groups of stages that share weights, unless only the first and the last do."""
    shared: set[tuple[str, int]] = set()
    for job in (graph.job for graph in graphs):
        for group in job.groups:
            points = [{**job.world.point(rank), AXIS: 0} for rank in group.ranks]
            along_pipeline = all(point == points[0] for point in points)
            if along_pipeline and group.name not in job.world.sizes and len(group.ranks) > 1:
                shared.add((group.name, len(group.ranks)))
    # One pair of first and last stage (tied embedding and head) works with every schedule.
    only_ends = len(shared) < 2 and all(size == 2 for _, size in shared)
    return [] if only_ends else sorted({name for name, _ in shared})
