"""Steps of pipelines from blocks, against formulas of the papers that define the schedules."""

from dataclasses import replace

import pytest

from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD
from onerank.converters.expand.pipeline.stages import AFTER, BEFORE, StageBlock
from onerank.plan.pipeline_step import pipeline_step
from onerank.plan.stage_times import NO_FIGURES, Figures, StageTimes, at_depth

FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 100, 200, 50


def _stage(scale: float = 1.0) -> StageTimes:
    blocks = {
        StageBlock(BEFORE): NO_FIGURES,
        StageBlock(AFTER): Figures(OPTIMIZER_NS, OPTIMIZER_NS),
    }
    for micro_batch in range(3):
        for phase, ns in ((FORWARD, FORWARD_NS), (BACKWARD, BACKWARD_NS)):
            blocks[StageBlock(phase, micro_batch)] = Figures(ns * scale, ns * scale, 0, 1, 10)
    return StageTimes(
        blocks=blocks, micro_batches=3, input_share=0.5, sent_bytes=(1000, 1000), start_bytes=1e6,
        activation_bytes=1000, temporary_bytes=10, other_bytes=5, compute_factors=(0.9, 1.1),
        host_factors=(1, 1), host_bound_share=0,
    )  # fmt: skip


def _no_message(size: int, rank: int, peer: int) -> float:
    return 0.0


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 5), (2, 4), (4, 8), (8, 8), (4, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_flush_adds_ranks_minus_one_micro_batches(
    ranks: int, micro_batches: int, schedule: str
) -> None:
    step = pipeline_step(
        [_stage()] * ranks, PipelineSchedule.parse(schedule), micro_batches, _no_message
    )
    each = FORWARD_NS + BACKWARD_NS
    assert step.slowest.end_ns == (micro_batches + ranks - 1) * each + OPTIMIZER_NS
    for rank in step.ranks:
        assert rank.busy.elapsed_ns == micro_batches * each + OPTIMIZER_NS
        assert rank.busy.flops == micro_batches * 20


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    ranks, micro_batches, chunks = 4, 8, 2
    step = pipeline_step(
        [_stage(1 / chunks)] * ranks * chunks,
        PipelineSchedule.parse(f"interleaved:{chunks}"),
        micro_batches,
        _no_message,
    )
    each = FORWARD_NS + BACKWARD_NS
    # Narayanan et al. 2021, section 2.2: the bubble is (p - 1) (f + b) / v. Both chunks have an
    # optimizer here.
    expected = micro_batches * each + (ranks - 1) * each / chunks + chunks * OPTIMIZER_NS
    assert step.slowest.end_ns == expected


def test_zbv_has_a_smaller_bubble_than_1f1b() -> None:
    ranks, micro_batches = 4, 8
    halves = [_stage(0.5)] * 2 * ranks
    zbv = pipeline_step(halves, PipelineSchedule.parse("zbv"), micro_batches, _no_message)
    plain = pipeline_step(
        [_stage()] * ranks, PipelineSchedule.parse("1f1b"), micro_batches, _no_message
    )
    assert zbv.slowest.busy.compute_ns == plain.slowest.busy.compute_ns + OPTIMIZER_NS
    # Qi et al. 2024: with equal forwards and halves of backwards the bubble is zero but for the
    # end; the forward of one stage and the last weight gradients remain.
    bubble = zbv.slowest.end_ns - zbv.slowest.busy.elapsed_ns
    assert bubble < (plain.slowest.end_ns - plain.slowest.busy.elapsed_ns) / 2


def test_messages_delay_only_what_waits_for_them() -> None:
    micro_batches = 4
    step = pipeline_step([_stage()] * 2, PipelineSchedule("1f1b"), micro_batches, lambda *_: 30.0)
    each = FORWARD_NS + BACKWARD_NS
    # Rank 1 waits once, for the first activation; later ones arrive while it computes.
    assert step.ranks[1].end_ns >= FORWARD_NS + 30 + micro_batches * each + OPTIMIZER_NS
    # Rank 0 waits for a gradient's and an activation's message in each of its steady rounds.
    assert step.slowest.end_ns > (micro_batches + 1) * each + OPTIMIZER_NS
    assert step.slowest.end_ns <= (micro_batches + 1) * (each + 60) + OPTIMIZER_NS


def test_a_message_can_leave_before_its_block_ends() -> None:
    """The last reduce-scatters of a backward delay no other stage."""
    stage = _stage()
    blocks = dict(stage.blocks)
    last = StageBlock(BACKWARD, 2)
    blocks[last] = replace(blocks[last], send_lead_ns=60)
    stage = replace(stage, blocks=blocks)
    step = pipeline_step([stage] * 3, PipelineSchedule("1f1b"), 1, _no_message)
    assert step.slowest.end_ns == 3 * (FORWARD_NS + BACKWARD_NS) - 2 * 60 + OPTIMIZER_NS


def test_captured_micro_batches_between_the_first_and_the_last_take_turns() -> None:
    stage = _stage()
    blocks = {**stage.blocks, StageBlock(FORWARD, 3): Figures(FORWARD_NS)}
    blocks[StageBlock(BACKWARD, 3)] = Figures(BACKWARD_NS)
    blocks[StageBlock(FORWARD, 1)] = Figures(FORWARD_NS + 40)
    stage = replace(stage, blocks=blocks, micro_batches=4)
    # 1, 2, 1, 2, 1 stand between.
    (rank,) = pipeline_step([stage], PipelineSchedule("1f1b"), 7, _no_message).ranks
    assert rank.end_ns == 7 * (FORWARD_NS + BACKWARD_NS) + 3 * 40 + OPTIMIZER_NS
    assert rank.busy.elapsed_ns == rank.end_ns


def test_the_slowest_stage_sets_the_pace() -> None:
    step = pipeline_step([_stage(), _stage(2.0)], PipelineSchedule("1f1b"), 6, _no_message)
    each = FORWARD_NS + BACKWARD_NS
    assert step.slowest.end_ns == 6 * 2 * each + each + OPTIMIZER_NS


def test_memory_counts_the_micro_batches_in_flight() -> None:
    step = pipeline_step([_stage()] * 4, PipelineSchedule("1f1b"), 8, _no_message)
    assert [rank.peak_bytes for rank in step.ranks] == [
        1e6 + 10 + in_flight * 1000 for in_flight in (4, 3, 2, 1)
    ]
    assert step.fullest.other_bytes == 5


def test_figures_lie_on_the_line_through_two_depths() -> None:
    stage = at_depth(_stage(2.0), _stage(4.0), (2, 4), 20)
    assert stage.blocks[StageBlock(FORWARD, 1)].elapsed_ns == 20 * FORWARD_NS
    assert stage.blocks[StageBlock(AFTER)].elapsed_ns == OPTIMIZER_NS
    assert stage.start_bytes == 1e6
