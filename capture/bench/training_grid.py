"""The grids. That of training shapes: calls of dense and mixture models over tensor-parallel sizes.

Each call is made once, the most useful first: long micro-batches of common models in bfloat16,
then other lengths, other models, short ones, and other data types.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from onerank.capture.bench.layer_calls import (
    attention,
    embedding,
    experts,
    head,
    mlp,
    norms,
    optimizer,
    products,
    rotary,
    small,
    squares,
    typed,
)
from onerank.capture.bench.measured_call import BenchCall
from onerank.capture.bench.model_shapes import MODELS, Model
from onerank.capture.bench.power_grid import drawn
from onerank.capture.bench.trace_calls import Wanted

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
