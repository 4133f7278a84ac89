"""Sparse latent attention of DeepSeek-V3.2 and GLM-5 (DSA) as inference engines compute it.

An indexer with few heads scores all cached tokens for each query, and attention reads the best
`index_topk` of them. As in vLLM (vllm/model_executor/layers/sparse_attn_indexer.py and
v1/attention/backends/mla/flashmla_sparse.py), queries and keys of the indexer are quantised to fp8
with a scale each, its cache holds the quantised keys, and prefills attend to latent vectors that
are not expanded, as decodes do. Each step has one operator for each kernel of engines: DeepGEMM's
logits, the choice of the largest, and FlashMLA's sparse attention.
"""

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.serving.state_operators import define_operator
from onerank.capture.serving.step_cache import running_step
from onerank.ir.errors import CaptureError

# torch's dispatcher has no types.
_ops: Any = torch.ops

PARTS = "step_index"
"""Name of the module, below an indexer, that scores the tokens of a step's parts."""

SCALE_BYTES = 4
"""Bytes of the scale of a cached key of the indexer."""

_ROTARY = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")

_FP8, _LARGEST = torch.float8_e4m3fn, 448.0


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / _LARGEST
    return (x.float() / scale).to(_FP8), scale


def _store_keys(keys: Tensor, cached: Tensor) -> Tensor:
    quantised, scale = _quantised(keys)
    cached[..., : keys.shape[-1]] = quantised.view(torch.uint8)
    cached[..., keys.shape[-1] :] = scale.contiguous().view(torch.uint8)
    return cached.new_empty(0)


def _fake_store(_: Tensor, cached: Tensor) -> Tensor:
    return cached.new_empty(0)


