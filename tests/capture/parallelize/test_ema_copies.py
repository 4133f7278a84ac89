"""Copies of a model: those that a script holds, and no other module."""

import copy
import gc

from torch import nn

from onerank.capture.parallelize.ema_copies import copies_of, references_of


def test_a_copy_is_one_as_long_as_somebody_holds_it():
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    average = copy.deepcopy(model)
    other = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))  # random numbers of its own
    assert copies_of(model) == [average]
    average.itself = [average]  # only the collector of cycles finds out that nobody holds it
    gc.disable()
    try:
        del average
        assert copies_of(model) == []
    finally:
        gc.enable()
    assert copies_of(other) == []


def test_a_reference_is_alike_and_trains_nothing():
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))

    model, reference, trained = made(), made().requires_grad_(False), made()
    other = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).requires_grad_(False)
    larger = nn.ModuleList([made(), nn.Linear(5, 3)]).requires_grad_(False)
    outer = nn.ModuleList([made()]).requires_grad_(False)  # adds nothing, as torch.compile's
    held = [trained, other, larger, outer]
    assert references_of(model) == [reference, outer[0]]
    assert references_of(trained) == [reference, outer[0]]
    assert len(held) == 4
