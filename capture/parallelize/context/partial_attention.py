"""Attention to a part of the keys, forward and backward as separate calls.

A part of the queries attends to keys of other ranks, which are communicated again in the backward
instead of being kept by autograd. So the kernels behind
`torch.nn.functional.scaled_dot_product_attention` are called directly, under torch's own
conditions: FlashAttention in bf16 and fp16; the memory-efficient kernel in fp32, with a mask, or if
values and keys differ in width (latent attention); the CPU kernel on a CPU.

Where no fused kernel applies on a CPU (dropout, values of another width), attention is computed
from elementary operators, like torch's `_scaled_dot_product_attention_math`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onerank.ir.errors import SliceError


@dataclass(frozen=True)
class AttentionMode:
    """Scale, window and dropout of a layer's attention.

    Attributes:
        scale: factor of the scores.
        window: number of keys that a query sees, up to its own; None for no window.
        dropout: probability of dropping an attention weight.
    """

    scale: float
    window: int | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class AttentionOutput:
    """Output of attention, and the data its backward needs.

    Attributes:
        output: [batch, heads, queries, width].
        log_sums: log-sum-exp of the scores, [batch, heads, queries].
        random: random state of the dropout (kernels) or the mask of kept weights (eager).
    """

    output: Tensor
    log_sums: Tensor
    random: tuple[Tensor, ...] = ()


def attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    how: AttentionMode,
    causal: bool,
    mask: Tensor | None,
) -> AttentionOutput:
    """Attend to keys with elementary operators; the causal mask starts at the upper left.

    With dropout, the output records the mask of kept weights.
    """
    scores = _scores(query, key, how, mask, causal=causal)
    sums = scores.logsumexp(dim=-1)
    weights = _weights(scores, sums)
    random: tuple[Tensor, ...] = ()
    if how.dropout > 0:
        random = (torch.rand_like(weights) >= how.dropout,)
        weights = weights * random[0] / (1 - how.dropout)
    return AttentionOutput(weights @ _for_heads(value, query), sums, random)


def attend_eager_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: AttentionOutput,
    *,
    how: AttentionMode,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the gradient of the output."""
    weights = _weights(_scores(query, key, how, mask, causal=causal), of.log_sums)
    for_weights = gradient @ _for_heads(value, query).mT
    kept = weights
    if how.dropout > 0:
        scaled = of.random[0].to(weights.dtype) / (1 - how.dropout)
        kept, for_weights = weights * scaled, for_weights * scaled
    inner = (gradient * of.output).sum(-1, keepdim=True)
    for_scores = weights * (for_weights - inner) * how.scale
    return (
        for_scores @ _for_heads(key, query),
        _summed(for_scores.mT @ query, key),
        _summed(kept.mT @ gradient, value),
    )


def _scores(
    query: Tensor, key: Tensor, how: AttentionMode, mask: Tensor | None, *, causal: bool
) -> Tensor:
    scores = query @ _for_heads(key, query).mT * how.scale
    if causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(behind, float("-inf"))
    return scores if mask is None else scores + mask


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the scores' softmax; zeros where a query sees no key."""
    return torch.exp(scores - sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1))