def _scale_queries(q: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    quantised, scales = _quantised(q)
    return quantised, weights.float() * scales[..., 0] * scale


def _fake_queries(q: Tensor, weights: Tensor, _: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=_FP8), weights.new_empty(weights.shape, dtype=torch.float32)


def _scores(q: Tensor, weights: Tensor, cached: Tensor) -> Tensor:
    width = q.shape[-1]
    keys = cached[..., :width].contiguous().view(_FP8).float()
    keys = keys * cached[..., width:].contiguous().view(torch.float32)
    products = torch.einsum("nthd,nkd->nthk", q.float(), keys).relu()
    scores = torch.einsum("nthk,nth->ntk", products, weights)
    tokens, count = scores.shape[1:]
    seen = torch.ones(tokens, count, dtype=torch.bool, device=q.device).tril(count - tokens)
    return scores.masked_fill(~seen, float("-inf"))


def _fake_scores(q: Tensor, weights: Tensor, cached: Tensor) -> Tensor:
    return weights.new_empty(*q.shape[:2], cached.shape[1])


def _largest(scores: Tensor, count: int) -> Tensor:
    values, indices = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return indices.masked_fill(values == float("-inf"), -1).int()


def _fake_largest(scores: Tensor, count: int) -> Tensor:
    shape = *scores.shape[:2], min(count, scores.shape[-1])
    return scores.new_empty(shape, dtype=torch.int32)


def _attend(query: Tensor, cached: Tensor, indices: Tensor, width: int, scale: float) -> Tensor:
    chosen = indices.clamp(min=0).long()
    sequences = torch.arange(cached.shape[0], device=cached.device)[:, None, None]
    keys = cached[sequences, chosen].float()
    scores = torch.einsum("nthd,ntkd->nthk", query.float(), keys) * scale
    weights = scores.masked_fill((indices < 0)[:, :, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("nthk,ntkd->nthd", weights, keys[..., :width]).to(query.dtype)


def _fake_attend(query: Tensor, cached: Tensor, indices: Tensor, width: int, _: float) -> Tensor:
    return query.new_empty(*query.shape[:3], width)


def _no_kernel(*_: Any) -> Any:
    raise CaptureError(
        "an indexer's scores and sparse latent attention run DeepGEMM's and FlashMLA's kernels in "
        "engines, which capture serve does not call\n  predict the steps: --device none --like GPU",
        code="serve-sparse-on-gpu",
    )


for _schema, _fake, _cpu in (
    ("store_index_keys(Tensor keys, Tensor(a!) cached) -> Tensor",
     _fake_store, _store_keys),
    ("scale_index_queries(Tensor q, Tensor weights, float scale) -> (Tensor, Tensor)",
     _fake_queries, _scale_queries),
    ("index_scores(Tensor q, Tensor weights, Tensor cached) -> Tensor", _fake_scores, _scores),
    ("largest_scores(Tensor scores, int count) -> Tensor", _fake_largest, _largest),
    ("sparse_latent_attention(Tensor query, Tensor cached, Tensor indices, int width, float scale)"
     " -> Tensor", _fake_attend, _attend),
):  # fmt: skip
    define_operator(_schema, _fake, _cpu, _no_kernel)


class _PartIndex(nn.Module):
    """Scores of the prefills or of the decodes of a step; a module, to have a scope."""

    def forward(self, q: Tensor, keys: Tensor, weights: Tensor, cached: Tensor, count: int) -> Any:
        """Return the indices of the tokens with the largest scores, [n, t, count].

        Args:
            q: [n, t, heads, d].
            keys: new keys, [n, t, d].
            weights: of the heads, [n, t, heads].
            cached: quantised keys with their scales, [n, tokens, d + 4].
            count: tokens that a query attends to.
        """
        _ops.onerank_serving.store_index_keys(keys, cached[:, cached.shape[1] - keys.shape[1] :])
        scale = q.shape[-1] ** -0.5 * q.shape[2] ** -0.5
        quantised, scaled = _ops.onerank_serving.scale_index_queries(q, weights, scale)
        scores = _ops.onerank_serving.index_scores(quantised, scaled, cached)
        return _ops.onerank_serving.largest_scores(scores, count)


class _Parts(nn.Module):
    """The two kinds of scores of an indexer."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill, self.decode = _PartIndex(), _PartIndex()


def indexers(model: nn.Module) -> Iterator[Any]:
    """Yield the indexers of a model."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("wq_b", "wk", "weights_proj", "index_topk")):
            yield module


def attended_tokens(model: nn.Module) -> int | None:
    """Return the most tokens that a query of sparse attention reads; None without an indexer."""
    return next((int(indexer.index_topk) for indexer in indexers(model)), None)


def keep_indices(model: nn.Module) -> None:
    """Let indexers score the sequences of an engine's step, against their quantised cache."""
    for module in list(indexers(model)):
        if hasattr(module, PARTS):
            continue
        original = inspect.unwrap(type(module).forward)
        names = [name for name in _ROTARY if name in original.__code__.co_names]
        if not names:
            continue
        setattr(module, PARTS, _Parts())
        module.rotate = original.__globals__[names[0]]
        module.forward = MethodType(_index, module)


def _index(
    self: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> dict[str, Tensor]:
    """Return the indices of the tokens that each query attends to, by part of the step."""
    # Not the argument, which transformers 5.24 renamed.
    cache = running_step.cache
    assert cache is not None, "a step is running"
    plain = self.head_dim - self.qk_rope_head_dim
    q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    keys = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
    of_q, of_keys = (t.split([self.qk_rope_head_dim, plain], dim=-1) for t in (q, keys))
    rotated = self.rotate(of_q[0], of_keys[0], *position_embeddings, unsqueeze_dim=2)
    q = torch.cat((rotated[0], of_q[1]), dim=-1)
    keys = torch.cat((rotated[1], of_keys[1]), dim=-1).squeeze(2)
    weights = self.weights_proj(hidden_states)
    start, indices = 0, dict[str, Tensor]()
    for part, count, tokens in cache.composition.parts():
        end = start + count * tokens
        operands = [t[0, start:end].unflatten(0, (count, tokens)) for t in (q, keys, weights)]
        cached = cache.index_room(part, operands[1], SCALE_BYTES)
        indices[part] = getattr(getattr(self, PARTS), part)(*operands, cached, self.index_topk)
        start = end
    return indices
