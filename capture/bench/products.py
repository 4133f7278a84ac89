"""Matrix products of a layer: forward, the input's gradient, the weight's gradient."""

from collections.abc import Iterator
from dataclasses import replace

from onerank.capture.bench.call import BenchCall, Operand
from onerank.capture.bench.models import Model

BF16 = "bfloat16"
_BFLOAT16_CODE = 15  # c10::ScalarType of bfloat16, as the schema's argument takes it


def products(model: Model, tp: int, tokens: int, *, backward: bool = True) -> Iterator[BenchCall]:
    """Yield the products of a layer's linears on one of `tp` ranks."""
    for rows, columns in _linears(model, tp):
        yield from linear(tokens, rows, columns, backward=backward)


def linear(
    tokens: int, rows: int, columns: int, dtype: str = BF16, *, backward: bool = True
) -> Iterator[BenchCall]:
    """Yield the products of a linear of `rows` inputs and `columns` outputs without bias."""
    yield _mm(Operand((tokens, rows), dtype), _transposed((rows, columns), dtype))
    if backward:
        yield _mm(Operand((tokens, columns), dtype), Operand((columns, rows), dtype))
        yield _mm(_transposed((columns, tokens), dtype), Operand((tokens, rows), dtype))


def typed(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield a layer's products in float8, float16, TF32 and float32."""
    for rows, columns in _linears(model, tp):
        yield from scaled(tokens, rows, columns)
        yield from linear(tokens, rows, columns, "float16")
        for call in linear(tokens, rows, columns, "float32"):
            yield replace(call, tf32=True)
    if tokens * model.hidden <= 4096 * 4096:  # without tensor cores they take long
        for rows, columns in _linears(model, tp):
            yield from linear(tokens, rows, columns, "float32", backward=False)


def squares() -> Iterator[BenchCall]:
    """Yield products that span intensities, for power: from memory-bound to the largest."""
    for m, n, k in (
        (8192, 8192, 8192), (16384, 16384, 4096), (4096, 4096, 4096), (8192, 8192, 1024),
        (8192, 8192, 256), (2048, 2048, 2048), (1024, 8192, 8192), (256, 16384, 8192),
        (128, 16384, 8192), (64, 16384, 8192), (16, 16384, 8192), (1, 16384, 16384),
    ):  # fmt: skip
        yield _mm(Operand((m, k), BF16), _transposed((k, n), BF16))
        yield from scaled(m, k, n)
    for size in (1 << 24, 1 << 26, 1 << 28):
        one = Operand((size,), BF16)
        yield BenchCall("aten::add", (one, one, 1))
        yield BenchCall("aten::silu", (one,))
        yield BenchCall("aten::copy_", (Operand((size,), "float32"), one, False))


def experts(model: Model, tokens: int) -> Iterator[BenchCall]:
    """Yield grouped products over all experts, and those of one expert with an even share."""
    routed = tokens * model.chosen
    ends = Operand((model.experts,), "int32")
    for rows, columns in ((model.hidden, model.inner), (model.inner, model.hidden)):
        yield from linear(routed // model.experts, rows, columns)
        weight = Operand((model.experts, rows, columns), BF16).swapped(1, 2)
        back = Operand((model.experts, columns, rows), BF16)
        for size, operand in ((rows, weight), (columns, back)):
            left = Operand((routed, size), BF16)
            yield BenchCall("aten::_grouped_mm", (left, operand, ends, None, None))


def _linears(model: Model, tp: int) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the distinct linears of a layer on one of `tp` ranks."""
    width = model.heads * model.head // tp
    keys = max(1, model.key_heads // tp) * model.head
    found = [(model.hidden, width), (model.hidden, keys), (width, model.hidden)]
    if not model.experts:
        inner = model.inner // tp
        found += [(model.hidden, inner), (inner, model.hidden)]
    return list(dict.fromkeys(found))


def scaled(tokens: int, rows: int, columns: int) -> Iterator[BenchCall]:
    """Yield the product in float8 with one scale for each operand, if its sizes are multiples."""
    if tokens % 16 or rows % 16 or columns % 16:
        return
    fp8 = "float8_e4m3fn"
    scale = Operand((), "float32")
    left, right = Operand((tokens, rows), fp8), _transposed((rows, columns), fp8)
    yield BenchCall(
        "aten::_scaled_mm", (left, right, scale, scale, None, None, _BFLOAT16_CODE, True)
    )


def _mm(left: Operand, right: Operand) -> BenchCall:
    return BenchCall("aten::mm", (left, right))


def _transposed(shape: tuple[int, int], dtype: str) -> Operand:
    return Operand(shape, dtype).swapped(0, 1)
