"""Layouts that earlier outcomes rule out, and the order that lets them do so."""

from itertools import pairwise
from typing import Any

import pytest
from raised import raises_code

from onerank.converters.expand.pipeline import PipelineSchedule, most_in_flight
from onerank.plan.layouts import Choices, Layout, Outcome, PredictedRange, enumerate_layouts
from onerank.plan.make_plan import Plan, check_fits, memory_rounds, without_too_large

CAPACITY = 80e9


def _layouts(global_batch: int = 64) -> list[Layout]:
    choices = Choices(seq=(64,), tp=(1, 2), micro_batch=(4, 1, 2), recompute=("none", "full"))
    return enumerate_layouts(choices, gpus=8, global_batch=global_batch)[0]


def _outcome(layout: Layout, peak: float) -> Outcome:
    one = PredictedRange(1.0, 1.0, 1.0)
    return Outcome(
        layout, layout.gpus, one, one, None, PredictedRange(peak, 0.99 * peak, 1.1 * peak),
        peak <= CAPACITY, max(0, round(peak - CAPACITY)), None, None, 1.0, 0.0, 0.0, (), (),
    )  # fmt: skip


def _named(layouts: list[Layout]) -> set[tuple[int, int, str]]:
    return {(each.tp, each.micro_batch, each.recompute) for each in layouts}


def test_rounds_grow_in_memory() -> None:
    rounds = memory_rounds(_layouts())
    assert [{choices[1:] for choices in _named(layouts)} for layouts in rounds] == [
        {(1, "full")},
        {(2, "full"), (1, "none")},
        {(4, "full"), (2, "none")},
        {(4, "none")},
    ]
    assert sum(map(len, rounds)) == len(_layouts()) == 12


def test_a_layout_that_needs_more_than_one_that_does_not_fit_is_dropped() -> None:
    layouts = _layouts()
    (small,) = [each for each in layouts if _named([each]) == {(1, 2, "full")}]
    kept, dropped = without_too_large(layouts, [_outcome(small, 120e9)])
    # tp 2 is another family; a smaller micro-batch needs less.
    assert _named(layouts) - _named(kept) == {
        (1, 2, "full"), (1, 4, "full"), (1, 2, "none"), (1, 4, "none"),
    }  # fmt: skip
    assert {each.code for each in dropped} == {"plan-too-large"}
    assert all("120.000 GB, 40.000 GB more" in each.reason for each in dropped)


def test_the_error_counts_layouts_that_were_ruled_out() -> None:
    layouts = _layouts()
    (small,) = [each for each in layouts if _named([each]) == {(1, 2, "full")}]
    misfit = _outcome(small, 120e9)
    _, dropped = without_too_large([each for each in layouts if each != small], [misfit])
    config: Any = None
    plan = Plan(config, 4, fitting=(), misfits=(misfit,), dropped=tuple(dropped))
    with raises_code("plan-nothing-fits", naming="none of 4 layouts"):
        check_fits(plan)


def test_a_layout_is_kept_within_the_interval_and_where_gradients_do_not_accumulate() -> None:
    layouts = _layouts(32)
    small = [each for each in layouts if _named([each]) == {(1, 1, "full")}]
    assert without_too_large(layouts, [_outcome(small[0], 80.5e9)])[0] == layouts
    # With dp 8, a micro-batch of 4 is the only one of the step.
    kept, _ = without_too_large(layouts, [_outcome(small[0], 120e9)])
    assert {each for each in _named(kept) if each[0] == 1} == {(1, 4, "full"), (1, 4, "none")}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved:2", "zbv"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_larger_micro_batches_hold_no_fewer_sequences_in_flight(schedule: str, ranks: int) -> None:
    parsed = PipelineSchedule.parse(schedule)
    in_flight: list[list[int]] = []
    for micro_batch in (1, 2, 4, 8):
        actions = parsed.actions(ranks, 64 // micro_batch)
        sizes = dict.fromkeys(range(parsed.chunks), micro_batch)
        in_flight.append([most_in_flight(of_rank, sizes) for of_rank in actions])
    for smaller, larger in pairwise(in_flight):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))
