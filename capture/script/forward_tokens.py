"""Tokens of a model's forward: batch, new tokens and context, read from its arguments."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from onerank.capture.profiling.module_scopes import Arguments

ForwardKind = Literal["prefill", "decode", "forward"]

# Names of the argument with the new tokens, first those of a decoder behind an encoder.
_TOKENS = (
    *("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds"),
    *("tokens", "token_ids", "idx", "ids"),
)

# Names of the argument with the position of the first new token.
_POSITIONS = ("cache_position", "input_pos", "start_pos", "position_ids", "positions")

_INTEGER_TOKEN_DIMS = (1, 2)
_EMBEDDED_TOKEN_DIMS = 3
_KEY_DIMS = 3  # of a cached key: head, token, channel at least


@dataclass(frozen=True)
class ForwardTokens:
    """Tokens of one forward.

    Attributes:
        batch: sequences; 0 if the arguments show no tokens.
        new_tokens: tokens of each sequence that this forward computes, padding included.
        context: tokens of each sequence in the KV cache before the forward; None if unknown.
    """

    batch: int = 0
    new_tokens: int = 0
    context: tuple[int, ...] | None = ()

    @property
    def kind(self) -> ForwardKind:
        """Whether it is a prefill or a decode; "forward" if the arguments show no tokens."""
        if not self.new_tokens:
            return "forward"
        return "decode" if self.new_tokens == 1 and any(self.context or ()) else "prefill"


def forward_tokens(model: nn.Module, arguments: Arguments) -> ForwardTokens:
    """Return the tokens of a forward, by the names and shapes of its arguments."""
    named = _by_name(model, arguments)
    tokens = next((named[name] for name in _TOKENS if _has_tokens(named.get(name))), None)
    if tokens is None:
        tokens = next((value for value in named.values() if _has_tokens(value)), None)
    if tokens is None:
        return ForwardTokens()
    sequences = tokens.dim() > 1
    batch, new_tokens = (tokens.shape[0], tokens.shape[1]) if sequences else (1, tokens.shape[0])
    cached = _cached_tokens(named)
    if cached is None:
        return ForwardTokens(int(batch), int(new_tokens), None)
    context = _unpadded(named.get("attention_mask"), int(batch), int(new_tokens), cached)
    return ForwardTokens(int(batch), int(new_tokens), context)


def _by_name(model: Any, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments by the parameters of the model's forward, in the order of the call."""
    args, kwargs = arguments
    # A compiled module's own forward takes *args.
    forward = getattr(model, "_orig_mod", model).forward
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a builtin, or arguments that only a wrapper takes
        bound = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, Mapping):  # the parameter **kwargs
            flat |= value
        else:
            flat[name] = value
    return flat


def _has_tokens(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    if value.is_floating_point():
        return value.dim() == _EMBEDDED_TOKEN_DIMS
    return value.dim() in _INTEGER_TOKEN_DIMS


def _cached_tokens(named: Mapping[str, Any]) -> int | None:
    """Return the tokens in the KV cache before the forward; None if the arguments do not say."""
    for value in named.values():
        if callable(length := getattr(value, "get_seq_length", None)):  # a Cache of transformers
            return _number(length())
    for value in named.values():
        if isinstance(value, list | tuple) and (key := next(_keys(value), None)) is not None:
            return int(key.shape[-2])
    for name in _POSITIONS:
        if (position := _number(named.get(name))) is not None:
            return position
    return None


def _keys(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples that have the shape of cached keys and values."""
    if isinstance(value, Tensor):
        if value.dim() >= _KEY_DIMS and value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _keys(part)


def _number(value: Any) -> int | None:
    """Return a number, or the least number of a tensor; None if no device computed it."""
    if isinstance(value, int):
        return value
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or not value.numel():
        return None
    return int(value.min())


def _unpadded(mask: Any, batch: int, new_tokens: int, cached: int) -> tuple[int, ...]:
    """Return the context of each sequence without the padding that the attention mask marks."""
    shows = isinstance(mask, Tensor) and tuple(mask.shape) == (batch, cached + new_tokens)
    if not shows or isinstance(mask, FakeTensor):
        return (cached,) * batch
    return tuple((mask[:, :cached] != 0).sum(dim=1).tolist())
