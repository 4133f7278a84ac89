"""How the operands of a traced call may have lain in memory: a graph holds no strides.

The layouts are tried in turn, and those that launch the traced kernels are measured.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from onerank.capture.bench.call import BenchCall, Operand, contiguous

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_SCALED = frozenset({"_scaled_mm"})


def layouts(call: BenchCall) -> list[BenchCall]:
    """Return the call with every layout worth a try, the likeliest first."""
    base = call.op.split("::")[-1]
    if base in _PRODUCTS:
        return [*_products(call, *_PRODUCTS[base])]
    if base in _SCALED:  # its kernels take no other
        return [_placed(call, {1: _transposed})]
    tensors = [one for one in call.operands() if not one.host]
    if base.startswith(("_foreach_", "_fused_")) or len(tensors) > 8:
        return [call]
    return list(dict.fromkeys([call, *_views(call)]))


def _products(call: BenchCall, left: int, right: int) -> Iterator[BenchCall]:
    """Yield a product's forward, its input's gradient, its weight's gradient, and the last one."""
    yield _placed(call, {right: _transposed})
    yield call
    yield _placed(call, {left: _transposed})
    yield _placed(call, {left: _transposed, right: _transposed})


def _views(call: BenchCall) -> Iterator[BenchCall]:
    """Yield heads swapped with the sequence, halves of the last dimension, spread rows."""
    operands = list(call.operands())
    for change in (_heads, _half, _half_of_heads, _rows_last, _spread):
        changed = [change(one) for one in operands]
        if changed == operands:
            continue
        yield call.with_operands(changed)
        for at, one in enumerate(changed):
            if one != operands[at] and len(operands) > 1:
                yield call.with_operands([*operands[:at], one, *operands[at + 1 :]])


def _placed(call: BenchCall, changes: dict[int, object]) -> BenchCall:
    operands = list(call.operands())
    for at, change in changes.items():
        operands[at] = change(operands[at])  # pyright: ignore
    return call.with_operands(operands)


def _transposed(one: Operand) -> Operand:
    return one.swapped(-2 % len(one.shape), -1 % len(one.shape)) if len(one.shape) > 1 else one


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


def _rows_last(one: Operand) -> Operand:
    """The last two dimensions swapped."""
    return one if one.host else _transposed(one)


def _spread(one: Operand) -> Operand:
    """A row's one number, read for every column."""
    if len(one.shape) != 2 or one.host or one.dtype != "int64":
        return one
    return replace(one, strides=(1, 0))
