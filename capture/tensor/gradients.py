"""Sum the gradients of replicated parameters that each rank computes a part of."""

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

_SUMMED = "_onerank_gradient_is_summed"


def sum_gradients(
    module: nn.Module, group: dist.ProcessGroup, names: Collection[str] | None = None
) -> None:
    """All-reduce the gradients of a module's own parameters, or of those named, as they come.

    Placed before each forward, since moving a model off the meta device makes new parameters.
    """
    module.register_forward_pre_hook(_summing(group, names))


def _summing(group: dist.ProcessGroup, names: Collection[str] | None) -> Callable[..., None]:
    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    def hook(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            wanted = names is None or name in names
            if wanted and parameter.requires_grad and not hasattr(parameter, _SUMMED):
                parameter.register_hook(total)
                setattr(parameter, _SUMMED, True)

    return hook
