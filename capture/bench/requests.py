"""The calls to benchmark: those of a trace, a grid of training shapes, and a grid for power.

The training grid holds the calls of dense and mixture-of-experts models, each call once. The most
useful calls come first, because a benchmark may run out of time: long micro-batches of common
models in bfloat16, then other lengths, other models, short lengths, and other dtypes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.layer_calls import (
    MODELS,
    DecoderSizes,
    attention,
    embedding,
    experts,
    head,
    linear,
    mlp,
    norms,
    optimizer,
    pointwise_sizes,
    products,
    rotary,
    scaled,
    squares,
    typed,
)
from onerank.capture.bench.random_operands import layouts
from onerank.ir import Graph
from onerank.ir.errors import CaptureError

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A call to measure.

    Attributes:
        layouts: the call with each memory layout to try; one layout where it is known.
        kernels: names of the kernels that it launched in a trace; empty if any kernel will do.
        sustained: whether to repeat it for seconds, so that the board's power can be read.
    """

    layouts: tuple[BenchCall, ...]
    kernels: frozenset[str] = frozenset()
    sustained: bool = False


@dataclass(frozen=True, slots=True)
class TraceRequests:
    """Requests for the calls of a trace.

    Attributes:
        requests: one for each distinct call, in order of priority.
        dropped: reason -> number of kernels whose call cannot be repeated.
    """

    requests: tuple[BenchRequest, ...]
    dropped: dict[str, int]


_COLUMNS = ("op", "input_shapes", "input_types", "input_values")


def trace_requests(graph: Graph) -> TraceRequests:
    """Return requests for the distinct calls of a graph's GPU operations, by total time.

    Communication is excluded: its time belongs to the network.
    """
    # By time, so that a benchmark that runs out of time has measured most of the step.
    nodes, strings = graph.nodes, graph.strings
    index = np.flatnonzero(graph.gpu_compute)
    rows = np.stack([getattr(nodes, name)[index] for name in (*_COLUMNS, "name")], axis=1)
    total_ns: dict[BenchCall, int] = {}
    kernels: dict[BenchCall, set[str]] = {}
    dropped: dict[str, int] = {}
    # Layers repeat, so a graph has far fewer distinct calls than kernels. The key is of string
    # codes, because parsing the JSON columns of every kernel would dominate.
    parsed: dict[tuple[int, ...], BenchCall | str] = {}
    for row, kernel_ns in zip(rows.tolist(), nodes.duration_ns[index].tolist(), strict=True):
        key = tuple(row[:-1])
        if key not in parsed:
            parsed[key] = _parsed(*(strings[code] for code in key))
        call = parsed[key]
        if isinstance(call, str):
            dropped[call] = dropped.get(call, 0) + 1
            continue
        total_ns[call] = total_ns.get(call, 0) + kernel_ns
        kernels.setdefault(call, set()).add(strings[row[-1]])
    ordered = sorted(total_ns, key=lambda call: -total_ns[call])
    requests = (BenchRequest(tuple(layouts(call)), frozenset(kernels[call])) for call in ordered)
    return TraceRequests(tuple(requests), dropped)


def _parsed(op: str, shapes: str, types: str, values: str) -> BenchCall | str:
    """Return the call, or the reason why it cannot be repeated."""
    if not op.startswith("aten::"):
        return f"{op or 'kernels without an operator'}: only operators of aten are measured"
    try:
        return BenchCall.parse(op, shapes, types, values)
    except CaptureError as error:
        return str(error)


_MODEL = MODELS[0]

_TOKENS = 4096

_LARGE, _CACHED = 1 << 28, 1 << 22

