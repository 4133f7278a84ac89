"""Pipeline schedules as data: what each rank does, in order.

- gpipe: all forwards, then all backwards (Huang et al. 2019; backwards oldest first, as
  torch.distributed.pipelining and Megatron-LM's predecessors run them).
- 1f1b: PipeDream-Flush (Narayanan et al. 2021, figure 4 top).
- interleaved: 1f1b of several chunks per rank (the same, figure 4 bottom; Megatron-LM's
  forward_backward_pipelining_with_interleaving).
- zbv: ZB-V, two chunks per rank in the shape of a V, the backward split in two (Qi et al. 2024,
  "Zero bubble pipeline parallelism", section 6).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from onerank.ir.errors import ExportError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
"""Phases: forward, whole backward, gradient of the input, gradient of the weights."""

KINDS = ("gpipe", "1f1b", "interleaved", "zbv")


class Action(NamedTuple):
    """One phase of a micro-batch on one of the rank's chunks of layers."""

    phase: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.phase}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A pipeline schedule.

    Attributes:
        kind: one of `KINDS`.
        chunks: pipeline stages per rank.
    """

    kind: str
    chunks: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "gpipe", "1f1b", "interleaved:V" or "zbv".

        Raises:
            ExportError: it is none of these, or V is not 2 or more.
        """
        kind, colon, chunks = text.partition(":")
        if kind == "interleaved" and chunks.isdecimal() and int(chunks) > 1:
            return cls(kind, int(chunks))
        if kind in KINDS and kind != "interleaved" and not colon:
            return cls(kind, 2 if kind == "zbv" else 1)
        raise ExportError(
            f"--schedule {text}: expected gpipe, 1f1b, zbv or interleaved:V, with V >= 2 stages "
            "per rank",
            code="schedule-unknown",
        )

    def stage(self, ranks: int, rank: int, chunk: int) -> int:
        """Return the pipeline stage of a rank's chunk."""
        if self.kind == "zbv" and chunk == 1:
            return 2 * ranks - 1 - rank
        return chunk * ranks + rank

    def place(self, ranks: int, stage: int) -> tuple[int, int]:
        """Return the rank and the chunk of a stage."""
        chunk, rank = divmod(stage, ranks)
        return (ranks - 1 - rank if self.kind == "zbv" and chunk == 1 else rank), chunk

    def actions(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """Return the actions of each rank, in order.

        Raises:
            ExportError: the schedule does not exist for these numbers.
        """
        if ranks < 1 or micro_batches < 1:
            raise ExportError(
                f"{micro_batches} micro-batches on {ranks} ranks: expected 1 or more of both",
                code="schedule-too-small",
            )
        actions_of_rank = {
            "gpipe": _gpipe,
            "1f1b": _one_forward_one_backward,
            "interleaved": _interleaved,
            "zbv": _zbv,
        }[self.kind]
        return [
            [*actions_of_rank(rank, ranks, micro_batches, self.chunks)] for rank in range(ranks)
        ]

    def __str__(self) -> str:
        return f"{self.kind}:{self.chunks}" if self.kind == "interleaved" else self.kind


def most_in_flight(actions: Sequence[Action], weights: Mapping[int, int]) -> int:
    """Return the highest sum of weights over the micro-batches between forward and backward.

    A split backward keeps its micro-batch in flight until the weight gradient.

    Args:
        actions: the rank's part of a schedule.
        weights: chunk -> weight of one micro-batch, such as its activation bytes.
    """
    level = highest = 0
    for action in actions:
        if action.phase == FORWARD:
            level += weights[action.chunk]
            highest = max(highest, level)
        elif action.phase in (BACKWARD, WEIGHT):
            level -= weights[action.chunk]
    return highest


def _gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    for phase in (FORWARD, BACKWARD):
        yield from (Action(phase, micro_batch) for micro_batch in range(micro_batches))


def _one_forward_one_backward(
    rank: int, ranks: int, micro_batches: int, chunks: int
) -> Iterator[Action]:
    # One forward per later rank keeps the pipeline busy until the first backward arrives.
    warmup = min(ranks - 1 - rank, micro_batches)
    yield from (Action(FORWARD, micro_batch) for micro_batch in range(warmup))
    for micro_batch in range(micro_batches):
        if micro_batch + warmup < micro_batches:
            yield Action(FORWARD, micro_batch + warmup)
        yield Action(BACKWARD, micro_batch)


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Yield the actions of 1F1B with several chunks, which alternate by rounds of micro-batches."""
    # As torch.distributed.pipelining's ScheduleInterleaved1F1B: it takes any number of
    # micro-batches that the rounds divide, where Megatron-LM needs a multiple of the ranks.
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise ExportError(
            f"interleaved: {rounds} rounds do not divide {micro_batches} micro-batches on {ranks} "
            f"ranks ({micro_batches} = {rounds} x {micro_batches // rounds} "
            f"+ {micro_batches % rounds})\n  use a multiple of {ranks}",
            code="schedule-unequal-rounds",
        )
    size, total = micro_batches // rounds, micro_batches * chunks
    # As many as in Megatron-LM's forward_backward_pipelining_with_interleaving.
    warmup = min((chunks - 1) * size + 2 * (ranks - 1 - rank), total)

    def action(phase: str, step: int) -> Action:
        turn, place = divmod(step, size)
        chunk = turn % chunks if phase == FORWARD else chunks - 1 - turn % chunks
        return Action(phase, turn // chunks * size + place, chunk)

    yield from (action(FORWARD, step) for step in range(warmup))
    for step in range(total):
        if step + warmup < total:
            yield action(FORWARD, step + warmup)
        yield action(BACKWARD, step)


def _zbv(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """Yield the actions of ZB-V, whose backward is split in two."""
    # The pattern is defined for 2 * ranks - 1 micro-batches or more. With fewer, the actions of
    # the surplus ones are skipped below.
    full = max(2 * ranks - 1, micro_batches)
    count = Counter[tuple[str, int]]()

    def steps() -> Iterator[tuple[str, int]]:
        yield from [(FORWARD, 0)] * (2 * (ranks - rank) - 1)
        yield from [(FORWARD, 1), (FORWARD, 0)] * rank
        yield from [(FORWARD, 1), (INPUT, 1), (WEIGHT, 1)] * (ranks - rank)
        while count[FORWARD, 1] < full:
            if count[FORWARD, 0] < full:
                yield FORWARD, 0
            yield from [(INPUT, 0), (WEIGHT, 0), (FORWARD, 1), (INPUT, 1), (WEIGHT, 1)]
        yield from [(INPUT, 0), (INPUT, 1)] * rank
        yield from [(INPUT, 0), (WEIGHT, 0)] * (ranks - rank)
        yield from [(WEIGHT, 1)] * (full - count[WEIGHT, 1])
        yield from [(WEIGHT, 0)] * (full - count[WEIGHT, 0])

    for phase, chunk in steps():
        micro_batch = count[phase, chunk]
        count[phase, chunk] += 1
        if micro_batch < micro_batches:
            yield Action(phase, micro_batch, chunk)
