"""Layers whose attention sees a part of a sequence only, and the KV cache that they need.

A layer with a sliding window, as half of gpt-oss's, never reads a token again that lies before the
window. Engines free its blocks: vLLM and SGLang have pools of blocks for each kind of layer (hybrid
KV cache; `SlidingWindowSpec` and `ChunkedLocalAttentionSpec` in vLLM's
vllm/v1/kv_cache_interface.py). This module imports no torch.
"""

from collections.abc import Iterable, Mapping

import msgspec

from onerank.capture.serving.compositions import Composition


class AttentionWindow(msgspec.Struct, frozen=True, order=True):
    """The tokens that a query of a layer sees.

    Attributes:
        tokens: the most tokens that a query sees, with its own.
        chunked: whether a sequence is cut into chunks of so many tokens, and a query sees its chunk
            up to itself, as in Llama 4. Otherwise it sees the last tokens up to itself.
    """

    tokens: int
    chunked: bool = False

    def __str__(self) -> str:
        return f"{'a chunk' if self.chunked else 'a window'} of {self.tokens:,} tokens"

    def seen_before(self, context: int) -> int:
        """Return how many cached tokens the next new token of a sequence sees.

        Args:
            context: tokens of the sequence in the KV cache.
        """
        return context % self.tokens if self.chunked else min(context, self.tokens - 1)

    def products(self, context: int, new_tokens: int) -> float:
        """Return how many keys the new tokens of a sequence see, summed.

        A query that sees n keys counts n - 1/2, as half of its own key.

        Args:
            context: tokens of the sequence in the KV cache.
            new_tokens: tokens that the step computes.
        """
        before = self.seen_before(context)
        growing = min(new_tokens, self.tokens - before)
        others = new_tokens - growing
        of_growing = growing * (before + growing / 2)
        if not self.chunked:
            return of_growing + others * (self.tokens - 0.5)
        whole, rest = divmod(others, self.tokens)
        return of_growing + (whole * self.tokens**2 + rest**2) / 2


class WindowedLayers(msgspec.Struct, frozen=True):
    """The layers of a rank with one window.

    Attributes:
        window: the tokens that a query sees.
        layers: number of these layers.
        bytes_per_token: their KV cache of a token inside the window, summed.
    """

    window: AttentionWindow
    layers: int
    bytes_per_token: int


def windowed_layers(
    bytes_per_token: Mapping[int, int], windows: Mapping[int, AttentionWindow]
) -> tuple[WindowedLayers, ...]:
    """Return the layers with a window, by window.

    Args:
        bytes_per_token: KV cache of a token, by layer.
        windows: window of each layer that has one.
    """
    sizes: dict[AttentionWindow, list[int]] = {}
    for layer, size in bytes_per_token.items():
        if layer in windows:
            sizes.setdefault(windows[layer], []).append(size)
    return tuple(
        WindowedLayers(window, len(sizes[window]), sum(sizes[window])) for window in sorted(sizes)
    )


def sequence_bytes(
    bytes_per_token: int, windowed: Iterable[WindowedLayers], context: int, new_tokens: int = 1
) -> int:
    """Return the KV cache that a sequence needs in a step, of all layers.

    A layer with a window needs the new tokens, and those before that the first of them sees. In a
    layer with chunks this is the most at any place in a chunk, since a sequence passes through all.

    Args:
        bytes_per_token: KV cache of a token in all layers, those with a window included.
        windowed: the layers with a window.
        context: tokens of the sequence before the step.
        new_tokens: tokens that the step computes.
    """
    tokens = context + new_tokens
    outside = sum(
        layers.bytes_per_token * max(0, context - (layers.window.tokens - 1)) for layers in windowed
    )
    return bytes_per_token * tokens - outside


def step_bytes(
    bytes_per_token: int, windowed: Iterable[WindowedLayers], composition: Composition
) -> int:
    """Return the KV cache that the sequences of a step need; arguments as `sequence_bytes`."""
    c, windowed = composition, tuple(windowed)
    prefill = sequence_bytes(bytes_per_token, windowed, c.prefill_context, c.prefill_tokens)
    decode = sequence_bytes(bytes_per_token, windowed, c.decode_context)
    return c.prefills * prefill + c.decodes * decode
