"""Flat gradient buckets, sliced over the ranks, and their reductions."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.data.data_groups import sort_of
from onerank.capture.parallelize.pipeline.stage import TIED
from onerank.ir.errors import SliceError

# DeepSpeed's reduce_bucket_size and nccl_start_alignment_factor, in elements
BUCKET_ELEMENTS = 500_000_000
ALIGNMENT = 2

# torch 2.13 renamed both and warns about the names that 2.11 has
_renamed = hasattr(dist, "all_gather_single")
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _renamed else "all_gather_into_tensor"
)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"
)


class Bucket:
    """Some parameters in one flat buffer, and the slice of it that this rank updates.

    Attributes:
        shard: the slice [padded / ranks], a parameter for the optimizer.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
        self._group = group
        self._divisor = divisor
        self._views: dict[Tensor, tuple[int, int]] = {}
        end = 0
        for parameter in parameters:
            self._views[parameter] = end, parameter.numel()
            end += parameter.numel()
        unit = ALIGNMENT * group.size()
        self._flat = parameters[0].new_zeros(-(-end // unit) * unit)
        for parameter, (start, length) in self._views.items():
            view = self._flat[start : start + length].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self._filling: Tensor | None = None
        self._missing: set[Tensor] = set()
        self._in_flight: tuple[Any, Tensor, Tensor] | None = None
        self._sum: Tensor | None = None
        self._tied: Any = getattr(parameters[0], TIED, None)
        own = self._flat.chunk(group.size())[group.rank()]
        self.shard = nn.Parameter(own)
        self._noted: tuple[str, list[int]] | None = None

    def note_weights(self) -> None:
        """Remember what the weights sum to, if they have gradients that no step has used."""
        pending = self._filling, self._in_flight, self._sum, *(p.grad for p in self._views)
        if any(one is not None for one in pending):
            self._noted = self._weights()

    def forget_weights(self) -> None:
        """Take it that the weights may change."""
        self._noted = None

    def weights_changed(self) -> bool:
        """Whether the weights are others than were noted, or lie elsewhere."""
        return self._noted is not None and self._noted != self._weights()

    def _weights(self) -> tuple[str, list[int]]:
        total = str(self._flat.sum(dtype=torch.float64).item())  # "nan" is the same as itself
        return total, [parameter.data_ptr() for parameter in self._views]

    def take(self, parameter: Tensor) -> bool:
        """Move a parameter's gradient into the bucket; return whether that completes it."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise SliceError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, whose size "
                "is not known ahead: make its embedding with sparse=False"
            )
        if self._filling is not None and parameter not in self._missing:
            self.launch()  # the micro-batch before did not complete it
        if self._filling is None:
            self._filling = torch.empty_like(self._flat)
            used = sum(length for _, length in self._views.values())
            self._filling[used:].zero_()
            self._missing = set(self._views)
        start, length = self._views[parameter]
        self._filling[start : start + length].copy_(parameter.grad.view(-1))
        parameter.grad = None
        self._missing.discard(parameter)
        return not self._missing

    def take_all(self) -> None:
        """Move the gradients of all parameters that have one into the bucket."""
        for parameter in self._views:
            if parameter.grad is not None:
                self.take(parameter)

    def launch(self) -> None:
        """Sum what the bucket holds over the ranks; parameters without a gradient count as zero."""
        if self._filling is None:
            return
        self.land()
        gradients, self._filling = self._filling, None
        for parameter in self._missing:
            start, length = self._views[parameter]
            gradients[start : start + length].zero_()
        gradients.div_(self._divisor)
        if self._group.size() == 1:
            self._in_flight = None, gradients, gradients
            return
        own = torch.empty_like(self.shard)
        work = _reduce_scatter(own, gradients, group=self._group, async_op=True)
        self._in_flight = work, gradients, own

    def land(self) -> None:
        """Wait for the sum and add it to those of the micro-batches before."""
        if self._in_flight is None:
            return
        work, _, own = self._in_flight
        self._in_flight = None
        if work is not None:
            work.wait()
        self._sum = own if self._sum is None else self._sum.add_(own)

    def finish(self) -> None:
        """Give the shard the gradients of the step."""
        self.launch()
        self.land()
        if self._sum is None:
            return
        if self._tied is not None:
            dist.all_reduce(self._sum, group=self._tied)
        before = self.shard.grad
        self.shard.grad = self._sum if before is None else before.add_(self._sum)
        self._sum = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that has elements in the shard, and their gradients."""
        if self.shard.grad is None:
            return
        first = self._group.rank() * self.shard.numel()
        for parameter, (start, length) in self._views.items():
            begin = max(start - first, 0)
            end = min(start + length - first, self.shard.numel())
            if begin < end:
                yield parameter, self.shard.grad[begin:end]

    def gather(self) -> None:
        """Collect the shards that the other ranks have updated."""
        if self._group.size() > 1:
            _all_gather(self._flat, self.shard.detach(), group=self._group)

    def watch(self, call: Callable[["Bucket", Tensor], None], undo: contextlib.ExitStack) -> None:
        """Have `call` told of each gradient that is complete, until `undo` is closed."""

        def arrived(parameter: Tensor) -> None:
            call(self, parameter)

        for parameter in self._views:
            handle = parameter.register_post_accumulate_grad_hook(arrived)
            undo.callback(handle.remove)


def buckets_of(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in the order in which backward reaches them.

    An embedding that other pipeline stages have too has a bucket of its own, as in Megatron-LM
    (megatron/core/distributed/param_and_grad_buffer.py): its shards are alike on all of them.
    """
    sorts: dict[Any, list[list[Tensor]]] = {}
    for parameter in reversed(parameters):
        sort = parameter.dtype, parameter.device, sort_of(parameter), hasattr(parameter, TIED)
        parts = sorts.setdefault(sort, [[]])
        filled = sum(p.numel() for p in parts[-1])
        if parts[-1] and filled + parameter.numel() > BUCKET_ELEMENTS:
            parts.append([])
        parts[-1].append(parameter)
    return [part for parts in sorts.values() for part in parts]
