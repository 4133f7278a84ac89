"""Grids of calls to benchmark: training shapes over tensor-parallel sizes, and the power range.

The training grid holds the calls of dense and mixture-of-experts models, each call once. The most
useful calls come first, because a benchmark may run out of time: long micro-batches of common
models in bfloat16, then other lengths, other models, short lengths, and other dtypes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from onerank.capture.bench.layer_calls import (
    attention,
    embedding,
    experts,
    head,
    linear,
    mlp,
    norms,
    optimizer,
    products,
    rotary,
    scaled,
    small,
    squares,
    typed,
)
from onerank.capture.bench.measured_call import BenchCall, Operand
from onerank.capture.bench.model_shapes import MODELS, Model
from onerank.capture.bench.trace_calls import Wanted

BF16, FP16, FP32 = "bfloat16", "float16", "float32"

_MODEL = MODELS[0]

_TOKENS = 4096

_LARGE, _CACHED = 1 << 28, 1 << 22

_PRODUCTS = (
    (8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 4096, 4096),
    (8192, 8192, 256), (2048, 2048, 2048), (512, 4096, 4096), (256, 16384, 8192),
    (64, 16384, 16384), (1, 16384, 16384), (1024, 1024, 1024), (512, 512, 512), (128, 128, 8192),
)  # fmt: skip
"""m, n and k: at the limit, of a layer, bound by memory, in the cache, on few units."""

_IN_CACHE = ("add", "silu", "sum", "exp", "fill_")


def drawn() -> Iterator[BenchCall]:
    """Yield some sixty calls, those that tell most first."""
    large, cached = list(_moves(_LARGE)), list(_moves(_CACHED))
    yield from large
    yield from (one for one in cached if one.op.removeprefix("aten::") in _IN_CACHE)
    for m, n, k in _PRODUCTS:
        yield _product(m, n, k, BF16)
    yield from attention(_MODEL, 1, _TOKENS)
    yield from _optimizer()
    yield from _norms()
    yield from _loss()
    m, n, k = 4096, 4096, 4096
    yield from scaled(m, k, n)
    yield _product(m, n, k, FP16)
    yield replace(_product(m, n, k, FP32), tf32=True)
    yield _product(m, n, k, FP32)
    yield from scaled(256, 8192, 16384)
    for size in (1 << 12, 1 << 16):
        yield BenchCall("aten::add", (Operand((size,)), Operand((size,)), 1))


def _product(m: int, n: int, k: int, dtype: str) -> BenchCall:
    return next(linear(m, k, n, dtype, backward=False))


def _moves(size: int) -> Iterator[BenchCall]:
    """Yield reads, writes and both, with little arithmetic for each byte and with much."""
    one, wide = Operand((size,)), Operand((size,), FP32)
    yield BenchCall("aten::add", (one, one, 1))
    yield BenchCall("aten::silu", (one,))
    yield BenchCall("aten::mul", (one, one))
    yield BenchCall("aten::copy_", (wide, one, False))
    yield BenchCall("aten::fill_", (one, 0))
    yield BenchCall("aten::sum", (wide, (), False, None))
    yield BenchCall("aten::exp", (wide,))
    yield BenchCall("aten::gelu", (one, "none"))
    yield BenchCall("aten::silu_backward", (one, one))
    yield BenchCall("aten::copy_", (one, wide, False))
    yield BenchCall("aten::copy_", (one, one, False))


def _optimizer() -> Iterator[BenchCall]:
    """Yield Adam over a layer in bfloat16, fused and in steps, and fused in float32."""
    calls = list(optimizer(_MODEL, 1))
    half = len(calls) // 2
    yield from calls[:half]
    yield calls[half]


def _norms() -> Iterator[BenchCall]:
    """Yield fused norms, and a rotation's parts."""
    names = ("_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "mean")
    yield from (norm for norm in norms(_MODEL, _TOKENS) if norm.op.removeprefix("aten::") in names)
    heads = Operand((1, _MODEL.heads, _TOKENS, _MODEL.head)).swapped(1, 2)
    yield BenchCall("aten::copy_", (replace(heads, strides=None), heads, False))
    yield BenchCall("aten::cat", ((heads, heads), -1))


def _loss() -> Iterator[BenchCall]:
    """Yield the cross-entropy of float32 logits, and the look-up of rows."""
    wide = Operand((_TOKENS, _MODEL.vocabulary), FP32)
    yield BenchCall("aten::_log_softmax", (wide, 1, False))
    yield BenchCall("aten::_log_softmax_backward_data", (wide, wide, 1, 6))
    table, index = Operand((_MODEL.vocabulary, _MODEL.hidden)), Operand((1, _TOKENS), "int64")
    yield BenchCall("aten::embedding", (table, index, -1, False, False))
    made = Operand((1, _TOKENS, _MODEL.hidden))
    yield BenchCall("aten::embedding_dense_backward", (made, index, _MODEL.vocabulary, -1, False))


_SIZES = (1, 2, 4, 8)

Tier = Iterator[BenchCall]


def power() -> tuple[Wanted, ...]:
    """Return calls that span what a GPU draws, each to be held."""
    return tuple(Wanted((call,), held=True) for call in dict.fromkeys(drawn()))


def training() -> tuple[Wanted, ...]:
    """Return what to measure, in order, each call once."""
    held = dict.fromkeys(chain(drawn(), squares()))
    first, *others = _TIERS
    seen = dict.fromkeys(chain(first(), held, *(tier() for tier in others)))
    return tuple(Wanted((call,), held=call in held) for call in seen)


def _first() -> Tier:
    for model in MODELS[:3]:
        for tp in _SIZES:
            yield from _layer(model, tp, 4096)
    for model in MODELS[:3]:
        yield from _whole(model, 4096)


def _mixtures() -> Tier:
    for model in MODELS:
        if model.experts:
            for tokens in (4096, 8192):
                yield from experts(model, tokens)
            yield from _layer(model, 1, 4096)
            yield from _whole(model, 4096)


def _short_first() -> Tier:
    yield from _decode(MODELS[:3])


def _long() -> Tier:
    for tokens in (8192, 2048, 16384, 1024):
        for model in MODELS[:3]:
            for tp in _SIZES:
                yield from _layer(model, tp, tokens)


def _others() -> Tier:
    for tokens in (4096, 8192, 2048):
        for model in MODELS[3:]:
            for tp in _SIZES:
                yield from _layer(model, tp, tokens)


def _types() -> Tier:
    for model in MODELS[:3]:
        for tokens in (4096, 8192, 1024):
            for tp in (1, 4):
                yield from typed(model, tp, tokens)


def _short() -> Tier:
    yield from _decode(MODELS[3:])


def _decode(models: Sequence[Model]) -> Tier:
    """Yield the forward products of few tokens."""
    for model in models:
        for tokens in (1, 16, 64, 128, 256, 512):
            for tp in (1, 2, 4, 8):
                yield from products(model, tp, tokens, backward=False)


def _sizes_alone() -> Tier:
    yield from small()


_TIERS: tuple[Callable[[], Tier], ...] = (
    _first, _sizes_alone, _mixtures, _types, _long, _short_first, _others, _short,
)  # fmt: skip


def _layer(model: Model, tp: int, tokens: int) -> Tier:
    """Yield the calls of one layer on one of `tp` ranks, forward and backward."""
    if model.heads % tp:
        return
    yield from products(model, tp, tokens)
    yield from attention(model, tp, tokens)
    yield from mlp(model, tp, tokens)
    yield from rotary(model, tp, tokens)
    if tp == 1:
        yield from norms(model, tokens)


def _whole(model: Model, tokens: int) -> Tier:
    """Yield embedding, loss and optimizer."""
    for tp in (1, 4):
        yield from head(model, tp, tokens)
    yield from embedding(model, tokens)
    for tp in (1, 4, 8):
        yield from optimizer(model, tp)
