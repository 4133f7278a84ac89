"""Tensor parallelism of mixture-of-experts layers.

Each expert is cut like a dense MLP, the first projection by its output features, the second by its
input features (Megatron-LM's expert tensor parallelism of the size of --tp, its default). Routers
are replicated. With sequence parallelism, without which Megatron-LM trains no mixture of experts
under tensor parallelism, each rank routes its own shard of the sequence; around the experts tokens,
indices and weights are gathered and the sums scattered, as its allgather dispatcher does
(megatron/core/transformer/moe/token_dispatcher.py). Otherwise tokens are replicated, and the
borders stand around the experts module as transformers places them (`moe_tp_experts`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onerank.capture.experts import are_shared, expert_layers, is_fused
from onerank.capture.latent import latent_styles
from onerank.capture.parallel import all_gather, copy_to_group, reduce_from_group
from onerank.capture.sequence import gather_sequence, scatter_sum_to_sequence
from onerank.capture.styles import EXPERTS, WHOLE
from onerank.ir.errors import SliceError

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


def with_mixtures(
    model: PreTrainedModel, styles: dict[str, str], *, complete: bool
) -> dict[str, str]:
    """Return the styles with those of latent attention and, if `complete`, what the plan left out.

    Transformers' plans leave out shared experts (Qwen2-MoE), latent attention (DeepSeek-V3) or
    attention (Phi-3.5-MoE), which Megatron-LM slices.
    """
    result = dict(styles)
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if complete and all(isinstance(children.get(key), nn.Linear) for key in _ATTENTION):
            for key, style in _ATTENTION.items():
                result.setdefault(f"{name}.{key}", style)
    result |= latent_styles(model, styles, complete=complete)
    for name in expert_layers(model) if complete else ():
        result[name] = EXPERTS[0]
        block = name.rpartition(".")[0]
        for child, module in model.get_submodule(block).named_children():
            if child in _SHARED:
                for key, _ in module.named_children():
                    if key in _MLP:
                        result.setdefault(f"{block}.{child}.{key}", _MLP[key])
            elif isinstance(module, nn.Linear):  # a router, or the gate of shared experts
                result.setdefault(f"{block}.{child}", WHOLE[0])
    return result


def cut_experts(
    module: Any, name: str, group: dist.ProcessGroup, *, sequence: bool = False
) -> None:
    """Keep this rank's features of every expert, and place the borders around the module.

    Args:
        module: the fused experts of a layer.
        name: its qualified name.
        group: the tensor-parallel group.
        sequence: whether each rank routes its own shard of the sequence. Tokens, the experts they
            go to and the weights are then gathered, and the sums scattered; experts that are
            shared out see to that themselves, since tokens travel first.

    Raises:
        SliceError: a size does not divide, or the experts have biases or a norm, whose place in a
            partial sum is not known.
    """
    if not is_fused(module):
        raise SliceError(
            f"{name} is planned as {EXPERTS[0]} but is a {type(module).__name__}, not the fused "
            "experts of transformers' experts interface: leave --tp out"
        )
    if module.has_bias or getattr(module, "has_post_expert_norm", False):
        raise SliceError(
            f"{name}: experts with biases or a norm after them cannot be sliced by --tp: leave "
            "--tp out, and share the experts out by --ep"
        )
    for key, parameter in module.named_parameters(recurse=False):
        output = key != "down_proj"
        dim = 1 if output != module.is_transposed else 2
        fused = 2 if output and module.has_gate and module.is_concatenated else 1
        _cut(parameter, f"{name}.{key}", group, dim=dim, fused=fused)
    if hasattr(module, "intermediate_dim"):
        module.intermediate_dim //= group.size()
    if not sequence:
        module.register_forward_pre_hook(_entering(group))
        module.register_forward_hook(_leaving(group))
    elif not are_shared(module):
        module.register_forward_pre_hook(_gathering(group))
        module.register_forward_hook(_scattering(group))


def _cut(
    parameter: nn.Parameter, name: str, group: dist.ProcessGroup, *, dim: int, fused: int
) -> None:
    features, size = parameter.shape[dim] // fused, group.size()
    if features % size:
        raise SliceError(
            f"--tp {size} must divide {name}'s {features} features per expert "
            f"({features} = {size} x {features // size} + {features % size})"
        )
    with torch.no_grad():
        parts = [part.chunk(size, dim)[group.rank()] for part in parameter.data.chunk(fused, dim)]
        parameter.data = torch.cat(parts, dim).contiguous()
        parameter.grad = None


def _entering(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        return copy_to_group(hidden, group), index, copy_to_group(weights, group)

    return hook


def _gathering(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        everywhere = index.new_empty((group.size() * index.shape[0], index.shape[1]))
        all_gather(everywhere, index.contiguous(), group=group)
        return gather_sequence(hidden, group), everywhere, gather_sequence(weights, group)

    return hook


def _scattering(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return scatter_sum_to_sequence(output, group)

    return hook


def _leaving(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return reduce_from_group(output, group)

    return hook
