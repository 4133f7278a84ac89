"""Attention to a part of the keys, forward and backward as separate calls.

A rank's queries attend to keys of other ranks. The backward communicates those keys again, so that
autograd does not keep them. The kernels behind `torch.nn.functional.scaled_dot_product_attention`
are therefore called directly, chosen as torch chooses them: FlashAttention in bf16 and fp16; the
memory-efficient kernel in fp32, with a mask, or if values and keys differ in width (latent
attention); the CPU kernel on a CPU.

Where no fused kernel applies on a CPU (dropout, values of another width), attention is computed
from elementary operators, like torch's `_scaled_dot_product_attention_math`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onerank.ir.errors import SliceError, division


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
class AttentionCall:
    """Queries of a rank, and the keys and values that they attend to: a part, or all.

    Attributes:
        query: [batch, heads, queries, width].
        key: [batch, key heads, keys, width].
        value: [batch, key heads, keys, value width].
        mode: scale, window and dropout.
        causal: whether the queries belong to the last keys and see no later keys; else each query
            sees all keys.
        mask: additive mask [batch or 1, 1, queries, keys] that replaces causality and window.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mode: AttentionMode
    causal: bool
    mask: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class AttentionOutput:
    """Output of attention, and the data its backward needs.

    Attributes:
        output: [batch, heads, queries, width].
        logsumexp: log-sum-exp of the scores, [batch, heads, queries].
        dropout_state: random state of the dropout (kernels) or the mask of kept weights (eager).
    """

    output: Tensor
    logsumexp: Tensor
    dropout_state: tuple[Tensor, ...] = ()


def attend_eager(call: AttentionCall) -> AttentionOutput:
    """Attend to keys with elementary operators; the causal mask starts at the upper left.

    With dropout, the output records the mask of kept weights.
    """
    scores = _scores(call)
    sums = scores.logsumexp(dim=-1)
    weights = _weights(scores, sums)
    dropout, dropout_state = call.mode.dropout, tuple[Tensor, ...]()
    if dropout > 0:
        dropout_state = (torch.rand_like(weights) >= dropout,)
        weights = weights * dropout_state[0] / (1 - dropout)
    output = weights @ _repeat_kv_heads(call.value, call.query)
    return AttentionOutput(output, sums, dropout_state)


def attend_eager_backward(
    call: AttentionCall, forward: AttentionOutput, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the gradient of the output."""
    query, key, value = call.operands
    weights = _weights(_scores(call), forward.logsumexp)
    grad_weights = grad_output @ _repeat_kv_heads(value, query).mT
    kept = weights
    # The softmax gradient uses the weights before dropout, the values' gradient those after it.
    if call.mode.dropout > 0:
        scaled = forward.dropout_state[0].to(weights.dtype) / (1 - call.mode.dropout)
        kept, grad_weights = weights * scaled, grad_weights * scaled
    # The softmax gradient needs sum(weights * grad_weights) over all keys. A rank holds a part of
    # the keys; grad_output * output sums to the same number (FlashAttention, arXiv:2205.14135).
    inner = (grad_output * forward.output).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * call.mode.scale
    return (
        grad_scores @ _repeat_kv_heads(key, query),
        _sum_over_query_heads(grad_scores.mT @ query, key),
        _sum_over_query_heads(kept.mT @ grad_output, value),
    )


def _scores(call: AttentionCall) -> Tensor:
    scores = call.query @ _repeat_kv_heads(call.key, call.query).mT * call.mode.scale
    if call.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores if call.mask is None else scores + call.mask


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the scores' softmax; zeros where a query sees no key."""
    # A query whose keys are all masked has sums of -inf, and -inf - -inf is NaN.
    return torch.exp(scores - sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1))


def _repeat_kv_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat key or value heads to the number of query heads (grouped-query attention)."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_over_query_heads(gradient: Tensor, key: Tensor) -> Tensor:
    """Sum gradients [batch, heads, keys, width] over the query heads that share a key head."""
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2)


_aten: Any = torch.ops.aten

# CausalFromBottomRight of the memory-efficient kernel's CustomMaskType
# (aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)
_LOWER_RIGHT = 2

