"""Copies of a model: those that a script holds, and no other module."""

import copy
import gc

from torch import nn

from onerank.capture.copies import copies_of


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
