"""Exchange of token rows between ranks: all-to-all, all-gather, reduce-scatter."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows [sum(sends), ...] -> [sum(receives), ...]; backward, the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchange(x, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.sends, ctx.receives, ctx.group), None, None, None


def exchange_rows(
    x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sends[r]` rows to each rank r and return the `receives[r]` rows from each, in order."""
    result: Tensor = ExchangeRows.apply(x, receives, sends, group)  # pyright: ignore[reportAssignmentType]
    return result


def _exchange(x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty((sum(receives), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), receives, sends, group=group)
    return received


class GatherRows(torch.autograd.Function):
    """All-gather of rows [lengths[own], ...] -> [sum(lengths), ...]; backward, reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _gather(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grads[0], ctx.lengths, ctx.group), None, None


class ScatterRows(torch.autograd.Function):
    """Reduce-scatter of rows [sum(lengths), ...] -> [lengths[own], ...]; backward, all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _scatter(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.lengths, ctx.group), None, None


def gather_rows(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the `lengths[r]` rows of each rank r, in order."""
    result: Tensor = GatherRows.apply(x, lengths, group)  # pyright: ignore[reportAssignmentType]
    return result


def scatter_rows(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sum rows over the ranks and return this rank's `lengths[own]` of them."""
    result: Tensor = ScatterRows.apply(x, lengths, group)  # pyright: ignore[reportAssignmentType]
    return result


def _gather(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((sum(lengths), *x.shape[1:]))
    if len(set(lengths)) == 1:
        all_gather(gathered, x.contiguous(), group=group)
    else:
        dist.all_gather(list(gathered.split(lengths)), x.contiguous(), group=group)
    return gathered


def _scatter(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    own = x.new_empty((lengths[group.rank()], *x.shape[1:]))
    if len(set(lengths)) == 1:
        reduce_scatter(own, x.contiguous(), group=group)
    else:
        dist.reduce_scatter(own, list(x.contiguous().split(lengths)), group=group)
    return own
