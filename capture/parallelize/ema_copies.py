"""Copies of a model that a script keeps next to it; they are sliced and sharded with the model.

Averages (EMA) are such copies; under FSDP so are frozen reference models whose outputs are compared
with the model's (DPO).
"""

import gc
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from onerank.capture.patches import live

Fits = Callable[[nn.Module, nn.Module, list[nn.Module]], bool]
_COMPARED = 1024


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the live modules of a model's class that have parameters of its names and shapes.

    To be called while the model is whole. Modules that share a parameter with it or hold other
    numbers are none, nor are parts of a module that it is itself part of: layers are alike.
    """
    return _found(model, _is_copy)


def references_of(model: nn.Module) -> list[nn.Module]:
    """Return the live modules of a model's class, names and shapes that train nothing.

    Whatever numbers they hold. Parts of a larger module are none.
    """
    return _found(model, _is_reference)


class LateReferences:
    """Knows the trained models, to tell a reference that is not sliced before it is called."""

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()
        self._called: set[nn.Module] = set()

    def follow(self, model: nn.Module) -> None:
        """Take note of a model that trains, before it is sharded."""
        self._kinds.add(_kind(model))

    def is_called(self, module: nn.Module) -> bool:
        """Whether a module that is called from outside is a reference, called the first time."""
        if module in self._called:
            return False
        self._called.add(module)
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        return frozen and _kind(module) in self._kinds


def _kind(module: nn.Module) -> Hashable:
    root = getattr(module, "_orig_mod", module)  # what torch.compile wraps
    return type(root), tuple((name, one.shape) for name, one in root.named_parameters())


def _found(model: nn.Module, fits: Fits) -> list[nn.Module]:
    if not _alike(model, fits):
        return []
    gc.collect()  # of those found, some may be held by nobody any more
    return _alike(model, fits)


def _alike(model: nn.Module, fits: Fits) -> list[nn.Module]:
    modules = live(nn.Module)
    holders = [module for module in modules if any(part is model for part in module.modules())]
    family = {part for holder in holders for part in holder.modules()}
    alike = [module for module in modules if type(module) is type(model) and module not in family]
    return [one for one in alike if fits(model, one, modules)]


def _is_copy(model: nn.Module, other: nn.Module, _: list[nn.Module]) -> bool:
    pairs = _pairs(model, other)
    return bool(pairs) and _equal(*next((pair for pair in pairs if pair[0].ndim > 1), pairs[0]))


def _is_reference(model: nn.Module, other: nn.Module, modules: list[nn.Module]) -> bool:
    pairs = _pairs(model, other)
    if not pairs or any(parameter.requires_grad for _, parameter in pairs):
        return False
    holders = [module for module in modules if any(part is other for part in module.modules())]
    return all(len([*holder.parameters()]) == len(pairs) for holder in holders)


def _pairs(model: nn.Module, other: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of two modules by name; none, unless they are alike and not shared."""
    own, others = dict(model.named_parameters()), dict(other.named_parameters())
    if own.keys() != others.keys():
        return []
    pairs = [(parameter, others[name]) for name, parameter in own.items()]
    if any(type(one) is not type(two) or one.shape != two.shape for one, two in pairs):
        return []  # shards of another model among them
    apart = {*map(id, own.values())}.isdisjoint(map(id, others.values()))
    return [*pairs] if apart else []


def _equal(one: Tensor, two: Tensor) -> bool:
    """Compare the beginnings; nothing is known of numbers that are not there yet."""
    if one.is_meta or two.is_meta:
        return True
    first, second = (tensor.detach().flatten()[:_COMPARED] for tensor in (one, two))
    rounded = torch.equal(first.to(second), second), torch.equal(first, second.to(first))
    return any(rounded)  # one of them may have been cast
