"""Attention of an engine's step: once for its prefills and once for its decodes.

transformers looks up this function for the attention of a model, and passes it the new keys and
values of all sequences of a step, which lie in one row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.no_device.emulated_gpu import MOST_FLASH_HEAD
from onerank.capture.serving import latent_attention
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.capture.serving.step_cache import running_step

ATTENTION = "onerank_serving"
"""Name of `step_attention` in transformers' table of attention functions."""

# torch's dispatcher has no types.
_ops: Any = torch.ops

_LEAST_FLASH_CAPABILITY = 8, 0


class _CacheWrite(nn.Module):
    """Writes new keys and values to the KV cache; a module, to have a scope."""

    def forward(self, keys: Tensor, values: Tensor, new: tuple[Tensor, Tensor], at: int) -> None:
        """Write new keys and values from position `at` on."""
        for cached, added in zip((keys, values), new, strict=True):
            cached[:, :, at:].copy_(added)


class _PartAttention(nn.Module):
    """Attention of the prefills, or of the decodes, of a step; a module, to have a scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.cache_write = _CacheWrite()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: AttentionWindow | None,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens; tensors as in transformers."""
        cache = running_step.cache
        assert cache is not None, "a step is running"
        count, _ = cache.sequences(self.part)
        # [1, heads, sequences * tokens, size] -> [sequences, heads, tokens, size]
        q, k, v = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in (query, key, value))
        keys = cache.room(self.part, k, value=False)
        values = cache.room(self.part, v, value=True)
        if running_step.writes:
            self.cache_write(
                keys, values, (k, v), cache.cached_before(self.part, running_step.layer)
            )
        out = attend(q, keys, values, scale, window)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


class _LatentWrite(nn.Module):
    """Writes latent vectors and rotary parts to the KV cache; a module, to have a scope."""

    def forward(self, cached: Tensor, latents: Tensor, rotary: Tensor) -> None:
        """Write new vectors, in one kernel as engines do."""
        torch.cat((latents, rotary), dim=-1, out=cached)


class _LatentAttention(nn.Module):
    """Attention to latent vectors in one part of a step; a module, to have a scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.cache_write = _LatentWrite()

    def _cached(self, new: tuple[Tensor, Tensor]) -> Tensor:
        """Write the part's new vectors to the cache; return all vectors of its sequences.

        Args:
            new: latent vectors and rotary parts, [1, 1, tokens, width] each.

        Returns:
            [sequences, 1, context with the new tokens, width of both].
        """
        cache = running_step.cache
        assert cache is not None, "a step is running"
        count, _ = cache.sequences(self.part)
        # [1, 1, sequences * tokens, width] -> [sequences, 1, tokens, width]
        latents, rotary = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in new)
        width = latents.shape[-1] + rotary.shape[-1]
        cached = cache.room(self.part, latents, width=width)
        before = cache.cached_before(self.part, running_step.layer)
        self.cache_write(cached[:, :, before:], latents, rotary)
        return cached


class _LatentPart(_LatentAttention):
    """Latent attention of the prefills, or of the decodes, of a step."""

    def forward(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        weight: Tensor,
        scale: float | None,
        window: AttentionWindow | None,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens.

        Args:
            query: queries, [1, heads, tokens, width].
            new: latent vectors and rotary parts, [1, 1, tokens, width] each.
            weight: as `latent_attention.up_weight` returns it.
            scale: as in transformers.
            window: tokens that a query sees; None for all up to itself.
        """
        cached = self._cached(new)
        if self.part == "decode":
            return latent_attention.decode(cached[:, 0], weight, query[0], scale).unsqueeze(0)
        queries = query[0].unflatten(1, (cached.shape[0], -1)).transpose(0, 1)
        keys, values = latent_attention.expand(cached[:, 0], weight, queries)
        out = attend(queries, keys, values, scale, window)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


