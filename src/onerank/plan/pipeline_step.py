"""The step of a job: the blocks of its stages in the order of a pipeline schedule."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from onerank.converters.expand.pipeline import AXIS, Action, PipelineSchedule, most_in_flight
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from onerank.converters.expand.pipeline.stages import (
    AFTER,
    BEFORE,
    EVALUATION,
    StageBlock,
    captured_micro_batch,
)
from onerank.ir import World
from onerank.plan.cluster import ClusterNetwork
from onerank.plan.stage_times import NO_FIGURES, Figures, StageTimes


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

    A block begins when its rank has ended the block before and its message has arrived. It sends
    its own message when that is ready (`Figures.send_lead_ns`). A send completes in the background.

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
    clocks = _RankClocks(stages, numbers, micro_batches, message_ns)
    place = [0] * count
    pending = True
    # Ranks wait for each other's messages: each round takes every rank as far as it can go.
    while pending:
        pending = False
        for rank, of_rank in enumerate(actions):
            while place[rank] < len(of_rank) and clocks.run(rank, of_rank[place[rank]]):
                place[rank] += 1
                pending = True
    # The loop also ends when all ranks wait, which no valid schedule does.
    assert all(at == len(of_rank) for at, of_rank in zip(place, actions, strict=True))
    return PipelineStep(
        tuple(
            _rank_step(
                [stages[n] for n in numbers[rank]], actions[rank], micro_batches, clocks.ns[rank]
            )
            for rank in range(count)
        )
    )


class _RankClocks:
    """The time of each rank while its actions run.

    Attributes:
        ns: end of each rank's last action.
    """

    def __init__(
        self,
        stages: Sequence[StageTimes],
        numbers: list[list[int]],
        micro_batches: int,
        message_ns: Callable[[int, int, int], float],
    ) -> None:
        """Begin a step with what ranks do before their first micro-batch.

        Args:
            stages: times of each stage.
            numbers: the stages of each rank, by chunk.
            micro_batches: as for `pipeline_step`.
            message_ns: as for `pipeline_step`.
        """
        self._stages = stages
        self._numbers = numbers
        self._micro_batches = micro_batches
        rank_of = {stage: rank for rank, of_rank in enumerate(numbers) for stage in of_rank}
        self._messages = _messages(stages, rank_of, message_ns)
        before = StageBlock(BEFORE)
        self.ns = [
            _sum(stages[n].blocks.get(before, NO_FIGURES) for n in of_rank).elapsed_ns
            for of_rank in numbers
        ]
        # When the activation or the gradient that a stage computes is sent:
        # (stage, micro-batch) -> ns.
        self._forward: dict[tuple[int, int], float] = {}
        self._backward: dict[tuple[int, int], float] = {}
        # (stage, phase, captured micro-batch) -> figures.
        self._figures_by_block: dict[tuple[int, str, int], Figures] = {}

    def run(self, rank: int, action: Action) -> bool:
        """Run the next action of a rank; return False if its message has not been sent yet."""
        phase, micro_batch, chunk = action
        stage = self._numbers[rank][chunk]
        arrival_ns = self._arrival_ns(phase, stage, micro_batch)
        if arrival_ns is None:
            return False
        figures = self._figures(phase, stage, micro_batch)
        self.ns[rank] = max(self.ns[rank], arrival_ns) + figures.elapsed_ns
        sent_ns = self.ns[rank] - figures.send_lead_ns
        if phase == FORWARD:
            self._forward[stage, micro_batch] = sent_ns
        elif phase != WEIGHT:
            self._backward[stage, micro_batch] = sent_ns
        return True

    def _arrival_ns(self, phase: str, stage: int, micro_batch: int) -> float | None:
        """Return when the message that an action waits for arrives; 0 if it waits for none."""
        if phase == FORWARD and stage > 0:
            ready = self._forward.get((stage - 1, micro_batch))
            return None if ready is None else ready + self._messages[stage - 1][0]
        if phase in (BACKWARD, INPUT) and stage < len(self._stages) - 1:
            ready = self._backward.get((stage + 1, micro_batch))
            return None if ready is None else ready + self._messages[stage + 1][1]
        return 0.0

    def _figures(self, phase: str, stage: int, micro_batch: int) -> Figures:
        # A few captured micro-batches represent all.
        times, count = self._stages[stage], self._micro_batches
        key = stage, phase, captured_micro_batch(micro_batch, count, times.micro_batches)
        if key not in self._figures_by_block:
            self._figures_by_block[key] = times.block(phase, micro_batch, count)
        return self._figures_by_block[key]


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
    # Chunk, phase, captured micro-batch -> micro-batches that it represents.
    represented = defaultdict[tuple[int, str, int], list[int]](list)
    for phase, micro_batch, chunk in actions:
        captured = captured_micro_batch(micro_batch, micro_batches, chunks[chunk].micro_batches)
        represented[chunk, phase, captured].append(micro_batch)
    busy = _sum(chunk.blocks.get(block, NO_FIGURES) for chunk in chunks for block in outside)
    for (chunk, phase, _), numbers in represented.items():
        busy += chunks[chunk].block(phase, numbers[0], micro_batches) * len(numbers)
    activations = {n: round(chunk.activation_bytes) for n, chunk in enumerate(chunks)}
    peak = sum(chunk.start_bytes for chunk in chunks)
    # A rank runs one block at a time, so temporaries of two chunks never coexist.
    peak += max(chunk.temporary_bytes for chunk in chunks) + most_in_flight(actions, activations)
    return RankStep(
        clock_ns + after.elapsed_ns, busy, peak, max(chunk.other_bytes for chunk in chunks)
    )


def _sum(figures: Iterable[Figures]) -> Figures:
    return sum(figures, start=NO_FIGURES)


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
