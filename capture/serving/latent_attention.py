"""Multi-head latent attention (MLA) as inference engines compute it.

Models of DeepSeek's kind project each token down to a latent vector and a rotary part of the key,
which all heads share, and `kv_b_proj` expands the latent vector to the keys and values of all
heads. Engines cache the vector and the rotary part only. As in vLLM
(vllm/model_executor/layers/attention/mla_attention.py), a prefill expands the cached vectors, and a
decode does not: the half of `kv_b_proj` that makes keys multiplies the queries, and the half that
makes values multiplies the results. Attention then has one key for all heads, the cached vector,
whose leading part is the value.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.serving.sparse_attention import SCALE_BYTES, indexers

# torch's dispatcher has no types.
_torch: Any = torch

# Names of the two projections in transformers.
_DOWN, _UP = "kv_a_proj_with_mqa", "kv_b_proj"
# Since transformers 5.15 the attention of all models with latent vectors has this method, which it
# calls after the update of the cache.
_EXPAND = "expand_kv"

# Not `onerank`, which starts the names of the capture's marks in a profile.
_library = _torch.library.Library("onerank_serving", "DEF")
_library.define("latent_attention(Tensor query, Tensor keys, Tensor values, float scale) -> Tensor")


def _shared_head(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    # The heads are the queries of one head, so that a kernel reads a key once for all of them.
    q, k, v = (tensor.unsqueeze(1) for tensor in (query, keys, values))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale)[:, 0].contiguous()


# Queries and keys of a block of torch's kernel, and the fewest parts that are faster than one. Two
# take 117 us for 105 (64 sequences of 1,001 tokens, 32 heads, an H200).
_BLOCK_QUERIES, _BLOCK_KEYS, _FEWEST_PARTS = 32, 128, 3


def _split_context(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute attention in parts of the context that run side by side, as FlashMLA does.

    torch's kernel has one block for 32 heads of a sequence, whatever the context: 4 sequences of
    32,000 tokens take 3.1 ms on an H200, and 0.16 ms in parts (2026-11-28-serving-blind-5-h200).
    """
    sequences, heads, _ = query.shape
    tokens = keys.shape[1]
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    blocks = sequences * -(-heads // _BLOCK_QUERIES)
    parts = min(sms // blocks, tokens // _BLOCK_KEYS)
    if parts < _FEWEST_PARTS:
        return _shared_head(query, keys, values, scale)
    whole = parts * (tokens // parts)

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return results [sequences, heads, parts, width] and ln of sums [sequences, parts, heads].

        The kernel's heads are the parts, and its queries the heads.
        """
        q = query.unsqueeze(2).expand(-1, -1, k.shape[2], -1)
        results, sums, *_ = _torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, 0, True, scale=scale
        )
        return results, sums[..., :heads]

    attended = [
        attend(*(t[:, :whole].unflatten(1, (parts, -1)).transpose(1, 2) for t in (keys, values)))
    ]
    if whole < tokens:
        # Fewer tokens than there are parts are left.
        attended.append(attend(*(t[:, whole:].unsqueeze(2) for t in (keys, values))))
    results, sums = zip(*attended, strict=True)
    shares = torch.cat(sums, dim=1).softmax(dim=1).transpose(1, 2).unsqueeze(-1)
    return (torch.cat(results, dim=2) * shares).sum(dim=2).to(query.dtype)


def _empty_result(query: Tensor, _: Tensor, values: Tensor, __: float) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


_library.impl("latent_attention", _shared_head, "CPU")
_library.impl("latent_attention", _split_context, "CUDA")
_torch.library.register_fake("onerank_serving::latent_attention", _empty_result, lib=_library)


def latent_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules of latent attention in a model."""
    for module in model.modules():
        if hasattr(module, _DOWN) and hasattr(module, _UP):
            yield module


def keep_latents(model: nn.Module) -> None:
    """Let latent attention pass vectors that are not expanded to the attention function.

    A layer still caches expanded keys and values if its version of transformers expands them
    before the cache, or if `kv_b_proj` is quantised or has an adapter: `decode` multiplies by its
    weight.
    """
    for module in latent_modules(model):
        up = getattr(module, _UP)
        dense = (
            getattr(up, "bias", None) is None
            and isinstance(up, nn.Linear)
            and up.weight.is_floating_point()
            and up.weight.dim() == 2
            and not is_traceable_wrapper_subclass(up.weight)
        )
        if dense and hasattr(module, _EXPAND):
            setattr(module, _EXPAND, _unexpanded)


def _unexpanded(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotary


def keeps_latents(module: nn.Module) -> bool:
    """Return whether a module passes vectors that are not expanded to the attention function."""
    return vars(module).get(_EXPAND) is _unexpanded


def up_weight(module: Any) -> Tensor:
    """Return the weight of `kv_b_proj`, [heads * (key width + value width), latent width]."""
    return getattr(module, _UP).weight


def latent_bytes_per_token(model: nn.Module, cached: dict[int, int], itemsize: int) -> int | None:
    """Return the bytes per token that engines cache for a model with latent attention.

    A layer with another kind of attention counts with its bytes in `cached`. The cache of an
    indexer counts as it is.

    Args:
        model: a model.
        cached: bytes of a token in the KV cache, by layer.
        itemsize: bytes of an element of the cache.

    Returns:
        The bytes; None if no layer of the model has such attention.
    """
    widths = {m.layer_idx: getattr(m, _DOWN).weight.shape[0] for m in latent_modules(model)}
    if not widths:
        return None
    others = sum(size for layer, size in cached.items() if layer not in widths)
    indexed = sum(
        indexer.head_dim + SCALE_BYTES for indexer in indexers(model) if indexer.layer_idx in widths
    )
    return others + indexed + sum(widths.values()) * itemsize


def expand(cached: Tensor, weight: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all heads, [sequences, heads, tokens, width].

    Args:
        cached: latent vectors and rotary parts, [sequences, tokens, width].
        weight: as `up_weight` returns it.
        query: queries, [sequences, heads, new tokens, width].
    """
    latents, rotary = cached.split([weight.shape[1], cached.shape[2] - weight.shape[1]], dim=-1)
    heads, width = query.shape[1], query.shape[3]
    unrotated = width - rotary.shape[-1]
    expanded = functional.linear(latents, weight).unflatten(-1, (heads, -1))
    keys = expanded.new_empty(*expanded.shape[:3], width)
    keys[..., :unrotated].copy_(expanded[..., :unrotated])
    keys[..., unrotated:].copy_(rotary.unsqueeze(2))
    return keys.transpose(1, 2), expanded[..., unrotated:].transpose(1, 2)


def decode(cached: Tensor, weight: Tensor, query: Tensor, scale: float | None) -> Tensor:
    """Return the attention of one query per sequence, [sequences, heads, value width].

    Args:
        cached: latent vectors and rotary parts, [sequences, tokens, width].
        weight: as `up_weight` returns it.
        query: queries, [heads, sequences, width].
        scale: of the scores; None for 1 / sqrt(width of a query).
    """
    width, rank = query.shape[-1], weight.shape[1]

    def attend(joined: Tensor) -> Tensor:
        return _torch.ops.onerank_serving.latent_attention(
            joined, cached, cached[..., :rank], width**-0.5 if scale is None else scale
        )

    return absorbed_attention(query, weight, cached.shape[2] - rank, attend)


def absorbed_attention(
    query: Tensor, weight: Tensor, rotary: int, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return attention to vectors that are not expanded, [tokens, heads, value width].

    Args:
        query: queries, [heads, tokens, width].
        weight: as `up_weight` returns it.
        rotary: width of the rotary part.
        attend: computes attention [tokens, heads, latent width] of queries in the width of a
            cached vector, [tokens, heads, latent width + rotary].
    """
    heads, tokens, width = query.shape
    unrotated = width - rotary
    of_keys, of_values = weight.view(heads, -1, weight.shape[1]).tensor_split([unrotated], dim=1)
    absorbed = torch.bmm(query[..., :unrotated], of_keys)
    result = attend(torch.cat((absorbed, query[..., unrotated:]), dim=-1).transpose(0, 1))
    values = result.new_empty(tokens, heads, of_values.shape[1])
    torch.bmm(result.transpose(0, 1), of_values.transpose(1, 2), out=values.transpose(0, 1))
    return values
