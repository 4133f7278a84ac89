"""Attention over a sequence whose parts lie on the ranks of a context-parallel group.

Of 2 x size equal chunks rank r holds the chunks r and 2 x size - 1 - r, so that causal attention is
as much work on each. Before attention the ranks all-gather keys and values; each chunk of queries
then attends to the keys up to its own end. The backward gathers keys and values once more instead
of keeping them, and reduce-scatters their gradients: per layer and step 4 all-gathers and 2
reduce-scatters. So does Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2), and
TransformerEngine for Megatron-LM's `--cp-comm-type all_gather`
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py).

Different from TransformerEngine: both chunks run on one stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.attention import Attended, attend, attend_backward, check_widths
from onerank.capture.parallel import all_gather, reduce_scatter
from onerank.ir.errors import SliceError


@dataclass(frozen=True)
class Context:
    """The shares of a sequence among the ranks of a group."""

    group: dist.ProcessGroup

    def __deepcopy__(self, _: Any) -> "Context":
        return self  # as functions are, when a model with its hooks is copied

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks of 2 x size that this rank holds."""
        return self.group.rank(), 2 * self.group.size() - 1 - self.group.rank()

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of [batch, sequence, ...], one after the other.

        Raises:
            SliceError: the sequence is not a multiple of 2 x size.
        """
        size, length = self.group.size(), x.shape[1]
        if length % (2 * size):
            raise SliceError(
                f"--cp {size} cuts the sequence into 2 x {size} = {2 * size} chunks, and the "
                f"sequence has {length} tokens ({length} = {2 * size} x {length // (2 * size)} + "
                f"{length % (2 * size)}): pad or cut the batch"
            )
        parts = x.chunk(2 * size, dim=1)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim=1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend to the whole sequence, given this rank's part of it.

        Args:
            query: [batch, heads, part, width].
            key: [batch, key heads, part, width].
            value: as `key`.
            scale: of the scores.

        Returns:
            [batch, part, heads, width].
        """
        check_widths(query, key, value)
        result: Any = _GatheringAttention.apply(query, key, value, self, scale)
        return result


class _GatheringAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, context, scale = args
        ctx.context, ctx.scale = context, scale
        keys, values = (_whole(x, context.group) for x in (key, value))
        parts = [
            attend(part, keys[:, :, :end], values[:, :, :end], scale=scale)
            for part, end in _parts(query, context)
        ]
        kept = [[part.output, part.log_sums, *part.random] for part in parts]
        ctx.save_for_backward(query, key, value, *kept[0], *kept[1])
        return torch.cat([part.output.transpose(1, 2) for part in parts], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        context, half = ctx.context, len(kept) // 2
        keys, values = (_whole(x, context.group) for x in (key, value))
        for_keys, for_values = torch.zeros_like(keys), torch.zeros_like(values)
        for_query: list[Tensor] = []
        gradients = grads[0].transpose(1, 2).chunk(2, dim=2)
        for number, (part, end) in enumerate(_parts(query, context)):
            output, sums, *random = kept[number * half : (number + 1) * half]
            found = attend_backward(
                *(gradients[number], part, keys[:, :, :end], values[:, :, :end]),
                Attended(output, sums, tuple(random)),
                scale=ctx.scale,
            )
            for_query.append(found[0])
            for_keys[:, :, :end] += found[1]
            for_values[:, :, :end] += found[2]
        for_key, for_value = (_shares(x, context.group) for x in (for_keys, for_values))
        return torch.cat(for_query, dim=2), for_key, for_value, None, None


def _parts(query: Tensor, context: Context) -> Sequence[tuple[Tensor, int]]:
    """Return each chunk of the queries, and where it ends in the sequence."""
    parts = query.chunk(2, dim=2)
    length = parts[0].shape[2]
    return [(part, (at + 1) * length) for part, at in zip(parts, context.chunks, strict=True)]


def _whole(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' [batch, heads, part, width] and put the chunks in order."""
    size, (batch, heads, part, width) = group.size(), x.shape
    gathered = x.new_empty((size, batch, heads, part, width))
    all_gather(gathered.view(-1, heads, part, width), x.contiguous(), group=group)
    halves = [share.chunk(2, dim=2) for share in gathered]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves[::-1]], dim=2)


def _shares(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, heads, sequence, width] over the ranks and return this rank's chunks."""
    size = group.size()
    chunks = x.chunk(2 * size, dim=2)
    order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    shards = torch.stack([chunks[chunk] for chunk in order])
    own = x.new_empty((2, *shards.shape[1:]))
    reduce_scatter(own, shards, group=group)
    return torch.cat([own[0], own[1]], dim=2)