def _for_heads(x: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


_aten: Any = torch.ops.aten

_LOWER_RIGHT = 2  # the memory-efficient kernel's custom mask type

_ROWS = 32  # the memory-efficient kernel pads its log-sums to multiples of 32 rows

_ALIGNED = 16  # it needs mask rows whose stride is a multiple of 16 elements

_HALVES = (torch.bfloat16, torch.float16)


def check_widths(query: Tensor, value: Tensor) -> None:
    """Check head and value widths against the CUDA kernels.

    Raises:
        SliceError: a width is not a multiple of 8.
    """
    for what, width in (("heads", query.shape[-1]), ("values", value.shape[-1])):
        if query.is_cuda and width % 8:
            raise SliceError(
                f"--cp: attention {what} have {width} features ({width} = 8 x {width // 8} + "
                f"{width % 8}); the kernels on CUDA need a multiple of 8",
                code="cp-head-width",
            )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    how: AttentionMode,
    causal: bool,
    mask: Tensor | None = None,
) -> AttentionOutput:
    """Attend to keys.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, key heads, keys, width].
        value: [batch, key heads, keys, value width].
        how: scale, window and dropout.
        causal: whether the queries belong to the last keys and see no later keys; else each query
            sees all keys.
        mask: additive mask [batch or 1, 1, queries, keys] that replaces causality and window.
    """
    if not query.is_cuda:
        mask = _lower_right(query, key, how.window) if causal and mask is None else mask
        upper_left = causal and mask is None
        if _needs_eager(query, value, how):
            return attend_eager(query, key, value, how=how, causal=upper_left, mask=mask)
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, upper_left, attn_mask=mask, scale=how.scale
        )
        return AttentionOutput(output, sums)
    if _is_flash(query, value, mask) and how.window is not None:
        output, sums, seed, offset, _ = _aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (query, key, value)),
            *(None, None, query.shape[2], key.shape[2], how.dropout, causal, False),
            **_flash_window(how.window),
            scale=how.scale,
        )
        return AttentionOutput(output.transpose(1, 2), sums, (seed, offset))
    if _is_flash(query, value, mask):
        output, sums, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, how.dropout, causal, scale=how.scale
        )
        return AttentionOutput(output, sums, (seed, offset))
    mask = _band(query, key, how) if causal and mask is None else mask
    output, sums, seed, offset, _, _ = _aten._efficient_attention_forward(
        *(_rows_first(x, query) for x in (query, key, value)),
        *(_bias(mask, query), None, None, None, None, how.dropout),
        *(_LOWER_RIGHT if causal and mask is None else 0, True),
        scale=how.scale,
        window_size=how.window if mask is None else None,
    )
    return AttentionOutput(output.transpose(1, 2), sums[:, :, : query.shape[2]], (seed, offset))


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: AttentionOutput,
    *,
    how: AttentionMode,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the gradient of the output, in its shape.

    `of` may cover more keys than `key`; the gradients then cover the keys in `key`.
    """
    if not query.is_cuda:
        mask = _lower_right(query, key, how.window) if causal and mask is None else mask
        upper_left = causal and mask is None
        if _needs_eager(query, value, how):
            return attend_eager_backward(
                gradient, query, key, value, of, how=how, causal=upper_left, mask=mask
            )
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, query, key, value, of.output, of.log_sums.contiguous(), 0.0),
            upper_left,
            attn_mask=mask,
            scale=how.scale,
        )
    if _is_flash(query, value, mask) and how.window is not None:
        gradients = _aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (gradient, query, key, value, of.output)),
            *(of.log_sums.contiguous(), None, None, query.shape[2], key.shape[2]),
            *(how.dropout, causal, *of.random),
            **_flash_window(how.window),
            scale=how.scale,
        )
        for_query, for_key, for_value = (gradient.transpose(1, 2) for gradient in gradients)
        return for_query, for_key, for_value
    if _is_flash(query, value, mask):
        return _aten._scaled_dot_product_flash_attention_backward(
            *(gradient, query, key, value, of.output, of.log_sums.contiguous(), None, None),
            *(query.shape[2], key.shape[2], how.dropout, causal, *of.random),
            scale=how.scale,
        )
    mask = _band(query, key, how) if causal and mask is None else mask
    rows = [_rows_first(x, query) for x in (gradient, query, key, value, of.output)]
    sums = nn.functional.pad(of.log_sums, (0, -query.shape[2] % _ROWS))
    gradients = _aten._efficient_attention_backward(
        *(*rows[:4], _bias(mask, query), rows[4], None, None, query.shape[2], key.shape[2]),
        *(sums, how.dropout, *of.random, _LOWER_RIGHT if causal and mask is None else 0, False),
        scale=how.scale,
        window_size=how.window if mask is None else None,
    )
    for_query, for_key, for_value = (gradient.transpose(1, 2) for gradient in gradients[:3])
    return for_query, _summed_heads(for_key, key), _summed_heads(for_value, value)


def _needs_eager(query: Tensor, value: Tensor, how: AttentionMode) -> bool:
    """Return whether the CPU kernel does not apply: it needs equal widths and no dropout."""
    return how.dropout > 0 or query.shape[-1] != value.shape[-1]


def _is_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return query.dtype in _HALVES and mask is None and query.shape[-1] == value.shape[-1]


def _flash_window(window: int) -> dict[str, int]:
    """Return a window as FlashAttention counts it: keys before and after a query's own key."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def _lower_right(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """Return a lower-right causal mask for the CPU kernel, whose flag aligns at the upper left."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and window is None:
        return None
    mask = torch.full((queries, keys), float("-inf"), dtype=query.dtype, device=query.device)
    behind = mask.triu(keys - queries + 1)
    return behind if window is None else behind + mask.tril(keys - queries - window)


def _band(query: Tensor, key: Tensor, how: AttentionMode) -> Tensor | None:
    """Return the mask of a window for fewer queries than keys; None if none is needed.

    The memory-efficient kernel takes a window by its size, but its backward then counts from the
    first key, as if there were as many queries as keys (mem_eff_attention/kernel_backward.h, torch
    2.11 and 2.13: `shift = query_start - key_start - p.window_size`).
    """
    if how.window is None or query.shape[2] == key.shape[2]:
        return None
    return _lower_right(query, key, how.window)


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask for the memory-efficient kernel: per head, with aligned rows."""
    if mask is None:
        return None
    if mask.stride(-2) % _ALIGNED:
        keys = mask.shape[-1]
        mask = nn.functional.pad(mask, (0, -keys % _ALIGNED))[..., :keys]
    return mask.expand(*query.shape[:2], -1, -1)


def _rows_first(x: Tensor, query: Tensor) -> Tensor:
    """Return [batch, rows, heads, width], with as many heads as the query has."""
    groups = query.shape[1] // x.shape[1]
    return (x if groups == 1 else x.repeat_interleave(groups, dim=1)).transpose(1, 2)


def _summed_heads(gradient: Tensor, like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return gradient.reshape(batch, heads, -1, rows, width).sum(2)
