"""Copies of a model that a script references, and no other module."""

import copy
import gc

from torch import nn

from onerank.capture.parallelize.ema_copies import copies_of, references_of


def test_a_copy_counts_while_it_is_referenced():
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    average = copy.deepcopy(model)
    other = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))  # other random numbers
    assert copies_of(model) == [average]
    average.itself = [average]  # a cycle, which only the garbage collector frees
    gc.disable()
    try:
        del average
        assert copies_of(model) == []
    finally:
        gc.enable()
    assert copies_of(other) == []


def test_a_reference_has_equal_shapes_and_no_trained_parameters():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))

    model, reference, trained = build(), build().requires_grad_(False), build()
    other = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).requires_grad_(False)
    larger = nn.ModuleList([build(), nn.Linear(5, 3)]).requires_grad_(False)
    outer = nn.ModuleList([build()]).requires_grad_(
        False
    )  # adds no parameters, like the wrapper of torch.compile
    referenced = [trained, other, larger, outer]
    assert references_of(model) == [reference, outer[0]]
    assert references_of(trained) == [reference, outer[0]]
    assert len(referenced) == 4
