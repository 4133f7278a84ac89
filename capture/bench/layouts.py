"""How the operands of a traced call may have lain in memory: a graph holds no strides.

The layouts are tried in turn, and those that launch the traced kernels are measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

from onerank.capture.bench.call import BenchCall, Operand, contiguous

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
        single = all(one.dtype == "float32" for one in call.operands())
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
        changed = [change(one) for one in operands]
        if changed == operands:
            continue
        yield call.with_operands(changed)
        for at, one in enumerate(changed):
            if one != operands[at] and len(operands) > 1 and not call.same:
                yield call.with_operands([*operands[:at], one, *operands[at + 1 :]])


def _all(call: BenchCall, change: Callable[[Operand], Operand]) -> BenchCall:
    return call.with_operands([change(one) for one in call.operands()])


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
