"""Causal attention as torch's own kernels compute it, forward and backward by themselves.

A part of the queries attends to keys that other ranks hold, and what autograd would keep of those
is to be communicated again instead. So the kernels behind
`torch.nn.functional.scaled_dot_product_attention` are called directly: FlashAttention in bf16 and
fp16, the memory-efficient kernel in fp32, and the CPU's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onerank.ir.errors import SliceError

_aten: Any = torch.ops.aten
_LOWER_RIGHT = 2  # the memory-efficient kernel's custom mask type
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Attended:
    """What attention gave: the output [batch, heads, queries, width] and what its backward needs.

    The logarithms of the sums over the scores are [batch, heads, queries], but for padding.
    """

    output: Tensor
    log_sums: Tensor
    random: tuple[Tensor, ...] = ()


def check_widths(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what the kernels cannot compute.

    Raises:
        SliceError: keys and values differ in width, or it is not a multiple of 8.
    """
    width = query.shape[-1]
    if key.shape[-1] != value.shape[-1]:
        raise SliceError(
            f"--cp: keys have {key.shape[-1]} features and values {value.shape[-1]}; the attention "
            "kernels that are called for a part of the sequence are known for equal widths: leave "
            "--cp out"
        )
    if query.is_cuda and width % 8:
        raise SliceError(
            f"--cp: attention heads have {width} features ({width} = 8 x {width // 8} + "
            f"{width % 8}); the kernels on CUDA need a multiple of 8"
        )


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Attended:
    """Let the last positions of a sequence attend to all of it, causally.

    Args:
        query: [batch, heads, queries, width], of the sequence's last positions.
        key: [batch, key heads, keys, width], whole.
        value: as `key`.
        scale: of the scores.
    """
    if not query.is_cuda:
        mask = _lower_right(query, key)
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return Attended(output, sums)
    if query.dtype in _HALVES:
        output, sums, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scale
        )
        return Attended(output, sums, (seed, offset))
    output, sums, seed, offset, _, _ = _aten._efficient_attention_forward(
        *(_rows_first(x, query) for x in (query, key, value)),
        *(None, None, None, None, None, 0.0, _LOWER_RIGHT, True),
        scale=scale,
    )
    return Attended(output.transpose(1, 2), sums, (seed, offset))


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, of: Attended, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output, in its shape."""
    if not query.is_cuda:
        mask = _lower_right(query, key)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, query, key, value, of.output, of.log_sums, 0.0, mask is None),
            attn_mask=mask,
            scale=scale,
        )
    if query.dtype in _HALVES:
        return _aten._scaled_dot_product_flash_attention_backward(
            *(gradient, query, key, value, of.output, of.log_sums, None, None),
            *(query.shape[2], key.shape[2], 0.0, True, *of.random),
            scale=scale,
        )
    rows = [_rows_first(x, query) for x in (gradient, query, key, value, of.output)]
    gradients = _aten._efficient_attention_backward(
        *(*rows[:4], None, rows[4], None, None, query.shape[2], key.shape[2], of.log_sums, 0.0),
        *(*of.random, _LOWER_RIGHT, False),
        scale=scale,
    )
    for_query, for_key, for_value = (one.transpose(1, 2) for one in gradients[:3])
    return for_query, _summed_heads(for_key, key), _summed_heads(for_value, value)


def _lower_right(query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask that the CPU's kernel, which aligns at the upper left, needs beside a flag."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys:
        return None
    mask = torch.full((queries, keys), float("-inf"), dtype=query.dtype, device=query.device)
    return mask.triu_(keys - queries + 1)


def _rows_first(x: Tensor, query: Tensor) -> Tensor:
    """Return [batch, rows, heads, width], with as many heads as the query has."""
    groups = query.shape[1] // x.shape[1]
    return (x if groups == 1 else x.repeat_interleave(groups, dim=1)).transpose(1, 2)


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return gradient.reshape(batch, heads, -1, rows, width).sum(2)
