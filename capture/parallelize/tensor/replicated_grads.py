"""Sum the gradients of replicated parameters, of which each rank computes a part.

Either each gradient as it is computed, or all after the backward in one flat buffer, as Megatron-LM
does for norms and biases (megatron/core/distributed/finalize_model_grads.py).
"""

import functools
import importlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# flat buffers have no public names in torch
_utils: Any = importlib.import_module("torch._utils")

_PARTIAL = "_onerank_partial"
_SUMMED = "_onerank_gradient_is_summed"


class PartialGradients:
    """Those of a module's own parameters of which each rank of a group computes a part.

    Attributes:
        put_off: whether gradients are left as they come, for `reduce_deferred`.
        pending: whether some were left since then.
    """

    def __init__(self, group: dist.ProcessGroup, names: Collection[str] | None) -> None:
        self.group = group
        self.put_off = False
        self.pending = False
        self._names = names

    def __deepcopy__(self, _: Any) -> "PartialGradients":
        return PartialGradients(self.group, self._names)

    def add(self, names: Collection[str] | None) -> None:
        """Take in more parameters of the module; None is all."""
        self._names = None if names is None or self._names is None else {*self._names, *names}

    def of(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters as they are now."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (self._names is None or name in self._names):
                yield parameter

    def watch(self, module: nn.Module, *_: Any) -> None:
        """Before each forward, since moving a model off the meta device makes new parameters."""
        for parameter in self.of(module):
            if not hasattr(parameter, _SUMMED):
                parameter.register_hook(self._total)
                setattr(parameter, _SUMMED, True)

    def _total(self, gradient: Tensor) -> Tensor:
        if self.put_off:
            self.pending = True
            return gradient
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self.group)
        return gradient


def sum_gradients(
    module: nn.Module,
    group: dist.ProcessGroup,
    names: Collection[str] | None = None,
    *,
    reader: nn.Module | None = None,
) -> None:
    """All-reduce the gradients of a module's own parameters.

    Args:
        module: whose parameters they are.
        group: the ranks that compute a part each.
        names: of which parameters; None is all.
        reader: what reads them in its own forward, where the module's is not called.
    """
    partial: PartialGradients | None = vars(module).get(_PARTIAL)
    if partial is None:
        partial = vars(module)[_PARTIAL] = PartialGradients(group, names)
        if reader is None:
            module.register_forward_pre_hook(partial.watch)
        else:  # a partial, not a lambda, so that a copied model watches its own
            reader.register_forward_pre_hook(functools.partial(partial.watch, module))
    else:
        partial.add(names)


def partial_gradients(model: nn.Module) -> list[tuple[nn.Module, PartialGradients]]:
    """Return the modules in a model that have such parameters."""
    return [
        (module, vars(module)[_PARTIAL]) for module in model.modules() if _PARTIAL in vars(module)
    ]


def reduce_deferred(partials: Iterable[tuple[nn.Module, PartialGradients]]) -> None:
    """All-reduce the gradients that were put off: one call for all of a group and a type.

    Shards of them (FSDP's) are summed as they are: other ranks have the same rows.
    """
    held: dict[tuple[dist.ProcessGroup, torch.dtype], dict[int, Tensor]] = {}
    for module, partial in partials:
        for parameter in partial.of(module) if partial.pending else ():
            gradient: Any = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                held.setdefault((partial.group, local.dtype), {})[id(parameter)] = local.detach()
        partial.pending = False
    for (group, _), gradients in held.items():
        own = list(gradients.values())
        flat = _utils._flatten_dense_tensors(own)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(own, _utils._unflatten_dense_tensors(flat, own), strict=True):
            gradient.copy_(summed)
