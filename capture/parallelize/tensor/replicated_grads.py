"""Sum the gradients of replicated parameters when each rank computes a partial gradient.

Gradients are summed one by one as they are computed, or all after the backward in one flat
buffer, as Megatron-LM does for norms and biases
(megatron/core/distributed/finalize_model_grads.py).
"""

import functools
import importlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.model_structure import ROUTERS
from onerank.capture.parallelize.module_names import parent_of

# flat buffers have no public names in torch
_utils: Any = importlib.import_module("torch._utils")

_PARTIAL = "_onerank_partial"
_SUMMED = "_onerank_gradient_is_summed"


class PartialGradients:
    """Parameters of a module whose gradients are partial on each rank of a group.

    Attributes:
        deferred: whether gradients stay partial until `reduce_deferred`.
        pending: whether a gradient was deferred since the last reduction.
    """

    def __init__(self, group: dist.ProcessGroup, names: Collection[str] | None) -> None:
        self.group = group
        self.deferred = False
        self.pending = False
        self._names = names

    def __deepcopy__(self, _: Any) -> "PartialGradients":
        # A process group cannot be copied, so a copy of the model (EMA) shares it.
        return PartialGradients(self.group, self._names)

    def add(self, names: Collection[str] | None) -> None:
        """Add parameter names of the module; None adds all."""
        self._names = None if names is None or self._names is None else {*self._names, *names}

    def of(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the current parameters; moving a model may replace them."""
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (self._names is None or name in self._names):
                yield parameter

    def watch(self, module: nn.Module, *_: Any) -> None:
        """Hook the parameters, before each forward: a move off the meta device creates new ones."""
        for parameter in self.of(module):
            if not hasattr(parameter, _SUMMED):
                parameter.register_hook(self._total)
                setattr(parameter, _SUMMED, True)

    def _total(self, gradient: Tensor) -> Tensor:
        if self.deferred:
            self.pending = True
            return gradient
        # A collective takes contiguous tensors only, and a gradient may be a transposed view.
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
    """All-reduce the gradients of a module's direct parameters.

    Args:
        module: the module with the parameters.
        group: the ranks with partial gradients.
        names: names of the parameters; None selects all.
        reader: the module whose forward reads the parameters, if `module` itself is not called.
    """
    partial: PartialGradients | None = vars(module).get(_PARTIAL)
    if partial is None:
        partial = vars(module)[_PARTIAL] = PartialGradients(group, names)
        if reader is None:
            module.register_forward_pre_hook(partial.watch)
        else:  # a partial, not a lambda: a deep copy then refers to the copied module
            reader.register_forward_pre_hook(functools.partial(partial.watch, module))
    else:
        partial.add(names)


def sum_sharded_gradients(
    model: nn.Module,
    name: str,
    final_norms: Collection[nn.Module],
    group: dist.ProcessGroup,
    blocks: Collection[str],
) -> None:
    """Sum the gradients of the layers `name` and of the norms after them that run on a shard."""
    sharded = dict.fromkeys(final_norms)
    for inner, module in model.get_submodule(name).named_modules():
        qualified = f"{name}.{inner}"
        if not any(f"{qualified}.".startswith(f"{block}.") for block in blocks):
            parent = parent_of(qualified)
            # LongCat-Flash reads only the weight of this submodule: its parent's forward uses it.
            is_router_weight = parent.rpartition(".")[2] in ROUTERS
            sharded[module] = model.get_submodule(parent) if is_router_weight else None
    for module, reader in sharded.items():
        if any(True for _ in module.parameters(recurse=False)):
            sum_gradients(module, group, reader=reader)


def partial_gradients(model: nn.Module) -> list[tuple[nn.Module, PartialGradients]]:
    """Return the modules of a model with partial gradients."""
    return [
        (module, vars(module)[_PARTIAL]) for module in model.modules() if _PARTIAL in vars(module)
    ]


def reduce_deferred(partials: Iterable[tuple[nn.Module, PartialGradients]]) -> None:
    """All-reduce deferred gradients, with one collective per group and dtype.

    FSDP's shards are summed directly, because the other ranks hold the same rows.
    """
    # By id: modules that share a parameter would add it to the flat buffer twice.
    by_group: dict[tuple[dist.ProcessGroup, torch.dtype], dict[int, Tensor]] = {}
    for module, partial in partials:
        for parameter in partial.of(module) if partial.pending else ():
            gradient: Any = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                by_group.setdefault((partial.group, local.dtype), {})[id(parameter)] = (
                    local.detach()
                )
        partial.pending = False
    for (group, _), gradients in by_group.items():
        tensors = list(gradients.values())
        flat = _utils._flatten_dense_tensors(tensors)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(
            tensors, _utils._unflatten_dense_tensors(flat, tensors), strict=True
        ):
            gradient.copy_(summed)
