"""Random operands for a call, in the memory layouts that the traced call may have had.

A graph records no strides. The benchmark tries the possible layouts in turn and measures those that
launch the traced kernels. Operands are random, never zeros: kernels run faster on zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from onerank.capture.bench.measured_call import BenchCall, Operand, contiguous
from onerank.ir.errors import CaptureError

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}

_SCALED = frozenset({"_scaled_mm"})

_ANY = frozenset(
    """add add_ sub sub_ mul mul_ div div_ neg exp pow rsqrt sqrt copy_ cat clone silu silu_backward
    gelu gelu_backward sigmoid tanh relu where masked_fill masked_fill_ fill_ zero_ sum mean
    addcmul addcdiv lerp""".split()
)
"""Operators that take any strides."""

_ROWS = frozenset({"gather", "scatter_add", "scatter_add_"})
"""Operators whose index may be one number for each row, read for every column."""


def layouts(call: BenchCall) -> list[BenchCall]:
    """Return the call with every layout worth a try, the likeliest first."""
    base = call.op.split("::")[-1]
    if base in _PRODUCTS:
        made = [*_products(call, *_PRODUCTS[base])]
        single = all(operand.dtype == "float32" for operand in call.operands())
        return [*made, *(replace(one, tf32=True) for one in made)] if single else made
    if base in _SCALED:  # its kernels take no other
        return [_placed(call, {1: _transposed})]
    if "attention" in base:  # its kernels take no other, and do not always say so
        return list(dict.fromkeys([_all(call, _heads), call]))
    if base in _ANY:
        return list(dict.fromkeys([call, *_views(call)]))
    return list(dict.fromkeys([call, _all(call, _rows)])) if base in _ROWS else [call]


def _products(call: BenchCall, left: int, right: int) -> Iterator[BenchCall]:
    """Yield a product's forward, its input's gradient, its weight's gradient, and the last one."""
    yield _placed(call, {right: _transposed})
    yield call
    yield _placed(call, {left: _transposed})
    yield _placed(call, {left: _transposed, right: _transposed})


def _views(call: BenchCall) -> Iterator[BenchCall]:
    """Yield heads swapped with the sequence, halves of the last dimension, spread rows."""
    operands = list(call.operands())
    for change in (_heads, _half_of_heads, _spread, _half, _transposed):
        changed = [change(operand) for operand in operands]
        if changed == operands:
            continue
        yield call.with_operands(changed)
        for at, one in enumerate(changed):
            if one != operands[at] and len(operands) > 1 and not call.same:
                yield call.with_operands([*operands[:at], one, *operands[at + 1 :]])


def _all(call: BenchCall, change: Callable[[Operand], Operand]) -> BenchCall:
    return call.with_operands([change(operand) for operand in call.operands()])


def _placed(call: BenchCall, changes: dict[int, Callable[[Operand], Operand]]) -> BenchCall:
    operands = list(call.operands())
    for at, change in changes.items():
        operands[at] = change(operands[at])
    return call.with_operands(operands)


def _transposed(one: Operand) -> Operand:
    """The last two dimensions swapped."""
    if len(one.shape) < 2 or one.host:
        return one
    return one.swapped(len(one.shape) - 2, len(one.shape) - 1)


def _heads(one: Operand) -> Operand:
    """[b, h, s, d] as a view of [b, s, h, d]."""
    return one.swapped(1, 2) if len(one.shape) == 4 and not one.host else one


def _half(one: Operand) -> Operand:
    """The first half of each row of a tensor twice as wide."""
    if len(one.shape) < 2 or one.host or prod(one.shape) < 2:
        return one
    wide = contiguous((*one.shape[:-1], 2 * one.shape[-1]))
    return replace(one, strides=wide)


def _half_of_heads(one: Operand) -> Operand:
    """Half of each row of [b, h, s, d], a view of [b, s, h, 2d]."""
    if len(one.shape) != 4 or one.host:
        return one
    wide = replace(one, shape=(*one.shape[:-1], 2 * one.shape[-1])).swapped(1, 2)
    return replace(one, strides=wide.strides)


def _rows(one: Operand) -> Operand:
    """An index of rows, read for every column."""
    return replace(one, strides=(1, 0)) if len(one.shape) == 2 and one.dtype == "int64" else one


def _spread(one: Operand) -> Operand:
    """A row's one number, read for every column, as a mean's gradient is."""
    if len(one.shape) not in (2, 3) or one.host or one.shape[-1] == 1:
        return one
    return replace(one, strides=(*contiguous(one.shape[:-1]), 0))


_POSITIVE = frozenset("sqrt rsqrt log log2 pow _foreach_sqrt div div_ reciprocal".split())
"""Operators that a negative or tiny operand would fill with nan or infinities."""


