"""Calls of a transformer layer: attention, pointwise, GEMM, embedding, loss, optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onerank.capture.bench.bench_call import BenchCall, BenchOperand

BF16, FP32 = "bfloat16", "float32"


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder, from its published configuration.

    Attributes:
        name: as published.
        hidden: width of the residual stream.
        intermediate: width of the MLP; of one expert in a mixture.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: width of a head.
        vocabulary: rows of the embedding.
        experts: of each layer; 0 for a dense model.
        top_k: experts that a token goes to.
        gated: whether the MLP has a gate (SwiGLU) or is a plain GELU MLP.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    gated: bool = True


MODELS = (
    DecoderSizes("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    DecoderSizes("Llama-3-70B", 8192, 28672, 64, 8, 128, 128256),
    DecoderSizes("Qwen3-32B", 5120, 25600, 64, 8, 128, 151936),
    DecoderSizes("Mixtral-8x7B", 4096, 14336, 32, 8, 128, 32000, 8, 2),
    DecoderSizes("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, 128, 8),
    DecoderSizes("Qwen2.5-7B", 3584, 18944, 28, 4, 128, 152064),
    DecoderSizes("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 128256),
    DecoderSizes("GPT-3-175B", 12288, 49152, 96, 96, 128, 50257, gated=False),
    DecoderSizes("Llama-3.1-405B", 16384, 53248, 128, 8, 128, 128256),
    DecoderSizes("GPT-2-XL", 1600, 6400, 25, 25, 64, 50257, gated=False),
    DecoderSizes("Llama-3.2-3B", 3072, 8192, 24, 8, 128, 128256),
)
"""Published models in order of measurement: the time limit may end before the last ones."""


def attention(model: DecoderSizes, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield causal attention over `tokens` tokens: one sequence, and 2 and 4 shorter ones."""
    heads, keys = model.heads // tp, max(1, model.kv_heads // tp)
    # Training rarely has sequences below 1024 tokens.
    for batch in (1, 2, 4):
        if tokens // batch >= 1024:
            yield from _cudnn(batch, heads, keys, tokens // batch, model.head_dim)
    yield from _flash(1, heads, keys, tokens, model.head_dim)


def _cudnn(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    """Yield forward and backward; operands [b, h, s, d] are views of [b, s, h, d]."""
    query = BenchOperand((batch, heads, length, head)).swapped(1, 2)
    key = BenchOperand((batch, keys, length, head)).swapped(1, 2)
    scale = head**-0.5
    yield BenchCall(
        "aten::_cudnn_attention_forward",
        (query, key, key, None, None, None, length, length, True, 0.0, True, False, scale),
    )
    sums = BenchOperand((batch, heads, length, 1), "float32")
    seed = BenchOperand((), "int64")
    yield BenchCall(
        "aten::_cudnn_attention_backward",
        (query, query, key, key, query, sums, seed, seed, None, None, None, length, length, 0.0,
         True, scale),
    )  # fmt: skip


def _flash(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    query, key = (
        BenchOperand((batch, length, heads, head)),
        BenchOperand((batch, length, keys, head)),
    )
    scale = head**-0.5
    yield BenchCall(
        "aten::_flash_attention_forward",
        (query, key, key, None, None, length, length, 0.0, True, False, scale),
    )
    sums = BenchOperand((batch, heads, length), "float32")
    seed, unused = BenchOperand((2,), "int64"), BenchOperand((), "int64")
    yield BenchCall(
        "aten::_flash_attention_backward",
        (query, query, key, key, query, sums, None, None, length, length, 0.0, True, seed, unused,
         scale),
    )  # fmt: skip


def mlp(model: DecoderSizes, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the activation and the residual additions."""
    routed = tokens * max(1, model.top_k)
    if model.experts:
        inner = BenchOperand((routed, model.intermediate))
    else:
        inner = BenchOperand((1, tokens, model.intermediate // tp))
    if model.gated:
        yield BenchCall("aten::silu", (inner,))
        yield BenchCall("aten::silu_backward", (inner, inner))
        yield BenchCall("aten::mul", (inner, inner))
    else:
        for kind in ("none", "tanh"):
            yield BenchCall("aten::gelu", (inner, kind))
            yield BenchCall("aten::gelu_backward", (inner, inner, kind))
    hidden = BenchOperand((1, tokens, model.hidden))
    yield BenchCall("aten::add", (hidden, hidden, 1))
    yield BenchCall("aten::add_", (hidden, hidden, 1))
    yield BenchCall("aten::copy_", (hidden, hidden, False))


def norms(model: DecoderSizes, tokens: int) -> Iterator[BenchCall]:
    """Yield RMS norm as transformers computes it, fused RMS norm, and layer norm."""
    wide, narrow = (
        BenchOperand((1, tokens, model.hidden), FP32),
        BenchOperand((1, tokens, model.hidden)),
    )
    rows, scale = BenchOperand((1, tokens, 1), FP32), BenchOperand((model.hidden,))
    epsilon, two = BenchOperand((), "float64", host=True), BenchOperand((), "int64", host=True)
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
    # The backward of a mean expands its gradient over the reduced dimension.
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


def rotary(model: DecoderSizes, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the rotary embedding of queries and keys, as transformers computes it."""
    for heads in dict.fromkeys((model.heads // tp, max(1, model.kv_heads // tp))):
        whole = BenchOperand((1, heads, tokens, model.head_dim))
        swapped = whole.swapped(1, 2)
        half = replace(whole, shape=(1, heads, tokens, model.head_dim // 2))
        halved = replace(half, strides=swapped.strides)
        negated = half.swapped(1, 2)
        angles = BenchOperand((1, 1, tokens, model.head_dim))
        yield BenchCall("aten::mul", (swapped, angles))
        yield BenchCall("aten::mul", (whole, angles))
        yield BenchCall("aten::neg", (halved,))
        yield BenchCall("aten::cat", ((negated, halved), -1))
        yield BenchCall("aten::add", (swapped, whole, 1))
        yield BenchCall("aten::add_", (swapped, swapped, 1))
        yield BenchCall("aten::copy_", (swapped, replace(swapped, strides=None), False))
        rows = BenchOperand((1, tokens, heads, model.head_dim))
        yield BenchCall("aten::copy_", (rows, rows.swapped(1, 2), False))


def pointwise_sizes() -> Iterator[BenchCall]:
    """Yield pointwise and reduction calls from launch-bound to memory-bound sizes."""
    for power in range(10, 29, 2):
        size = (1 << power,)
        narrow, wide = BenchOperand(size), BenchOperand(size, FP32)
        for operand in (narrow, wide):
            yield BenchCall("aten::add", (operand, operand, 1))
            yield BenchCall("aten::mul", (operand, operand))
            yield BenchCall("aten::fill_", (operand, 0))
            yield BenchCall("aten::copy_", (operand, operand, False))
            yield BenchCall("aten::exp", (operand,))
            yield BenchCall("aten::sum", (operand, (), False, None))
        yield BenchCall("aten::copy_", (wide, narrow, False))
        yield BenchCall("aten::copy_", (narrow, wide, False))
        yield BenchCall("aten::silu", (narrow,))
        yield BenchCall("aten::gelu", (narrow, "none"))


_BFLOAT16_CODE = 15  # c10::ScalarType of bfloat16, as the schema's argument takes it


def products(
    model: DecoderSizes, tp: int, tokens: int, *, backward: bool = True
) -> Iterator[BenchCall]:
    """Yield the GEMMs of a layer's linears on one of `tp` ranks."""
    for rows, columns in _linears(model, tp):
        yield from linear(tokens, rows, columns, backward=backward)


def linear(
    tokens: int, rows: int, columns: int, dtype: str = BF16, *, backward: bool = True
) -> Iterator[BenchCall]:
    """Yield the GEMMs of a linear without bias, of `rows` inputs and `columns` outputs."""
    yield _mm(BenchOperand((tokens, rows), dtype), _transposed((rows, columns), dtype))
    if backward:
        yield _mm(BenchOperand((tokens, columns), dtype), BenchOperand((columns, rows), dtype))
        yield _mm(_transposed((columns, tokens), dtype), BenchOperand((tokens, rows), dtype))


def typed(model: DecoderSizes, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield a layer's GEMMs in float8, float16, TF32 and float32."""
    for rows, columns in _linears(model, tp):
        yield from scaled(tokens, rows, columns)
        yield from linear(tokens, rows, columns, "float16")
        for call in linear(tokens, rows, columns, "float32"):
            yield replace(call, tf32=True)
    # float32 runs without tensor cores, which takes long for large sizes.
    if tokens * model.hidden <= 4096 * 4096:
        for rows, columns in _linears(model, tp):
            yield from linear(tokens, rows, columns, "float32", backward=False)


def squares() -> Iterator[BenchCall]:
    """Yield GEMMs and pointwise calls for power, from memory-bound to power-limited."""
    for m, n, k in (
        (8192, 8192, 8192), (16384, 16384, 4096), (4096, 4096, 4096), (8192, 8192, 1024),
        (8192, 8192, 256), (2048, 2048, 2048), (1024, 8192, 8192), (256, 16384, 8192),
        (128, 16384, 8192), (64, 16384, 8192), (16, 16384, 8192), (1, 16384, 16384),
    ):  # fmt: skip
        yield _mm(BenchOperand((m, k), BF16), _transposed((k, n), BF16))
        yield from scaled(m, k, n)
    for size in (1 << 24, 1 << 26, 1 << 28):
        operand = BenchOperand((size,), BF16)
        yield BenchCall("aten::add", (operand, operand, 1))
        yield BenchCall("aten::silu", (operand,))
        yield BenchCall("aten::copy_", (BenchOperand((size,), "float32"), operand, False))


def experts(model: DecoderSizes, tokens: int) -> Iterator[BenchCall]:
    """Yield grouped GEMMs over all experts, and the GEMMs of one expert with an even share."""
    routed = tokens * model.top_k
    ends = BenchOperand((model.experts,), "int32")
    for rows, columns in ((model.hidden, model.intermediate), (model.intermediate, model.hidden)):
        yield from linear(routed // model.experts, rows, columns)
        weight = BenchOperand((model.experts, rows, columns), BF16).swapped(1, 2)
        back = BenchOperand((model.experts, columns, rows), BF16)
        for size, operand in ((rows, weight), (columns, back)):
            left = BenchOperand((routed, size), BF16)
            yield BenchCall("aten::_grouped_mm", (left, operand, ends, None, None))


def _linears(model: DecoderSizes, tp: int) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the distinct linears of a layer on one of `tp` ranks."""
    width = model.heads * model.head_dim // tp
    keys = max(1, model.kv_heads // tp) * model.head_dim
    shapes = [(model.hidden, width), (model.hidden, keys), (width, model.hidden)]
    if not model.experts:
        inner = model.intermediate // tp
        shapes += [(model.hidden, inner), (inner, model.hidden)]
    return list(dict.fromkeys(shapes))


def scaled(tokens: int, rows: int, columns: int) -> Iterator[BenchCall]:
    """Yield the float8 GEMM with one scale per operand; nothing unless 16 divides its sizes."""
    if tokens % 16 or rows % 16 or columns % 16:
        return
    fp8 = "float8_e4m3fn"
    scale = BenchOperand((), "float32")
    left, right = BenchOperand((tokens, rows), fp8), _transposed((rows, columns), fp8)
    yield BenchCall(
        "aten::_scaled_mm", (left, right, scale, scale, None, None, _BFLOAT16_CODE, True)
    )


def _mm(left: BenchOperand, right: BenchOperand) -> BenchCall:
    return BenchCall("aten::mm", (left, right))


def _transposed(shape: tuple[int, int], dtype: str) -> BenchOperand:
    return BenchOperand(shape, dtype).swapped(0, 1)


_MEAN, _IGNORED = 1, -100


def head(model: DecoderSizes, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the output head's GEMMs and the cross-entropy of its logits in float32."""
    words = model.vocabulary // tp
    yield from linear(tokens, model.hidden, words)
    narrow, wide = BenchOperand((tokens, words)), BenchOperand((tokens, words), FP32)
    target, grad = BenchOperand((tokens,), "int64"), BenchOperand((), FP32)
    yield BenchCall("aten::copy_", (wide, narrow, False))
    yield BenchCall("aten::copy_", (narrow, wide, False))
    yield BenchCall("aten::_log_softmax", (wide, 1, False))
    yield BenchCall("aten::_log_softmax_backward_data", (wide, wide, 1, 6))
    yield BenchCall("aten::nll_loss_forward", (wide, target, None, _MEAN, _IGNORED))
    yield BenchCall("aten::nll_loss_backward", (grad, wide, target, None, _MEAN, _IGNORED, grad))
    rows = BenchOperand((tokens, 1), FP32)
    yield BenchCall("aten::max", (wide, -1, False))
    yield BenchCall("aten::sum", (wide, (-1,), False, None))
    yield BenchCall("aten::sub_", (wide, rows, 1))
    yield BenchCall("aten::div_", (wide, rows))
    yield BenchCall("aten::mul_", (wide, rows))
    yield BenchCall("aten::exp", (wide, wide), same=((1, 0),))


def embedding(model: DecoderSizes, tokens: int) -> Iterator[BenchCall]:
    """Yield the embedding lookup, its gradient, and the dispatch of tokens to experts."""
    table, hidden = (
        BenchOperand((model.vocabulary, model.hidden)),
        BenchOperand((tokens, model.hidden)),
    )
    # `index_select` calls `gather` with its index expanded over the columns.
    index = BenchOperand((tokens, model.hidden), "int64", strides=(1, 0))
    yield BenchCall("aten::gather", (table, 0, index, False, hidden))
    ids = BenchOperand((tokens,), "int64")
    yield BenchCall("aten::embedding_dense_backward", (hidden, ids, model.vocabulary, -1, False))
    yield BenchCall("aten::fill_", (table, 0))
    if model.experts:
        routed = tokens * model.top_k
        rows = BenchOperand((routed, model.hidden))
        which = BenchOperand((routed,), "int64")
        yield BenchCall("aten::index", (hidden, (which,)))
        yield BenchCall("aten::index_add_", (hidden, 0, which, rows, 1))
        scores = BenchOperand((tokens, model.experts), FP32)
        yield BenchCall("aten::_softmax", (scores, -1, False))
        yield BenchCall("aten::topk", (scores, model.top_k, -1, True, True))
        yield BenchCall("aten::sort", (which, True, -1, False))


def optimizer(model: DecoderSizes, tp: int) -> Iterator[BenchCall]:
    """Yield AdamW over the parameters of one layer: fused, and as foreach operators."""
    sizes = _parameters(model, tp)
    for dtype in (BF16, FP32):
        all_of = tuple(BenchOperand(size, dtype) for size in sizes)
        steps = tuple(BenchOperand((), FP32) for _ in sizes)
        yield BenchCall(
            "aten::_fused_adamw_",
            (all_of, all_of, all_of, all_of, (), steps, 1e-4, 0.9, 0.95, 0.1, 1e-8, False, False,
             None, None),
        )  # fmt: skip
        # Factors close to 1: the operators work in place and are repeated thousands of times, and
        # dividing infinities takes twice as long.
        scalars = (1.0000001,) * len(sizes)
        yield BenchCall("aten::_foreach_mul_", (all_of, 0.999999))
        yield BenchCall("aten::_foreach_lerp_", (all_of, all_of, 0.1))
        # Adam passes the gradient twice. Read once, it takes 35 us where two tensors take 45 us
        # (H200).
        yield BenchCall("aten::_foreach_addcmul_", (all_of, all_of, all_of, 1e-3), same=((2, 1),))
        yield BenchCall("aten::_foreach_sqrt", (all_of,))
        yield BenchCall("aten::_foreach_div_", (all_of, scalars))
        yield BenchCall("aten::_foreach_add_", (all_of, 1e-8))
        yield BenchCall("aten::_foreach_addcdiv_", (all_of, all_of, all_of, scalars))


def _parameters(model: DecoderSizes, tp: int) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's parameters on one of `tp` ranks."""
    width, keys = model.heads * model.head_dim // tp, max(1, model.kv_heads // tp) * model.head_dim
    inner, hidden = model.intermediate // tp, model.hidden
    shapes: list[tuple[int, ...]] = [(width, hidden), (keys, hidden), (keys, hidden),
                                    (hidden, width)]  # fmt: skip
    if model.experts:
        shapes += [(model.experts, 2 * model.intermediate, hidden),
                  (model.experts, hidden, model.intermediate), (model.experts, hidden)]  # fmt: skip
    else:
        shapes += [(inner, hidden)] * (2 if model.gated else 1) + [(hidden, inner)]
    return [*shapes, (hidden,), (hidden,)]
