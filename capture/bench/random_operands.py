"""Random operands for a call, in the memory layouts that the traced call may have had.

A graph may record no strides. The benchmark tries the possible layouts in turn and measures those
that launch the traced kernels. Operands are random, never zeros: kernels run faster on zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from onerank.capture.bench.bench_call import BenchCall, BenchOperand, contiguous
from onerank.ir.errors import CaptureError

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}

# Operators that take any strides.
_ANY_STRIDES = frozenset(
    """add add_ sub sub_ mul mul_ div div_ neg exp pow rsqrt sqrt copy_ cat clone silu silu_backward
    gelu gelu_backward sigmoid tanh relu where masked_fill masked_fill_ fill_ zero_ sum mean
    addcmul addcdiv lerp""".split()
)

# Operators whose index may be one number per row, expanded over the columns.
_ROW_INDEXED = frozenset({"gather", "scatter_add", "scatter_add_"})


def layouts(call: BenchCall) -> list[BenchCall]:
    """Return the call with every layout to try, the most likely first."""
    base = call.op.split("::")[-1]
    if base in _PRODUCTS:
        candidates = [*_products(call, *_PRODUCTS[base])]
        if all(operand.dtype == "float32" for operand in call.operands()):
            candidates += [replace(candidate, tf32=True) for candidate in candidates]
        return candidates
    # torch accepts float8 operands in this layout only.
    if base == "_scaled_mm":
        return [_placed(call, {1: _transposed})]
    # Attention kernels need a contiguous last dimension, and do not always check it.
    if "attention" in base:
        return list(dict.fromkeys([_all(call, _heads), call]))
    if base in _ANY_STRIDES:
        return list(dict.fromkeys([call, *_views(call)]))
    return list(dict.fromkeys([call, _all(call, _rows)])) if base in _ROW_INDEXED else [call]


def _products(call: BenchCall, left: int, right: int) -> Iterator[BenchCall]:
    """Yield the layouts of a linear's GEMMs: forward, gradients, then the last."""
    yield _placed(call, {right: _transposed})
    yield call
    yield _placed(call, {left: _transposed})
    yield _placed(call, {left: _transposed, right: _transposed})


def _views(call: BenchCall) -> Iterator[BenchCall]:
    """Yield views that training makes: swapped heads, halves of the last dimension, broadcasts."""
    operands = list(call.operands())
    for change in (_heads, _half_of_heads, _broadcast_rows, _half, _transposed):
        changed = [change(operand) for operand in operands]
        if changed == operands:
            continue
        yield call.with_operands(changed)
        for at, view in enumerate(changed):
            if view != operands[at] and len(operands) > 1 and not call.same:
                yield call.with_operands([*operands[:at], view, *operands[at + 1 :]])


def _all(call: BenchCall, change: Callable[[BenchOperand], BenchOperand]) -> BenchCall:
    return call.with_operands([change(operand) for operand in call.operands()])


def _placed(
    call: BenchCall, changes: dict[int, Callable[[BenchOperand], BenchOperand]]
) -> BenchCall:
    operands = list(call.operands())
    for at, change in changes.items():
        operands[at] = change(operands[at])
    return call.with_operands(operands)


def _transposed(operand: BenchOperand) -> BenchOperand:
    """Return the operand as a view with the last two dimensions swapped."""
    if len(operand.shape) < 2 or operand.host:
        return operand
    return operand.swapped(len(operand.shape) - 2, len(operand.shape) - 1)


def _heads(operand: BenchOperand) -> BenchOperand:
    """Return [b, h, s, d] as a view of [b, s, h, d]."""
    return operand.swapped(1, 2) if len(operand.shape) == 4 and not operand.host else operand


def _half(operand: BenchOperand) -> BenchOperand:
    """Return the operand as the first half of each row of a tensor twice as wide."""
    if len(operand.shape) < 2 or operand.host or prod(operand.shape) < 2:
        return operand
    wide = contiguous((*operand.shape[:-1], 2 * operand.shape[-1]))
    return replace(operand, strides=wide)


def _half_of_heads(operand: BenchOperand) -> BenchOperand:
    """Return [b, h, s, d] as half of each row of a view of [b, s, h, 2d]."""
    if len(operand.shape) != 4 or operand.host:
        return operand
    wide = replace(operand, shape=(*operand.shape[:-1], 2 * operand.shape[-1])).swapped(1, 2)
    return replace(operand, strides=wide.strides)


