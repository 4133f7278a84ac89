"""The cases of `small_operators.py`: operators that memory or latency limits, and their sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases.

    Attributes:
        tables: words and width of embeddings.
        embedded: tokens of the backward of embeddings.
        tokens: of all other cases; up to 1,024 of those of a layer.
        widths: of hidden states.
        heads: number and size of heads.
        batches: rows of logits.
        words: columns of logits.
        others: operators, of `_OTHERS` and `_BLIND`, which the first sizes have not.
        repeated: whether the calls of a case follow each other.
    """

    tables: tuple[tuple[int, int], ...]
    embedded: tuple[int, ...]
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    words: int
    others: tuple[str, ...] = ()
    repeated: bool = False


_BLIND_SIZES = Sizes(
    tables=((64000, 2048),),
    embedded=(700, 5000),
    tokens=(3, 40, 1500),
    widths=(1152, 3584, 8192),
    heads=((20, 128), (16, 96)),
    batches=(3, 48),
    words=64000,
    others=("unseen", "blind"),
)
SIZES = {
    "first": Sizes(
        tables=((2048, 1024), (32000, 1024), (128256, 2048)),
        embedded=(128, 1024, 4096, 16384),
        tokens=(1, 16, 64, 1024, 8192),
        widths=(1024, 4096, 7168),
        heads=((32, 128), (8, 128), (16, 64)),
        batches=(1, 8, 64),
        words=128256,
    ),
    "held-out": Sizes(
        tables=((50304, 768), (151936, 4096)),
        embedded=(512, 2048, 8192),
        tokens=(4, 32, 256, 3000),
        widths=(1536, 2048, 5120),
        heads=((28, 128), (4, 128), (64, 64)),
        batches=(2, 32),
        words=151936,
    ),
    "unseen": Sizes(
        tables=((32768, 1280), (100352, 3072)),
        embedded=(300, 1500, 6000),
        tokens=(2, 12, 96, 600, 5000),
        widths=(896, 2560, 6144),
        heads=((24, 128), (12, 64), (40, 128)),
        batches=(4, 16, 100),
        words=102400,
        others=("unseen",),
    ),
    "blind": _BLIND_SIZES,
    "blind-repeated": replace(_BLIND_SIZES, repeated=True),
}
_BF16, _F32 = torch.bfloat16, torch.float32
_random: Any = torch.randn
_aten: Any = torch.ops.aten

