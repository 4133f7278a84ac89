"""The functions of TransformerEngine's extension, `transformer_engine_torch`.

Signatures, results and their order are those of version 2.20 (pytorch/csrc/extensions). Tensors in
8 or 4 bits are allocated by the quantizers' own description of them (`inner_tensor_specs`). FLOPs:
`annotate/op_costs/library_operators.py`.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.extensions.emulated_modules import Extension, Function, Launch
from onerank.capture.no_device.operators.gpu_operators import Shaped
from onerank.capture.patches import resolve

# Enumerations, in the order of their values -------------------------------------------------------


def _enumeration(name: str, members: str, start: int = 0) -> Any:
    """Return an enumeration; pybind11 gives one its members as `__members__`, as Python does."""
    return IntEnum(name, members.split(), start=start, module=__name__)


# transformer_engine.h has others in between.
DType: Any = IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)

_TORCH_TYPES: dict[Any, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


class _MaskType(IntEnum):
    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


# Type of mask -> that of torch's attention: 1 causal, 2 causal and aligned with the last key.
_CAUSAL = {2: 1, 3: 1, 4: 2, 5: 2}

_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD "
    "THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD "
    "Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD "
    "Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD"
)

_Layout: Any = _enumeration(
    "NVTE_QKV_Layout", " ".join(f"NVTE_{x}" for x in (*_LAYOUTS.split(), "QKV_Layout_NOT_SET"))
)

_Backend: Any = IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)

_ENUMERATIONS: dict[str, Any] = {
    "DType": DType,
    "NVTE_Mask_Type": _MaskType,
    "NVTE_QKV_Layout": _Layout,
    "NVTE_Fused_Attn_Backend": _Backend,
    "NVTE_Bias_Type": _enumeration(
        "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
    ),
    "NVTE_Softmax_Type": _enumeration(
        "NVTE_Softmax_Type",
        "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    ),
    "NVTE_QKV_Format": _enumeration(
        "NVTE_QKV_Format",
        "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD "
        "NVTE_THD_2SBHD NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    ),
    "Float8BlockScaleTensorFormat": _enumeration(
        "Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID"
    ),
    "CommOverlapType": _enumeration("CommOverlapType", "RS AG"),
    "CommOverlapAlgo": _enumeration(
        "CommOverlapAlgo",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
        "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
        "EXTERNAL_BULK_OVERLAP_AG",
    ),
    "FP8FwdTensors": _enumeration(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
        "GEMM3_WEIGHT GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": _enumeration(
        "FP8BwdTensors",
        "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    ),
    "NVTERoutingMapFormat": _enumeration("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": _enumeration("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC"),
    "NVTEScalingMode": _enumeration(
        "NVTEScalingMode",
        "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
        "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    ),
}


def _torch_type(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a member of `DType`, of the extension's or of the package's."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH_TYPES[DType(int(dtype))]


def _given(names: Sequence[str], args: Sequence[Any], named: dict[str, Any]) -> SimpleNamespace:
    """Return the arguments of a function by name; None for those that are not given."""
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    return SimpleNamespace(**{**dict.fromkeys(names), **given, **named})


def _kind(quantizer: Any) -> str:
    return type(quantizer).__name__


# Tensors with scales ------------------------------------------------------------------------------


_SAME_TENSORS = "transformer_engine.pytorch.tensor.float8_tensor.Float8CurrentScalingQuantizer"


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer") and hasattr(tensor, "get_data_tensors")


# Attributes of a quantized tensor: data in the order of rows and of columns, then their scales.
_DATA = (("_rowwise_data", "_data"), ("_columnwise_data", "_transpose"))
_SCALES = (("_rowwise_scale_inv", "_scale_inv"), ("_columnwise_scale_inv", "_scale_inv"))


def _first(tensor: Any, names: Sequence[str]) -> Tensor | None:
    values = (getattr(tensor, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _data_and_scale(tensor: Any, *, by_columns: bool) -> tuple[Tensor, torch.dtype, Tensor | None]:
    """Return the numbers of a tensor, their dtype and their scales."""
    if not _is_quantized(tensor):
        return tensor, tensor.dtype, None
    # A GPU that multiplies 8 bits in any layout has no copy for the other order.
    data = _first(tensor, _DATA[by_columns])
    scale = _first(tensor, _SCALES[by_columns])
    if data is None:
        data, scale = _first(tensor, _DATA[not by_columns]), _first(tensor, _SCALES[not by_columns])
    assert data is not None
    kind = getattr(tensor, "_fp8_dtype", None)
    return data, torch.uint8 if kind is None else _torch_type(kind), scale


def _parts(tensor: Any) -> list[Tensor]:
    """Return the tensors of a result: itself, or numbers and scales in both orders."""
    if tensor is None:
        return []
    if not _is_quantized(tensor):
        return [tensor]
    parts = [_first(tensor, names) for names in (*_DATA, *_SCALES)]
    unique = {id(part): part for part in parts if part is not None}
    return list(unique.values())


def create_empty_quantized_tensor(
    _: Launch, quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool
) -> Any:
    """Allocate a tensor as its quantizer describes it."""
    del pin_memory
    shape = tuple(int(size) for size in shape)
    description = type(quantizer)
    if description.__name__ == "Float8Quantizer":
        # It describes nothing; its tensors are those of the quantizer for present numbers.
        description = resolve(_SAME_TENSORS)
    context: dict[str, Any] = {
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        **description.storage_metadata(quantizer, _torch_type(dtype)),
    }
    inner = {
        name: torch.empty(size, dtype=kind, device=device)
        for name, (size, kind) in description.inner_tensor_specs(quantizer, shape).items()
    }
    return context["cls"].__tensor_unflatten__(inner, context, torch.Size(shape), None)


def _allocate(launch: Launch, quantizer: Any, shape: Sequence[int], dtype: Any) -> Any:
    if quantizer is None:
        return torch.empty(tuple(shape), dtype=_torch_type(dtype), device="cuda")
    return create_empty_quantized_tensor(launch, quantizer, shape, dtype, "cuda", False)


def quantize(
    launch: Launch, tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None
) -> Any:
    """Convert a tensor; scales of the present numbers need their largest one first."""
    if quantizer is None:
        return tensor
    if output is None:
        output = _allocate(launch, quantizer, tensor.shape, tensor.dtype)
    _quantize_into(launch, tensor, quantizer, output, noop)
    return output


def _quantize_into(
    launch: Launch, tensor: Any, quantizer: Any, output: Any, noop: Tensor | None = None
) -> None:
    (source,) = _parts(tensor)[:1]
    if not source.numel():
        return
    kind = _kind(quantizer)
    if kind in ("Float8CurrentScalingQuantizer", "NVFP4Quantizer"):
        amax = torch.empty(1, dtype=torch.float32, device="cuda")
        launch("compute_amax", [source], [amax])
    scale = getattr(quantizer, "scale", None)
    given = [scale] if isinstance(scale, Tensor) else []
    launch("quantize", [source, *given, noop], _parts(output))


def split_quantize(
    launch: Launch, tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Any], **_: Any
) -> list[Any]:
    """Convert the rows of each group apart."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split(list(sections))
    return [quantize(launch, *each) for each in zip(parts, quantizers, strict=True)]


