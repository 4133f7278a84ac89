"""TransformerEngine's tensors in 8 and 4 bits, and the functions that convert to and from them.

Tensors are allocated by the quantizers' own description of them (`inner_tensor_specs`). Signatures
and enumerations are those of version 2.20 (pytorch/csrc/extensions, transformer_engine.h).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.extensions.emulated_modules import Launch
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

AttentionBackend: Any = IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)

ENUMERATIONS: dict[str, Any] = {
    "DType": DType,
    "NVTE_Mask_Type": _MaskType,
    "NVTE_QKV_Layout": _Layout,
    "NVTE_Fused_Attn_Backend": AttentionBackend,
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


def torch_type(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a member of `DType`, of the extension's or of the package's."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH_TYPES[DType(int(dtype))]


def arguments_by_name(
    names: Sequence[str], args: Sequence[Any], named: dict[str, Any]
) -> SimpleNamespace:
    """Return the arguments of a function by name; None for those that are not given."""
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    return SimpleNamespace(**{**dict.fromkeys(names), **given, **named})


def kind_of(quantizer: Any) -> str:
    """Return the name of a quantizer's class; the package, and so the class, is imported later."""
    return type(quantizer).__name__


# Tensors with scales ------------------------------------------------------------------------------


# Its tensors are also those of delayed scaling, see `create_empty_quantized_tensor`.
_CURRENT_SCALING = "transformer_engine.pytorch.tensor.float8_tensor.Float8CurrentScalingQuantizer"


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor has numbers in 8 or 4 bits, and scales."""
    return hasattr(tensor, "_quantizer") and hasattr(tensor, "get_data_tensors")


# Attributes of a quantized tensor: data in the order of rows and of columns, then their scales.
_DATA = (("_rowwise_data", "_data"), ("_columnwise_data", "_transpose"))
_SCALES = (("_rowwise_scale_inv", "_scale_inv"), ("_columnwise_scale_inv", "_scale_inv"))


def _first(tensor: Any, names: Sequence[str]) -> Tensor | None:
    values = (getattr(tensor, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def data_and_scale(tensor: Any, *, by_columns: bool) -> tuple[Tensor, torch.dtype, Tensor | None]:
    """Return the numbers of a tensor, their dtype and their scales."""
    if not is_quantized(tensor):
        return tensor, tensor.dtype, None
    # A GPU that multiplies 8 bits in any layout has no copy for the other order.
    data = _first(tensor, _DATA[by_columns])
    scale = _first(tensor, _SCALES[by_columns])
    if data is None:
        data, scale = _first(tensor, _DATA[not by_columns]), _first(tensor, _SCALES[not by_columns])
    assert data is not None
    kind = getattr(tensor, "_fp8_dtype", None)
    return data, torch.uint8 if kind is None else torch_type(kind), scale


def parts_of(tensor: Any) -> list[Tensor]:
    """Return the tensors of a result: itself, or numbers and scales in both orders."""
    if tensor is None:
        return []
    if not is_quantized(tensor):
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
        description = resolve(_CURRENT_SCALING)
    context: dict[str, Any] = {
        "is_tensor": not quantizer.internal,
        "requires_grad": False,
        **description.storage_metadata(quantizer, torch_type(dtype)),
    }
    inner = {
        name: torch.empty(size, dtype=kind, device=device)
        for name, (size, kind) in description.inner_tensor_specs(quantizer, shape).items()
    }
    return context["cls"].__tensor_unflatten__(inner, context, torch.Size(shape), None)


def allocate(launch: Launch, quantizer: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Allocate a tensor that a quantizer stores, or one of `dtype` if it is None."""
    if quantizer is None:
        return torch.empty(tuple(shape), dtype=torch_type(dtype), device="cuda")
    return create_empty_quantized_tensor(launch, quantizer, shape, dtype, "cuda", False)


def quantize(
    launch: Launch, tensor: Any, quantizer: Any, output: Any = None, noop: Tensor | None = None
) -> Any:
    """Convert a tensor; scales of the present numbers need their largest one first."""
    if quantizer is None:
        return tensor
    if output is None:
        output = allocate(launch, quantizer, tensor.shape, tensor.dtype)
    quantize_into(launch, tensor, quantizer, output, noop)
    return output


def quantize_into(
    launch: Launch, tensor: Any, quantizer: Any, output: Any, noop: Tensor | None = None
) -> None:
    """Record the conversion of a tensor into an allocated one; an empty tensor has none."""
    (source,) = parts_of(tensor)[:1]
    if not source.numel():
        return
    kind = kind_of(quantizer)
    if kind in ("Float8CurrentScalingQuantizer", "NVFP4Quantizer"):
        amax = torch.empty(1, dtype=torch.float32, device="cuda")
        launch("compute_amax", [source], [amax])
    scale = getattr(quantizer, "scale", None)
    given = [scale] if isinstance(scale, Tensor) else []
    launch("quantize", [source, *given, noop], parts_of(output))


FUSING = ("Float8Quantizer",)
"""Quantizers with which a product or a norm writes 8 bits itself: their scale is known before."""

FUSING_ELEMENTWISE = (*FUSING, "MXFP8Quantizer")
"""The same for activations: a thread block has all the numbers of a block of MXFP8."""


@dataclass(frozen=True)
class Result:
    """What a kernel computes for a tensor.

    Attributes:
        out: the tensor, as its quantizer stores it.
        shape: of its numbers.
        dtype: of its numbers before they are quantized.
        quantizer: its quantizer; None leaves the numbers as they are.
    """

    out: Any
    shape: Sequence[int]
    dtype: Any
    quantizer: Any


def launch_quantizing(
    launch: Launch,
    name: str,
    reads: Sequence[Any],
    result: Result,
    more: Sequence[Tensor] = (),
    *,
    fusing: tuple[str, ...] = FUSING,
) -> None:
    """Record a kernel, and the conversion of its result if the kernel does not quantize.

    Args:
        launch: records a launch.
        name: the kernel's.
        reads: what it reads.
        result: its result.
        more: what else it writes.
        fusing: quantizers whose conversion is part of the kernel.
    """
    if result.quantizer is None or kind_of(result.quantizer) in fusing:
        launch(name, reads, [*parts_of(result.out), *more])
        return
    unquantized = torch.empty(tuple(result.shape), dtype=torch_type(result.dtype), device="cuda")
    launch(name, reads, [unquantized, *more])
    quantize_into(launch, unquantized, result.quantizer, result.out)


def split_quantize(
    launch: Launch, tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Any], **_: Any
) -> list[Any]:
    """Convert the rows of each group apart."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split(list(sections))
    return [quantize(launch, *each) for each in zip(parts, quantizers, strict=True)]


def dequantize(launch: Launch, tensor: Any, otype: Any) -> Tensor:
    """Convert a tensor back."""
    data, _, scale = data_and_scale(tensor, by_columns=False)
    result = torch.empty(tuple(tensor.size()), dtype=torch_type(otype), device="cuda")
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
