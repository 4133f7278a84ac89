"""Context-parallel attention that all-gathers keys and values.

Each chunk of queries attends to the keys up to the end of the chunk. The backward gathers keys and
values again instead of keeping them, and reduce-scatters their gradients: per layer and step 4
all-gathers and 2 reduce-scatters. Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2) and
TransformerEngine for Megatron-LM's `--cp-comm-type all_gather` do the same
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py).

Keys and values keep their own widths. Multi-head latent attention gathers the keys and values of
all heads, as in Megatron-LM (megatron/core/transformer/multi_latent_attention.py). A sliding window
gathers as many keys and attends to fewer. With a mask, a chunk still sees only keys up to its end.

Unlike in TransformerEngine, both chunks run on one stream. A model's own ("eager") attention needs
all keys at once and autograd keeps them: per layer and step 2 all-gathers and 2 reduce-scatters.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter
from onerank.capture.parallelize.context.partial_attention import (
    AttentionMode,
    AttentionOutput,
    attend,
    attend_backward,
)


def chunks_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the chunks that this rank holds, of 2 x size."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


class GatheringAttention(torch.autograd.Function):
    """Attention of [batch, heads, part, width] to the keys of all ranks -> [batch, part, ...]."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, group, mode, mask = args
        ctx.group, ctx.mode = group, mode
        keys, values = (_gather_sequence(x, group) for x in (key, value))
        parts = [
            attend(
                part,
                keys[:, :, key_range],
                values[:, :, key_range],
                mode=mode,
                causal=True,
                mask=part_mask,
            )
            for part, key_range, part_mask in _query_parts(query, group, mode, mask)
        ]
        saved = [[part.output, part.logsumexp, *part.dropout_state] for part in parts]
        ctx.save_for_backward(query, key, value, mask, *saved[0], *saved[1])
        return torch.cat([part.output.transpose(1, 2) for part in parts], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *saved = ctx.saved_tensors
        group, states_per_part = ctx.group, len(saved) // 2
        keys, values = (_gather_sequence(x, group) for x in (key, value))
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_query: list[Tensor] = []
        grad_outputs = grads[0].transpose(1, 2).chunk(2, dim=2)
        for index, (part, key_range, part_mask) in enumerate(
            _query_parts(query, group, ctx.mode, mask)
        ):
            output, sums, *dropout_state = saved[
                index * states_per_part : (index + 1) * states_per_part
            ]
            gradient_parts = attend_backward(
                *(grad_outputs[index], part, keys[:, :, key_range], values[:, :, key_range]),
                AttentionOutput(output, sums, tuple(dropout_state)),
                mode=ctx.mode,
                causal=True,
                mask=part_mask,
            )
            grad_query.append(gradient_parts[0])
            grad_keys[:, :, key_range] += gradient_parts[1]
            grad_values[:, :, key_range] += gradient_parts[2]
        grad_key, grad_value = (
            _reduce_scatter_sequence(x, group) for x in (grad_keys, grad_values)
        )
        return torch.cat(grad_query, dim=2), grad_key, grad_value, None, None, None


class GatheredKeys(torch.autograd.Function):
    """All-gather of [batch, heads, part, width] -> [batch, heads, sequence, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grads[0], ctx.group), None


def gather_keys(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather keys or values of the whole sequence; the backward reduce-scatters gradients."""
    result: Tensor = GatheredKeys.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


class GatheredLogits(torch.autograd.Function):
    """All-gather of [batch, part, vocabulary] -> [batch, sequence, vocabulary].

    Every rank computes the same loss from them and keeps the gradient of its part. The gradient is
    scaled by the group size, because data parallelism averages over these ranks.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_sequence(logits.unsqueeze(1), group).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        chunks = grads[0].chunk(2 * size, dim=1)
        local = torch.cat([chunks[chunk] for chunk in chunks_of(ctx.group)], dim=1)
        return local.mul_(size), None


def _query_parts(
    query: Tensor, group: dist.ProcessGroup, mode: AttentionMode, mask: Tensor | None
) -> Sequence[tuple[Tensor, slice, Tensor | None]]:
    """Return each chunk of the queries, the range of keys it sees, and its mask."""
    parts = query.chunk(2, dim=2)
    length = parts[0].shape[2]
    starts = [chunk * length for chunk in chunks_of(group)]
    if mask is not None:  # from key 0 on, because kernels need aligned mask rows
        return [
            (part, slice(0, start + length), rows[..., : start + length])
            for part, start, rows in zip(parts, starts, mask.chunk(2, dim=2), strict=True)
        ]
    window = mode.window
    return [
        (part, slice(max(0, start + 1 - window) if window else 0, start + length), None)
        for part, start in zip(parts, starts, strict=True)
    ]


def _gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' [batch, heads, part, width] and put the chunks in order."""
    size, (batch, heads, part, width) = group.size(), x.shape
    gathered = x.new_empty((size, batch, heads, part, width))
    all_gather(gathered.view(-1, heads, part, width), x.contiguous(), group=group)
    halves = [shard.chunk(2, dim=2) for shard in gathered]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves[::-1]], dim=2)


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, heads, sequence, width] over the ranks and return this rank's chunks."""
    size = group.size()
    chunks = x.chunk(2 * size, dim=2)
    order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    shards = torch.stack([chunks[chunk] for chunk in order])
    local = x.new_empty((2, *shards.shape[1:]))
    reduce_scatter(local, shards, group=group)
    return torch.cat([local[0], local[1]], dim=2)
