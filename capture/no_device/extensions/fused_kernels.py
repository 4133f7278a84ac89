"""Functions of the extensions of apex, DeepSpeed and Mamba 1.

Signatures are those of apex's csrc at 6424da3 (2026-07), DeepSpeed 0.19 (csrc/adam) and mamba_ssm
2.3 (csrc/selective_scan). FLOPs: `annotate/op_costs/library_operators/`.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.extensions.emulated_modules import Extension, Function, Launch

# Norms of apex ------------------------------------------------------------------------------------


def _statistics(source: Tensor, shape: Sequence[int], count: int) -> list[Tensor]:
    """Allocate a mean and a scale, or a scale alone, for each row."""
    rows = source.numel() // max(1, prod(shape))
    dtype = torch.float32 if source.element_size() == 2 else source.dtype
    return [source.new_empty((rows,), dtype=dtype) for _ in range(count)]


def _norm(name: str, *, affine: int, statistics: int, mixed: bool = False) -> Function:
    """Return the counterpart of a norm.

    Args:
        name: operator's name.
        affine: number of weights: 2 of a layer norm, 1 of an RMS norm, 0 without weights.
        statistics: number of results besides the normalised input.
        mixed: whether the result has the dtype of the weights.
    """

    def forward(launch: Launch, source: Tensor, shape: Sequence[int], *rest: Any) -> list[Tensor]:
        weights = list(rest[:affine])
        dtype = weights[0].dtype if mixed else source.dtype
        results = [torch.empty_like(source, dtype=dtype), *_statistics(source, shape, statistics)]
        launch(name, [source, *weights], results)
        return results

    return forward


def _norm_gradient(name: str, *, affine: int, statistics: int) -> Function:
    """Return the counterpart of a norm's backward.

    Its arguments are gradient, statistics, input, shape and weights.
    """

    def backward(launch: Launch, gradient: Tensor, *rest: Any) -> Any:
        saved, source = list(rest[:statistics]), rest[statistics]
        weights = list(rest[statistics + 2 : statistics + 2 + affine])
        results = [torch.empty_like(each) for each in (source, *weights)]
        launch(name, [gradient, source, *saved, *weights], results)
        return results if weights else results[0]

    return backward


_APEX_NORMS: dict[str, Function] = {
    "forward": _norm("layer_norm_forward", affine=0, statistics=2),
    "forward_affine": _norm("layer_norm_forward", affine=2, statistics=2),
    "forward_affine_mixed_dtypes": _norm("layer_norm_forward", affine=2, statistics=2, mixed=True),
    "backward": _norm_gradient("layer_norm_backward", affine=0, statistics=2),
    "backward_affine": _norm_gradient("layer_norm_backward", affine=2, statistics=2),
    "rms_forward": _norm("rms_norm_forward", affine=0, statistics=1),
    "rms_forward_affine": _norm("rms_norm_forward", affine=1, statistics=1),
    "rms_forward_affine_mixed_dtypes": _norm(
        "rms_norm_forward", affine=1, statistics=1, mixed=True
    ),
    "rms_backward": _norm_gradient("rms_norm_backward", affine=0, statistics=1),
    "rms_backward_affine": _norm_gradient("rms_norm_backward", affine=1, statistics=1),
}


# Products with accumulation of apex ---------------------------------------------------------------


def _accumulated_product(launch: Launch, source: Tensor, gradient: Tensor, weight: Tensor) -> None:
    """Add gradient^T x source to the gradient of a weight."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    operands = [rows.t(), source.reshape(-1, source.shape[-1])]
    # Positions as for TransformerEngine's product: two scales, a bias, what it adds to.
    launch("wgrad_gemm_accum", [*operands, None, None, None, None, weight], [weight])


# Softmax of scores, and other functions of one operand's shape ------------------------------------

SCALED_SOFTMAX = ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax")
"""Megatron-LM's kernels. Apex has a module for each, TransformerEngine a function."""


def like_first(name: str) -> Function:
    """Return a counterpart whose result has the shape of its first operand."""

    def function(launch: Launch, *args: Any, **named: Any) -> Tensor:
        operands = [*args, *named.values()]
        result = torch.empty_like(operands[0], memory_format=torch.contiguous_format)
        launch(name, [each for each in operands if isinstance(each, Tensor)], [result])
        return result

    return function


def in_place(name: str) -> Function:
    """Return a counterpart that writes its first operand, and returns it."""

    def function(launch: Launch, *args: Any, **named: Any) -> Tensor:
        operands = [*args, *named.values()]
        launch(name, [each for each in operands if isinstance(each, Tensor)], [operands[0]])
        return operands[0]

    return function


# Mamba 1 ------------------------------------------------------------------------------------------

# Tokens that a block of the scan computes; it keeps a state for each block (selective_scan.cpp).
_SCAN_CHUNK = 2048


