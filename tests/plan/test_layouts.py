"""Layouts of a cluster: combinations, their arithmetic, and what is dropped."""

import pytest

from onerank.plan.layouts import Choices, Layout, PlanError, enumerate_layouts


def _layouts(gpus: int, global_batch: int, **choices: object) -> list[Layout]:
    return enumerate_layouts(Choices(seq=(64,), **choices), gpus=gpus, global_batch=global_batch)[0]


def test_dp_takes_the_gpus_that_the_other_axes_leave() -> None:
    layouts = _layouts(64, 128, tp=(1, 2, 8), pp=(1, 4), cp=(1, 2))
    assert {layout.gpus for layout in layouts} == {64}
    assert {(layout.tp, layout.cp, layout.pp): layout.dp for layout in layouts} == {
        (1, 1, 1): 64, (1, 1, 4): 16, (1, 2, 1): 32, (1, 2, 4): 8,
        (2, 1, 1): 32, (2, 1, 4): 8, (2, 2, 1): 16, (2, 2, 4): 4,
        (8, 1, 1): 8, (8, 1, 4): 2, (8, 2, 1): 4, (8, 2, 4): 1,
    }  # fmt: skip
    for layout in layouts:
        assert layout.dp * layout.micro_batch * layout.micro_batches == 128
        assert layout.tokens_per_step == 128 * 64


def test_choices_without_effect_give_one_layout() -> None:
    layouts = _layouts(
        4, 8, tp=(4,), pp=(1,), schedule=("1f1b", "gpipe", "zbv"), sharding=("ddp", "fsdp")
    )
    assert len(layouts) == 1
    assert (layouts[0].sharding, layouts[0].schedule, layouts[0].sp) == ("ddp", "1f1b", True)
    assert not _layouts(4, 8, tp=(1,))[0].sp


@pytest.mark.parametrize(
    ("batch", "choices", "code"),
    [
        (8, {"tp": (3, 1)}, "plan-indivisible-gpus"),
        (8, {"tp": (16, 1)}, "plan-too-few-gpus"),
        (16, {"dp": (16, 8)}, "plan-too-few-gpus"),
        (8, {"ep": (3, 1)}, "world-ep-indivisible"),
        (24, {"micro_batch": (2, 1)}, "plan-indivisible-batch"),
        (22, {"pp": (4,), "schedule": ("interleaved:2", "1f1b")}, "schedule-unequal-rounds"),
        (8, {"pp": (4,), "schedule": ("2f2b", "1f1b")}, "schedule-unknown"),
    ],
)
def test_what_is_no_layout_is_dropped_with_its_code(
    batch: int, choices: dict[str, tuple[object, ...]], code: str
) -> None:
    layouts, dropped = enumerate_layouts(Choices(seq=(64,), **choices), gpus=8, global_batch=batch)
    assert [entry.code for entry in dropped] == [code]
    assert len(layouts) == 1
    first = {name: values[:1] for name, values in choices.items()}
    with pytest.raises(PlanError) as error:
        enumerate_layouts(Choices(seq=(64,), **first), gpus=8, global_batch=batch)
    assert error.value.code == "plan-no-layout"


def test_interleaved_runs_several_stages_per_rank() -> None:
    layout = _layouts(8, 16, pp=(4,), schedule=("interleaved:2",))[0]
    assert (layout.pp, layout.stages, layout.dp) == (4, 8, 2)
