"""Copies of a model, whose averages a script keeps (EMA): they are sliced and sharded with it."""

import gc

from torch import nn


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the live modules of a model's class that have parameters of its names and shapes.

    To be called while the model is whole. Modules that share a parameter with it are none.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    own = {id(parameter) for parameter in model.parameters()}
    alike = [one for one in gc.get_objects() if type(one) is type(model) and one is not model]
    return [
        one
        for one in alike
        if shapes
        and {name: p.shape for name, p in one.named_parameters()} == shapes
        and own.isdisjoint(id(parameter) for parameter in one.parameters())
    ]