class Made(NamedTuple):
    """A call with freshly created operands.

    Attributes:
        function: makes the call.
        call: the requested call, except for operands that the forward produced.
    """

    function: Callable[[], Any]
    call: BenchCall


def make(call: BenchCall, device: torch.device) -> Made:
    """Return the call on random operands.

    Raises:
        CaptureError: torch has no such operator, or none that takes these arguments.
    """
    overload = overload_of(call)
    base = call.op.split("::")[-1]
    values = _made(call, device)
    schema = overload._schema.arguments
    split = next((at for at, one in enumerate(schema) if one.kwarg_only), len(schema))
    positional = values[:split]
    named = {one.name: value for one, value in zip(schema[split:], values[split:], strict=False)}

    def run() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = call.tf32
        return overload(*positional, **named)

    return Made(run, call if base not in _FROM_FORWARD else _as_made(call, values))


def _as_made(call: BenchCall, values: list[Any]) -> BenchCall:
    """Return the call with the operands it really has, where the forward made some of them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    operands = [
        replace(one, shape=tuple(made.shape), dtype=str(made.dtype).removeprefix("torch."),
                strides=tuple(made.stride()))
        for one, made in zip(call.operands(), tensors, strict=True)
    ]  # fmt: skip
    return call.with_operands(operands)


def overload_of(call: BenchCall) -> Any:
    """Return the overload of an operator whose schema takes the call's arguments."""
    namespace, _, name = call.op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.split(".")[0], None)
    if not name or packet is None:
        raise CaptureError(
            f"torch {torch.__version__} has no operator {call.op}", code="bench-unknown-operator"
        )
    overloads = [getattr(packet, variant) for variant in packet.overloads()]
    for overload in sorted(overloads, key=lambda one: len(one._schema.arguments)):
        arguments = overload._schema.arguments
        given = arguments[: len(call.arguments)]
        rest = arguments[len(call.arguments) :]
        if len(given) == len(call.arguments) and all(one.has_default_value() for one in rest):
            kinds = zip(given, call.arguments, strict=True)
            if all(_takes(str(one.type), value) for one, value in kinds):
                return overload
    raise CaptureError(
        f"no overload of {call.op} takes {len(call.arguments)} arguments of these kinds; the trace "
        "may be of another torch version, or the operator of a kind that is not measured",
        code="bench-no-overload",
    )


def _takes(kind: str, value: Any) -> bool:
    """Return whether an argument of a schema's type may be `value`."""
    if value is None:
        return kind.startswith("Optional[") or kind == "Tensor"
    inner = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
    if isinstance(value, Operand):
        return inner == "Tensor"
    if isinstance(value, tuple):
        tensors = any(isinstance(one, Operand) for one in value)
        if not value:
            return inner.startswith("List[")
        return inner.startswith("List[") and ("Tensor" in inner) == tensors
    wanted = {bool: ("bool",), int: ("int", "number", "float"), float: ("float", "number"),
              str: ("str", "Device")}[type(value)]  # fmt: skip
    return inner in wanted or (isinstance(value, bool) and inner in ("number",))


def _made(call: BenchCall, device: torch.device) -> list[Any]:
    """Return the arguments, tensors made."""
    base = call.op.split("::")[-1]

    def fill(argument: Any, position: int, place: int | None = None) -> Any:
        if isinstance(argument, tuple):
            return [fill(one, position, at) for at, one in enumerate(argument)]
        if not isinstance(argument, Operand):
            return argument
        bound = _bound(base, call, position, place)
        return _tensor(argument, device, bound, positive=base in _POSITIVE)

    _refuse_indices(base, call)
    values = [fill(argument, position) for position, argument in enumerate(call.arguments)]
    for position, earlier in call.same:
        values[position] = values[earlier]
    if base in _COMPOUNDING:
        values[1:] = [_of_size_one(value) for value in values[1:]]
    return _from_forward(base, values)


_COMPOUNDING = frozenset("mul_ div_ _foreach_mul_ _foreach_div_".split())
"""Operators that, again and again on one operand, would make it zero, infinite or slow."""


def _of_size_one(value: Any) -> Any:
    """Return signs in place of numbers."""
    if isinstance(value, torch.Tensor):
        return value.sign_().masked_fill_(value == 0, 1) if value.is_floating_point() else value
    if isinstance(value, list):
        return [_of_size_one(one) for one in value]
    return 1.0 if isinstance(value, float) else value


