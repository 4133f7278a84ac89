"""Attention by elementary operators, for what a fused kernel on the CPU does not know.

So torch computes it there too (`_scaled_dot_product_attention_math`): with dropout, and where
values are not as wide as keys.
"""

import torch
from torch import Tensor

from onerank.capture.context.attended import Attended, Manner


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    how: Manner,
    causal: bool,
    mask: Tensor | None,
) -> Attended:
    """Attend to keys, as `attention.attend` does; causal where there are as many as queries.

    Of what dropout draws, it is kept which weights are left.
    """
    scores = _scores(query, key, how, mask, causal=causal)
    sums = scores.logsumexp(dim=-1)
    weights = _weights(scores, sums)
    random: tuple[Tensor, ...] = ()
    if how.dropout > 0:
        random = (torch.rand_like(weights) >= how.dropout,)
        weights = weights * random[0] / (1 - how.dropout)
    return Attended(weights @ _for_heads(value, query), sums, random)


def attend_plainly_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: Attended,
    *,
    how: Manner,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output."""
    weights = _weights(_scores(query, key, how, mask, causal=causal), of.log_sums)
    for_weights = gradient @ _for_heads(value, query).mT
    kept = weights
    if how.dropout > 0:
        scaled = of.random[0].to(weights.dtype) / (1 - how.dropout)
        kept, for_weights = weights * scaled, for_weights * scaled
    inner = (gradient * of.output).sum(-1, keepdim=True)
    for_scores = weights * (for_weights - inner) * how.scale
    return (
        for_scores @ _for_heads(key, query),
        _summed(for_scores.mT @ query, key),
        _summed(kept.mT @ gradient, value),
    )


def _scores(
    query: Tensor, key: Tensor, how: Manner, mask: Tensor | None, *, causal: bool
) -> Tensor:
    scores = query @ _for_heads(key, query).mT * how.scale
    if causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(behind, float("-inf"))
    return scores if mask is None else scores + mask


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the scores' softmax; zeros where a query sees no key."""
    return torch.exp(scores - sums.masked_fill(sums == float("-inf"), 0.0).unsqueeze(-1))


def _for_heads(x: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)