def dequantize(launch: Launch, tensor: Any, otype: Any) -> Tensor:
    """Convert a tensor back."""
    data, _, scale = _data_and_scale(tensor, by_columns=False)
    result = torch.empty(tuple(tensor.size()), dtype=_torch_type(otype), device="cuda")
    launch("dequantize", [data, scale], [result])
    return result


def fp8_transpose(
    launch: Launch, source: Tensor, dtype: Any, *, out: Tensor | None = None
) -> Tensor:
    """Transpose numbers in 8 bits."""
    del dtype
    rows, columns = prod(source.shape[:-1]), source.shape[-1]
    if out is None:
        out = torch.empty((columns, rows), dtype=torch.uint8, device="cuda")
    launch("fp8_transpose", [source], [out])
    return out


# Matrix products ----------------------------------------------------------------------------------


def _product(a: Any, b: Any, trans_a: bool, trans_b: bool) -> tuple[list[Any], tuple[int, ...]]:
    """Return the operands of a product, as [m, k] x [k, n] with scales, and the result's shape.

    cuBLAS sees matrices by columns, so the rows of the result come from b, its columns from a.
    """
    numbers_a, type_a, scale_a = _data_and_scale(a, by_columns=not trans_a)
    numbers_b, type_b, scale_b = _data_and_scale(b, by_columns=trans_b)
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
    given = _given(_GEMM, args, named)
    if given.comm_overlap is not None:
        raise NotImplementedError("userbuffers: GEMMs that overlap communication have no model")
    reads, shape = _product(given.a, given.b, given.trans_a, given.trans_b)
    dtype = given.a.dtype if given.output_dtype is None else given.output_dtype
    d = _allocate(launch, given.quantizer, shape, dtype) if given.d is None else given.d
    # Only the kernels for scales of a whole tensor write 8 bits themselves.
    own = given.quantizer is None or _kind(given.quantizer) == "Float8Quantizer"
    result = d if own else torch.empty(shape, dtype=_torch_type(dtype), device="cuda")
    bias_grad = pre_gelu = None
    if given.bias is not None and given.grad:
        bias_grad = torch.empty(given.b.size()[-1], dtype=_torch_type(dtype), device="cuda")
    if given.gelu and not given.grad:
        scaled = _is_quantized(given.a) or _is_quantized(given.b)
        like = given.bias_type if scaled else dtype
        pre_gelu = torch.empty(shape, dtype=_torch_type(like), device="cuda")
    added = [
        None if given.grad else given.bias,
        given.gelu_in if given.gelu else None,
        _parts(d)[0] if given.accumulate else None,
    ]
    written = [each for each in (bias_grad, pre_gelu) if each is not None]
    if all(prod(each.shape) for each in reads[:2]):
        launch("generic_gemm", [*reads, *added], [*_parts(result), *written])
    if not own:
        _quantize_into(launch, result, given.quantizer, d)
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
    given = _given(_GROUPED_GEMM, args, named)
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
        launch("generic_gemm", [*reads, *added, *before], [*_parts(result), *written])
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
            out = _allocate(launch, quantizer, source.shape, dtype)
        own = quantizer is None or _kind(quantizer) == "Float8Quantizer"
        result = out
        if not own:
            result = torch.empty(source.shape, dtype=_torch_type(dtype), device="cuda")
        launch(name, [source, weight, given.get("bias")], [*_parts(result), *statistics])
        if not own:
            _quantize_into(launch, result, quantizer, out)
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
    """Record an activation; it quantizes its result unless scales need the largest number."""
    out = _allocate(launch, quantizer, shape, reads[-1].dtype)
    fused = _kind(quantizer) in ("NoneType", "Float8Quantizer", "MXFP8Quantizer")
    if fused:
        launch(name, reads, _parts(out))
        return out
    result = torch.empty(tuple(shape), dtype=reads[-1].dtype, device="cuda")
    launch(name, reads, [result])
    _quantize_into(launch, result, quantizer, out)
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
        out = _allocate(launch, quantizer, source.shape, source.dtype)
        launch(name, [gradient, source], [*_parts(out), bias])
        return [bias, out]

    return differentiate


