"""Tensor-parallel borders as autograd functions, and the linear layers between them."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# torch 2.13 renamed them and warns about the names that 2.11 has
_RENAMED = hasattr(dist, "all_gather_single")
all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _RENAMED else "all_gather_into_tensor"
)
reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _RENAMED else "reduce_scatter_tensor"
)


class CopyToGroup(torch.autograd.Function):
    """Identity forward; all-reduce of the gradient backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """All-reduce forward, in place; identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x.detach()  # which a model may add to in place, as it may not to an input

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherFromGroup(torch.autograd.Function):
    """All-gather along the last dimension forward; the own part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), x.shape[-1]
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None


class SplitToGroup(torch.autograd.Function):
    """The own part of the last dimension forward; all-gather of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        width = x.shape[-1] // group.size()
        return x.narrow(-1, group.rank() * width, width).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor of any shape."""
    result: Tensor = CopyToGroup.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region with partial sums of any shape."""
    result: Tensor = ReduceFromGroup.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def gather_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region with shards [..., n / size]; return [..., n]."""
    result: Tensor = GatherFromGroup.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def split_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor [..., n]; return [..., n / size]."""
    result: Tensor = SplitToGroup.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather(gathered, x.contiguous(), group=group)
    return torch.cat(gathered.chunk(group.size()), dim=-1)


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
