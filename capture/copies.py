"""Copies of a model, whose averages a script keeps (EMA): they are sliced and sharded with it."""

import gc

import torch
from torch import Tensor, nn

_COMPARED = 1024


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the live modules of a model's class that have parameters of its names and shapes.

    To be called while the model is whole. Modules that share a parameter with it or hold other
    numbers are none, nor are parts of a module that it is itself part of: layers are alike.
    """
    if not _alike(model):
        return []
    gc.collect()  # of those found, some may be held by nobody any more
    return _alike(model)


def _alike(model: nn.Module) -> list[nn.Module]:
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    holders = [one for one in modules if any(part is model for part in one.modules())]
    family = {part for holder in holders for part in holder.modules()}
    alike = [one for one in modules if type(one) is type(model) and one not in family]
    return [one for one in alike if _is_copy(model, one)]


def _is_copy(model: nn.Module, other: nn.Module) -> bool:
    own, others = dict(model.named_parameters()), dict(other.named_parameters())
    if not own or own.keys() != others.keys():
        return False
    pairs = [(parameter, others[name]) for name, parameter in own.items()]
    if any(type(one) is not type(two) or one.shape != two.shape for one, two in pairs):
        return False  # shards of another model among them
    matrix = next((pair for pair in pairs if pair[0].ndim > 1), pairs[0])
    return {*map(id, own.values())}.isdisjoint(map(id, others.values())) and _equal(*matrix)


def _equal(one: Tensor, two: Tensor) -> bool:
    """Compare the beginnings; nothing is known of numbers that are not there yet."""
    if one.is_meta or two.is_meta:
        return True
    first, second = (tensor.detach().flatten()[:_COMPARED] for tensor in (one, two))
    rounded = torch.equal(first.to(second), second), torch.equal(first, second.to(first))
    return any(rounded)  # one of them may have been cast