def bgrad_quantize(launch: Launch, gradient: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and the quantized gradient of its result."""
    bias = torch.empty(gradient.shape[-1], dtype=gradient.dtype, device="cuda")
    if quantizer is None:
        launch("compute_dbias", [gradient], [bias])
        return [bias, gradient]
    out = _allocate(launch, quantizer, gradient.shape, gradient.dtype)
    fused = _kind(quantizer) in ("Float8Quantizer", "MXFP8Quantizer")
    if fused:
        launch("bgrad_quantize", [gradient], [*_parts(out), bias])
    else:
        launch("compute_dbias", [gradient], [bias])
        _quantize_into(launch, gradient, quantizer, out)
    return [bias, out]


# Attention ----------------------------------------------------------------------------------------


def get_fused_attn_backend(_: Launch, *args: Any) -> Any:
    """Return cuDNN's kernels, for 8 bits if queries are in 8 bits.

    They refuse cases such as wide heads, which is not modelled here. Since version 2.20 the only
    argument is a record, and the reason of a refusal is a second result.
    """
    dtype = args[0].qkv_dtype if len(args) == 1 else args[1]
    eight = int(dtype) in (DType.kFloat8E4M3, DType.kFloat8E5M2)
    backend = _Backend.NVTE_FP8 if eight else _Backend.NVTE_F16_arbitrary_seqlen
    return (backend, "") if len(args) == 1 else backend


def _format(layout: Any, *, of_keys: bool) -> str:
    """Return the order of dimensions of queries or keys: "SBHD", "BSHD", "THD" or "BHSD"."""
    name = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_")
    parts = [part.replace("2", "").replace("3", "") for part in name.split("_")]
    return parts[-1] if of_keys else parts[0]


def _by_sequence(tensor: Any, order: str) -> Any:
    """Return (batch, sequence, heads, width) of an operand; packed ones stay."""
    data, dtype, _ = _data_and_scale(tensor, by_columns=False)
    sizes = dict(zip(order, tensor.size(), strict=True))
    if "T" in sizes:
        return Shaped(data, dtype, [sizes[axis] for axis in "THD"])
    return Shaped(data, dtype, [sizes[axis] for axis in "BSHD"])


def _queries_and_keys(given: SimpleNamespace) -> list[Any]:
    """Return queries, keys and values, the mask, and what gives the lengths of packed sequences.

    These are their boundaries, the longest queries and the longest keys.
    """
    order = _format(given.qkv_layout, of_keys=False)
    key_order = _format(given.qkv_layout, of_keys=True)
    operands = zip((given.q, given.k, given.v), (order, key_order, key_order), strict=True)
    longest = (given.max_seqlen_q, given.max_seqlen_kv)
    return [
        *(_by_sequence(*each) for each in operands),
        _CAUSAL.get(int(given.attn_mask_type), 0),
        *([given.cu_seqlens_q, *longest] if "T" in order else [None, 0, 0]),
    ]


_FORWARD = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout o_format "
    "qkv_scale_inv_format bias_type attn_mask_type softmax_type window_size bottom_right_diagonal "
    "cu_seqlens_q cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded "
    "page_table_k page_table_v s_quantizer o_quantizer bias softmax_offset rng_gen "
    "rng_elts_per_thread return_max_logit cuda_graph"
).split()


def fused_attn_fwd(launch: Launch, *args: Any) -> list[Any]:
    """Return the result of cuDNN's attention, statistics of its softmax and the random state."""
    given = _given(_FORWARD, args, {})
    order = _format(given.qkv_layout, of_keys=False)
    sizes = dict(zip(order, given.q.size(), strict=True)) | {"D": given.v.size()[-1]}
    result_order = given.o_format.name.removeprefix("NVTE_").rpartition("2")[2]
    shape = [sizes[axis] for axis in result_order]
    out = _allocate(launch, given.o_quantizer, shape, given.fake_dtype)
    heads, batch = sizes["H"], given.cu_seqlens_q.numel() - 1
    shape = (sizes["T"], heads, 1) if "T" in sizes else (batch, heads, given.max_seqlen_q, 1)
    statistics = [
        torch.empty(shape, dtype=torch.float32, device="cuda")
        for _ in range(2 if given.return_max_logit else 1)
    ]
    random = torch.empty(2, dtype=torch.int64, device="cuda")
    added = [each for each in (given.bias, given.softmax_offset) if each is not None]
    reads = [*_queries_and_keys(given), *added]
    launch("fused_attn_fwd", reads, [*_parts(out)[:1], *statistics])
    return [out, *statistics, random, *added]


_BACKWARD = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout o_format do_format "
    "dqkv_layout qkv_scale_inv_format do_scale_inv_format bias_type attn_mask_type softmax_type "
    "window_size bottom_right_diagonal deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o "
    "fake_dtype aux_ctx_tensors cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer "
    "dqkv_quantizer cuda_graph"
).split()

