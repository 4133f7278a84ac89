"""Schedules against the published pictures and against torch.distributed.pipelining's tables."""

from types import SimpleNamespace
from typing import Any

import pytest
from raised import raises_code

from onerank.converters.expand.pipeline.schedules import Action, PipelineSchedule, most_in_flight
from onerank.ir.errors import ExportError


def text(schedule: str, ranks: int, micro_batches: int) -> list[str]:
    rows = PipelineSchedule.parse(schedule).actions(ranks, micro_batches)
    return [" ".join(map(str, row)) for row in rows]


def test_gpipe():
    assert text("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_of_the_paper_s_figure():
    """Narayanan et al. 2021, figure 4: four devices, eight micro-batches."""
    assert text("1f1b", 4, 8) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_interleaved_of_the_paper_s_figure():
    """The same figure, bottom: the first device, whose second chunk is set off by `.1`."""
    assert text("interleaved:2", 4, 8)[0].startswith(
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1"
    )


def test_zbv_of_the_paper_s_figure():
    """Qi et al. 2024, figure of ZB-V: the first and the last of four devices."""
    first, *_, last = text("zbv", 4, 8)
    assert first.startswith("F0 F1 F2 F3 F4 F5 F6 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1")
    assert last.startswith("F0 F0.1 F1 F1.1 F2 F2.1 F3 F3.1 I0.1 W0.1 F4 I0 W0 F4.1 I1.1 W1.1")


NUMBERS = [(1, 1), (2, 2), (2, 5), (3, 3), (4, 2), (4, 4), (4, 8), (4, 16), (8, 32)]
CASES = [
    ("gpipe", "ScheduleGPipe", 1),
    ("1f1b", "Schedule1F1B", 1),
    ("interleaved:2", "ScheduleInterleaved1F1B", 2),
    ("interleaved:3", "ScheduleInterleaved1F1B", 3),
    ("zbv", "ScheduleZBVZeroBubble", 2),
]


def tables_of_torch(name: str, ranks: int, micro_batches: int, chunks: int) -> Any:
    """Return torch's table without idle slots and gradient synchronisation."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=chunk * ranks,
            stage_index_to_group_rank={},
            is_first=chunk == 0,
            is_last=ranks * chunks == 1,
            has_backward=True,
            group=None,
            submod=None,
            device="cpu",
        )
        for chunk in range(chunks)
    ]
    try:
        torch_schedule = getattr(schedules, name)(
            stages if chunks > 1 else stages[0], micro_batches, loss_fn=lambda *_: None
        )
    except ValueError as error:
        return str(error)
    letters = {"FULL_BACKWARD": "B", "FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            (letters[action.computation_type.name], action.microbatch_index, action.stage_index)
            for action in torch_schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in letters
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(0, 4), (2, 0)])
def test_a_schedule_needs_ranks_and_micro_batches(ranks, micro_batches):
    numbers = f"{micro_batches} micro-batches on {ranks} ranks"
    with raises_code("schedule-too-small", naming=numbers):
        PipelineSchedule.parse("1f1b").actions(ranks, micro_batches)


@pytest.mark.parametrize(("schedule", "name", "chunks"), CASES)
@pytest.mark.parametrize(("ranks", "micro_batches"), NUMBERS)
def test_the_order_is_torch_s(schedule, name, chunks, ranks, micro_batches):
    theirs = tables_of_torch(name, ranks, micro_batches, chunks)
    parsed = PipelineSchedule.parse(schedule)
    if schedule == "1f1b" and micro_batches < ranks:
        assert "microbatches" in theirs  # torch refuses it
        return
    if isinstance(theirs, str):
        with raises_code("schedule-unequal-rounds"):
            parsed.actions(ranks, micro_batches)
        return
    ours = [
        [(a.phase, a.micro_batch, parsed.stage(ranks, rank, a.chunk)) for a in actions]
        for rank, actions in enumerate(parsed.actions(ranks, micro_batches))
    ]
    if schedule == "1f1b":  # the table, not the runtime, numbers the last stage's forwards from 1
        theirs[-1] = [(p, m - (p == "F"), stage) for p, m, stage in theirs[-1]]
    assert ours == theirs


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "interleaved:4", "zbv"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [*NUMBERS, (16, 64)])
def test_no_rank_waits_for_ever(schedule, ranks, micro_batches):
    """Run the table: a forward waits for the previous stage, a backward for the next."""
    parsed = PipelineSchedule.parse(schedule)
    try:
        pending = parsed.actions(ranks, micro_batches)
    except ExportError:
        assert micro_batches % max(1, micro_batches // ranks)
        return
    stages = ranks * parsed.chunks
    done: set[tuple[str, int, int]] = set()
    while any(pending):
        before = len(done)
        for rank, actions in enumerate(pending):
            while actions and ready(actions[0], parsed.stage(ranks, rank, actions[0].chunk), done):
                action = actions.pop(0)
                stage = parsed.stage(ranks, rank, action.chunk)
                done.add((action.phase, action.micro_batch, stage))
        assert len(done) > before, f"stuck at {[row[0] for row in pending if row]}"
    phases = 3 if schedule == "zbv" else 2
    assert len(done) == stages * micro_batches * phases
    assert all(
        parsed.place(ranks, parsed.stage(ranks, rank, chunk)) == (rank, chunk)
        for rank in range(ranks)
        for chunk in range(parsed.chunks)
    )


def ready(action: Action, stage: int, done: set[tuple[str, int, int]]) -> bool:
    micro_batch = action.micro_batch
    last = max([stage for _, _, stage in done], default=0)
    if action.phase == "F":
        return stage == 0 or ("F", micro_batch, stage - 1) in done
    if action.phase == "W":
        return ("I", micro_batch, stage) in done
    next_done = (action.phase, micro_batch, stage + 1) in done
    return ("F", micro_batch, stage) in done and (stage >= last or next_done)


def test_micro_batches_in_flight():
    """1F1B has as many in flight as later stages, GPipe all, interleaved schedules per chunk."""

    def in_flight(schedule: str) -> list[int]:
        parsed = PipelineSchedule.parse(schedule)
        weights = dict.fromkeys(range(parsed.chunks), 1)
        return [most_in_flight(actions, weights) for actions in parsed.actions(4, 8)]

    assert in_flight("gpipe") == [8, 8, 8, 8]
    assert in_flight("1f1b") == [4, 3, 2, 1]
    assert in_flight("interleaved:2") == [11, 9, 7, 5]
    assert in_flight("zbv") == [8, 8, 8, 8]


@pytest.mark.parametrize("wrong", ["", "dualpipe", "1f1b:2", "interleaved", "interleaved:1"])
def test_an_unknown_schedule_names_the_known_ones(wrong):
    with raises_code("schedule-unknown"):
        PipelineSchedule.parse(wrong)
