"""Operators without products: activations, norms as models write them, rotary embedding, copies."""

from collections.abc import Iterator
from dataclasses import replace

from onerank.capture.bench.call import BenchCall, Operand
from onerank.capture.bench.models import Model

BF16, FP32 = "bfloat16", "float32"


def mlp(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the activation, and the residual sums."""
    routed = tokens * max(1, model.chosen)
    if model.experts:
        one = Operand((routed, model.inner))
    else:
        one = Operand((1, tokens, model.inner // tp))
    if model.gated:
        yield BenchCall("aten::silu", (one,))
        yield BenchCall("aten::silu_backward", (one, one))
        yield BenchCall("aten::mul", (one, one))
    else:
        for kind in ("none", "tanh"):
            yield BenchCall("aten::gelu", (one, kind))
            yield BenchCall("aten::gelu_backward", (one, one, kind))
    hidden = Operand((1, tokens, model.hidden))
    yield BenchCall("aten::add", (hidden, hidden, 1))
    yield BenchCall("aten::add_", (hidden, hidden, 1))
    yield BenchCall("aten::copy_", (hidden, hidden, False))


def norms(model: Model, tokens: int) -> Iterator[BenchCall]:
    """Yield RMS norm as transformers writes it, and fused; layer norm."""
    wide, narrow = Operand((1, tokens, model.hidden), FP32), Operand((1, tokens, model.hidden))
    rows, scale = Operand((1, tokens, 1), FP32), Operand((model.hidden,))
    epsilon, two = Operand((), "float64", host=True), Operand((), "int64", host=True)
    yield BenchCall("aten::copy_", (wide, narrow, False))
    yield BenchCall("aten::pow", (wide, 2))
    yield BenchCall("aten::mean", (wide, (-1,), True, None))
    yield BenchCall("aten::add", (rows, epsilon, 1))
    yield BenchCall("aten::rsqrt", (rows,))
    yield BenchCall("aten::mul", (wide, rows))
    yield BenchCall("aten::copy_", (narrow, wide, False))
    yield BenchCall("aten::mul", (scale, narrow))
    yield BenchCall("aten::mul", (narrow, scale))
    yield BenchCall("aten::mul", (narrow, narrow))
    yield BenchCall("aten::sum", (narrow, (0, 1), True, None))
    yield BenchCall("aten::mul", (wide, wide))
    yield BenchCall("aten::sum", (wide, (2,), True, None))
    yield BenchCall("aten::mul", (wide, epsilon))
    spread = replace(wide, strides=(tokens, 1, 0))
    yield BenchCall("aten::div", (spread, two))
    yield BenchCall("aten::add_", (wide, wide, 1))
    size = (model.hidden,)
    yield BenchCall("aten::_fused_rms_norm", (narrow, size, scale, 1e-6))
    yield BenchCall(
        "aten::_fused_rms_norm_backward", (narrow, narrow, size, rows, scale, (True, True))
    )
    yield BenchCall("aten::native_layer_norm", (narrow, size, scale, scale, 1e-5))
    yield BenchCall(
        "aten::native_layer_norm_backward",
        (narrow, narrow, size, rows, rows, scale, scale, (True, True, True)),
    )


def rotary(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the rotary embedding of queries and keys, as transformers writes it."""
    for heads in dict.fromkeys((model.heads // tp, max(1, model.key_heads // tp))):
        whole = Operand((1, heads, tokens, model.head))
        turned = whole.swapped(1, 2)
        half = replace(whole, shape=(1, heads, tokens, model.head // 2))
        halved = replace(half, strides=turned.strides)
        made = half.swapped(1, 2)
        angles = Operand((1, 1, tokens, model.head))
        yield BenchCall("aten::mul", (turned, angles))
        yield BenchCall("aten::mul", (whole, angles))
        yield BenchCall("aten::neg", (halved,))
        yield BenchCall("aten::cat", ((made, halved), -1))
        yield BenchCall("aten::add", (turned, whole, 1))
        yield BenchCall("aten::add_", (turned, turned, 1))
        yield BenchCall("aten::copy_", (turned, replace(turned, strides=None), False))
        rows = Operand((1, tokens, heads, model.head))
        yield BenchCall("aten::copy_", (rows, rows.swapped(1, 2), False))


def small() -> Iterator[BenchCall]:
    """Yield sizes from a launch to the memory's bandwidth, for each sort of operator."""
    for power in range(10, 29, 2):
        size = (1 << power,)
        one, wide = Operand(size), Operand(size, FP32)
        for operand in (one, wide):
            yield BenchCall("aten::add", (operand, operand, 1))
            yield BenchCall("aten::mul", (operand, operand))
            yield BenchCall("aten::fill_", (operand, 0))
            yield BenchCall("aten::copy_", (operand, operand, False))
            yield BenchCall("aten::exp", (operand,))
            yield BenchCall("aten::sum", (operand, (), False, None))
        yield BenchCall("aten::copy_", (wide, one, False))
        yield BenchCall("aten::copy_", (one, wide, False))
        yield BenchCall("aten::silu", (one,))
        yield BenchCall("aten::gelu", (one, "none"))
