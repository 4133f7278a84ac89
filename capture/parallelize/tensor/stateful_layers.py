"""Slice layers with a state per sequence by heads or channels: linear attention and Mamba.

Each rank computes the convolution, the scan and the norm of its heads, as in vLLM
(vllm/model_executor/layers/mamba) and in Megatron-LM: projections in are column-parallel, the one
out is row-parallel. transformers' plans gather the output of every projection instead, and compute
the scan of all heads on each rank. A convolution has the channels of queries, keys and values, or
of inputs, B and C, which are sliced part by part.

A single group of Mamba 2 serves the heads of all ranks. In inference each rank has a copy of it,
and the norm sums its squares over the ranks, as in vLLM (`Mixer2RMSNormGated`). In training the
copies would need a sum of their gradients, and Megatron-LM requires a group for each rank: refused.

Lightning attention (MiniMax) is sliced in inference only: its norm is over the heads of all ranks.

The step, B and C of Mamba 1 depend on all channels: `x_proj` sums over the ranks before the scan,
as in vLLM (`MambaMixer`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.tensor.gathered_attention import NORM_OF_RANKS, norm_over_ranks
from onerank.capture.parallelize.tensor.module_styles import COLUMN, HEADS, REPLICATED, ROW
from onerank.capture.parallelize.tensor.shard_parameters import (
    cut_blocks,
    cut_heads,
    cut_parameter,
    divide_attributes,
)

STATEFUL = "state_heads"
"""Style of a layer with states: its parameters, convolution and head counts are sliced."""

CHANNELS = "state_channels"
"""Style of its convolution, and of a child with heads, which are sliced with the layer."""

SUMMED = "state_summed"
"""Style of a row-parallel layer whose sum each rank uses for its channels: gradients are summed."""

# Marks a module whose heads were cut. An attribute, because pipeline stages rename modules.
_CUT = "_onerank_state_heads_cut"

_COLUMN, _ROW = COLUMN[0], ROW[0]


class _LayerKind(NamedTuple):
    """How a kind of layer is sliced.

    Attributes:
        known_by: attributes that show the kind.
        channels: widths of the parts of the convolution.
        divide: attributes that count what is sliced.
        heads: attributes that must be multiples of the number of ranks.
        styles: child module -> style; the names are those of all models of the kind.
        parts: child module -> widths of its fused parts.
        nested: child module -> attributes of it that are divided, too.
        buffers: buffer of the layer -> widths of the parts of its last axis.
        of_heads: buffer of the layer -> its axis of heads.
    """

    known_by: tuple[str, ...]
    channels: tuple[str, ...]
    divide: tuple[str, ...]
    heads: tuple[str, ...]
    styles: dict[str, str]
    parts: dict[str, tuple[str, ...]]
    nested: dict[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    of_heads: Mapping[str, int] = MappingProxyType({})


_DELTA_RULE = _LayerKind(
    known_by=("conv1d", "A_log", "num_k_heads", "num_v_heads", "key_dim", "value_dim"),
    channels=("key_dim", "key_dim", "value_dim"),
    divide=("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
    heads=("num_k_heads", "num_v_heads"),
    styles={
        # Qwen3-Next keeps the rows of a key head together (queries, keys, values and gates), so a
        # rank's share of the rows is that of its heads.
        **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), _COLUMN),
        **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _COLUMN),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"), _COLUMN),
        **dict.fromkeys(("out_proj", "o_proj"), _ROW),
        **dict.fromkeys(("norm", "o_norm"), REPLICATED[0]),
    },
    parts={"in_proj_qkv": ("key_dim", "key_dim", "value_dim")},
    nested={},
)

_KIMI_DELTA = _LayerKind(
    known_by=("conv1d", "forget_gate", "num_heads", "qkv_dim", "conv_dim"),
    channels=("qkv_dim", "qkv_dim", "qkv_dim"),
    divide=("num_heads", "qkv_dim", "conv_dim"),
    heads=("num_heads",),
    styles={
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "g_b_proj"), _COLUMN),
        "o_proj": _ROW,
        # Narrow, so each rank computes all of it, as in vLLM (`ReplicatedLinear`).
        **dict.fromkeys(("g_a_proj", "forget_gate.f_a_proj", "o_norm"), REPLICATED[0]),
        # Not column-parallel: its input belongs to the layer, which has its boundary already.
        **dict.fromkeys(("forget_gate.f_b_proj", "forget_gate.f_proj"), HEADS[0]),
        "forget_gate": CHANNELS,
    },
    parts={},
    nested={"forget_gate": ("num_heads", "qkv_dim")},
)

_MAMBA_2 = _LayerKind(
    known_by=(
        *("conv1d", "A_log", "D", "in_proj", "n_groups", "num_heads", "ssm_state_size"),
        # The norm has the groups of the layer: one over all features would need a sum over ranks.
        *("intermediate_size", "conv_dim", "norm.group_size"),
    ),
    channels=("intermediate_size", "of_groups", "of_groups"),
    divide=("num_heads", "n_groups", "intermediate_size", "conv_dim"),
    heads=("num_heads", "n_groups"),
    styles={"in_proj": _COLUMN, "out_proj": _ROW, "norm": HEADS[0]},
    parts={
        "in_proj": ("intermediate_size", "intermediate_size", "of_groups", "of_groups", "num_heads")
    },
    nested={},
)


_FALCON_H1 = _MAMBA_2._replace(
    # The norm is optional, and counts its groups.
    known_by=(*_MAMBA_2.known_by[:-1], "mamba_rms_norm", "mup_vector"),
    styles={**_MAMBA_2.styles, "norm": CHANNELS},
    nested={"norm": ("n_groups",)},
    buffers={"mup_vector": _MAMBA_2.parts["in_proj"]},
)

_MAMBA_1 = _LayerKind(
    known_by=(
        *("conv1d", "A_log", "D", "in_proj", "x_proj", "dt_proj"),
        *("time_step_rank", "ssm_state_size", "intermediate_size"),
    ),
    channels=("intermediate_size",),
    divide=("intermediate_size",),
    heads=("intermediate_size",),
    styles={
        "in_proj": _COLUMN,
        "x_proj": SUMMED,
        # Not column-parallel: its input follows from a sum whose gradients are summed already.
        "dt_proj": HEADS[0],
        "out_proj": _ROW,
        **dict.fromkeys(("dt_layernorm", "b_layernorm", "c_layernorm"), REPLICATED[0]),
    },
    parts={"in_proj": ("intermediate_size", "intermediate_size")},
    nested={},
)


_LIGHTNING = _LayerKind(
    known_by=("qkv_proj", "output_gate", "out_proj", "slope_rate", "num_attention_heads"),
    channels=(),
    divide=("num_attention_heads",),
    heads=("num_attention_heads",),
    styles={
        # Queries, keys and values of a head are together.
        **dict.fromkeys(("qkv_proj", "output_gate"), _COLUMN),
        "out_proj": _ROW,
        "norm": NORM_OF_RANKS,
    },
    parts={},
    nested={},
    of_heads={"slope_rate": 0, "query_decay": 0, "key_decay": 0, "diagonal_decay": 1},
)
"""Lightning attention of MiniMax, in inference: its norm is over all heads."""


def _width(module: Any, name: str) -> int:
    if name == "of_groups":
        return module.n_groups * module.ssm_state_size
    return getattr(module, name)


def _kind_of(module: nn.Module) -> _LayerKind | None:
    for kind in (_DELTA_RULE, _KIMI_DELTA, _MAMBA_2, _FALCON_H1, _MAMBA_1, _LIGHTNING):
        if all(_has(module, name) for name in kind.known_by):
            return kind
    return None


def is_lightning_attention(module: nn.Module) -> bool:
    """Return whether a module is a layer of MiniMax's lightning attention."""
    return _kind_of(module) is _LIGHTNING