def _tensor(operand: Operand, device: torch.device, bound: int, *, positive: bool) -> torch.Tensor:
    """Return random elements: normal, bits, or whole numbers below `bound`."""
    where = torch.device("cpu") if operand.host else device
    dtype: torch.dtype = getattr(torch, operand.dtype)
    count = prod(operand.shape)
    if operand.strides is not None:
        count = 1 + sum((n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True))
    if dtype == torch.bool:
        flat = torch.rand(count, device=where) < 0.5
    elif not dtype.is_floating_point:
        flat = torch.randint(
            int(operand.host), bound, (count,), device=where, dtype=torch.int64
        ).to(dtype)
    else:
        made = dtype if dtype.itemsize > 1 else torch.bfloat16
        flat = torch.randn(count, device=where, dtype=made)
        if positive or operand.host:  # a factor of the host's: near one
            flat = flat.abs().add_(0.5)
        flat = flat.to(dtype)
    if operand.strides is None:
        return flat.view(operand.shape)
    return flat.as_strided(operand.shape, operand.strides)


_BOUNDS: dict[str, dict[int, Callable[[BenchCall, int], int]]] = {
    "embedding": {1: lambda call, _: call.arguments[0].shape[0]},
    "embedding_dense_backward": {1: lambda call, _: call.arguments[2]},
    "index_select": {2: lambda call, _: _size(call, 1)},
    "index_add": {2: lambda call, _: _size(call, 1)},
    "index_add_": {2: lambda call, _: _size(call, 1)},
    "gather": {2: lambda call, _: _size(call, 1)},
    "scatter_add_": {2: lambda call, _: _size(call, 1)},
    "scatter_": {2: lambda call, _: _size(call, 1)},
    "index": {1: lambda call, place: call.arguments[0].shape[place]},
    "_index_put_impl_": {1: lambda call, place: call.arguments[0].shape[place]},
    "index_put_": {1: lambda call, place: call.arguments[0].shape[place]},
    "nll_loss_forward": {1: lambda call, _: call.arguments[0].shape[-1]},
    "nll_loss_backward": {2: lambda call, _: call.arguments[1].shape[-1]},
}
"""Operator -> position of its indices -> what they are below, by their place in a list."""

_NO_INDICES = frozenset(
    """add add_ sub sub_ rsub mul mul_ div div_ floor_divide remainder eq ne lt le gt ge eq_ ne_
    copy_ _to_copy clone fill_ zero_ masked_fill masked_fill_ where cat stack cumsum sum any all max
    min amax amin argmax argmin sort topk argsort abs neg clamp clamp_min clamp_max minimum maximum
    bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_not logical_xor
    isin arange random_ tril triu flip roll repeat histc _grouped_mm _fused_adamw_ _fused_adam_
    _fused_sgd_ _cudnn_attention_backward _flash_attention_backward""".split()
)
"""Operators to whom any whole number does."""


def _refuse_indices(base: str, call: BenchCall) -> None:
    """Refuse whole numbers that may be indices of nobody knows what: out of range, they crash."""
    for position, argument in enumerate(call.arguments):
        some = argument if isinstance(argument, tuple) else (argument,)
        whole = any(isinstance(one, Operand) and "int" in one.dtype and not one.host
                    and one.shape for one in some)  # fmt: skip
        if whole and base not in _NO_INDICES and position not in _BOUNDS.get(base, {}):
            raise CaptureError(
                f"{call.op}: argument {position} are whole numbers of a range that nobody knows",
                code="bench-unknown-range",
            )


def _size(call: BenchCall, position: int) -> int:
    return call.arguments[0].shape[call.arguments[position]]


def _bound(base: str, call: BenchCall, position: int, place: int | None) -> int:
    limit = _BOUNDS.get(base, {}).get(position)
    return 100 if limit is None else limit(call, place or 0)


_FROM_FORWARD = frozenset({"_cudnn_attention_backward", "_flash_attention_backward"})


def _from_forward(base: str, values: list[Any]) -> list[Any]:
    """Replace operands that no random numbers can stand for by what the forward made of others."""
    if base == "_grouped_mm" and isinstance(values[2], torch.Tensor):
        rows, experts = values[0].shape[0], values[2].numel()
        ends = torch.linspace(rows / experts, rows, experts, device=values[2].device)
        values[2] = ends.round().to(torch.int32)
    elif base == "_cudnn_attention_backward":
        made = torch.ops.aten._cudnn_attention_forward(
            *values[1:4], None, None, None, values[11], values[12], True, 0.0, values[14], False,
            scale=values[15],
        )  # fmt: skip
        values[4], values[5], values[6], values[7] = made[0], made[1], made[6], made[7]
    elif base == "_flash_attention_backward":
        made = torch.ops.aten._flash_attention_forward(
            *values[1:4], None, None, values[8], values[9], 0.0, values[11], False, scale=values[14]
        )
        values[4], values[5], values[12], values[13] = made[0], made[1], made[2], made[3]
    elif base in ("_log_softmax_backward_data", "_softmax_backward_data"):
        values[1] = torch.softmax(values[1], values[2])
        if "log" in base:
            values[1] = values[1].log()
    elif base in ("_fused_adamw_", "_fused_adam_"):
        for second in values[3]:
            second.abs_()
        for step in values[5]:
            step.fill_(10.0)
    return values
