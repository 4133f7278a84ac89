"""Find the copies of a model that a script keeps; they are sliced and sharded with the model.

Averages (EMA) are such copies; under FSDP so are frozen reference models whose outputs are compared
with the model's (DPO).
"""

import gc
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from onerank.capture.parallelize.model_structure import uncompiled
from onerank.capture.patches import live

Fits = Callable[[nn.Module, nn.Module, list[nn.Module]], bool]
_COMPARED = 1024  # elements; enough to distinguish a copy, cheap for large models


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the live modules of a model's class that have parameters of its names and shapes.

    Call it while the model is whole. Excluded are modules that share a parameter with the model or
    hold other values, and siblings of the model in a larger module, because layers look the same.
    """
    return _live_matches(model, _is_copy)


def references_of(model: nn.Module) -> list[nn.Module]:
    """Return the live frozen modules with a model's class, parameter names and shapes.

    Their values may differ. Parts of a larger module are excluded.
    """
    return _live_matches(model, _is_reference)


class LateReferences:
    """Recognises reference models that the script creates after the trained model was sharded."""

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()
        self._called: set[nn.Module] = set()

    def follow(self, model: nn.Module) -> None:
        """Record a trained model, before it is sharded."""
        self._kinds.add(_kind(model))

    def is_called(self, module: nn.Module) -> bool:
        """Return whether an outermost module is a reference in its first call."""
        if module in self._called:
            return False
        self._called.add(module)
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        return frozen and _kind(module) in self._kinds


def _kind(module: nn.Module) -> Hashable:
    root = uncompiled(module)
    return type(root), tuple((name, parameter.shape) for name, parameter in root.named_parameters())


def _live_matches(model: nn.Module, fits: Fits) -> list[nn.Module]:
    if not _matches(model, fits):
        return []
    gc.collect()  # reference cycles may keep unused copies alive
    return _matches(model, fits)


def _matches(model: nn.Module, fits: Fits) -> list[nn.Module]:
    modules = live(nn.Module)
    holders = [module for module in modules if any(part is model for part in module.modules())]
    family = {part for holder in holders for part in holder.modules()}
    same_class = [module for module in modules if type(module) is type(model)]
    return [other for other in same_class if other not in family and fits(model, other, modules)]


def _is_copy(model: nn.Module, other: nn.Module, _: list[nn.Module]) -> bool:
    pairs = _pairs(model, other)
    # A matrix, because the norms and biases of two fresh models are equal.
    return bool(pairs) and _equal(*next((pair for pair in pairs if pair[0].ndim > 1), pairs[0]))


def _is_reference(model: nn.Module, other: nn.Module, modules: list[nn.Module]) -> bool:
    pairs = _pairs(model, other)
    if not pairs or any(parameter.requires_grad for _, parameter in pairs):
        return False
    holders = [module for module in modules if any(part is other for part in module.modules())]
    return all(len([*holder.parameters()]) == len(pairs) for holder in holders)


def _pairs(model: nn.Module, other: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of equally named parameters; [] if names or shapes differ or one is shared."""
    originals, others = dict(model.named_parameters()), dict(other.named_parameters())
    if originals.keys() != others.keys():
        return []
    pairs = [(parameter, others[name]) for name, parameter in originals.items()]
    if any(type(mine) is not type(theirs) or mine.shape != theirs.shape for mine, theirs in pairs):
        return []  # `other` is sharded already
    disjoint = {*map(id, originals.values())}.isdisjoint(map(id, others.values()))
    return [*pairs] if disjoint else []


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    """Compare the first elements; tensors on the meta device count as equal."""
    if mine.is_meta or theirs.is_meta:
        return True
    first, second = (tensor.detach().flatten()[:_COMPARED] for tensor in (mine, theirs))
    # In both directions: either of them may have the narrower dtype.
    rounded = torch.equal(first.to(second), second), torch.equal(first, second.to(first))
    return any(rounded)  # one tensor may be a cast copy of the other