_WITH_BIAS = (1, 2)  # before or after the scale


def fused_attn_bwd(launch: Launch, *args: Any) -> list[Any]:
    """Return the gradients of queries, keys, values, bias and the offset of the softmax."""
    given = _given(_BACKWARD, args, {})
    shapes = [tuple(each.size()) for each in (given.q, given.k, given.v)]
    gradients = _interleaved(given.dqkv_layout, shapes, given.fake_dtype)
    bias = None
    if int(given.bias_type) in _WITH_BIAS:
        bias = torch.empty_like(given.aux_ctx_tensors[-1])
    outputs = [_data_and_scale(each, by_columns=False)[0] for each in (given.o, given.d_o)]
    saved = [each for each in given.aux_ctx_tensors if each.is_floating_point()]
    reads = [*_queries_and_keys(given), *outputs, *saved]
    launch("fused_attn_bwd", reads, [*gradients, *([bias] if bias is not None else [])])
    return [*gradients, bias, None]


def _interleaved(
    layout: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """Allocate gradients of queries, keys and values, in one tensor where a layout has one."""
    parts = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")
    results: list[Tensor] = []
    for part in parts:
        shape = shapes[len(results)]
        count = next((int(digit) for digit in "23" if digit in part), 1)
        if count == 1:
            results.append(torch.empty(shape, dtype=dtype, device="cuda"))
            continue
        # "SB3HD": before the heads; "SBH3D": before a head's numbers.
        axis = len(shape) - (2 if part.endswith("HD") and part[-3].isdigit() else 1)
        whole = torch.empty((*shape[:axis], count, *shape[axis:]), dtype=dtype, device="cuda")
        results.extend(whole.select(axis, at) for at in range(count))
    return results


# Rotary embedding, softmax, dropout ---------------------------------------------------------------


def _like_first(name: str) -> Function:
    """Return a counterpart whose result has the shape of its first operand."""

    def function(launch: Launch, *args: Any, **named: Any) -> Tensor:
        operands = [*args, *named.values()]
        result = torch.empty_like(operands[0], memory_format=torch.contiguous_format)
        launch(name, [each for each in operands if isinstance(each, Tensor)], [result])
        return result

    return function


def _in_place(name: str) -> Function:
    """Return a counterpart that writes its first operand, and returns it."""

    def function(launch: Launch, *args: Any, **named: Any) -> Tensor:
        operands = [*args, *named.values()]
        launch(name, [each for each in operands if isinstance(each, Tensor)], [operands[0]])
        return operands[0]

    return function


# Optimizers and lists of tensors ------------------------------------------------------------------


def multi_tensor_adam(
    launch: Launch, chunk_size: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any
) -> None:
    """Update gradients, parameters and two moments; more lists are copies of the parameters."""
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


def _update_scales(
    launch: Launch, amax: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], *_: Any
) -> None:
    """Shift the histories of largest numbers, and compute scales from them."""
    launch("fused_amax_and_scale_update", [amax, *histories], [*histories, *scales])


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
"""Functions on lists of tensors, which TransformerEngine took over from apex."""


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
    "fused_rope_forward": _like_first("fused_rope_forward"),
    "fused_rope_backward": _like_first("fused_rope_backward"),
    **{
        f"{kind}_forward": _like_first(f"{kind}_forward")
        for kind in (
            "scaled_softmax",
            "scaled_masked_softmax",
            "scaled_upper_triang_masked_softmax",
            "scaled_aligned_causal_masked_softmax",
        )
    },
    **{
        f"{kind}_backward": _in_place(f"{kind}_backward")
        for kind in (
            "scaled_softmax",
            "scaled_masked_softmax",
            "scaled_upper_triang_masked_softmax",
            "scaled_aligned_causal_masked_softmax",
        )
    },
    **MULTI_TENSOR,
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
    {**_ENUMERATIONS, "FP8TensorMeta": _Scales},
)