# the memory-efficient kernel pads its log-sum-exp to a multiple of 32 queries (kAlignLSE)
_ROWS = 32

MASK_ROW_MULTIPLE = 16
"""Elements of which the stride of a mask's rows is a multiple, for the memory-efficient kernel."""

HALF_TYPES = (torch.bfloat16, torch.float16)
"""Types that FlashAttention takes."""


def check_widths(query: Tensor, value: Tensor) -> None:
    """Check head and value widths against the CUDA kernels.

    Raises:
        SliceError: a width is not a multiple of 8.
    """
    for what, width in (("heads", query.shape[-1]), ("values", value.shape[-1])):
        if query.is_cuda and width % 8:
            raise SliceError(
                f"--cp: attention {what} have {width} features ({division(width, 8)}); "
                "the kernels on CUDA need a multiple of 8",
                code="cp-head-width",
            )


_Kernel = Literal["eager", "cpu", "flash", "flash window", "efficient"]


def _kernel_call(call: AttentionCall) -> tuple[_Kernel, AttentionCall]:
    """Return the kernel of a call, the same in forward and backward, and the call that it takes."""
    mode, mask = call.mode, call.mask
    causal = call.causal and mask is None
    same_width = call.query.shape[-1] == call.value.shape[-1]
    if not call.query.is_cuda:
        if causal:
            mask = _lower_right(call.query, call.key, mode.window)
        # The CPU kernel needs equal widths and no dropout.
        kernel: _Kernel = "cpu" if same_width and mode.dropout == 0 else "eager"
        return kernel, replace(call, mask=mask, causal=call.causal and mask is None)
    if call.query.dtype in HALF_TYPES and mask is None and same_width:
        return "flash" if mode.window is None else "flash window", call
    if causal:
        mask = _band(call.query, call.key, mode)
    return "efficient", replace(call, mask=mask, causal=call.causal and mask is None)


def attend(call: AttentionCall) -> AttentionOutput:
    """Attend to keys."""
    kernel, call = _kernel_call(call)
    query, key, mode = call.query, call.key, call.mode
    if kernel == "eager":
        return attend_eager(call)
    if kernel == "cpu":
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *call.operands, 0.0, call.causal, attn_mask=call.mask, scale=mode.scale
        )
        return AttentionOutput(output, sums)
    if kernel == "flash window":
        output, sums, seed, offset, _ = _aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in call.operands),
            None,
            None,
            query.shape[2],
            key.shape[2],
            mode.dropout,
            call.causal,
            False,
            **_flash_window(mode),
            scale=mode.scale,
        )
        return AttentionOutput(output.transpose(1, 2), sums, (seed, offset))
    if kernel == "flash":
        output, sums, *_, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            *call.operands, mode.dropout, call.causal, scale=mode.scale
        )
        return AttentionOutput(output, sums, (seed, offset))
    output, sums, seed, offset, _, _ = _aten._efficient_attention_forward(
        *(_to_kernel_layout(x, query) for x in call.operands),
        _bias(call.mask, query),
        None,
        None,
        None,
        None,
        mode.dropout,
        _LOWER_RIGHT if call.causal else 0,
        True,
        scale=mode.scale,
        window_size=mode.window if call.mask is None else None,
    )
    # Without the kernel's padding, which parts of other lengths do not have.
    return AttentionOutput(output.transpose(1, 2), sums[:, :, : query.shape[2]], (seed, offset))


