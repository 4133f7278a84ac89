"""The node columns of a fused attention kernel: PyTorch's operator, operands and results.

The operators are those that launch the kernels, `_cudnn_attention_forward` and
`_flash_attention_forward` with their backwards; arguments in the order of their schemas (torch 2.11
and 2.13).
"""

from typing import Any, NamedTuple

from onerank.annotate.passes.attention.dataflow import Operand
from onerank.annotate.passes.attention.eager_kernels import Sizes
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.tensor_access import as_text

BY_TORCH = frozenset({"flash2", "cudnn", "aotriton"})
"""Families that PyTorch's own operators run."""
_KERNELS = {
    "flash2": ("flash_fwd_kernel", "flash_bwd_kernel"),
    "flash3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
    "cudnn": ("cudnn sdpa flash_fprop", "cudnn sdpa flash_bprop"),
    "aotriton": ("attn_fwd", "bwd_kernel_fuse"),
    "ck": ("ck_tile fmhafwd", "ck_tile fmhabwd"),
    "aiter": ("fmha_fwd_hd", "fmha_bwd_hd"),
}
"""Names by which `attention_kernels.family_of` knows a family."""
_NO_SIZES: list[int] = []


class _Argument(NamedTuple):
    """Type, shape and value, as the columns hold them."""

    type: str
    shape: list[int]
    value: Any


_NONE = _Argument("None", _NO_SIZES, "<None>")


class _Tensors(NamedTuple):
    """Operands and results of both passes; None for a missing backward."""

    query: _Argument
    key: _Argument
    value: _Argument
    out: _Argument
    sums: _Argument
    given: _Argument
    gradients: tuple[_Argument, ...]


def forward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the forward kernel of a family, "" for one that is not known."""
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    off, scale = _flag(value=False), _number("Double", call.sizes.d**-0.5)
    inputs = [t.query, t.key, t.value, _NONE, _NONE]
    if cudnn:
        inputs += [_NONE, *lengths, _flag(value=True), _dropped(call), causal, off, scale]
    else:
        inputs += [*lengths, _dropped(call), causal, off, scale]
    return _columns(_name(family, 0), f"{_kind(family)}_forward", inputs, [t.out, t.sums])


def backward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the backward kernel of a family."""
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    scale = _number("Double", call.sizes.d**-0.5)
    inputs = [t.given, t.query, t.key, t.value, t.out, t.sums]
    if cudnn:
        seeds = [_untold("Tensor(long int)", [])] * 2
        inputs += [*seeds, _NONE, _NONE, _NONE, *lengths, _dropped(call), causal, scale]
    else:
        seeds = [_untold("Tensor(unsigned long)", shape) for shape in ([2], [])]
        inputs += [_NONE, _NONE, *lengths, _dropped(call), causal, *seeds, scale]
    kind = f"{_kind(family)}_backward"
    return _columns(_name(family, 1), kind, inputs, list(t.gradients))


def _kind(family: str) -> str:
    return "cudnn" if family == "cudnn" else "flash"


def _name(family: str, which: int) -> str:
    return _KERNELS[family][which] if family else ("attention forward", "attention backward")[which]


def _columns(
    name: str, kind: str, inputs: list[_Argument], outputs: list[_Argument]
) -> dict[str, str]:
    library, which = kind.split("_")
    made = {
        "name": f"{name} (in place of eager attention)",
        "op": f"aten::_{library}_attention_{which}",
        "grid": "",
        "block": "",
    }
    for side, arguments in (("input", inputs), ("output", outputs)):
        for place, column in enumerate(("types", "shapes", "values")):
            made[f"{side}_{column}"] = as_text([one[place] for one in arguments])
    return made


def _tensors(call: EagerCall, *, cudnn: bool) -> _Tensors:
    """Return the tensors of a call: heads first for cuDNN, rows first for flash-attention."""
    s: Sizes = call.sizes

    def shaped(one: Operand, heads: int, rows: int, width: int) -> _Argument:
        shape = [s.batch, heads, rows, width] if cudnn else [s.batch, rows, heads, width]
        count = s.batch * heads * rows * width
        return _Argument(one.type, shape, [*one.place, count, one.tensor.item_bytes, ""])

    def all_of(query: Operand, key: Operand, value: Operand) -> tuple[_Argument, ...]:
        return (
            shaped(query, s.heads, s.rows, s.d),
            shaped(key, s.key_heads, s.keys, s.d),
            shaped(value, s.key_heads, s.keys, s.dv),
        )

    query, key, value = all_of(*call.tensors[:3])
    made = call.gradients
    return _Tensors(
        query,
        key,
        value,
        shaped(call.tensors.out, s.heads, s.rows, s.dv),
        _untold("Tensor(float)", [s.batch, s.heads, s.rows, 1][: 4 if cudnn else 3]),
        shaped(made.out, s.heads, s.rows, s.dv) if made else _NONE,
        all_of(*made[1:]) if made else (),
    )


def _untold(kind: str, shape: list[int]) -> _Argument:
    """Return a tensor of unknown storage."""
    return _Argument(kind, shape, [0, 0, 0, 0, 0, ""])


def _dropped(call: EagerCall) -> _Argument:
    """Return the dropout probability, which the trace does not record."""
    return _NONE if call.dropout else _number("Double", 0.0)


def _flag(*, value: bool) -> _Argument:
    return _Argument("Bool", _NO_SIZES, value)


def _number(kind: str, value: float) -> _Argument:
    return _Argument(kind, _NO_SIZES, value)