def _rows(operand: BenchOperand) -> BenchOperand:
    """Return an index of rows expanded over the columns."""
    is_index = len(operand.shape) == 2 and operand.dtype == "int64"
    return replace(operand, strides=(1, 0)) if is_index else operand


def _broadcast_rows(operand: BenchOperand) -> BenchOperand:
    """Return one number per row, expanded over the columns as the gradient of a mean is."""
    if len(operand.shape) not in (2, 3) or operand.host or operand.shape[-1] == 1:
        return operand
    return replace(operand, strides=(*contiguous(operand.shape[:-1]), 0))


# Operators that turn negative or tiny operands into NaN or infinities, which change their time.
_POSITIVE = frozenset("sqrt rsqrt log log2 pow _foreach_sqrt div div_ reciprocal".split())


class RunnableCall(NamedTuple):
    """A call with new operands.

    Attributes:
        function: runs the call.
        call: the requested call. Operands that come from a forward have that forward's layout.
    """

    function: Callable[[], Any]
    call: BenchCall


def with_random_operands(call: BenchCall, device: torch.device) -> RunnableCall:
    """Return the call on random operands.

    Raises:
        CaptureError: torch has no such operator, no overload takes these arguments, or an operand
            is an index of unknown range.
    """
    overload = overload_of(call)
    base = call.op.split("::")[-1]
    values = _argument_values(call, device)
    schema = overload._schema.arguments
    split = next((at for at, slot in enumerate(schema) if slot.kwarg_only), len(schema))
    positional = values[:split]
    named = {slot.name: value for slot, value in zip(schema[split:], values[split:], strict=False)}

    def run() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = call.tf32
        return overload(*positional, **named)

    return RunnableCall(run, call if base not in _FROM_FORWARD else _with_layouts_of(call, values))