def attend_backward(
    call: AttentionCall, forward: AttentionOutput, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, each in the shape of its tensor.

    Args:
        call: the call; its keys are a part of those that `forward` attended to, or all of them.
        forward: output and log-sum-exp over all keys that the queries attended to.
        grad_output: gradient of the output, [batch, heads, queries, value width].
    """
    # Kernels recompute the weights as exp(scores - log-sum-exp). With the log-sum-exp over all keys
    # a call for a part of the keys returns that part's exact share of the gradients.
    kernel, call = _kernel_call(call)
    query, key, mode = call.query, call.key, call.mode
    if kernel == "eager":
        return attend_eager_backward(call, forward, grad_output)
    lengths = query.shape[2], key.shape[2]
    tensors = grad_output, *call.operands, forward.output
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors,
            forward.logsumexp.contiguous(),
            0.0,
            call.causal,
            attn_mask=call.mask,
            scale=mode.scale,
        )
    if kernel == "flash window":
        gradients = _aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in tensors),
            forward.logsumexp.contiguous(),
            None,
            None,
            *lengths,
            mode.dropout,
            call.causal,
            *forward.dropout_state,
            **_flash_window(mode),
            scale=mode.scale,
        )
        grad_query, grad_key, grad_value = (x.transpose(1, 2) for x in gradients)
        return grad_query, grad_key, grad_value
    if kernel == "flash":
        return _aten._scaled_dot_product_flash_attention_backward(
            *tensors,
            forward.logsumexp.contiguous(),
            None,
            None,
            *lengths,
            mode.dropout,
            call.causal,
            *forward.dropout_state,
            scale=mode.scale,
        )
    return _efficient_backward(call, forward, tensors)


def _efficient_backward(
    call: AttentionCall, forward: AttentionOutput, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by the memory-efficient kernel.

    Args:
        call: as for `attend_backward`.
        forward: as for `attend_backward`.
        tensors: gradient of the output, query, key, value and output.
    """
    query, key, mode = call.query, call.key, call.mode
    rows = [_to_kernel_layout(x, query) for x in tensors]
    # `attend` cut the padding off, so that the log-sum-exp of several calls can be merged.
    padded_sums = nn.functional.pad(forward.logsumexp, (0, -query.shape[2] % _ROWS))
    gradients = _aten._efficient_attention_backward(
        *rows[:4],
        _bias(call.mask, query),
        rows[4],
        None,
        None,
        query.shape[2],
        key.shape[2],
        padded_sums,
        mode.dropout,
        *forward.dropout_state,
        _LOWER_RIGHT if call.causal else 0,
        False,
        scale=mode.scale,
        window_size=mode.window if call.mask is None else None,
    )
    grad_query, grad_key, grad_value = (x.transpose(1, 2) for x in gradients[:3])
    return (
        grad_query,
        _sum_over_query_heads(grad_key, key),
        _sum_over_query_heads(grad_value, call.value),
    )


def _flash_window(mode: AttentionMode) -> dict[str, int]:
    """Return the window as FlashAttention counts it: keys before and after a query's own key."""
    assert mode.window is not None, "the kernel is chosen by the window"
    return {"window_size_left": mode.window - 1, "window_size_right": 0}


def _lower_right(query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
    """Return a lower-right causal mask for the CPU kernel, whose flag aligns at the upper left."""
    queries, keys = query.shape[2], key.shape[2]
    if queries == keys and window is None:
        return None
    mask = torch.full((queries, keys), float("-inf"), dtype=query.dtype, device=query.device)
    future = mask.triu(keys - queries + 1)
    return future if window is None else future + mask.tril(keys - queries - window)


def _band(query: Tensor, key: Tensor, mode: AttentionMode) -> Tensor | None:
    """Return the mask of a window for fewer queries than keys; None if none is needed.

    The memory-efficient kernel takes a window by its size, but its backward then counts from the
    first key, as if there were as many queries as keys (mem_eff_attention/kernel_backward.h, torch
    2.11 and 2.13: `shift = query_start - key_start - p.window_size`).
    """
    if mode.window is None or query.shape[2] == key.shape[2]:
        return None
    return _lower_right(query, key, mode.window)


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask for the memory-efficient kernel: per head, with aligned rows."""
    if mask is None:
        return None
    if mask.stride(-2) % MASK_ROW_MULTIPLE:
        keys = mask.shape[-1]
        mask = nn.functional.pad(mask, (0, -keys % MASK_ROW_MULTIPLE))[..., :keys]
    return mask.expand(*query.shape[:2], -1, -1)


def _to_kernel_layout(x: Tensor, query: Tensor) -> Tensor:
    """Return [batch, tokens, heads, width] with the query's number of heads.

    The memory-efficient kernel takes this layout and does not broadcast key-value heads.
    """
    return _repeat_kv_heads(x, query).transpose(1, 2)
