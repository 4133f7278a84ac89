"""Calls that span the GPU's power range."""

from collections.abc import Iterator
from dataclasses import replace

from onerank.capture.bench.layer_calls import attention, linear, norms, optimizer, scaled
from onerank.capture.bench.measured_call import BenchCall, Operand
from onerank.capture.bench.model_shapes import MODELS

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
    yield from (one for one in norms(_MODEL, _TOKENS) if one.op.removeprefix("aten::") in names)
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
