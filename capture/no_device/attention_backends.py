"""Choose the kernel of scaled dot-product attention, as torch does on a GPU.

torch chooses in C++, by a function that only a CUDA build has.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from onerank.capture.no_device.emulated_gpu import MOST_FLASH_HEAD, EmulatedGpu
from onerank.capture.patches import overridden_kernels, rebound

_torch: Any = torch
# GPUs for which torch prefers cuDNN's attention: measured on an H100 and an H200 with torch 2.11,
# and `priority_order` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
_CUDNN_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
# The order in `ATen/Context.h`, before a script sets another one.
_DEFAULT_ORDER = [
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    *(SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION),
]
_MOST_CUDNN_HEAD = 128
# Heads of 192 and 256 ran on an H100 with torch 2.11.
_MOST_CUDNN_HEAD_ON_HOPPER = 256


@contextlib.contextmanager
def choose_attention(gpu: EmulatedGpu) -> Generator[None]:
    """Run scaled dot-product attention on CUDA tensors by the operator that `gpu` would run."""
    by_torch: Any = functional.scaled_dot_product_attention

    def enabled() -> tuple[str, ...]:
        return tuple(
            _BACKENDS[backend] for backend in _priority_order(gpu) if _IS_ENABLED[backend]()
        )

    # Dynamo calls it when it traces, and cannot trace the settings of torch's backends.
    vars(enabled)["_dynamo_marked_constant"] = True

    @functools.wraps(by_torch)
    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Real tensors on the CPU keep torch's own choice. So do nested tensors: torch chooses for
        # them in Python, by the functions of `_usable_backends`.
        if not query.is_cuda or query.is_nested or query.dim() != 4:
            return by_torch(query, *args, **kwargs)
        return _run(_Attention.of(query, *args, **kwargs).autocast(), gpu, enabled())

    def operator(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_nested or query.dim() != 4:
            # Its C++ implementation, which calls other operators.
            return _torch.ops.aten.scaled_dot_product_attention.default.decompose(
                query, *args, **kwargs
            )
        return attention(query, *args, **kwargs)

    with (
        # Graphs of torch.export call the operator, for which C++ would choose as on a CPU.
        overridden_kernels("aten", [("scaled_dot_product_attention", "AutogradCUDA", operator)]),
        rebound("torch.nn.functional", {"scaled_dot_product_attention": attention}),
        rebound("torch.backends.cuda", _usable_backends(gpu)),
    ):
        yield


def _usable_backends(gpu: EmulatedGpu) -> dict[str, Callable[..., bool]]:
    """Return replacements of `torch.backends.cuda`'s questions, which answer for `gpu`."""

    def usable(backend: SDPBackend, fits: Callable[["_Attention"], bool]) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            attention = _Attention(
                query=params.query,
                key=params.key,
                value=params.value,
                mask=params.attn_mask,
                dropout=params.dropout,
                is_causal=params.is_causal,
                scale=None,  # does not decide
            )
            return _IS_ENABLED[backend]() and fits(attention)

        return can_use

    return {
        "can_use_cudnn_attention": usable(
            SDPBackend.CUDNN_ATTENTION, lambda attention: attention.fits_cudnn(gpu)
        ),
        "can_use_flash_attention": usable(
            SDPBackend.FLASH_ATTENTION, lambda attention: attention.fits_flash(gpu)
        ),
        "can_use_efficient_attention": usable(
            SDPBackend.EFFICIENT_ATTENTION, _Attention.fits_efficient
        ),
        # Whether torch was built with FlashAttention, as CUDA builds are.
        "is_flash_attention_available": lambda: True,
    }


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

    def autocast(self) -> "_Attention":
        """Return the call as autocast changes it: the operator is one of those that it casts."""
        if not _torch.is_autocast_enabled("cuda"):
            return self
        dtype = _torch.get_autocast_dtype("cuda")

        def cast(tensor: Tensor) -> Tensor:
            casts = tensor.is_floating_point() and tensor.dtype != torch.float64
            return tensor.to(dtype) if casts else tensor

        mask = None if self.mask is None else cast(self.mask)
        query, key, value = map(cast, (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, mask=mask)

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.query.shape[-1]

    @property
    def needs_gradient(self) -> bool:
        """Whether the backward will read what the kernel saves for it."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    @property
    def _is_16_bit(self) -> bool:
        """Whether the dtype is one that cuDNN and FlashAttention take."""
        return self.query.dtype in (torch.float16, torch.bfloat16)

    @property
    def _has_contiguous_rows(self) -> bool:
        """Whether elements of a head, and of a row of the mask, are adjacent.

        All kernels but the math need it (`check_last_dim_stride_equals_1_dense` in
        sdp_utils_cpp.h). T5's bias has its heads last and is transposed, so it runs as math.
        """
        tensors = (self.query, self.key, self.value)
        adjacent = self.head == 1 or all(tensor.stride(-1) == 1 for tensor in tensors)
        return adjacent and (self.mask is None or self.mask.stride(-1) == 1)

    def additive_mask(self) -> Tensor | None:
        """Return the mask as numbers that are added to the scores."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return self.mask
        return torch.where(self.mask, 0.0, float("-inf")).to(self.query.dtype)

    def fits_cudnn(self, gpu: EmulatedGpu) -> bool:
        """Return whether cuDNN's kernel takes the call on `gpu`.

        It takes a mask, which GPT-2 has on an H100 (torch 2.11), but no gradient of it.
        """
        hopper = gpu.capability == (9, 0)
        most = _MOST_CUDNN_HEAD_ON_HOPPER if hopper else _MOST_CUDNN_HEAD
        fits = self.head <= most and self.head % 8 == 0
        constant = self.mask is None or not self.mask.requires_grad
        taken = self._is_16_bit and self._has_contiguous_rows
        return taken and constant and fits and gpu.capability >= (8, 0)

    def fits_flash(self, gpu: EmulatedGpu) -> bool:
        """Return whether FlashAttention 2 takes the call on `gpu`."""
        fits = self.head <= MOST_FLASH_HEAD and self.head == self.value.shape[-1]
        taken = self._is_16_bit and self._has_contiguous_rows
        return taken and self.mask is None and fits and gpu.capability >= (8, 0)

    def fits_efficient(self) -> bool:
        """Return whether the memory-efficient kernel takes the call.

        It needs a key for each head of the queries (`check_batch_size_and_num_heads_dense` in
        sdp_utils.cpp).
        """
        has_all_heads = self.key.shape[1] == self.query.shape[1] == self.value.shape[1]
        return has_all_heads and self._has_contiguous_rows

    def with_all_heads(self) -> "_Attention":
        """Return the call with a key and a value for each head of the queries."""
        copies = self.query.shape[1] // self.key.shape[1]
        if copies == 1:
            return self
        key, value = (t.repeat_interleave(copies, dim=1) for t in (self.key, self.value))
        return replace(self, key=key, value=value)


def _run(attention: _Attention, gpu: EmulatedGpu, enabled: Sequence[str]) -> Tensor:
    """Run attention by the first enabled backend that supports it.

    Raises:
        RuntimeError: none does, as torch raises it.
    """
    for backend in enabled:
        if backend == "cudnn" and attention.fits_cudnn(gpu):
            return _cudnn(attention)
        if backend == "flash" and attention.fits_flash(gpu):
            return _flash(attention)
        if backend == "efficient" and attention.fits_efficient():
            return _efficient(attention)
        if backend == "math":
            return _math(attention)
    raise RuntimeError("No available kernel. Aborting execution.")


def _priority_order(gpu: EmulatedGpu) -> list[SDPBackend]:
    """Return the backends in the order in which torch tries them on `gpu`."""
    numbers: list[int] = _torch._C._get_sdp_priority_order()
    order = [backend for backend in map(SDPBackend, numbers) if backend in _BACKENDS]
    cudnn = SDPBackend.CUDNN_ATTENTION
    # torch keeps an order that the script sets, and moves cuDNN to the front of the default order.
    preferred = gpu.capability in _CUDNN_CAPABILITIES and not _cudnn_is_deprioritized()
    if order == _DEFAULT_ORDER and preferred:
        order = [cudnn, *(backend for backend in order if backend != cudnn)]
    return order


def _cudnn_is_deprioritized() -> bool:
    # `check_prefer_cudnn_attention` in sdp_utils.cpp; c10 takes "1" alone for true.
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"


def _cudnn(attention: _Attention) -> Tensor:
    return _torch.ops.aten._scaled_dot_product_cudnn_attention(
        attention.query,
        attention.key,
        attention.value,
        attention.additive_mask(),
        attention.needs_gradient,
        attention.dropout,
        attention.is_causal,
        False,
        scale=attention.scale,
    )[0]


def _flash(attention: _Attention) -> Tensor:
    tensors, scale = (attention.query, attention.key, attention.value), attention.scale
    # The kernel needs heads of a multiple of 8 elements.
    padding = -attention.head % 8
    if padding:
        scale = attention.head**-0.5 if scale is None else scale
        tensors = tuple(functional.pad(tensor, (0, padding)) for tensor in tensors)
    # Called directly: without a GPU torch's dispatcher never picks it.
    output: Tensor = _torch.ops.aten._scaled_dot_product_flash_attention(
        *tensors, attention.dropout, attention.is_causal, False, scale=scale
    )[0]
    return output[..., : attention.head] if padding else output


def _efficient(attention: _Attention) -> Tensor:
    mask = attention.additive_mask()
    if mask is not None:
        sizes = *attention.query.shape[:3], attention.key.shape[2]
        # torch expands a broadcast mask before this operator too.
        mask = mask.expand(sizes)
    return _torch.ops.aten._scaled_dot_product_efficient_attention(
        attention.query,
        attention.key,
        attention.value,
        mask,
        attention.needs_gradient,
        attention.dropout,
        attention.is_causal,
        scale=attention.scale,
    )[0]


def _math(attention: _Attention) -> Tensor:
    attention = attention.with_all_heads()
    # Its products are within an operator that autocast has cast, so they keep float32, in which
    # this backend computes operands of 16 bits.
    with torch.autocast("cuda", enabled=False):
        return _torch.ops.aten._scaled_dot_product_attention_math(
            attention.query,
            attention.key,
            attention.value,
            attention.mask,
            attention.dropout,
            attention.is_causal,
            scale=attention.scale,
        )[0]


_BACKENDS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
# backend -> whether the script enables it
_IS_ENABLED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
