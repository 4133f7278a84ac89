"""Notes on a row of a plan."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from notes import codes, note_of

from onerank.annotate import load_gpu
from onerank.plan.evaluate import _notes
from onerank.plan.layouts import Choices, PredictedRange, Underived, enumerate_layouts
from onerank.plan.make_plan import notes_on_captures


def notes(gpu: str, micro_batches: int, host_bound: float, *, capacity: float = 80e9) -> Any:
    stages: Any = [SimpleNamespace(micro_batches=1, host_bound_share=host_bound)]
    layout: Any = SimpleNamespace(micro_batches=micro_batches)
    return _notes(load_gpu(gpu), stages, layout, PredictedRange(70e9, 69e9, 75e9), capacity)


def test_a_row_names_what_its_figures_lack():
    assert notes("H100", 1, 0.0) == ()
    assert codes(notes("H100", 4, 0.0)) == ["plan-one-micro-batch"]
    note_of(notes("H100", 1, 0.25), "plan-host-bound", 25)
    assert codes(notes("MI300X", 1, 0.0)) == ["plan-link-power-unknown"]
    # The upper end of the interval counts for a layout that fits; others have missing bytes.
    note_of(notes("H100", 1, 0.0, capacity=72e9), "plan-may-not-fit", 75, 72)
    assert notes("H100", 1, 0.0, capacity=75e9) == notes("H100", 1, 0.0, capacity=69e9) == ()


def test_a_plan_names_why_layouts_are_captured_again():
    (layout,), _ = enumerate_layouts(Choices(seq=(512,)), gpus=2, global_batch=4)
    again = [
        Underived(replace(layout, dp=dp), reason) for dp, reason in ((3, "a"), (5, "b"), (7, "a"))
    ]
    found = notes_on_captures(again)
    assert codes(found) == ["plan-captured-again"] * 2
    note_of(found[:1], "plan-captured-again", 2)
    note_of(found[1:], "plan-captured-again", 1)
    assert notes_on_captures([]) == ()
