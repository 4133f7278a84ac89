"""The functions of TransformerEngine's extension, `transformer_engine_torch`.

Signatures, results and their order are those of version 2.20 (pytorch/csrc/extensions). FLOPs:
`annotate/op_costs/library_operators/`.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.event_log import Shaped
from onerank.capture.no_device.extensions.emulated_modules import Extension, Function, Launch
from onerank.capture.no_device.extensions.fused_kernels import (
    MULTI_TENSOR,
    SCALED_SOFTMAX,
    in_place,
    like_first,
)
from onerank.capture.no_device.extensions.transformer_engine_attention import (
    fused_attn_bwd,
    fused_attn_fwd,
    get_fused_attn_backend,
)
from onerank.capture.no_device.extensions.transformer_engine_routers import ROUTERS
from onerank.capture.no_device.extensions.transformer_engine_tensors import (
    ENUMERATIONS,
    FUSING_ELEMENTWISE,
    Result,
    allocate,
    arguments_by_name,
    create_empty_quantized_tensor,
    data_and_scale,
    dequantize,
    fp8_transpose,
    is_quantized,
    kind_of,
    launch_quantizing,
    parts_of,
    quantize,
    quantize_into,
    split_quantize,
    torch_type,
)

# Matrix products ----------------------------------------------------------------------------------


def _product(a: Any, b: Any, trans_a: bool, trans_b: bool) -> tuple[list[Any], tuple[int, ...]]:
    """Return the operands of a product, as [m, k] x [k, n] with scales, and the result's shape.

    cuBLAS sees matrices by columns, so the rows of the result come from b, its columns from a.
    """
    numbers_a, type_a, scale_a = data_and_scale(a, by_columns=not trans_a)
    numbers_b, type_b, scale_b = data_and_scale(b, by_columns=trans_b)
    shape_a, shape_b = tuple(a.size()), tuple(b.size())
    rows_a, columns_a = prod(shape_a[:-1]), shape_a[-1]
    rows_b, columns_b = prod(shape_b[:-1]), shape_b[-1]
    n, k = (rows_a, columns_a) if trans_a else (columns_a, rows_a)
    m = columns_b if trans_b else rows_b
    packed = 2 if numbers_b.numel() * 2 == rows_b * columns_b else 1
    reads = [
        Shaped(numbers_b, type_b, (m, k // packed)),
        Shaped(numbers_a, type_a, (k // packed, n)),
        scale_b,
        scale_a,
    ]
    return reads, ((columns_b, n) if trans_b else (*shape_b[:-1], n))


_GEMM = (
    "a trans_a b trans_b d quantizer output_dtype bias bias_type gelu gelu_in grad workspace "
    "workspace_size accumulate use_split_accumulator comm_overlap comm_type extra_output "
    "bulk_overlap alpha beta"
).split()


def generic_gemm(launch: Launch, *args: Any, **named: Any) -> list[Any]:
    """Multiply two matrices, with bias and GELU or their gradients in the same kernel."""
    given = arguments_by_name(_GEMM, args, named)
    assert given.comm_overlap is None, "a script cannot create one: CommOverlap has no counterpart"
    reads, shape = _product(given.a, given.b, given.trans_a, given.trans_b)
    dtype = given.a.dtype if given.output_dtype is None else given.output_dtype
    d = allocate(launch, given.quantizer, shape, dtype) if given.d is None else given.d
    bias_grad = pre_gelu = None
    if given.bias is not None and given.grad:
        bias_grad = torch.empty(given.b.size()[-1], dtype=torch_type(dtype), device="cuda")
    if given.gelu and not given.grad:
        scaled = is_quantized(given.a) or is_quantized(given.b)
        like = given.bias_type if scaled else dtype
        pre_gelu = torch.empty(shape, dtype=torch_type(like), device="cuda")
    added = [
        None if given.grad else given.bias,
        given.gelu_in if given.gelu else None,
        parts_of(d)[0] if given.accumulate else None,
    ]
    written = [each for each in (bias_grad, pre_gelu) if each is not None]
    if all(prod(each.shape) for each in reads[:2]):
        result = Result(d, shape, dtype, given.quantizer)
        launch_quantizing(launch, "generic_gemm", [*reads, *added], result, written)
    return [d, bias_grad, pre_gelu, given.extra_output]


_GROUPED_GEMM = (
    "a trans_a b trans_b d d_type m_splits bias bias_type single_output pre_gelu_out grad "
    "workspace workspace_size accumulate use_split_accumulator math_sm_count"
).split()


def te_general_grouped_gemm(launch: Launch, *args: Any, **named: Any) -> list[Tensor]:
    """Multiply pairs of matrices, one after another on several streams of cuBLAS.

    Returns:
        The biases, or their gradients, which it was given.
    """
    given = arguments_by_name(_GROUPED_GEMM, args, named)
    offset = 0
    for at, (left, right) in enumerate(zip(given.a, given.b, strict=True)):
        reads, shape = _product(left, right, given.trans_a, given.trans_b)
        if given.single_output:
            rows = prod(shape[:-1])
            (whole,) = given.d
            result = whole[offset : offset + rows]
            offset += rows
        else:
            result = given.d[at]
        if not all(prod(each.shape) for each in reads[:2]):
            continue
        # Both lists hold empty tensors where there is no bias or no GELU. A gradient's kernel
        # writes the bias and reads GELU's input, and a forward's the other way round.
        bias, gelu = ([*each[at : at + 1]] for each in (given.bias, given.pre_gelu_out))
        added, written = (gelu, bias) if given.grad else (bias, gelu)
        added = [each for each in added if each.numel()]
        written = [each for each in written if each.numel()]
        before = [result] if given.accumulate else []
        launch("generic_gemm", [*reads, *added, *before], [*parts_of(result), *written])
    return list(given.bias)


# Norms and activations ----------------------------------------------------------------------------


def _norm_forward(name: str, *, has_mean: bool) -> Function:
    def forward(launch: Launch, source: Any, weight: Tensor, *rest: Any, **named: Any) -> list[Any]:
        keys = (*(("bias",) if has_mean else ()), "eps", "ln_out", "quantizer", "otype")
        given = {**dict(zip(keys, rest, strict=False)), **named}
        quantizer, dtype, out = given["quantizer"], given["otype"], given["ln_out"]
        rows = prod(source.shape[:-1])
        count = 2 if has_mean else 1
        statistics = [torch.empty(rows, dtype=torch.float32, device="cuda") for _ in range(count)]
        if out is None:
            out = allocate(launch, quantizer, source.shape, dtype)
        result = Result(out, source.shape, dtype, quantizer)
        reads = [source, weight, given.get("bias")]
        launch_quantizing(launch, name, reads, result, statistics)
        return [out, *statistics] if has_mean else [out, None, *statistics]

    return forward


def layernorm_bwd(launch: Launch, *args: Any) -> list[Tensor]:
    """Return the gradients of a layer norm's input, weight and bias."""
    gradient, source, mean, scale, weight, *_ = args
    results = [torch.empty_like(each) for each in (source, weight, weight)]
    launch("layernorm_bwd", [gradient, source, mean, scale, weight], results)
    return results


