"""What the time of each part of a step depends on: terms of its work, and sizes.

`latency_interpolation` fits the terms, and a smooth factor of the sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from onerank.annotate.models.flash2_decode import BLOCKS_PER_SM, FULL_WAVE
from onerank.annotate.op_costs.state_operators import DELTA_CHUNK
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.capture.serving.compositions import Composition
from onerank.serving.tables import Part

BLOCK = 128
"""Queries of a block of FlashAttention 2, which has 64 or 128 keys.

Sequences of whole blocks run a kernel without bounds checks: on an H100, 384 queries take 45% less
time than 370.
"""


@dataclass(frozen=True)
class AttentionWaves:
    """How attention of the steps that `capture serve` measures is divided among the SMs of a GPU.

    Its kernel is torch's FlashAttention 2. The kernels of other engines divide it differently.

    A decode has a thread block for each sequence and key-value head. With few of them, the kernel
    also divides the keys (`num_splits_heuristic` in torch's `flash_attn/flash_api.cpp`). On an
    H100, 40 decodes of a Llama-8B at 6,000 tokens take 2.3 times as long as 24: their last wave has
    56 of 264 blocks.

    Attributes:
        decodes: decoding sequences whose thread blocks occupy the GPU once.
    """

    decodes: float

    @classmethod
    def of(cls, sms: int, kv_heads: int) -> "AttentionWaves":
        """Return the waves of a GPU with `sms` SMs, for a rank with `kv_heads` key-value heads."""
        return cls(BLOCKS_PER_SM * sms / kv_heads)

    def occupied(self, decodes: int) -> float:
        """Return how many decodes would fill the waves that these take."""
        waves = decodes / self.decodes
        return (waves if waves < FULL_WAVE else math.ceil(waves)) * self.decodes


@dataclass(frozen=True)
class AttentionForm:
    """What the time of attention depends on besides the sequences of a step.

    Attributes:
        waves: its division among the SMs; None if its kernels divide it in an unknown way.
        windows: windows of layers, and the share of these layers in the KV cache of a token. The
            other layers see all tokens.
    """

    waves: AttentionWaves | None = None
    windows: tuple[tuple[AttentionWindow, float], ...] = ()

    def keys(self, context: int, new_tokens: int) -> float:
        """Return how many keys of a sequence a layer reads in a step, in the mean of the layers."""
        unseen = sum(
            share * (context - window.seen_before(context)) for window, share in self.windows
        )
        return context + new_tokens - unseen

    def products(self, context: int, new_tokens: int) -> float:
        """Return the products of queries and keys of a sequence, in the mean of the layers."""
        # A causal query sees the context and on average half of the chunk.
        every = new_tokens * (context + new_tokens / 2)
        unseen = sum(
            share * (every - window.products(context, new_tokens)) for window, share in self.windows
        )
        return every - unseen


def _of_prefill(c: Composition, form: AttentionForm) -> tuple[list[float], list[float]]:
    tokens, keys = c.prefills * c.prefill_tokens, form.keys(c.prefill_context, c.prefill_tokens)
    products = c.prefills * form.products(c.prefill_context, c.prefill_tokens)
    longest = c.prefill_context + c.prefill_tokens
    parted = form.waves is not None and (c.prefill_tokens % BLOCK > 0 or longest % BLOCK > 0)
    terms = [1.0, tokens, products, c.prefills * keys, tokens * parted, products * parted]
    if form.windows:
        # Kernels that take a window as a mask compute the products that it hides.
        terms.append(tokens * keys)
    return terms, [tokens, c.prefill_tokens, keys, 2.0**parted]


def _of_decode(c: Composition, form: AttentionForm) -> tuple[list[float], list[float]]:
    keys = form.keys(c.decode_context, 1)
    occupied = c.decodes if form.waves is None else form.waves.occupied(c.decodes)
    terms = [1.0, c.decodes, keys, c.decodes * keys, occupied * keys]
    return terms, [c.decodes, keys, (occupied / c.decodes) ** 2]


def _of_prefill_index(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    every = AttentionForm()
    tokens, keys = c.prefills * c.prefill_tokens, every.keys(c.prefill_context, c.prefill_tokens)
    products = c.prefills * every.products(c.prefill_context, c.prefill_tokens)
    return [1.0, tokens, products, c.prefills * keys], [tokens, c.prefill_tokens, keys]


def _of_decode_index(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    keys = AttentionForm().keys(c.decode_context, 1)
    return [1.0, c.decodes, keys, c.decodes * keys], [c.decodes, keys]


def _of_prefill_state(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    tokens = c.prefills * c.prefill_tokens
    # A scan computes the chunks of a sequence one after another. Those of mamba_ssm have 128 or 256
    # tokens: the fitted coefficient contains the ratio.
    chunks = math.ceil(c.prefill_tokens / DELTA_CHUNK)
    terms = [1.0, tokens, c.prefills, chunks, c.prefills * chunks]
    return terms, [tokens, c.prefill_tokens]


def _of_decode_state(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    return [1.0, c.decodes], [c.decodes]


def _of_cache_write(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    writes = float(c.prefills > 0) + float(c.decodes > 0)
    return [writes, c.new_tokens], [c.new_tokens]


def _of_head(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    return [1.0, c.sequences], [c.sequences]


def _of_tokens(c: Composition, _: AttentionForm) -> tuple[list[float], list[float]]:
    return [1.0, c.new_tokens], [c.new_tokens]


Sizes = Callable[[Composition, AttentionForm], tuple[list[float], list[float]]]

# Part -> function that returns the terms of its work, and the sizes that its factor depends on.
SIZES: dict[Part, Sizes] = {
    "prefill_attention": _of_prefill,
    "decode_attention": _of_decode,
    "prefill_index": _of_prefill_index,
    "decode_index": _of_decode_index,
    "prefill_state": _of_prefill_state,
    "decode_state": _of_decode_state,
    "cache_write": _of_cache_write,
    "head": _of_head,
    "tokens": _of_tokens,
}


OF_PREFILLS: tuple[Part, ...] = ("prefill_attention", "prefill_index", "prefill_state")
"""Parts of the prefills of a step."""

OF_DECODES: tuple[Part, ...] = ("decode_attention", "decode_index", "decode_state")
"""Parts of the decodes of a step."""


def has_part(part: Part, c: Composition) -> bool:
    """Return whether a step has a part."""
    if part in OF_PREFILLS:
        return c.prefills > 0
    return part not in OF_DECODES or c.decodes > 0
