"""Tokens of a model's forward: batch, new tokens and context, read from its arguments."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from onerank.capture.profiling.module_scopes import Arguments
from onerank.ir.errors import CaptureError

ForwardKind = Literal["prefill", "decode", "mixed", "forward"]

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
        new_tokens: tokens of each sequence that this forward computes, padding included; of packed
            sequences, those of the longest.
        context: tokens of each sequence in the KV cache before the forward; None if unknown.
        query_lengths: tokens of each packed sequence; () if they are equal.
    """

    batch: int = 0
    new_tokens: int = 0
    context: tuple[int, ...] | None = ()
    query_lengths: tuple[int, ...] = ()

    @property
    def kind(self) -> ForwardKind:
        """Whether it is a prefill or a decode; "forward" if the arguments show no tokens."""
        if not self.new_tokens:
            return "forward"
        pairs = zip(self.query_lengths, self.context or (), strict=False)
        if any(length == 1 and context for length, context in pairs):
            return "mixed"
        return "decode" if self.new_tokens == 1 and any(self.context or ()) else "prefill"


def forward_tokens(
    model: Any, arguments: Arguments, *, by_name_only: bool = False
) -> ForwardTokens:
    """Return the tokens of a forward, by the names and shapes of its arguments.

    Args:
        model: a module, or the function that is the step.
        arguments: arguments of the call.
        by_name_only: whether only arguments with a usual name of tokens count. The encoder of
            images has integers of the same shape: the sizes of its images.
    """
    named = _by_name(model, arguments)
    if (packed := _packed_tokens(named)) is not None:
        return packed
    tokens = next((named[name] for name in _TOKENS if _has_tokens(named.get(name))), None)
    if tokens is None and not by_name_only:
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


def _packed_tokens(named: Mapping[str, Any]) -> ForwardTokens | None:
    """Return the tokens of packed sequences, by the ends of their queries and keys.

    The names are those of transformers, whose continuous batching passes keys by kind of layer. A
    sliding window limits the keys of some layers, so the longest count.
    """
    queries = _lengths(named.get("cu_seq_lens_q"))
    keys: Any = named.get("cu_seq_lens_k")
    by_layer = [_lengths(ends) for ends in (keys.values() if isinstance(keys, dict) else (keys,))]
    if not queries or any(len(lengths) != len(queries) for lengths in by_layer):
        return None
    longest = [max(lengths) for lengths in zip(*by_layer, strict=True)]
    # A batch is padded with empty sequences where a CUDA graph has a fixed size.
    pairs = [(new, whole - new) for new, whole in zip(queries, longest, strict=True) if new]
    if not pairs:
        return None
    lengths, context = zip(*pairs, strict=True)
    differ = len(set(lengths)) > 1
    return ForwardTokens(len(lengths), max(lengths), context, lengths if differ else ())


def _lengths(ends: Any) -> list[int]:
    """Return the lengths between cumulative ends; [] if the ends are unknown."""
    if not isinstance(ends, Tensor) or ends.dim() != 1:
        return []
    try:
        numbers: list[int] = ends.tolist()
    except CaptureError:  # without a device, of a tensor whose numbers nothing computed
        return []
    return [end - start for start, end in pairwise(numbers)]


def _by_name(model: Any, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments by the parameters of the model's forward, in the order of the call."""
    args, kwargs = arguments
    # A compiled module's own forward takes *args. Anything but a module is the step itself.
    inner = getattr(model, "_orig_mod", model)
    forward = getattr(inner, "forward", inner)
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
    # An engine passes the tensors of a batch as attributes of an object.
    batches = [value for value in flat.values() if not isinstance(value, Tensor | nn.Module)]
    for batch in batches:
        flat = {**getattr(batch, "__dict__", {}), **flat}
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
        if callable(getattr(value, "get_seq_length", None)):  # a Cache of transformers
            if (cached := _cache_length(value)) is not None:
                return cached
            break
    for value in named.values():
        if isinstance(value, list | tuple) and (key := next(_keys(value), None)) is not None:
            return int(key.shape[-2])
    for name in _POSITIONS:
        if (position := _number(named.get(name))) is not None:
            return position
    return None


def _cache_length(cache: Any) -> int | None:
    """Return the tokens in a cache of transformers; None if it does not count them.

    Linear attention keeps a state without a length. In a model that mixes it with attention, the
    cache has the length of its first attention layer. A pipeline stage may lack that layer: it is
    empty after the steps that filled the states.
    """
    states = [getattr(layer, "has_previous_state", {}) for layer in getattr(cache, "layers", ())]
    filled = any(any(flags.values()) for flags in states)
    try:
        length = _number(cache.get_seq_length())
    except ValueError:  # no layer is one of attention
        length = 0
    return None if filled and not length else length


def _keys(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples that have the shape of cached keys and values."""
    if isinstance(value, Tensor):
        if value.dim() >= _KEY_DIMS and value.is_floating_point():
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
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