# m, n and k of GEMMs: compute-bound, of a layer, memory-bound, within the cache, on few SMs.
_PRODUCTS = (
    (8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (4096, 4096, 4096),
    (8192, 8192, 256), (2048, 2048, 2048), (512, 4096, 4096), (256, 16384, 8192),
    (64, 16384, 16384), (1, 16384, 16384), (1024, 1024, 1024), (512, 512, 512), (128, 128, 8192),
)  # fmt: skip

_IN_CACHE = ("add", "silu", "sum", "exp", "fill_")


def power_calls() -> Iterator[BenchCall]:
    """Yield some sixty calls that span a GPU's power draw, the most informative first."""
    cached = (call for call in _pointwise(_CACHED) if call.op.removeprefix("aten::") in _IN_CACHE)
    yield from _pointwise(_LARGE)
    yield from cached
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
        yield BenchCall("aten::add", (BenchOperand((size,)), BenchOperand((size,)), 1))


def _product(m: int, n: int, k: int, dtype: str) -> BenchCall:
    return next(linear(m, k, n, dtype, backward=False))


def _pointwise(size: int) -> Iterator[BenchCall]:
    """Yield calls that read, write or do both, with little and with much arithmetic per byte."""
    narrow, wide = BenchOperand((size,)), BenchOperand((size,), FP32)
    yield BenchCall("aten::add", (narrow, narrow, 1))
    yield BenchCall("aten::silu", (narrow,))
    yield BenchCall("aten::mul", (narrow, narrow))
    yield BenchCall("aten::copy_", (wide, narrow, False))
    yield BenchCall("aten::fill_", (narrow, 0))
    yield BenchCall("aten::sum", (wide, (), False, None))
    yield BenchCall("aten::exp", (wide,))
    yield BenchCall("aten::gelu", (narrow, "none"))
    yield BenchCall("aten::silu_backward", (narrow, narrow))
    yield BenchCall("aten::copy_", (narrow, wide, False))
    yield BenchCall("aten::copy_", (narrow, narrow, False))


def _optimizer() -> Iterator[BenchCall]:
    """Yield Adam over a layer in bfloat16, fused and as foreach operators, and fused in float32."""
    calls = list(optimizer(_MODEL, 1))
    half = len(calls) // 2  # the second half repeats the first in float32
    yield from calls[:half]
    yield calls[half]


def _norms() -> Iterator[BenchCall]:
    """Yield fused norms, and the copy and concatenation of a rotary embedding."""
    names = ("_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "mean")
    yield from (norm for norm in norms(_MODEL, _TOKENS) if norm.op.removeprefix("aten::") in names)
    heads = BenchOperand((1, _MODEL.heads, _TOKENS, _MODEL.head_dim)).swapped(1, 2)
    yield BenchCall("aten::copy_", (replace(heads, strides=None), heads, False))
    yield BenchCall("aten::cat", ((heads, heads), -1))


def _loss() -> Iterator[BenchCall]:
    """Yield the cross-entropy of float32 logits, and the embedding lookup with its gradient."""
    wide = BenchOperand((_TOKENS, _MODEL.vocabulary), FP32)
    yield BenchCall("aten::_log_softmax", (wide, 1, False))
    yield BenchCall("aten::_log_softmax_backward_data", (wide, wide, 1, 6))
    table, index = (
        BenchOperand((_MODEL.vocabulary, _MODEL.hidden)),
        BenchOperand((1, _TOKENS), "int64"),
    )
    yield BenchCall("aten::embedding", (table, index, -1, False, False))
    grad = BenchOperand((1, _TOKENS, _MODEL.hidden))
    yield BenchCall("aten::embedding_dense_backward", (grad, index, _MODEL.vocabulary, -1, False))


_TP_SIZES = (1, 2, 4, 8)

Tier = Iterator[BenchCall]
"""Calls of equal priority."""


def power_grid() -> tuple[BenchRequest, ...]:
    """Return requests for sustained runs of calls that span what a GPU draws."""
    return tuple(BenchRequest((call,), sustained=True) for call in dict.fromkeys(power_calls()))


def training_grid() -> tuple[BenchRequest, ...]:
    """Return requests for the training grid in order of priority, each call once."""
    sustained = dict.fromkeys(chain(power_calls(), squares()))
    first, *others = _TIERS
    calls = dict.fromkeys(chain(first(), sustained, *(tier() for tier in others)))
    return tuple(BenchRequest((call,), sustained=call in sustained) for call in calls)


def _common_models() -> Tier:
    for model in MODELS[:3]:
        for tp in _TP_SIZES:
            yield from _layer(model, tp, 4096)
    for model in MODELS[:3]:
        yield from _outside_layers(model, 4096)


def _mixtures() -> Tier:
    for model in MODELS:
        if model.experts:
            for tokens in (4096, 8192):
                yield from experts(model, tokens)
            yield from _layer(model, 1, 4096)
            yield from _outside_layers(model, 4096)


def _few_tokens_of_common_models() -> Tier:
    yield from _few_tokens(MODELS[:3])


def _other_lengths() -> Tier:
    for tokens in (8192, 2048, 16384, 1024):
        for model in MODELS[:3]:
            for tp in _TP_SIZES:
                yield from _layer(model, tp, tokens)


def _other_models() -> Tier:
    for tokens in (4096, 8192, 2048):
        for model in MODELS[3:]:
            for tp in _TP_SIZES:
                yield from _layer(model, tp, tokens)


def _other_dtypes() -> Tier:
    for model in MODELS[:3]:
        for tokens in (4096, 8192, 1024):
            for tp in (1, 4):
                yield from typed(model, tp, tokens)


def _few_tokens_of_other_models() -> Tier:
    yield from _few_tokens(MODELS[3:])


def _few_tokens(models: Sequence[DecoderSizes]) -> Tier:
    """Yield the forward GEMMs of micro-batches of up to 512 tokens."""
    for model in models:
        for tokens in (1, 16, 64, 128, 256, 512):
            for tp in _TP_SIZES:
                yield from products(model, tp, tokens, backward=False)


# In order of priority: a benchmark with a time limit may not reach the last ones.
_TIERS: tuple[Callable[[], Tier], ...] = (
    _common_models, pointwise_sizes, _mixtures, _other_dtypes, _other_lengths,
    _few_tokens_of_common_models, _other_models, _few_tokens_of_other_models,
)  # fmt: skip


def _layer(model: DecoderSizes, tp: int, tokens: int) -> Tier:
    """Yield the calls of one layer on one of `tp` ranks, forward and backward."""
    if model.heads % tp:
        return
    yield from products(model, tp, tokens)
    yield from attention(model, tp, tokens)
    yield from mlp(model, tp, tokens)
    yield from rotary(model, tp, tokens)
    if tp == 1:  # tensor parallelism leaves the norms whole
        yield from norms(model, tokens)


def _outside_layers(model: DecoderSizes, tokens: int) -> Tier:
    """Yield the calls of output head and loss, embedding and optimizer."""
    for tp in (1, 4):
        yield from head(model, tp, tokens)
    yield from embedding(model, tokens)
    for tp in (1, 4, 8):
        yield from optimizer(model, tp)
