"""Attention that transformers' plans gather, in inference: engines slice its heads.

With a gather, every rank attends with all heads and caches the keys of all.

- OLMo 2 and 3, OLMoE and MiniMax-M2 norm queries, and keys, over all heads. Each rank norms its
  part, and an all-reduce adds the squares, one number per token, as in vLLM's
  `MiniMaxText01RMSNormTP`. For OLMo, vLLM gathers queries and keys for the norm instead.
- MiniMax-M3 norms each head by itself. Its plan gathers for an indexer, which only its sparse
  layers have.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.parallelize.autograd_collectives import reduce_from_group
from onerank.capture.parallelize.tensor.module_styles import (
    COLUMN,
    GATHERED,
    REPLICATED,
    ROW,
    SPLIT,
)
from onerank.capture.parallelize.tensor.shard_parameters import cut_heads

NORM_OF_RANKS = "norm_of_ranks"
"""Style of a norm over the features of all ranks, each of which has a part."""


def gathered_attention(model: nn.Module, styles: dict[str, str], size: int) -> dict[str, str]:
    """Return module name -> style, to slice attention that a plan gathers but engines do not.

    Args:
        model: a model whose parameters are whole.
        styles: styles of its modules.
        size: number of ranks; an attention whose heads it does not divide stays gathered.
    """
    sliced: dict[str, str] = {}
    for name, module in model.named_modules():
        children: dict[str, Any] = dict(module.named_children())
        gathered = all(styles.get(f"{name}.{key}") in GATHERED for key in ("q_proj", "k_proj"))
        if not gathered or styles.get(f"{name}.o_proj") not in SPLIT:
            continue
        width: Any = getattr(module, "head_dim", 0)
        norms = {"q_norm": "q_proj", "k_norm": "k_proj"}
        features = [children[projection].out_features for projection in norms.values()]
        if not width or any(count % (width * size) for count in features):
            continue
        weights = [getattr(children.get(key), "weight", None) for key in norms]
        shapes = [weight.shape if isinstance(weight, Tensor) else None for weight in weights]
        if shapes == [(count,) for count in features]:
            norm_style = NORM_OF_RANKS
        elif shapes == [(width,)] * 2 and not {*children} - {*_HEADS_ALONE, *norms}:
            norm_style = REPLICATED[0]
        else:
            continue
        sliced |= {f"{name}.{key}": COLUMN[0] for key in ("q_proj", "k_proj", "v_proj")}
        sliced |= {f"{name}.{key}": norm_style for key in norms} | {f"{name}.o_proj": ROW[0]}
    return sliced


# Modules of an attention in which no head reads another. An indexer reads those of a group.
_HEADS_ALONE = ("q_proj", "k_proj", "v_proj", "o_proj")


def slice_norm(norm: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Keep this rank's features of a norm over the features of all ranks."""
    cut_heads(norm, name, group)
    norm_over_ranks(norm, group)


def norm_over_ranks(norm: Any, group: dist.ProcessGroup) -> None:
    """Let an RMS norm with this rank's weights norm over the features of all ranks."""
    norm.forward = functools.partial(_norm, norm, group)


def _norm(
    norm: Any, group: dist.ProcessGroup, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Return this rank's features of the norm.

    A gated norm multiplies by its gate before the norm, or after it if it says so by
    `norm_before_gate`.
    """
    gated_after = getattr(norm, "norm_before_gate", False)
    hidden = hidden_states.float()
    if gate is not None and not gated_after:
        hidden = hidden * functional.silu(gate.float())
    squares = reduce_from_group(hidden.pow(2).sum(-1, keepdim=True), group)
    variance = squares / (hidden.shape[-1] * group.size())
    hidden = hidden * torch.rsqrt(variance + norm.variance_epsilon)
    out = norm.weight * hidden.to(hidden_states.dtype)
    return out * functional.silu(gate) if gate is not None and gated_after else out
