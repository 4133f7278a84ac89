"""Cut a module's parameters to one rank's share, in place."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onerank.ir.errors import SliceError


def cut_module(
    module: nn.Module,
    name: str,
    group: dist.ProcessGroup,
    *,
    dim: int,
    cut: set[int],
    blocks: Sequence[int] = (),
    bias: bool = True,
) -> None:
    """Cut the module's parameters along `dim`, each of the fused `blocks` by itself."""
    for key, parameter in module.named_parameters(recurse=False):
        if id(parameter) in cut or (key == "bias" and not bias):
            continue  # tied weights are cut once
        parts = blocks or (parameter.shape[dim],)
        for length in parts:
            if length % group.size():
                raise SliceError(
                    f"--tp {group.size()} must divide {name}.{key}'s {length} "
                    f"{'rows' if dim == 0 else 'columns'}"
                    + (f" (a fused part of {sum(parts)})" if len(parts) > 1 else "")
                )
        with torch.no_grad():
            whole = parameter.data.split(list(parts), dim=dim)
            mine = [part.chunk(group.size(), dim=dim)[group.rank()] for part in whole]
            parameter.data = torch.cat(mine, dim=dim).contiguous()
            parameter.grad = None
        cut.add(id(parameter))
    for attribute, value in (("out_features", 0), ("in_features", 1), ("num_embeddings", 0)):
        if hasattr(module, attribute) and value == dim:
            setattr(module, attribute, module.get_parameter("weight").shape[dim])


def keep_heads(attention: Any, size: int) -> None:
    """Tell an attention module, which finds q, k and v by these counts, how many it has left."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= size
    attention.config.num_key_value_heads //= size
    attention.num_key_value_heads //= size