class _SparsePart(_LatentAttention):
    """Sparse latent attention of a part of a step."""

    def forward(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        weight: Tensor,
        scale: float | None,
        indices: Tensor,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens; arguments as `_LatentPart`.

        `indices` are the tokens that each query attends to, [sequences, new tokens, count].
        """
        cached = self._cached(new)
        rank, rotary_width = new[0].shape[-1], new[1].shape[-1]

        def attend(joined: Tensor) -> Tensor:
            result: Tensor = _ops.onerank_serving.sparse_latent_attention(
                joined.unflatten(0, (cached.shape[0], -1)).contiguous(),
                cached[:, 0],
                indices,
                rank,
                query.shape[-1] ** -0.5 if scale is None else scale,
            )
            return result.flatten(0, 1)

        attended = latent_attention.absorbed_attention(query[0], weight, rotary_width, attend)
        return attended.unsqueeze(0)


class _Parts(nn.Module):
    """The two kinds of attention of a layer."""

    def __init__(self, of_part: type[_PartAttention | _LatentPart | _SparsePart]) -> None:
        super().__init__()
        self.prefill = of_part("prefill")
        self.decode = of_part("decode")


PARTS = "step_attention"
"""Name of the module, below a layer's attention, that holds the attention of a step's parts."""


def step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    indices: dict[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a step, as a function of transformers' interface.

    Returns:
        [1, tokens, heads, size], prefills first, and no weights.
    """
    if running_step.callers is not None:
        running_step.callers.append(module)
        if not hasattr(module, PARTS):
            latent = latent_attention.keeps_latents(module)
            of_part = _SparsePart if latent and indices is not None else _LatentPart
            setattr(module, PARTS, _Parts(of_part if latent else _PartAttention))
    cache = running_step.cache
    assert cache is not None, "a step is running"
    step, parts = cache.composition, getattr(module, PARTS)
    running_step.layer = cache.layer_of(key)
    window = _window_of(module, sliding_window)
    if window is not None:
        cache.windows[running_step.layer] = window
    chunk = step.prefills * step.prefill_tokens
    outputs: list[Tensor] = []
    for part, start, end in ((parts.prefill, 0, chunk), (parts.decode, chunk, step.new_tokens)):
        if start < end:
            q, k, v = (t[:, :, start:end] for t in (query, key, value))
            operands, seen = (q, k, v), window
            if isinstance(part, _LatentAttention):
                operands = q, (k, v), latent_attention.up_weight(module)
            if isinstance(part, _SparsePart):
                assert indices is not None, "the layer's first call had some"
                seen = indices[part.part]
            outputs.append(part(*operands, scaling, seen))
    running_step.writes = False
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), None


def _window_of(module: nn.Module, sliding_window: int | None) -> AttentionWindow | None:
    """Return the window of a layer's attention; None if a query sees all tokens up to itself."""
    if sliding_window is not None:
        return AttentionWindow(sliding_window)
    # transformers states the chunks of a layer in its mask, and passes this function no mask.
    config: Any = vars(module).get("config")
    types = getattr(config, "layer_types", None)
    if types and types[running_step.layer] == "chunked_attention":
        return AttentionWindow(int(config.attention_chunk_size), chunked=True)
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: AttentionWindow | None
) -> Tensor:
    """Return attention of queries that are the last tokens of the keys.

    The first query sees the first key: keys before its window are not in the cache.
    """
    tokens, cached = q.shape[2], k.shape[2]
    hiding = window if window is not None and tokens > 1 and cached > window.tokens else None
    if hiding is not None and hiding.chunked:
        return _attend_to_chunks(q, k, v, scale, hiding.tokens)
    size = q.shape[-1]
    flash = (
        q.is_cuda
        # FlashAttention 2 does not run on Turing and Volta.
        and torch.cuda.get_device_capability(q.device) >= _LEAST_FLASH_CAPABILITY
        and q.dtype in (torch.float16, torch.bfloat16)
        and size <= MOST_FLASH_HEAD
        and size % 8 == 0
        and v.shape[-1] == size
    )
    if flash and hiding is not None:
        # Queries see `left` keys before their own; the operator takes tokens before heads.
        left = hiding.tokens - 1
        out = torch.ops.aten._flash_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, v)),
            None,
            None,
            tokens,
            cached,
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )[0]
        return out.transpose(1, 2)
    if flash:
        # The operator itself, since `scaled_dot_product_attention` would choose cuDNN on Hopper for
        # some compositions only. It aligns a causal mask with the last key, and shares key heads.
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, tokens > 1, False, scale=scale
        )[0]
    mask = None
    if (tokens > 1 and cached > tokens) or hiding is not None:
        mask = torch.ones(tokens, cached, dtype=torch.bool, device=q.device).tril(cached - tokens)
        if hiding is not None:
            mask = mask.triu(cached - tokens - hiding.tokens + 1)
    causal = mask is None and tokens > 1
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def _attend_to_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float | None, chunk: int) -> Tensor:
    """Return attention of queries that see the keys of their chunk up to their own.

    Engines give each chunk of a sequence to the kernel as a sequence.

    Args:
        q: queries of the last keys.
        k: keys; the first one starts a chunk, and a query sees it.
        v: values.
        scale: as for `attend`.
        chunk: tokens of a chunk.
    """
    before = k.shape[2] - q.shape[2]
    outputs: list[Tensor] = []
    for start in range(0, k.shape[2], chunk):
        keys, values = (t[:, :, start : start + chunk] for t in (k, v))
        queries = q[:, :, max(0, start - before) : start - before + chunk]
        outputs.append(attend(queries, keys, values, scale, None).transpose(1, 2))
    # In the layout of FlashAttention, [sequences, tokens, heads, size].
    return torch.cat(outputs, dim=1).transpose(1, 2)