def _with_layouts_of(call: BenchCall, values: list[Any]) -> BenchCall:
    """Return the call with the shape, dtype and strides of its actual tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    operands = [
        replace(operand, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."),
                strides=tuple(tensor.stride()))
        for operand, tensor in zip(call.operands(), tensors, strict=True)
    ]  # fmt: skip
    return call.with_operands(operands)


def overload_of(call: BenchCall) -> Any:
    """Return the overload of an operator whose schema takes the call's arguments.

    An execution trace names operators without their overload.
    """
    namespace, _, name = call.op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.split(".")[0], None)
    if not name or packet is None:
        raise CaptureError(
            f"torch {torch.__version__} has no operator {call.op}", code="bench-unknown-operator"
        )
    overloads = [getattr(packet, variant) for variant in packet.overloads()]
    for overload in sorted(overloads, key=lambda overload: len(overload._schema.arguments)):
        arguments = overload._schema.arguments
        given = arguments[: len(call.arguments)]
        rest = arguments[len(call.arguments) :]
        if len(given) == len(call.arguments) and all(slot.has_default_value() for slot in rest):
            kinds = zip(given, call.arguments, strict=True)
            if all(_takes(str(slot.type), value) for slot, value in kinds):
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
    if isinstance(value, BenchOperand):
        return inner == "Tensor"
    if isinstance(value, tuple):
        tensors = any(isinstance(item, BenchOperand) for item in value)
        if not value:
            return inner.startswith("List[")
        return inner.startswith("List[") and ("Tensor" in inner) == tensors
    wanted = {bool: ("bool",), int: ("int", "number", "float"), float: ("float", "number"),
              str: ("str", "Device")}[type(value)]  # fmt: skip
    return inner in wanted or (isinstance(value, bool) and inner in ("number",))


def _argument_values(call: BenchCall, device: torch.device) -> list[Any]:
    """Return the arguments, with a random tensor for each operand."""
    base = call.op.split("::")[-1]

    def fill(argument: Any, position: int, place: int | None = None) -> Any:
        if isinstance(argument, tuple):
            return [fill(item, position, at) for at, item in enumerate(argument)]
        if not isinstance(argument, BenchOperand):
            return argument
        bound = _bound(base, call, position, place)
        return _tensor(argument, device, bound, positive=base in _POSITIVE)

    _refuse_indices(base, call)
    values = [fill(argument, position) for position, argument in enumerate(call.arguments)]
    for position, earlier in call.same:
        values[position] = values[earlier]
    if base in _COMPOUNDING:
        values[1:] = [_with_magnitude_one(value) for value in values[1:]]
    return _from_forward(base, values)


# In-place operators that, repeated, would drive an operand to zero or infinity. A division of
# infinities takes twice as long.
_COMPOUNDING = frozenset("mul_ div_ _foreach_mul_ _foreach_div_".split())


def _with_magnitude_one(value: Any) -> Any:
    """Replace numbers by their signs."""
    if isinstance(value, torch.Tensor):
        return value.sign_().masked_fill_(value == 0, 1) if value.is_floating_point() else value
    if isinstance(value, list):
        return [_with_magnitude_one(item) for item in value]
    return 1.0 if isinstance(value, float) else value


def _tensor(
    operand: BenchOperand, device: torch.device, bound: int, *, positive: bool
) -> torch.Tensor:
    """Return a random tensor: normally distributed, booleans, or integers below `bound`."""
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
        # torch draws no float8.
        drawn = dtype if dtype.itemsize > 1 else torch.bfloat16
        flat = torch.randn(count, device=where, dtype=drawn)
        # Host operands are scalars, often factors: near one they keep results finite.
        if positive or operand.host:
            flat = flat.abs().add_(0.5)
        flat = flat.to(dtype)
    if operand.strides is None:
        return flat.view(operand.shape)
    return flat.as_strided(operand.shape, operand.strides)


# Operator -> position of its indices -> their bound, given the call and the place in a list.
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

# Operators whose integer operands are no indices: any value is valid.
_NO_INDICES = frozenset(
    """add add_ sub sub_ rsub mul mul_ div div_ floor_divide remainder eq ne lt le gt ge eq_ ne_
    copy_ _to_copy clone fill_ zero_ masked_fill masked_fill_ where cat stack cumsum sum any all max
    min amax amin argmax argmin sort topk argsort abs neg clamp clamp_min clamp_max minimum maximum
    bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_not logical_xor
    isin arange random_ tril triu flip roll repeat histc _grouped_mm _fused_adamw_ _fused_adam_
    _fused_sgd_ _cudnn_attention_backward _flash_attention_backward""".split()
)


def _refuse_indices(base: str, call: BenchCall) -> None:
    """Raise `CaptureError` for integers that may be indices of unknown range.

    An index out of range kills the process.
    """
    for position, argument in enumerate(call.arguments):
        items = argument if isinstance(argument, tuple) else (argument,)
        integers = any(isinstance(item, BenchOperand) and "int" in item.dtype and not item.host
                       and item.shape for item in items)  # fmt: skip
        if integers and base not in _NO_INDICES and position not in _BOUNDS.get(base, {}):
            raise CaptureError(
                f"{call.op}: argument {position} holds integers whose valid range is unknown",
                code="bench-unknown-range",
            )


def _size(call: BenchCall, position: int) -> int:
    return call.arguments[0].shape[call.arguments[position]]


def _bound(base: str, call: BenchCall, position: int, place: int | None) -> int:
    limit = _BOUNDS.get(base, {}).get(position)
    return 100 if limit is None else limit(call, place or 0)


_FROM_FORWARD = frozenset({"_cudnn_attention_backward", "_flash_attention_backward"})


def _from_forward(base: str, values: list[Any]) -> list[Any]:
    """Replace operands that only a forward computes, such as an attention's logsumexp and seed."""
    # The ends of the experts' rows ascend to the number of rows; here each expert gets the same.
    if base == "_grouped_mm" and isinstance(values[2], torch.Tensor):
        rows, experts = values[0].shape[0], values[2].numel()
        ends = torch.linspace(rows / experts, rows, experts, device=values[2].device)
        values[2] = ends.round().to(torch.int32)
    elif base == "_cudnn_attention_backward":
        forward = torch.ops.aten._cudnn_attention_forward(
            *values[1:4], None, None, None, values[11], values[12], True, 0.0, values[14], False,
            scale=values[15],
        )  # fmt: skip
        values[4], values[5], values[6], values[7] = forward[0], forward[1], forward[6], forward[7]
    elif base == "_flash_attention_backward":
        forward = torch.ops.aten._flash_attention_forward(
            *values[1:4], None, None, values[8], values[9], 0.0, values[11], False, scale=values[14]
        )
        values[4], values[5], values[12], values[13] = (
            forward[0],
            forward[1],
            forward[2],
            forward[3],
        )
    # The backward of a softmax reads the probabilities: random numbers would overflow in `exp`.
    elif base in ("_log_softmax_backward_data", "_softmax_backward_data"):
        values[1] = torch.softmax(values[1], values[2])
        if "log" in base:
            values[1] = values[1].log()
    elif base in ("_fused_adamw_", "_fused_adam_"):
        # A negative second moment gives NaN, and step 0 divides by zero (bias correction).
        for second in values[3]:
            second.abs_()
        for step in values[5]:
            step.fill_(10.0)
    return values
