"""The columns of a fused attention kernel: its operator as PyTorch has it, operands and results."""

from typing import Any

from onerank.annotate.what_ifs.attention.eager import Sizes
from onerank.annotate.what_ifs.attention.flow import Operand
from onerank.annotate.what_ifs.attention.found import EagerCall
from onerank.annotate.what_ifs.texts import as_text

_FLOAT = "Tensor(float)"
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

_Argument = tuple[str, Any, Any]
"""Type, shape and value, as the columns hold them."""


def forward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the forward kernel of a family, "" for one that is not known."""
    query, key, value, out, sums = _tensors(call)
    causal, kind = bool(call.causal), "cudnn" if family == "cudnn" else "flash"
    dropped = _dropped(call)
    if kind == "cudnn":
        rest = [_none(), _flag(value=True), dropped, _flag(value=causal), _flag(value=False)]
    else:
        rest = [dropped, _flag(value=causal), _flag(value=False)]
    scale = _number("Double", call.sizes.d**-0.5)
    return _columns(
        _name(family, 0), kind, [query, key, value, *rest, scale], [out, sums], backward=False
    )


def backward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the backward kernel of a family."""
    assert call.gradients is not None, "there is a backward pass"
    query, key, value, out, sums = _tensors(call)
    sizes, made = _shapes(call.sizes), call.gradients
    given = _tensor(made.out, sizes[3])
    results = [_tensor(one, shape) for one, shape in zip(made[1:], sizes[:3], strict=True)]
    kind = "cudnn" if family == "cudnn" else "flash"
    rows, keys = _number("Int", call.sizes.rows), _number("Int", call.sizes.keys)
    dropped, causal = _dropped(call), _flag(value=bool(call.causal))
    if kind == "cudnn":
        rest = [*[_none()] * 5, rows, keys, dropped, causal]
    else:
        rest = [*[_none()] * 2, rows, keys, dropped, causal, *[_none()] * 2]
    scale = _number("Double", call.sizes.d**-0.5)
    operands = [given, query, key, value, out, sums, *rest, scale]
    return _columns(_name(family, 1), kind, operands, results, backward=True)


def _name(family: str, which: int) -> str:
    return _KERNELS[family][which] if family else ("attention forward", "attention backward")[which]


def _columns(
    name: str, kind: str, inputs: list[_Argument], outputs: list[_Argument], *, backward: bool
) -> dict[str, str]:
    made = {
        "name": f"{name} (in place of eager attention)",
        "op": f"aten::_scaled_dot_product_{kind}_attention" + "_backward" * backward,
        "grid": "",
        "block": "",
    }
    for side, arguments in (("input", inputs), ("output", outputs)):
        for place, column in enumerate(("types", "shapes", "values")):
            made[f"{side}_{column}"] = as_text([one[place] for one in arguments])
    return made


def _shapes(s: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of queries, keys, values and the output, heads first."""
    return (
        (s.batch, s.heads, s.rows, s.d),
        (s.batch, s.key_heads, s.keys, s.d),
        (s.batch, s.key_heads, s.keys, s.dv),
        (s.batch, s.heads, s.rows, s.dv),
    )


def _tensors(call: EagerCall) -> list[_Argument]:
    """Return queries, keys, values, output, and the sums of exponentials of each row."""
    shapes = _shapes(call.sizes)
    made = [_tensor(one, shape) for one, shape in zip(call.tensors, shapes, strict=True)]
    s = call.sizes
    return [*made, (_FLOAT, [s.batch, s.heads, s.rows], [0, 0, 0, 0, 0, ""])]


def _tensor(one: Operand, shape: tuple[int, ...]) -> _Argument:
    count = 1
    for size in shape:
        count *= size
    return one.type, list(shape), [*one.place, count, one.tensor.item_bytes, ""]


def _dropped(call: EagerCall) -> _Argument:
    """Return the part of probabilities that is dropped, which the trace does not tell."""
    return _none() if call.dropout else _number("Double", 0.0)


def _none() -> _Argument:
    return "None", _NO_SIZES, "<None>"


def _flag(*, value: bool) -> _Argument:
    return "Bool", _NO_SIZES, value


def _number(kind: str, value: float) -> _Argument:
    return kind, _NO_SIZES, value
