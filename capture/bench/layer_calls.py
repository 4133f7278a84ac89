"""Calls of a transformer layer: attention, pointwise, GEMM, embedding, loss, optimizer."""

from collections.abc import Iterator
from dataclasses import replace

from onerank.capture.bench.measured_call import BenchCall, Operand
from onerank.capture.bench.model_shapes import Model

BF16, FP32 = "bfloat16", "float32"


def attention(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield causal attention of one sequence, and of shorter ones with as many tokens."""
    heads, keys = model.heads // tp, max(1, model.key_heads // tp)
    for batch in (1, 2, 4):
        if tokens // batch >= 1024:
            yield from _cudnn(batch, heads, keys, tokens // batch, model.head)
    yield from _flash(1, heads, keys, tokens, model.head)


def _cudnn(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    """Operands [b, h, s, d] as views of [b, s, h, d], as a model's projections leave them."""
    query = Operand((batch, heads, length, head)).swapped(1, 2)
    key = Operand((batch, keys, length, head)).swapped(1, 2)
    scale = head**-0.5
    yield BenchCall(
        "aten::_cudnn_attention_forward",
        (query, key, key, None, None, None, length, length, True, 0.0, True, False, scale),
    )
    sums = Operand((batch, heads, length, 1), "float32")
    seed = Operand((), "int64")
    yield BenchCall(
        "aten::_cudnn_attention_backward",
        (query, query, key, key, query, sums, seed, seed, None, None, None, length, length, 0.0,
         True, scale),
    )  # fmt: skip


def _flash(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    query, key = Operand((batch, length, heads, head)), Operand((batch, length, keys, head))
    scale = head**-0.5
    yield BenchCall(
        "aten::_flash_attention_forward",
        (query, key, key, None, None, length, length, 0.0, True, False, scale),
    )
    sums = Operand((batch, heads, length), "float32")
    seed, unused = Operand((2,), "int64"), Operand((), "int64")
    yield BenchCall(
        "aten::_flash_attention_backward",
        (query, query, key, key, query, sums, None, None, length, length, 0.0, True, seed, unused,
         scale),
    )  # fmt: skip


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


BF16_PRODUCTS = "bfloat16"

_BFLOAT16_CODE = 15  # c10::ScalarType of bfloat16, as the schema's argument takes it


def products(model: Model, tp: int, tokens: int, *, backward: bool = True) -> Iterator[BenchCall]:
    """Yield the products of a layer's linears on one of `tp` ranks."""
    for rows, columns in _linears(model, tp):
        yield from linear(tokens, rows, columns, backward=backward)


def linear(
    tokens: int, rows: int, columns: int, dtype: str = BF16_PRODUCTS, *, backward: bool = True
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
        yield _mm(Operand((m, k), BF16_PRODUCTS), _transposed((k, n), BF16_PRODUCTS))
        yield from scaled(m, k, n)
    for size in (1 << 24, 1 << 26, 1 << 28):
        one = Operand((size,), BF16_PRODUCTS)
        yield BenchCall("aten::add", (one, one, 1))
        yield BenchCall("aten::silu", (one,))
        yield BenchCall("aten::copy_", (Operand((size,), "float32"), one, False))


def experts(model: Model, tokens: int) -> Iterator[BenchCall]:
    """Yield grouped products over all experts, and those of one expert with an even share."""
    routed = tokens * model.chosen
    ends = Operand((model.experts,), "int32")
    for rows, columns in ((model.hidden, model.inner), (model.inner, model.hidden)):
        yield from linear(routed // model.experts, rows, columns)
        weight = Operand((model.experts, rows, columns), BF16_PRODUCTS).swapped(1, 2)
        back = Operand((model.experts, columns, rows), BF16_PRODUCTS)
        for size, operand in ((rows, weight), (columns, back)):
            left = Operand((routed, size), BF16_PRODUCTS)
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


_MEAN, _IGNORED = 1, -100


def head(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the output product and the cross-entropy of its logits in float32."""
    words = model.vocabulary // tp
    yield from linear(tokens, model.hidden, words)
    narrow, wide = Operand((tokens, words)), Operand((tokens, words), FP32)
    target, one = Operand((tokens,), "int64"), Operand((), FP32)
    yield BenchCall("aten::copy_", (wide, narrow, False))
    yield BenchCall("aten::copy_", (narrow, wide, False))
    yield BenchCall("aten::_log_softmax", (wide, 1, False))
    yield BenchCall("aten::_log_softmax_backward_data", (wide, wide, 1, 6))
    yield BenchCall("aten::nll_loss_forward", (wide, target, None, _MEAN, _IGNORED))
    yield BenchCall("aten::nll_loss_backward", (one, wide, target, None, _MEAN, _IGNORED, one))
    rows = Operand((tokens, 1), FP32)
    yield BenchCall("aten::max", (wide, -1, False))
    yield BenchCall("aten::sum", (wide, (-1,), False, None))
    yield BenchCall("aten::sub_", (wide, rows, 1))
    yield BenchCall("aten::div_", (wide, rows))
    yield BenchCall("aten::mul_", (wide, rows))
    yield BenchCall("aten::exp", (wide, wide), same=((1, 0),))


def embedding(model: Model, tokens: int) -> Iterator[BenchCall]:
    """Yield the look-up of rows, its gradient, and moving rows between tokens and experts."""
    table, made = Operand((model.vocabulary, model.hidden)), Operand((tokens, model.hidden))
    index = Operand((tokens, model.hidden), "int64", strides=(1, 0))
    yield BenchCall("aten::gather", (table, 0, index, False, made))
    yield BenchCall("aten::embedding_dense_backward",
                    (made, Operand((tokens,), "int64"), model.vocabulary, -1, False))  # fmt: skip
    yield BenchCall("aten::fill_", (table, 0))
    if model.experts:
        routed = tokens * model.chosen
        rows = Operand((routed, model.hidden))
        which = Operand((routed,), "int64")
        yield BenchCall("aten::index", (made, (which,)))
        yield BenchCall("aten::index_add_", (made, 0, which, rows, 1))
        scores = Operand((tokens, model.experts), FP32)
        yield BenchCall("aten::_softmax", (scores, -1, False))
        yield BenchCall("aten::topk", (scores, model.chosen, -1, True, True))
        yield BenchCall("aten::sort", (which, True, -1, False))


def optimizer(model: Model, tp: int) -> Iterator[BenchCall]:
    """Yield Adam over the parameters of one layer: fused, and as a list of simple operators."""
    sizes = _parameters(model, tp)
    for dtype in (BF16, FP32):
        all_of = tuple(Operand(size, dtype) for size in sizes)
        steps = tuple(Operand((), FP32) for _ in sizes)
        yield BenchCall(
            "aten::_fused_adamw_",
            (all_of, all_of, all_of, all_of, (), steps, 1e-4, 0.9, 0.95, 0.1, 1e-8, False, False,
             None, None),
        )  # fmt: skip
        scalars = (1.0000001,) * len(sizes)
        yield BenchCall("aten::_foreach_mul_", (all_of, 0.999999))
        yield BenchCall("aten::_foreach_lerp_", (all_of, all_of, 0.1))
        yield BenchCall("aten::_foreach_addcmul_", (all_of, all_of, all_of, 1e-3), same=((2, 1),))
        yield BenchCall("aten::_foreach_sqrt", (all_of,))
        yield BenchCall("aten::_foreach_div_", (all_of, scalars))
        yield BenchCall("aten::_foreach_add_", (all_of, 1e-8))
        yield BenchCall("aten::_foreach_addcdiv_", (all_of, all_of, all_of, scalars))


def _parameters(model: Model, tp: int) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's parameters on one of `tp` ranks."""
    width, keys = model.heads * model.head // tp, max(1, model.key_heads // tp) * model.head
    inner, hidden = model.inner // tp, model.hidden
    found: list[tuple[int, ...]] = [(width, hidden), (keys, hidden), (keys, hidden),
                                    (hidden, width)]  # fmt: skip
    if model.experts:
        found += [(model.experts, 2 * model.inner, hidden), (model.experts, hidden, model.inner),
                  (model.experts, hidden)]  # fmt: skip
    else:
        found += [(inner, hidden)] * (2 if model.gated else 1) + [(hidden, inner)]
    return [*found, (hidden,), (hidden,)]
