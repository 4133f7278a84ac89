"""Tensor-parallel borders as autograd functions, and the linear layers between them."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 renamed it and warns about the name that 2.11 has
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)


class Forward(Protocol):
    """Forward of a module of one input."""

    def __call__(self, input: Tensor) -> Tensor: ...  # noqa: A002


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
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherFromGroup(torch.autograd.Function):
    """All-gather along the last dimension forward; the own part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        size = group.size()
        ctx.rank, ctx.width = group.rank(), x.shape[-1]
        gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=group)
        return torch.cat(gathered.chunk(size), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None


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


def column_forward(linear: nn.Linear, group: dist.ProcessGroup, *, copy: bool) -> Forward:
    """Forward of a linear layer whose output features are sharded: [..., in] -> [..., out / size].

    `copy` places the border at this layer; without it the border stands further out.
    """

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        x = copy_to_group(input, group) if copy else input
        return nn.functional.linear(x, linear.weight, linear.bias)

    return forward


def gathered_column_forward(linear: nn.Linear, group: dist.ProcessGroup) -> Forward:
    """As `column_forward` with its border, and the output gathered: [..., in] -> [..., out]."""
    column = column_forward(linear, group, copy=True)

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        return gather_from_group(column(input), group)

    return forward


def row_forward(linear: nn.Linear, group: dist.ProcessGroup) -> Forward:
    """Forward of a linear layer whose input features are sharded: [..., in / size] -> [..., out].

    The bias is added once, after the sum.
    """

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        y = reduce_from_group(nn.functional.linear(input, linear.weight), group)
        return y if linear.bias is None else y + linear.bias  # pyright: ignore[reportUnnecessaryComparison]

    return forward
