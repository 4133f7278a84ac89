"""Tensor parallelism of mixture-of-experts layers.

Each expert is sliced like a dense MLP: the first projection by output features, the second by input
features. This is Megatron-LM's expert tensor parallelism with its default size, that of --tp.
Routers are replicated.

With sequence parallelism, which Megatron-LM requires for mixtures of experts under tensor
parallelism, each rank routes its shard of the sequence. Tokens, indices and weights are
all-gathered before the experts and the partial sums reduce-scattered after them, as in its
allgather dispatcher (megatron/core/transformer/moe/token_dispatcher.py). Without sequence
parallelism, tokens are replicated: the copy precedes the experts module and an all-reduce follows
it, as in transformers (`moe_tp_experts`).

Biases of the second projection are replicated. Each rank adds bias / size to its partial sums, as
in torchtitan (torchtitan/models/gpt_oss/moe.py); Megatron-LM's experts have no bias under expert
tensor parallelism. Experts that return their input (LongCat-Flash) return 1 / size of it.
Llama-4's experts, which compute every token, are sliced in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import (
    all_gather,
    copy_to_group,
    reduce_from_group,
)
from onerank.capture.parallelize.experts.expert_parallel import are_sharded, is_dense, is_fused
from onerank.capture.parallelize.tensor.module_styles import EXPERTS
from onerank.capture.parallelize.tensor.sequence_parallel import (
    gather_sequence,
    scatter_sum_to_sequence,
)
from onerank.capture.parallelize.tensor.shard_parameters import cut_parameter
from onerank.ir.errors import SliceError

_DOWN_BIAS = "down_proj_bias"
# Experts in the memory layout of transformers' interface that do not go through it.
_OUTSIDE_INTERFACE = ("LongcatFlashExperts",)


@dataclass(frozen=True)
class _WeightLayout:
    """Memory layout of fused experts' weights.

    Attributes:
        transposed: whether weights are [expert, in, out] instead of [expert, out, in].
        fused: number of fused parts in the first projection; each is sliced separately.
    """

    transposed: bool
    fused: int


def cut_experts(
    module: Any, name: str, group: dist.ProcessGroup, *, sequence: bool = False
) -> None:
    """Keep this rank's features of every expert, and place the collectives around the module.

    Args:
        module: the fused experts of a layer.
        name: its qualified name.
        group: the tensor-parallel group.
        sequence: whether each rank routes its own shard of the sequence. Tokens, their expert
            indices and weights are then gathered, and the sums scattered. Experts distributed
            by --ep do so themselves, after exchanging tokens.

    Raises:
        SliceError: a size does not divide, the experts' class is unsupported, or they end with a
            norm, which cannot be applied to partial sums.
    """
    layout = _weight_layout(module, name, sequence=sequence)
    if getattr(module, "has_post_expert_norm", False):
        raise SliceError(
            f"{name}: experts with a norm after them cannot be sliced by --tp: leave --tp out, and "
            "distribute the experts with --ep",
            code="tp-experts-norm",
        )
    for key, parameter in module.named_parameters(recurse=False):
        if key == _DOWN_BIAS:
            continue
        output = key != "down_proj"
        # Dimension 0 is the expert; biases are [expert, features].
        dim = 2 if parameter.dim() == 3 and output == layout.transposed else 1
        cut_parameter(
            parameter,
            f"{name}.{key}",
            group,
            "features per expert",
            dim=dim,
            fused=layout.fused if output else 1,
        )
    if hasattr(module, _DOWN_BIAS):
        module.register_forward_pre_hook(_divide_bias_hook(group))
        # Also after an error in the forward, or the parameter would stay hidden.
        module.register_forward_hook(_restore_bias, always_call=True)
    if hasattr(module, "intermediate_dim"):
        # Their forward splits the fused projection by this width.
        module.intermediate_dim //= group.size()
    if not sequence:
        module.register_forward_pre_hook(_copy_hook(group))
        module.register_forward_hook(_reduce_hook(group))
    elif not are_sharded(module):
        module.register_forward_pre_hook(_gather_hook(group))
        module.register_forward_hook(_scatter_hook(group))


def _weight_layout(module: Any, name: str, *, sequence: bool) -> _WeightLayout:
    """Return the layout of fused experts' weights; arguments and errors as for `cut_experts`."""
    if is_dense(module):
        if sequence:
            raise SliceError(
                f"--sp: {name} computes every token for every expert; gathering those from shards "
                "of the sequence is not supported\n  leave --sp out",
                code="sp-dense-experts",
            )
        return _WeightLayout(transposed=True, fused=2)
    if type(module).__name__ in _OUTSIDE_INTERFACE:
        return _WeightLayout(transposed=False, fused=2)
    if is_fused(module):
        fused = 2 if module.has_gate and module.is_concatenated else 1
        return _WeightLayout(module.is_transposed, fused)
    raise SliceError(
        f"{name} is planned as {EXPERTS[0]} but is a {type(module).__name__}, not the fused "
        "experts of transformers' experts interface: leave --tp out",
        code="tp-experts-type",
    )


class _DividedBias(torch.autograd.Function):
    """A bias divided by the group's size, so that the sum over the ranks adds it once.

    The backward does not divide: each rank receives the gradient of the sum, which is the whole
    bias's gradient.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, size: int) -> Tensor:
        return bias / size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _divide_bias_hook(group: dist.ProcessGroup) -> Callable[..., None]:
    def hook(module: nn.Module, _: Any) -> None:
        bias = module.get_parameter(_DOWN_BIAS)
        # An instance attribute shadows the registered parameter of the same name, which stays.
        module.__dict__[_DOWN_BIAS] = _DividedBias.apply(bias, group.size())

    return hook


def _restore_bias(module: nn.Module, *_: Any) -> None:
    module.__dict__.pop(_DOWN_BIAS, None)


def _copy_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Indices of experts have no gradient to sum.
        return tuple(copy_to_group(x, group) if x.is_floating_point() else x for x in args)

    return hook


def _gather_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        all_indices = index.new_empty((group.size() * index.shape[0], index.shape[1]))
        all_gather(all_indices, index.contiguous(), group=group)
        return gather_sequence(hidden, group), all_indices, gather_sequence(weights, group)

    return hook


def _scatter_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return scatter_sum_to_sequence(output, group)

    return hook


def _reduce_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return reduce_from_group(output, group)

    return hook