def _scan_forward(launch: Launch, *args: Any) -> list[Tensor]:
    """Return the result of a selective scan, the states of its blocks and the gated result."""
    u, delta, a, _, _, _, z, *_ = args
    batch, width, length = u.shape
    chunks = -(-length // _SCAN_CHUNK)
    results = [
        torch.empty_like(delta),
        a.new_empty((batch, width, chunks, a.shape[1] * 2)),
        *([torch.empty_like(z)] if z is not None else []),
    ]
    launch("selective_scan_fwd", args[:8], results)
    return results


def _scan_backward(launch: Launch, *args: Any) -> list[Tensor | None]:
    """Return the gradients of a selective scan's operands, in their order."""
    u, delta, a, b, c, d, z, bias, gradient, states, out, dz, _, recomputes_gated = args
    results: list[Tensor | None] = [torch.empty_like(u), torch.empty_like(delta)]
    results.append(torch.zeros_like(a))
    # Sums over the channels of a group, in 32 bits; constants over time have the weights' dtype.
    wide = [torch.zeros_like(x, dtype=torch.float32 if x.dim() >= 3 else None) for x in (b, c)]
    rest = [None if x is None else torch.zeros_like(x) for x in (d, bias)]
    gated: list[Tensor] = []
    if z is not None:
        gated = [torch.empty_like(z) if dz is None else dz]
        gated += [torch.empty_like(z)] if recomputes_gated else []
    written = [x for x in (*results, *wide, *rest, *gated) if x is not None]
    launch("selective_scan_bwd", [*args[:8], gradient, states, out], written)
    narrow = [each.to(like.dtype) for each, like in zip(wide, (b, c), strict=True)]
    return [*results, *narrow, *rest, *gated]


# Optimizers and lists of tensors of apex ----------------------------------------------------------


def multi_tensor_adam(
    launch: Launch, chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any
) -> None:
    """Update parameters and two moments from gradients; more lists are copies of the parameters."""
    del chunk_size, noop
    if lists[0]:
        launch("multi_tensor_adam", list(lists[:4]), [t for each in lists[1:] for t in each])


def multi_tensor_sgd(
    launch: Launch, chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any
) -> None:
    """Update parameters and momenta; a fourth list is a copy of the parameters."""
    del chunk_size, noop
    if lists[0]:
        launch("multi_tensor_sgd", list(lists[:3]), [t for each in lists[1:] for t in each])


def multi_tensor_l2norm(
    launch: Launch,
    chunk_size: int,
    noop: Tensor,
    lists: Sequence[Sequence[Tensor]],
    per_tensor: bool | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors, and of each if it is wanted."""
    del chunk_size, noop
    norm = torch.empty(1, dtype=torch.float32, device="cuda")
    each = torch.empty(len(lists[0]) if per_tensor else 0, dtype=torch.float32, device="cuda")
    if lists[0]:
        launch("multi_tensor_l2norm", list(lists[:1]), [norm, *([each] if per_tensor else [])])
    return norm, each


def multi_tensor_scale(
    launch: Launch, chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any
) -> None:
    """Write a multiple of the first tensors into the second ones."""
    del chunk_size, noop
    if lists[0]:
        launch("multi_tensor_scale", list(lists[:1]), list(lists[1]))


MULTI_TENSOR: dict[str, Function] = {
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_adam_capturable": multi_tensor_adam,
    "multi_tensor_adam_capturable_master": multi_tensor_adam,
    "multi_tensor_sgd": multi_tensor_sgd,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_unscale_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_scale_tensor": multi_tensor_scale,
}
"""Functions of apex on lists of tensors, of which DeepSpeed, TransformerEngine and ColossalAI have
copies."""


EXTENSIONS = (
    Extension("amp_C", "apex", "apex", MULTI_TENSOR),
    Extension("fused_layer_norm_cuda", "apex", "apex", _APEX_NORMS),
    Extension(
        "fused_weight_gradient_mlp_cuda",
        "apex",
        "apex",
        {
            "wgrad_gemm_accum_fp32": _accumulated_product,
            "wgrad_gemm_accum_fp16": _accumulated_product,
        },
    ),
    *(
        Extension(
            f"{kind}_cuda",
            "apex",
            "apex",
            {"forward": like_first(f"{kind}_forward"), "backward": in_place(f"{kind}_backward")},
        )
        for kind in (*SCALED_SOFTMAX, "generic_scaled_masked_softmax")
    ),
    Extension("fused_adam", "deepspeed", "apex", MULTI_TENSOR),
    Extension("fused_optim_cuda", "colossalai", "apex", MULTI_TENSOR),
    Extension(
        "selective_scan_cuda",
        "mamba_ssm",
        "mamba_ssm",
        {"fwd": _scan_forward, "bwd": _scan_backward},
    ),
)
"""Extensions by the package that imports them. Optimizers of DeepSpeed and ColossalAI are
copies of apex's."""
