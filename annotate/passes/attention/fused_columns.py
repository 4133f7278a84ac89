"""Text columns of nodes of fused attention: PyTorch's operator, operands and results of each pass.

The operators are those that launch the kernels, `_cudnn_attention_forward` or
`_flash_attention_forward`, with arguments in the order of their schemas (torch 2.11 and 2.13). A
capture and the kernel databases have these operators, so look-ups find the new kernels.
"""

from typing import Any, NamedTuple

from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.dataflow import Operand, as_text

# Kernel names (forward, backward) that `attention_kernels.family_of` recognises.
_KERNELS = {
    "flash2": ("flash_fwd_kernel", "flash_bwd_kernel"),
    "flash3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
    "cudnn": ("cudnn sdpa flash_fprop", "cudnn sdpa flash_bprop"),
    "aotriton": ("attn_fwd", "bwd_kernel_fuse"),
    "ck": ("ck_tile fmhafwd", "ck_tile fmhabwd"),
    "aiter": ("fmha_fwd_hd", "fmha_bwd_hd"),
}

_NO_SIZES: list[int] = []


class _Argument(NamedTuple):
    """Type, shape and value of an argument, as stored in the node columns."""

    type: str
    shape: list[int]
    value: Any


_NONE = _Argument("None", _NO_SIZES, "<None>")


class _Tensors(NamedTuple):
    """Operands and results of both passes.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        out: result of forward.
        log_sums: log-sum of the softmax per row.
        out_gradient: gradient of the output; `_NONE` without backward.
        gradients: gradients of query, key and value; empty without backward.
    """

    query: _Argument
    key: _Argument
    value: _Argument
    out: _Argument
    log_sums: _Argument
    out_gradient: _Argument
    gradients: tuple[_Argument, ...]


def forward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the forward kernel.

    Args:
        call: the call of eager attention.
        family: the kernel's family; "" for an unknown kernel.
    """
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    off, scale = _flag(value=False), _number("Double", call.sizes.d**-0.5)
    inputs = [t.query, t.key, t.value, _NONE, _NONE]
    if cudnn:
        inputs += [_NONE, *lengths, _flag(value=True), _dropout(call), causal, off, scale]
    else:
        inputs += [*lengths, _dropout(call), causal, off, scale]
    return _text_columns(
        _kernel_name(family, 0), f"{_library(family)}_forward", inputs, [t.out, t.log_sums]
    )


def backward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the backward kernel; `family` as in `forward_columns`."""
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    scale = _number("Double", call.sizes.d**-0.5)
    inputs = [t.out_gradient, t.query, t.key, t.value, t.out, t.log_sums]
    if cudnn:
        seeds = [_unrecorded_tensor("Tensor(long int)", [])] * 2
        inputs += [*seeds, _NONE, _NONE, _NONE, *lengths, _dropout(call), causal, scale]
    else:
        seeds = [_unrecorded_tensor("Tensor(unsigned long)", shape) for shape in ([2], [])]
        inputs += [_NONE, _NONE, *lengths, _dropout(call), causal, *seeds, scale]
    operator = f"{_library(family)}_backward"
    return _text_columns(_kernel_name(family, 1), operator, inputs, list(t.gradients))


def _library(family: str) -> str:
    """Return the library in the name of PyTorch's operator; flash-attention if unknown."""
    return "cudnn" if family == "cudnn" else "flash"


def _kernel_name(family: str, pass_: int) -> str:
    return _KERNELS[family][pass_] if family else ("attention forward", "attention backward")[pass_]


def _text_columns(
    name: str, operator: str, inputs: list[_Argument], outputs: list[_Argument]
) -> dict[str, str]:
    library, pass_ = operator.split("_")
    columns = {
        "name": f"{name} (in place of eager attention)",
        "op": f"aten::_{library}_attention_{pass_}",
        "grid": "",
        "block": "",
    }
    for side, arguments in (("input", inputs), ("output", outputs)):
        for field, column in enumerate(("types", "shapes", "values")):
            columns[f"{side}_{column}"] = as_text([argument[field] for argument in arguments])
    return columns


def _tensors(call: EagerCall, *, cudnn: bool) -> _Tensors:
    """Return the tensors of a call: heads first for cuDNN, rows first for flash-attention."""
    s: AttentionSizes = call.sizes

    def with_layout(operand: Operand, heads: int, rows: int, width: int) -> _Argument:
        shape = [s.batch, heads, rows, width] if cudnn else [s.batch, rows, heads, width]
        count = s.batch * heads * rows * width
        return _Argument(
            operand.type, shape, [*operand.place, count, operand.tensor.item_bytes, ""]
        )

    def query_key_value(query: Operand, key: Operand, value: Operand) -> tuple[_Argument, ...]:
        return (
            with_layout(query, s.heads, s.rows, s.d),
            with_layout(key, s.key_heads, s.keys, s.d),
            with_layout(value, s.key_heads, s.keys, s.dv),
        )

    query, key, value = query_key_value(*call.tensors[:3])
    gradients = call.gradients
    return _Tensors(
        query,
        key,
        value,
        with_layout(call.tensors.out, s.heads, s.rows, s.dv),
        _unrecorded_tensor("Tensor(float)", [s.batch, s.heads, s.rows, 1][: 4 if cudnn else 3]),
        with_layout(gradients.out, s.heads, s.rows, s.dv) if gradients else _NONE,
        query_key_value(*gradients[1:]) if gradients else (),
    )


def _unrecorded_tensor(kind: str, shape: list[int]) -> _Argument:
    """Return a tensor of unknown storage."""
    return _Argument(kind, shape, [0, 0, 0, 0, 0, ""])


def _dropout(call: EagerCall) -> _Argument:
    """Return the dropout probability, which the trace does not record."""
    return _NONE if call.dropout else _number("Double", 0.0)


def _flag(*, value: bool) -> _Argument:
    return _Argument("Bool", _NO_SIZES, value)


def _number(kind: str, value: float) -> _Argument:
    return _Argument(kind, _NO_SIZES, value)