Call = Callable[[], Any]
Case = tuple[str, bool, Callable[[str], Call]]
"""Name, whether the case is cold, and what makes a call with new operands on a device."""


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yield all cases."""
    for dtype, (words, width), tokens in product((_BF16, _F32), sizes.tables, sizes.embedded):
        name = f"{words}x{width} {tokens} {'bf16' if dtype is _BF16 else 'f32'}"
        yield f"embedding_backward {name}", True, partial(_backward, words, width, tokens, dtype)
    for tokens in sizes.tokens:
        for name, make in _ROWS.items():
            yield f"{name} {tokens}", True, partial(make, tokens)
        for name, make in _EXPERTS.items():
            yield f"{name} {tokens}", False, partial(make, tokens)
        if tokens > 1500:
            continue
        for width, (name, make) in product(sizes.widths, _LAYERS.items()):
            yield f"{name} {tokens}x{width}", False, partial(make, tokens, width)
        for (heads, size), (name, make) in product(sizes.heads, _HEADS.items()):
            # One token is contiguous either way.
            if tokens > 1 or make is not _transposed:
                name_of_size = f"{name} {tokens}x{heads}x{size}"
                yield name_of_size, False, partial(make, tokens, heads, size)
        others = [item for name in sizes.others for item in _OTHERS[name].items()]
        for width, (name, make) in product(sizes.widths, others):
            yield f"{name} {tokens}x{width}", False, partial(make, tokens, width)
    for batch, (name, make) in product(sizes.batches, _LOGITS.items()):
        yield f"{name} of logits {batch}", False, partial(make, batch, sizes.words)


def _indices(most: int, *shape: int, device: str) -> Any:
    return torch.randint(0, most, shape, device=device)


def _backward(words: int, width: int, tokens: int, dtype: Any, device: str) -> Call:
    gradient = _random(tokens, width, device=device, dtype=dtype)
    at = _indices(words, tokens, device=device)
    return lambda: _aten.embedding_dense_backward(gradient, at, words, -1, False)


# Rows of a table, by random indices.


def _table(words: int, tokens: int, device: str) -> tuple[Any, Any]:
    width = 4096 if tokens <= 1024 else 2048
    table = _random(words, width, device=device, dtype=_BF16)
    return table, _indices(words, tokens, device=device)


def _embedding(tokens: int, device: str) -> Call:
    table, at = _table(128256, tokens, device)
    return lambda: functional.embedding(at, table)


def _index_select(tokens: int, device: str) -> Call:
    table, at = _table(65536, tokens, device)
    return lambda: table.index_select(0, at)


def _index(tokens: int, device: str) -> Call:
    table, at = _table(65536, tokens, device)
    return lambda: table[at]


def _into_rows(tokens: int, device: str) -> tuple[Any, Any]:
    table = _random(65536, 1024, device=device, dtype=_BF16)
    return table, _random(tokens, 1024, device=device, dtype=_BF16)


def _index_put(tokens: int, device: str) -> Call:
    table, rows = _into_rows(tokens, device)
    at = torch.randperm(len(table), device=device)[:tokens]
    return lambda: table.index_put_((at,), rows)


def _index_put_added(tokens: int, device: str) -> Call:
    table, rows = _into_rows(tokens, device)
    at = _indices(len(table), tokens, device=device)
    return lambda: table.index_put_((at,), rows, accumulate=True)


def _index_add(tokens: int, device: str) -> Call:
    table, rows = _into_rows(tokens, device)
    at = _indices(len(table), tokens, device=device)
    return lambda: table.index_add_(0, at, rows)


_ROWS = {
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
    "index_put": _index_put,
    "index_put accumulate": _index_put_added,
    "index_add": _index_add,
}


# Routing to 8 of 256 experts.


def _scatter(tokens: int, device: str) -> Call:
    into, at = torch.zeros(tokens, 128, device=device), _indices(128, tokens, 8, device=device)
    values = torch.rand(tokens, 8, device=device)
    return lambda: into.scatter_(1, at, values)


def _gather(tokens: int, device: str) -> Call:
    scores = torch.rand(tokens, 256, device=device)
    at = _indices(256, tokens, 8, device=device)
    return lambda: scores.gather(1, at)


def _topk_experts(tokens: int, device: str) -> Call:
    scores = torch.rand(tokens, 256, device=device)
    return lambda: scores.topk(8, dim=-1)


def _softmax_experts(tokens: int, device: str) -> Call:
    scores = torch.rand(tokens, 256, device=device)
    return lambda: scores.softmax(-1)


def _sort_experts(tokens: int, device: str) -> Call:
    return _indices(256, tokens * 8, device=device).sort


def _histogram(tokens: int, device: str) -> Call:
    at = _indices(256, tokens * 8, device=device)
    return lambda: at.float().histc(256, 0, 255)


def _cumsum_rows(tokens: int, device: str) -> Call:
    counts = _indices(64, tokens, 256, device=device)
    return lambda: counts.cumsum(0)


def _cumsum_columns(tokens: int, device: str) -> Call:
    values = torch.rand(tokens, 4096, device=device)
    return lambda: values.cumsum(-1)


_EXPERTS = {
    "scatter": _scatter,
    "gather": _gather,
    "topk 256": _topk_experts,
    "softmax 256": _softmax_experts,
    "sort experts": _sort_experts,
    "histc experts": _histogram,
    "cumsum rows": _cumsum_rows,
    "cumsum columns": _cumsum_columns,
}


# Between the products of a layer.


def _hidden(tokens: int, width: int, device: str) -> Any:
    return _random(1, tokens, width, device=device, dtype=_BF16)


def _eager_norm(tokens: int, width: int, device: str) -> Call:
    x, weight = _hidden(tokens, width, device), torch.ones(width, device=device, dtype=_BF16)

    def call() -> Any:
        wide = x.to(_F32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * scaled.to(_BF16)

    return call


def _rms_norm(tokens: int, width: int, device: str) -> Call:
    x, weight = _hidden(tokens, width, device), torch.ones(width, device=device, dtype=_BF16)
    return lambda: functional.rms_norm(x, (width,), weight, 1e-6)


def _layer_norm(tokens: int, width: int, device: str) -> Call:
    x, weight = _hidden(tokens, width, device), torch.ones(width, device=device, dtype=_BF16)
    bias = torch.ones(width, device=device, dtype=_BF16)
    return lambda: functional.layer_norm(x, (width,), weight, bias)


def _gated(tokens: int, width: int, device: str) -> Call:
    x, y = (_hidden(tokens, width, device) for _ in range(2))
    return lambda: functional.silu(x) * y


def _residual(tokens: int, width: int, device: str) -> Call:
    x, y = (_hidden(tokens, width, device) for _ in range(2))
    return lambda: x + y


_LAYERS = {
    "eager RMS norm": _eager_norm,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "silu mul": _gated,
    "add": _residual,
}


# On the heads of attention.


def _rope(tokens: int, heads: int, size: int, device: str) -> Call:
    q = _random(1, tokens, heads, size, device=device, dtype=_BF16).transpose(1, 2)
    cos, sin = (torch.rand(1, 1, tokens, size, device=device).to(_BF16) for _ in range(2))

    def call() -> Any:
        half = size // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
        return q * cos + turned * sin

    return call


def _cat(tokens: int, heads: int, size: int, device: str) -> Call:
    a, b = (_random(tokens, heads, n, device=device, dtype=_BF16) for n in (size, 64))
    return lambda: torch.cat((a, b), dim=-1)


def _transposed(tokens: int, heads: int, size: int, device: str) -> Call:
    a = _random(tokens, heads, size, device=device, dtype=_BF16)
    return a.transpose(0, 1).contiguous


_HEADS = {"rope": _rope, "cat": _cat, "transposed copy": _transposed}


# Sampling from the logits.


def _logits(batch: int, words: int, device: str) -> Any:
    return torch.rand(batch, words, device=device)


def _argmax(batch: int, words: int, device: str) -> Call:
    logits = _random(batch, words, device=device, dtype=_BF16)
    return lambda: logits.argmax(-1)


def _topk(batch: int, words: int, device: str) -> Call:
    logits = _logits(batch, words, device)
    return lambda: logits.topk(50, dim=-1)


def _softmax(batch: int, words: int, device: str) -> Call:
    logits = _logits(batch, words, device)
    return lambda: logits.softmax(-1)


def _sort(batch: int, words: int, device: str) -> Call:
    logits = _logits(batch, words, device)
    return lambda: logits.sort(dim=-1, descending=True)


def _cumsum(batch: int, words: int, device: str) -> Call:
    logits = _logits(batch, words, device)
    return lambda: logits.cumsum(-1)


def _multinomial(batch: int, words: int, device: str) -> Call:
    weights = _logits(batch, words, device)
    return lambda: weights.multinomial(1)


_LOGITS = {
    "argmax": _argmax,
    "topk": _topk,
    "softmax": _softmax,
    "sort": _sort,
    "cumsum": _cumsum,
    "multinomial": _multinomial,
}


# Operators that no other case has.


def _unary(function: Callable[[Any], Any], tokens: int, width: int, device: str) -> Call:
    x = _random(tokens, width, device=device, dtype=_BF16)
    return lambda: function(x)


def _masked(tokens: int, width: int, device: str) -> Call:
    x = _random(tokens, width, device=device)
    mask = x > 0
    return lambda: x.masked_fill(mask, 0.0)


def _one_hot(tokens: int, width: int, device: str) -> Call:
    at = _indices(64, tokens, device=device)
    return lambda: functional.one_hot(at, 64)


def _scatter_add(tokens: int, width: int, device: str) -> Call:
    into, at = torch.zeros(tokens, 64, device=device), _indices(64, tokens, 6, device=device)
    values = torch.rand(tokens, 6, device=device)
    return lambda: into.scatter_add_(1, at, values)


def _index_copy(tokens: int, width: int, device: str) -> Call:
    table = _random(8192, width, device=device, dtype=_BF16)
    rows = _random(tokens, width, device=device, dtype=_BF16)
    at = torch.randperm(len(table), device=device)[:tokens]
    return lambda: table.index_copy_(0, at, rows)


def _argsort(tokens: int, width: int, device: str) -> Call:
    at = _indices(64, tokens * 6, device=device)
    return lambda: at.argsort(stable=True)


def _of(function: Any, *kinds: str) -> Callable[[int, int, str], Call]:
    """Return a case that calls a function with new tensors.

    Args:
        function: takes the tensors.
        kinds: of each tensor: `x` for a hidden state in bf16, `f` in float32, `w` for a weight in
            float32, `i` for an index of each token.
    """

    def make(tokens: int, width: int, device: str) -> Call:
        made = {
            "x": lambda: _random(tokens, width, device=device, dtype=_BF16),
            "f": lambda: _random(tokens, width, device=device),
            "w": lambda: _random(width, device=device),
            "i": lambda: _indices(64, tokens, device=device),
        }
        operands = [made[kind]() for kind in kinds]
        return lambda: function(*operands)

    return make


def _softmax_backward(gradient: Any, result: Any) -> Any:
    return _aten._softmax_backward_data(gradient, result, -1, _F32)


def _group_norm(x: Any) -> Any:
    return functional.group_norm(x.unsqueeze(-1), 32)


_UNSEEN: dict[str, Callable[[int, int, str], Call]] = {
    **{
        name: partial(_unary, function)
        for name, function in {
            "gelu": functional.gelu,
            "sigmoid": torch.sigmoid,
            "exp": torch.exp,
            "sin": torch.sin,
            "clamp": lambda x: x.clamp(-1, 1),
            "square": torch.square,
            "to float": lambda x: x.float(),
            "sum rows": lambda x: x.sum(0),
            "amax": lambda x: x.abs().amax(-1, keepdim=True),
            "log_softmax": lambda x: x.log_softmax(-1),
            "std": lambda x: x.std(-1),
            "roll": lambda x: x.roll(1, 0),
            "flip": lambda x: x.flip(0),
            "triu": torch.triu,
            "repeat": lambda x: x.repeat(2, 1),
        }.items()
    },
    "masked_fill": _masked,
    "one_hot": _one_hot,
    "scatter_add": _scatter_add,
    "index_copy": _index_copy,
    "argsort": _argsort,
}

_BLIND: dict[str, Callable[[int, int, str], Call]] = {
    "tanh": _of(torch.tanh, "x"),
    "erf": _of(torch.erf, "f"),
    "log": _of(torch.log, "f"),
    "softplus": _of(functional.softplus, "x"),
    "cube": _of(lambda x: x.pow(3), "x"),
    "reciprocal": _of(torch.reciprocal, "f"),
    "div": _of(torch.div, "x", "x"),
    "maximum": _of(torch.maximum, "x", "x"),
    "mul by column": _of(lambda x, w: x * w, "f", "w"),
    "addcmul": _of(torch.addcmul, "f", "f", "f"),
    "lerp": _of(lambda a, b: torch.lerp(a, b, 0.1), "x", "x"),
    "where": _of(lambda a, b: torch.where(a > 0, a, b), "x", "x"),
    "greater": _of(lambda x: x > 0, "x"),
    "to bf16": _of(lambda x: x.to(_BF16), "f"),
    "to half": _of(lambda x: x.half(), "x"),
    "index to float": _of(lambda i: i.float(), "i"),
    "tril": _of(torch.tril, "f"),
    "flip columns": _of(lambda x: x.flip(-1), "f"),
    "roll columns": _of(lambda x: x.roll(3, -1), "f"),
    "repeat columns": _of(lambda x: x.repeat(1, 3), "x"),
    "repeat_interleave": _of(lambda x: x.repeat_interleave(2, 0), "x"),
    "pad": _of(lambda x: functional.pad(x, (0, 64)), "x"),
    "stack": _of(lambda a, b: torch.stack((a, b)), "x", "x"),
    "cat rows": _of(lambda a, b: torch.cat((a, b)), "f", "f"),
    "cat columns": _of(lambda a, b: torch.cat((a, b), -1), "f", "f"),
    "transpose": _of(lambda x: x.t().contiguous(), "x"),
    "every other": _of(lambda x: x[:, ::2].contiguous(), "x"),
    "var rows": _of(lambda x: x.var(0), "f"),
    "var": _of(lambda x: x.var(-1), "f"),
    "mean rows": _of(lambda x: x.mean(0), "f"),
    "sum": _of(torch.sum, "f"),
    "max": _of(lambda x: x.max(-1), "x"),
    "argmin": _of(lambda x: x.argmin(-1), "f"),
    "logsumexp": _of(lambda x: x.logsumexp(-1), "f"),
    "norm": _of(lambda x: torch.linalg.vector_norm(x, dim=-1), "x"),
    "any": _of(lambda x: (x > 3).any(-1), "x"),
    "all finite": _of(lambda x: torch.isfinite(x).all(), "x"),
    "group_norm": _of(_group_norm, "f"),
    "silu_backward": _of(_aten.silu_backward, "x", "x"),
    "softmax_backward": _of(_softmax_backward, "f", "f"),
    "mse_loss": _of(functional.mse_loss, "f", "f"),
    "cross_entropy": _of(functional.cross_entropy, "f", "i"),
    "dropout": _of(lambda x: functional.dropout(x, 0.1, training=True), "x"),
    "normal": _of(lambda x: x.normal_(), "f"),
    "cumprod": _of(lambda x: x.cumprod(-1), "f"),
    "topk of rows": _of(lambda x: x.topk(16, dim=-1), "f"),
    "sort rows": _of(lambda x: x.sort(-1), "f"),
    "searchsorted": _of(torch.searchsorted, "w", "f"),
    "index_fill": _of(lambda x, i: x.index_fill_(-1, i, 0.0), "x", "i"),
    "take_along_dim": _of(lambda x, i: x.take_along_dim(i.unsqueeze(-1), -1), "f", "i"),
    "copy": _of(lambda x: x.clone(), "x"),
    "zeros": _of(torch.zeros_like, "x"),
}
_OTHERS = {"unseen": _UNSEEN, "blind": _BLIND}
