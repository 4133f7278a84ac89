"""Norms whose features several ranks have, in inference.

OLMo 2 and 3, OLMoE and MiniMax-M2 norm queries, and keys, over all heads. transformers' plans
gather them, so that every rank attends with all heads and caches the keys of all. Engines slice the
heads. Each rank norms its part, and an all-reduce adds the squares, one number per token, as in
vLLM's `MiniMaxText01RMSNormTP`. For OLMo, vLLM gathers queries and keys for the norm instead.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.parallelize.autograd_collectives import reduce_from_group
from onerank.capture.parallelize.tensor.module_styles import COLUMN, GATHERED, ROW, SPLIT
from onerank.capture.parallelize.tensor.shard_parameters import cut_heads

NORM_OF_RANKS = "norm_of_ranks"
"""Style of a norm over the features of all ranks, each of which has a part."""


def norms_of_ranks(model: nn.Module, styles: dict[str, str], size: int) -> dict[str, str]:
    """Return module name -> style for attentions that a plan gathers for a norm over all heads.

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
        width, norms = getattr(module, "head_dim", 0), {"q_norm": "q_proj", "k_norm": "k_proj"}
        features = {key: children[projection].out_features for key, projection in norms.items()}
        if all(
            isinstance(weight := getattr(children.get(key), "weight", None), Tensor)
            and weight.shape == (count,)
            and width
            and count % (width * size) == 0
            for key, count in features.items()
        ):
            sliced |= {f"{name}.{key}": COLUMN[0] for key in ("q_proj", "k_proj", "v_proj")}
            sliced |= {f"{name}.{key}": NORM_OF_RANKS for key in norms} | {f"{name}.o_proj": ROW[0]}
    return sliced


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
