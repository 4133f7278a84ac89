"""Replay captured stages as a job: the same step that a plan predicts, from whole captures."""

from collections.abc import Sequence

import msgspec

from onerank.converters.expand.pipeline import AXIS, Schedule
from onerank.converters.expand.pipeline.stages import group_stages
from onerank.display import Displayed
from onerank.ir import Graph, World
from onerank.ir.errors import ExportError
from onerank.plan.cluster import Network
from onerank.plan.pipeline_step import PipelineStep, pipeline_step
from onerank.plan.stage_times import StageTimes, stage_times


class JobReplay(Displayed, msgspec.Struct, frozen=True):
    """A replayed step of a job; times in ns.

    Attributes:
        step_ns: the step.
        compute_ns: time in which the slowest rank computes.
        exposed_communication_ns: time in which it communicates and computes nothing.
        bubble_ns: time in which it waits for other stages.
        peak_bytes: memory of the fullest rank, that outside the allocator included.
        ranks: ranks of the job.
    """

    step_ns: int
    compute_ns: int
    exposed_communication_ns: int
    bubble_ns: int
    peak_bytes: int
    ranks: int


def replay_job(
    graphs: Sequence[Graph], network: Network, schedule: Schedule, micro_batches: int | None
) -> JobReplay:
    """Return the step of a job from the re-costed graphs of its stages.

    Args:
        graphs: one per class of equivalent ranks; a single one without a pipeline.
        network: times the communication.
        schedule: order of forwards and backwards.
        micro_batches: micro-batches of the step, which repeat those of the capture; None: as
            captured.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or do not fit the schedule.
        GraphError: a graph has a cycle, or takes no time.
    """
    captured = graphs[0].job.world
    stages = captured.sizes.get(AXIS, 1)
    if stages % schedule.chunks:
        raise ExportError(
            f"--schedule {schedule} puts {schedule.chunks} stages on each rank, which does not "
            f"divide the {stages} captured stages ({stages} = {schedule.chunks} x "
            f"{stages // schedule.chunks} + {stages % schedule.chunks})",
            code="pipeline-indivisible-stages",
        )
    if stages == 1:
        of_stages = [graphs[0]]
    else:
        of_stages = [stage.graph for stage in group_stages(graphs)[0].stages]
    # Each captured stage is a rank of the capture; some schedules put several on one rank.
    ranks = stages // schedule.chunks
    sizes = {axis: ranks if axis == AXIS else size for axis, size in captured.sizes.items()}
    world = World({axis: size for axis, size in sizes.items() if size > 1}, captured.ep)
    splits = schedule.kind == "zbv"
    by_graph: dict[int, StageTimes] = {}
    for graph in of_stages:
        # A graph may stand for several stages, and is replayed once.
        if id(graph) not in by_graph:
            by_graph[id(graph)] = stage_times(graph, network, world, splits_backward=splits)
    stages_of_rank = [by_graph[id(graph)] for graph in of_stages]
    count = micro_batches or stages_of_rank[0].micro_batches
    step = step_of(stages_of_rank, world, network, schedule, count)
    slowest, fullest = step.slowest, step.fullest
    return JobReplay(
        step_ns=round(slowest.end_ns),
        compute_ns=round(slowest.busy.compute_ns),
        exposed_communication_ns=round(slowest.busy.exposed_ns),
        bubble_ns=round(max(0.0, slowest.end_ns - slowest.busy.elapsed_ns)),
        peak_bytes=round(fullest.peak_bytes + fullest.other_bytes),
        ranks=world.size,
    )


def step_of(
    stages: Sequence[StageTimes],
    world: World,
    network: Network,
    schedule: Schedule,
    micro_batches: int,
) -> PipelineStep:
    """Return the step of a pipeline whose ranks lie in `world`."""
    distance = world.size // world.sizes.get(AXIS, 1)

    def message_ns(size: int, rank: int, peer: int) -> float:
        return network.time_ns("send", size, (rank * distance, peer * distance))

    return pipeline_step(stages, schedule, micro_batches, message_ns)
