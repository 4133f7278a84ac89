"""Layers whose attention sees only a part of a sequence, and the cache that a sequence needs.

A layer with a sliding window, such as every second layer of gpt-oss, never again reads tokens
before the window, so engines free their blocks. vLLM and SGLang have a pool of blocks for each kind
of layer (hybrid KV cache; `SlidingWindowSpec` and `ChunkedLocalAttentionSpec` in vLLM's
vllm/v1/kv_cache_interface.py). This module imports no torch.
"""

from collections.abc import Mapping

import msgspec

from onerank.capture.serving.compositions import Composition


class AttentionWindow(msgspec.Struct, frozen=True, order=True):
    """The tokens that a query of a layer sees.

    Attributes:
        tokens: the most tokens that a query sees, including its own.
        chunked: True if a sequence is cut into chunks of `tokens` tokens and a query sees its chunk
            up to itself, as in Llama 4; False if it sees the last `tokens` tokens up to itself.
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
        """Return the number of products of queries and keys of a sequence's new tokens.

        Each query counts its own key as a half. So t new tokens after c cached ones count
        t (c + t / 2) where the window hides no key, as in layers without a window.

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
        bytes_per_token: KV cache of one token inside the window, in all these layers.
    """

    window: AttentionWindow
    layers: int
    bytes_per_token: int


def windowed_layers(
    bytes_per_token: Mapping[int, int], windows: Mapping[int, AttentionWindow]
) -> tuple[WindowedLayers, ...]:
    """Group the layers that have a window by their window, in order of its tokens.

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


class CacheNeed(msgspec.Struct, frozen=True):
    """What a rank keeps of each sequence.

    Attributes:
        bytes_per_token: KV cache of a token in all layers, those with a window included.
        windowed: the layers with a window.
        state_bytes: states of constant size of a sequence, in all layers.
    """

    bytes_per_token: int
    windowed: tuple[WindowedLayers, ...] = ()
    state_bytes: int = 0

    def of_sequence(self, context: int, new_tokens: int = 1) -> int:
        """Return the bytes that a sequence needs in a step, in all layers.

        A layer with a window needs the new tokens and the earlier ones that the first of them sees.
        A layer with chunks counts like one with a sliding window of the chunk's size: that is its
        need at the end of a chunk, which a growing sequence reaches.

        Args:
            context: tokens of the sequence before the step.
            new_tokens: tokens that the step computes.
        """
        outside = sum(
            layers.bytes_per_token * max(0, context - (layers.window.tokens - 1))
            for layers in self.windowed
        )
        return self.state_bytes + self.bytes_per_token * (context + new_tokens) - outside

    def of_step(self, composition: Composition) -> int:
        """Return the bytes of all sequences of a step."""
        c = composition
        prefill = self.of_sequence(c.prefill_context, c.prefill_tokens)
        return c.prefills * prefill + c.decodes * self.of_sequence(c.decode_context)
