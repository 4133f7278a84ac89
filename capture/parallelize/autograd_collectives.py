"""Collectives as autograd functions: copy, reduce, gather and scatter regions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.ir.errors import SliceError, division

# torch 2.13 renamed both collectives and warns about the names that 2.11 has
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
        # Returned as a new tensor: autograd forbids in-place changes of an input that is returned,
        # and models add to the result in place.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class GatherFromGroup(torch.autograd.Function):
    """All-gather along the last dimension forward; this rank's part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.width = group.rank(), x.shape[-1]
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None


class SplitToGroup(torch.autograd.Function):
    """This rank's part of the last dimension forward; all-gather of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        width = x.shape[-1] // group.size()
        return x.narrow(-1, group.rank() * width, width).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


class AllGatherLastDim(torch.autograd.Function):
    """All-gather along the last dimension forward; reduce-scatter of the gradient backward.

    As `all_gather_last_dim_from_tensor_parallel_region` in
    megatron/core/tensor_parallel/mappings.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shards = torch.cat(grads[0].chunk(ctx.group.size(), dim=-1))
        grad = shards.new_empty((grads[0].shape[0], *shards.shape[1:]))
        reduce_scatter(grad, shards, group=ctx.group)
        return grad, None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor of any shape."""
    result: Tensor = CopyToGroup.apply(x, group)
    return result


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region with partial sums of any shape."""
    result: Tensor = ReduceFromGroup.apply(x, group)
    return result


def gather_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region with shards [..., n / size]; return [..., n]."""
    result: Tensor = GatherFromGroup.apply(x, group)
    return result


def split_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor [..., n]; return [..., n / size]."""
    result: Tensor = SplitToGroup.apply(x, group)
    return result


def all_gather_last_dim(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather shards [..., n / size] that ranks go on to use differently; return [..., n]."""
    result: Tensor = AllGatherLastDim.apply(x, group)
    return result


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The collective concatenates along the first dimension, so a copy reorders the shards, as in
    # Megatron-LM (_gather_along_last_dim in megatron/core/tensor_parallel/mappings.py).
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather(gathered, x.contiguous(), group=group)
    return torch.cat(gathered.chunk(group.size()), dim=-1)


def shard_length(length: int, size: int) -> int:
    """Return the tokens of each of `size` shards of a sequence.

    Raises:
        SliceError: the size does not divide the sequence.
    """
    if length % size:
        raise SliceError(
            f"--sp: --tp {size} must divide the sequence of {length} tokens "
            f"({division(length, size)}): pad or cut the batch",
            code="sp-sequence-indivisible",
        )
    return length // size
