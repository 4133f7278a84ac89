"""Choose the kernel of scaled dot-product attention, as torch does on a GPU.

torch chooses in C++, by a function that only a CUDA build has.
"""

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.patches import rebound

_torch: Any = torch
# GPUs for which torch prefers cuDNN's attention: measured on an H100 and an H200 with torch 2.11,
# and `priority_order` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
_CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
_MOST_CUDNN_HEAD = 128
# Elements of a head that FlashAttention 2 supports (`check_head_dim_size_flash`).
_MOST_FLASH_HEAD = 256


@contextlib.contextmanager
def choose_attention(gpu: EmulatedGpu) -> Generator[None]:
    """Run scaled dot-product attention on CUDA tensors by the operator that `gpu` would run."""
    by_torch: Any = functional.scaled_dot_product_attention

    @functools.wraps(by_torch)
    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not query.is_cuda or query.dim() != 4:
            return by_torch(query, *args, **kwargs)
        return _run(_Attention.of(query, *args, **kwargs), gpu)

    with rebound("torch.nn.functional", {"scaled_dot_product_attention": attention}):
        yield


@dataclass(frozen=True)
class _Attention:
    """Arguments of scaled dot-product attention; tensors are [batch, heads, sequence, head size].

    Attributes:
        query: queries.
        key: keys.
        value: values.
        mask: added to the scores; None for none.
        dropout: probability.
        is_causal: whether a token sees only those before it.
        scale: of the scores; None for 1 / sqrt(head size).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None

    @classmethod
    def of(  # noqa: PLR0917  torch's signature
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "_Attention":
        """Return the arguments, as torch's function takes them."""
        return cls(query, key, value, attn_mask, dropout_p, is_causal, scale)

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.query.shape[-1]

    @property
    def needs_gradient(self) -> bool:
        """Whether the backward will read what the kernel saves for it."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def with_all_heads(self) -> "_Attention":
        """Return it with a key and a value for each head of the queries."""
        copies = self.query.shape[1] // self.key.shape[1]
        if copies == 1:
            return self
        key, value = (t.repeat_interleave(copies, dim=1) for t in (self.key, self.value))
        return replace(self, key=key, value=value)


def _run(attention: _Attention, gpu: EmulatedGpu) -> Tensor:
    """Run attention by the first of cuDNN, FlashAttention and memory-efficient that supports it."""
    fused = attention.query.dtype in (torch.float16, torch.bfloat16) and attention.mask is None
    prefers_cudnn = gpu.capability in _CUDNN_CAPABILITIES
    if fused and prefers_cudnn and attention.head <= _MOST_CUDNN_HEAD and attention.head % 8 == 0:
        return _cudnn(attention)
    equal_heads = attention.head == attention.value.shape[-1]
    if fused and gpu.capability >= (8, 0) and attention.head <= _MOST_FLASH_HEAD and equal_heads:
        return _flash(attention)
    return _efficient(attention.with_all_heads())


def _cudnn(attention: _Attention) -> Tensor:
    return _torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(attention.query, attention.key, attention.value, None, attention.needs_gradient),
        *(attention.dropout, attention.is_causal, False),
        scale=attention.scale,
    )[0]


def _flash(attention: _Attention) -> Tensor:
    tensors, scale = (attention.query, attention.key, attention.value), attention.scale
    padding = -attention.head % 8  # the kernel needs heads of a multiple of 8 elements
    if padding:
        scale = attention.head**-0.5 if scale is None else scale
        tensors = tuple(functional.pad(tensor, (0, padding)) for tensor in tensors)
    output: Tensor = _torch.ops.aten._scaled_dot_product_flash_attention(
        *(*tensors, attention.dropout, attention.is_causal, False), scale=scale
    )[0]
    return output[..., : attention.head] if padding else output


def _efficient(attention: _Attention) -> Tensor:
    mask = attention.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(attention.query.dtype)
    if mask is not None:
        sizes = *attention.query.shape[:3], attention.key.shape[2]
        mask = mask.expand(sizes)
    return _torch.ops.aten._scaled_dot_product_efficient_attention(
        *(attention.query, attention.key, attention.value, mask, attention.needs_gradient),
        *(attention.dropout, attention.is_causal),
        scale=attention.scale,
    )[0]
