"""Column- and row-parallel linear layers."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from onerank.capture.parallelize.autograd_collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def replace_forward(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Let a module of one input run `forward(module, input)`.

    Bound, so that a deep copy of the module runs on its own weights.
    """
    module.forward = MethodType(forward, module)


def matrix_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer as [out, in]; transformers' Conv1D keeps [in, out]."""
    weight = module.get_parameter("weight")
    return weight.t() if isinstance(module, Conv1D) else weight


def column_linear(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    copy: bool,
    gathers: Callable[[], bool] = lambda: False,
    linear: Linear = nn.functional.linear,
) -> None:
    """Shard a linear layer's output features: [..., in] -> [..., out / size].

    `copy` places the border at this layer; without it the border stands further out, and `linear`
    is how it multiplies. Where `gathers` says so, the output is gathered: [..., in] -> [..., out].
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = copy_to_group(input, group) if copy else input
        y = linear(x, matrix_of(self), self.bias)
        return gather_from_group(y, group) if gathers() else y

    replace_forward(module, forward)


def row_linear(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    split: bool,
    reduce: Callable[[Tensor, dist.ProcessGroup], Tensor] = reduce_from_group,
) -> None:
    """Shard a linear layer's input features: [..., in / size] -> [..., out].

    With `split` the input is whole and split here. The bias is added once, after the sum.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = split_to_group(input, group) if split else input
        y = reduce(nn.functional.linear(x, matrix_of(self)), group)
        return y if self.bias is None else y + self.bias

    replace_forward(module, forward)