def _has(module: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return hasattr(getattr(module, owner, None) if owner else module, name)


def stateful_styles(model: nn.Module, size: int, *, shares_group: bool = False) -> dict[str, str]:
    """Return module name -> style for the layers with states, and the modules in them.

    With `shares_group`, each rank may have a copy of the only group of a Mamba 2 layer. Any other
    layer whose heads or groups a number of ranks does not divide keeps the styles of the model's
    plan. That of Qwen3-Next gathers the outputs of its projections: each rank computes all heads.
    The plans of models with Mamba 2 have no styles for it, so slicing refuses them.
    """
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind is None or (kind is _LIGHTNING and not shares_group):
            continue
        if not all(
            _width(module, heads) % size == 0 or (shares_group and _is_only_group(module, heads))
            for heads in kind.heads
        ):
            continue
        styles[name] = STATEFUL
        if kind.channels:
            styles[f"{name}.conv1d"] = CHANNELS
        for child, inner in module.named_modules():
            if child in kind.styles and any(True for _ in inner.parameters(recurse=False)):
                styles[f"{name}.{child}"] = kind.styles[child]
    return styles


def _is_only_group(module: Any, heads: str) -> bool:
    return heads == "n_groups" and module.n_groups == 1


def repeat_only_group(module: Any, size: int) -> None:
    """Give a layer of Mamba 2 with one group a copy of the group for each rank.

    Call it before the layer is cut, which leaves one copy.
    """
    if not hasattr(module, "n_groups") or module.n_groups % size == 0:
        return
    kind = _kind_of(module)
    assert kind is not None, "a layer that `stateful_styles` knows"
    for layer, parts in ((module.in_proj, kind.parts["in_proj"]), (module.conv1d, kind.channels)):
        for parameter in layer.parameters(recurse=False):
            parameter.data = _with_groups_of_ranks(module, parameter.data, parts, size, dim=0)
    for name, parts in kind.buffers.items():
        buffer = getattr(module, name)
        setattr(module, name, _with_groups_of_ranks(module, buffer, parts, size, dim=-1))
    module.n_groups = size
    module.conv_dim = sum(_width(module, part) for part in kind.channels)


def _with_groups_of_ranks(
    module: Any, tensor: Tensor, parts: Sequence[str], size: int, *, dim: int
) -> Tensor:
    """Return a tensor whose parts of the only group are repeated for each rank."""
    split = tensor.split([_width(module, part) for part in parts], dim)
    return torch.cat(
        [
            torch.cat([share] * size, dim) if part == "of_groups" else share
            for part, share in zip(parts, split, strict=True)
        ],
        dim,
    )


def fused_widths(module: nn.Module, child: str) -> Sequence[int]:
    """Return the output features of the fused parts of a projection in a layer with states.

    () if the layer has no state, or the projection has a single part.
    """
    kind = _kind_of(module)
    return [_width(module, name) for name in kind.parts.get(child, ())] if kind else ()


def cut_stateful(module: Any, name: str, group: dist.ProcessGroup) -> None:
    """Keep this rank's heads of a layer with states: parameters, convolution and counts.

    Call it after the projections are cut: the widths of their parts follow from these counts.
    """
    kind = _kind_of(module)
    assert kind is not None, "a layer that `stateful_styles` knows"
    size, norm_group = group.size(), _norm_group(module)
    cut_heads(module, name, group)
    if kind.channels:
        _cut_convolution(module, name, [_width(module, part) for part in kind.channels], group)
    for buffer, parts in kind.buffers.items():
        split = getattr(module, buffer).split([_width(module, part) for part in parts], -1)
        shares = [part.chunk(size, -1)[group.rank()] for part in split]
        setattr(module, buffer, torch.cat(shares, -1))
    for buffer, axis in kind.of_heads.items():
        setattr(module, buffer, getattr(module, buffer).chunk(size, axis)[group.rank()])
    for child, counts in kind.nested.items():
        inner = module.get_submodule(child)
        for key, parameter in inner.named_parameters(recurse=False):
            # `A_log` of Kimi Linear has dimensions of 1 around that of the heads.
            heads = next(dim for dim, length in enumerate(parameter.shape) if length > 1)
            cut_parameter(parameter, f"{name}.{child}.{key}", group, "heads", dim=heads)
        # A group that all ranks share still counts as one.
        counted = [count for count in counts if getattr(inner, count, 1) > 1]
        divide_attributes(inner, f"{name}.{child}", counted, size)
    divide_attributes(module, name, kind.divide, size)
    if norm_group and norm_group > module.intermediate_size:
        norm_over_ranks(module.norm, group)
    mark_as_cut(module)


def _cut_convolution(
    module: Any, name: str, widths: Sequence[int], group: dist.ProcessGroup
) -> None:
    convolution = module.conv1d
    for key, parameter in convolution.named_parameters(recurse=False):
        cut_blocks(parameter, f"{name}.conv1d.{key}", group, 0, widths)
    channels = convolution.weight.shape[0]
    convolution.in_channels = convolution.out_channels = convolution.groups = channels


def _norm_group(module: Any) -> int:
    """Return the features of a group of the norm of a layer; 0 for other kinds than Mamba 2."""
    kind = _kind_of(module)
    if kind is _MAMBA_2:
        return module.norm.group_size
    if kind is _FALCON_H1 and module.mamba_rms_norm:
        return module.intermediate_size // module.norm.n_groups
    return 0


def mark_as_cut(module: nn.Module) -> None:
    """Note that a module has this rank's heads or channels only."""
    setattr(module, _CUT, True)


def has_heads_of_rank(layer: nn.Module) -> bool:
    """Return whether a layer with states, or a convolution in it, has this rank's heads only."""
    return any(hasattr(module, _CUT) for module in layer.modules())