def rmsnorm_bwd(
    launch: Launch, gradient: Tensor, source: Tensor, scale: Tensor, weight: Tensor, *_: Any
) -> list[Tensor]:
    """Return the gradients of an RMS norm's input and weight."""
    results = [torch.empty_like(each) for each in (source, weight)]
    launch("rmsnorm_bwd", [gradient, source, scale, weight], results)
    return results


def rmsnorm_bwd_add(launch: Launch, *args: Any) -> list[Tensor]:
    """Return the gradients of an RMS norm's input, to which a tensor is added, and weight."""
    gradient, source, added, scale, weight, *_ = args
    results = [torch.empty_like(each) for each in (source, weight)]
    launch("rmsnorm_bwd_add", [gradient, source, scale, weight, added], results)
    return results


_POINTWISE = ("gelu", "qgelu", "relu", "srelu", "silu")

_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu")


def _activation(name: str, *, halves: bool) -> Function:
    def activate(launch: Launch, source: Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
        width = source.shape[-1] // 2 if halves else source.shape[-1]
        return _computed(launch, name, [source], quantizer, (*source.shape[:-1], width))

    return activate


def _activation_gradient(name: str) -> Function:
    def differentiate(
        launch: Launch, gradient: Tensor, source: Tensor, quantizer: Any, *_: Any, **__: Any
    ) -> Any:
        return _computed(launch, name, [gradient, source], quantizer, source.shape)

    return differentiate


def _computed(
    launch: Launch, name: str, reads: list[Tensor], quantizer: Any, shape: Sequence[int]
) -> Any:
    """Record an activation, and return its result."""
    dtype = reads[-1].dtype
    out = allocate(launch, quantizer, shape, dtype)
    result = Result(out, shape, dtype, quantizer)
    launch_quantizing(launch, name, reads, result, fusing=FUSING_ELEMENTWISE)
    return out


def _bias_and_activation_gradient(name: str) -> Function:
    def differentiate(
        launch: Launch, gradient: Tensor, source: Tensor, quantizer: Any
    ) -> list[Any]:
        bias = torch.empty(source.shape[-1], dtype=gradient.dtype, device="cuda")
        if quantizer is None:
            result = torch.empty_like(source)
            launch(name.removeprefix("dbias_"), [gradient, source], [result])
            launch("compute_dbias", [result], [bias])
            return [bias, result]
        out = allocate(launch, quantizer, source.shape, source.dtype)
        launch(name, [gradient, source], [*parts_of(out), bias])
        return [bias, out]

    return differentiate


def bgrad_quantize(launch: Launch, gradient: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the quantized gradient of its result."""
    bias = torch.empty(gradient.shape[-1], dtype=gradient.dtype, device="cuda")
    if quantizer is None:
        launch("compute_dbias", [gradient], [bias])
        return [bias, gradient]
    out = allocate(launch, quantizer, gradient.shape, gradient.dtype)
    if kind_of(quantizer) in FUSING_ELEMENTWISE:
        launch("bgrad_quantize", [gradient], [*parts_of(out), bias])
    else:
        launch("compute_dbias", [gradient], [bias])
        quantize_into(launch, gradient, quantizer, out)
    return [bias, out]


# Scales of delayed scaling, and the module --------------------------------------------------------


def _update_scales(
    launch: Launch, amax: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], *_: Any
) -> None:
    """Shift the histories of largest numbers, and compute scales from them."""
    launch("fused_amax_and_scale_update", [amax, *histories], [*histories, *scales])


def _constant(value: Any) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


_FUNCTIONS: dict[str, Function] = {
    "create_empty_quantized_tensor": create_empty_quantized_tensor,
    "quantize": quantize,
    "split_quantize": split_quantize,
    "dequantize": dequantize,
    "bgrad_quantize": bgrad_quantize,
    "fp8_transpose": fp8_transpose,
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "layernorm_fwd": _norm_forward("layernorm_fwd", has_mean=True),
    "layernorm_bwd": layernorm_bwd,
    "rmsnorm_fwd": _norm_forward("rmsnorm_fwd", has_mean=False),
    "rmsnorm_bwd": rmsnorm_bwd,
    "rmsnorm_bwd_add": rmsnorm_bwd_add,
    **{name: _activation(name, halves=False) for name in _POINTWISE},
    **{name: _activation(name, halves=True) for name in _GATED},
    **{
        name: _activation_gradient(name)
        for name in (
            *(f"d{name}" for name in (*_POINTWISE, *_GATED) if name != "clamped_swiglu"),
            "clamped_dswiglu",
        )
    },
    **{f"dbias_d{name}": _bias_and_activation_gradient(f"dbias_d{name}") for name in _POINTWISE},
    "get_fused_attn_backend": get_fused_attn_backend,
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": fused_attn_bwd,
    "fused_amax_and_scale_update_after_reduction": _update_scales,
    "fused_rope_forward": like_first("fused_rope_forward"),
    "fused_rope_backward": like_first("fused_rope_backward"),
    **{
        name: function
        for kind in (*SCALED_SOFTMAX, "scaled_aligned_causal_masked_softmax")
        for name, function in (
            (f"{kind}_forward", like_first(f"{kind}_forward")),
            (f"{kind}_backward", in_place(f"{kind}_backward")),
        )
    },
    **MULTI_TENSOR,
    **ROUTERS,
    # Answers as with cuBLAS 13.1.1 and cuDNN 9.24.
    "get_cublasLt_version": _constant(130101),
    "get_cudnn_version": _constant(92400),
    "get_num_cublas_streams": _constant(4),
    "get_stream_priority_range": _constant((0, -5)),
    "device_supports_multicast": _constant(value=False),
    "ubuf_built_with_mpi": _constant(value=False),
}


class _Scales:
    """`FP8TensorMeta`: scales and largest numbers of the tensors of a module."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


TRANSFORMER_ENGINE = Extension(
    "transformer_engine_torch",
    "transformer_engine",
    "transformer_engine",
    _FUNCTIONS,
    {**ENUMERATIONS, "FP8TensorMeta": _Scales},
)
