"""The step of a job: the blocks of its stages in the order of a pipeline schedule.

A plan computes it from shared captures, and `replay_job` from whole captures of the stages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from onerank.converters.expand.pipeline import AXIS, Action, PipelineSchedule, most_in_flight
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from onerank.converters.expand.pipeline.stages import (
    AFTER,
    BEFORE,
    EVALUATION,
    StageBlock,
    group_stages,
)
from onerank.display import Displayed
from onerank.ir import Graph, World
from onerank.ir.errors import ExportError
from onerank.plan.cluster import ClusterNetwork
from onerank.plan.stage_times import NO_FIGURES, Figures, StageTimes, stage_times


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's part of a step.

    Attributes:
        end_ns: end of its last block; the step begins at 0.
        busy: sum of its blocks.
        peak_bytes: memory within the allocator.
        other_bytes: memory outside.
    """

    end_ns: float
    busy: Figures
    peak_bytes: float
    other_bytes: int


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step of all ranks of a pipeline."""

    ranks: tuple[RankStep, ...]

    @property
    def slowest(self) -> RankStep:
        """The rank that ends the step."""
        return max(self.ranks, key=lambda rank: rank.end_ns)

    @property
    def fullest(self) -> RankStep:
        """The rank with the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes + rank.other_bytes)


def pipeline_step(
    stages: Sequence[StageTimes],
    schedule: PipelineSchedule,
    micro_batches: int,
    message_ns: Callable[[int, int, int], float],
) -> PipelineStep:
    """Return the step of a pipeline.

    A block begins when its rank has ended the block before and its message has arrived. A send
    completes in the background.

    Args:
        stages: times of each stage.
        schedule: order of forwards and backwards on each rank.
        micro_batches: micro-batches of the step.
        message_ns: returns the time of a message of some bytes between two ranks of the pipeline.

    Raises:
        ExportError: the schedule does not exist for this number of micro-batches.
    """
    count = len(stages) // schedule.chunks
    actions = schedule.actions(count, micro_batches)
    numbers = [[schedule.stage(count, r, c) for c in range(schedule.chunks)] for r in range(count)]
    rank_of = {stage: rank for rank, of_rank in enumerate(numbers) for stage in of_rank}
    clock = [_sum(stages[n].blocks.get(StageBlock(BEFORE), NO_FIGURES) for n in of_rank).elapsed_ns
             for of_rank in numbers]  # fmt: skip
    messages = _messages(stages, rank_of, message_ns)
    # When the activation or the gradient that a stage computes exists: (stage, micro-batch) -> ns.
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    place = [0] * count
    elapsed: dict[tuple[int, str, int], float] = {}
    pending = True
    # Ranks wait for each other's messages: each round takes every rank as far as it can go.
    while pending:
        pending = False
        for rank in range(count):
            while place[rank] < len(actions[rank]):
                phase, micro_batch, chunk = actions[rank][place[rank]]
                stage = numbers[rank][chunk]
                arrival = 0.0
                if phase == FORWARD and stage > 0:
                    ready = forward.get((stage - 1, micro_batch))
                    arrival = None if ready is None else ready + messages[stage - 1][0]
                elif phase in (BACKWARD, INPUT) and stage < len(stages) - 1:
                    ready = backward.get((stage + 1, micro_batch))
                    arrival = None if ready is None else ready + messages[stage + 1][1]
                if arrival is None:
                    break
                # Three positions serve all micro-batches of a phase.
                key = stage, phase, _position(micro_batch, micro_batches)
                if key not in elapsed:
                    figures = stages[stage].block(phase, micro_batch, micro_batches)
                    elapsed[key] = figures.elapsed_ns
                clock[rank] = max(clock[rank], arrival) + elapsed[key]
                if phase == FORWARD:
                    forward[stage, micro_batch] = clock[rank]
                elif phase != WEIGHT:
                    backward[stage, micro_batch] = clock[rank]
                place[rank] += 1
                pending = True
    # The loop also ends when all ranks wait, which no valid schedule does.
    assert all(at == len(of_rank) for at, of_rank in zip(place, actions, strict=True))
    return PipelineStep(
        tuple(
            _rank_step(
                [stages[n] for n in numbers[rank]], actions[rank], micro_batches, clock[rank]
            )
            for rank in range(count)
        )
    )


def _position(micro_batch: int, micro_batches: int) -> int:
    """Return 0 for the first micro-batch, 2 for the last, 1 for those between, which are equal."""
    return 2 if micro_batch == micro_batches - 1 else min(micro_batch, 1)


def _messages(
    stages: Sequence[StageTimes],
    rank_of: dict[int, int],
    message_ns: Callable[[int, int, int], float],
) -> list[tuple[float, float]]:
    """Return the time of the activation and of the gradient that each stage sends."""
    times: list[tuple[float, float]] = []
    for number, stage in enumerate(stages):
        each: list[float] = []
        for size, neighbour in zip(stage.sent_bytes, (number + 1, number - 1), strict=True):
            peer, rank = rank_of.get(neighbour), rank_of[number]
            # Two stages on one rank pass tensors without a message.
            absent = peer is None or peer == rank
            each.append(0.0 if absent or peer is None else message_ns(size, rank, peer))
        times.append((each[0], each[1]))
    return times


def _rank_step(
    chunks: Sequence[StageTimes], actions: Sequence[Action], micro_batches: int, clock_ns: float
) -> RankStep:
    outside = (StageBlock(BEFORE), StageBlock(EVALUATION), StageBlock(AFTER))
    after = _sum(chunk.blocks.get(block, NO_FIGURES) for chunk in chunks for block in outside[1:])
    calls = defaultdict[tuple[int, str, int], int](int)
    for phase, micro_batch, chunk in actions:
        calls[chunk, phase, _position(micro_batch, micro_batches)] += 1
    busy = _sum(chunk.blocks.get(block, NO_FIGURES) for chunk in chunks for block in outside)
    for (chunk, phase, position), times in calls.items():
        micro_batch = (0, 1, micro_batches - 1)[position]
        busy += chunks[chunk].block(phase, micro_batch, micro_batches) * times
    activations = {n: round(chunk.activation_bytes) for n, chunk in enumerate(chunks)}
    peak = sum(chunk.start_bytes for chunk in chunks)
    # A rank runs one block at a time, so temporaries of two chunks never coexist.
    peak += max(chunk.temporary_bytes for chunk in chunks) + most_in_flight(actions, activations)
    return RankStep(
        clock_ns + after.elapsed_ns, busy, peak, max(chunk.other_bytes for chunk in chunks)
    )


def _sum(figures: Iterable[Figures]) -> Figures:
    return sum(figures, start=NO_FIGURES)


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
    graphs: Sequence[Graph],
    network: ClusterNetwork,
    schedule: PipelineSchedule,
    micro_batches: int | None,
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
    network: ClusterNetwork,
    schedule: PipelineSchedule,
    micro_batches: int,
) -> PipelineStep:
    """Return the step of a pipeline whose ranks lie in `world`."""
    distance = world.size // world.sizes.get(AXIS, 1)

    def message_ns(size: int, rank: int, peer: int) -> float:
        return network.time_ns("send", size, (rank * distance, peer * distance))

    return pipeline_step(stages, schedule, micro_batches, message_ns)
