"""Attention to a part of the keys by torch's own kernels, forward and backward by themselves.

A part of the queries attends to keys that other ranks hold, and what autograd would keep of those
is to be communicated again instead. So the kernels behind
`torch.nn.functional.scaled_dot_product_attention` are called directly: FlashAttention in bf16 and
fp16, the memory-efficient kernel in fp32, and the CPU's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onerank.ir.errors import SliceError

_aten: Any = torch.ops.aten
_LOWER_RIGHT = 2  # the memory-efficient kernel's custom mask type
_ROWS = 32  # of which that kernel keeps whole multiples in its sums
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Attended:
    """What attention gave: the output [batch, heads, queries, width] and what its backward needs.

    `log_sums` are logarithms of the sums over the scores' exponentials, [batch, heads, queries].
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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> Attended:
    """Attend to keys.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, key heads, keys, width].
        value: as `key`.
        causal: whether the queries are those of the last keys, and see none behind their own;
            else each sees all.
        scale: of the scores.
        window: how many keys a query sees at most, its own the last; None for all, or causal.
    """
    if not query.is_cuda:
        mask = _lower_right(query, key, window) if causal else None
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
        return Attended(output, sums)
    if query.dtype in _HALVES and window is not None:
        output, sums, seed, offset, _ = _aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            *(None, None, query.shape[2], key.shape[2], 0.0, causal, False),
            **_flash_window(window),
            scale=scale,
        )
        return Attended(output.transpose(1, 2), sums, (seed, offset))
    if query.dtype in _HALVES:
        output, sums, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, scale=scale
        )
        return Attended(output, sums, (seed, offset))
    output, sums, seed, offset, _, _ = _aten._efficient_attention_forward(
        *(_rows_first(x, query) for x in (query, key, value)),
        *(None, None, None, None, None, 0.0, _LOWER_RIGHT if causal else 0, True),
        scale=scale,
        window_size=window,
    )
    return Attended(output.transpose(1, 2), sums[:, :, : query.shape[2]], (seed, offset))


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: Attended,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output, in its shape.

    Where the keys are a part of those that `of` is about, so are the gradients.
    """
    if not query.is_cuda:
        mask = _lower_right(query, key, window) if causal else None
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, query, key, value, of.output, of.log_sums.contiguous(), 0.0),
            causal and mask is None,
            attn_mask=mask,
            scale=scale,
        )
    if query.dtype in _HALVES and window is not None:
        gradients = _aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (gradient, query, key, value, of.output)),
            *(of.log_sums.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal),
            *of.random,
            **_flash_window(window),
            scale=scale,
        )
        for_query, for_key, for_value = (one.transpose(1, 2) for one in gradients)
        return for_query, for_key, for_value
    if query.dtype in _HALVES:
        return _aten._scaled_dot_product_flash_attention_backward(
            *(gradient, query, key, value, of.output, of.log_sums.contiguous(), None, None),
            *(query.shape[2], key.shape[2], 0.0, causal, *of.random),
            scale=scale,
        )
    rows = [_rows_first(x, query) for x in (gradient, query, key, value, of.output)]
    sums = nn.functional.pad(of.log_sums, (0, -query.shape[2] % _ROWS))
    gradients = _aten._efficient_attention_backward(
        *(*rows[:4], None, rows[4], None, None, query.shape[2], key.shape[2], sums, 0.0),
        *(*of.random, _LOWER_RIGHT if causal else 0, False),
        scale=scale,
        window_size=window,
    )
    for_query, for_key, for_value = (one.transpose(1, 2) for one in gradients[:3])
    return for_query, _summed_heads(for_key, key), _summed_heads(for_value, value)


def _flash_window(window: int) -> dict[str, int]:
    """Return a window as FlashAttention counts it: keys before and behind a query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def _lower_right(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """Return the mask that the CPU's kernel needs, whose flag aligns at the upper left."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and window is None:
        return None
    mask = torch.full((queries, keys), float("-inf"), dtype=query.dtype, device=query.device)
    behind = mask.triu(keys - queries + 1)
    return behind if window is None else behind + mask.tril(keys - queries - window)


def _rows_first(x: Tensor, query: Tensor) -> Tensor:
    """Return [batch, rows, heads, width], with as many heads as the query has."""
    groups = query.shape[1] // x.shape[1]
    return (x if groups == 1 else x.repeat_interleave(groups, dim=1)).transpose(1, 2)


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return gradient.reshape(batch, heads, -1, rows, width).sum(2)
