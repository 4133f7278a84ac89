"""Slice a Hugging Face model to one tensor-parallel rank, in place and with plain tensors.

What is sliced comes from the model's own tensor-parallel plan (module pattern -> style). Where
the borders stand is the flavour:

- `megatron`: one all-reduce per block and direction (4 a layer and step), embedding, head and
  loss parallel over the vocabulary, fused projections sliced part by part;
- `hf`: as transformers distributes it itself, every column-parallel layer with a border of its
  own (7 a layer and step), fused projections and the head's logits gathered.

Where a plan gathers for another reason (OLMo2 normalises queries over all heads), so do both.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onerank.capture.parallel import column_linear, copy_to_group, row_linear
from onerank.capture.shards import cut_module, keep_heads
from onerank.capture.styles import (
    COLUMN,
    EMBEDDING,
    GATHERED,
    ROW,
    SPLIT,
    Flavour,
    blocks_of,
    check_complete,
    check_sizes,
    parent_of,
    planned_styles,
    without_gathers,
)
from onerank.capture.vocabulary import parallel_embedding, parallel_head
from onerank.ir.errors import SliceError

_SUMMED = "_onerank_gradient_is_summed"


@dataclass(frozen=True)
class Sliced:
    """What was sliced: counts of modules by style, and elements before and after."""

    modules: dict[str, int]
    elements_before: int
    elements_after: int


def slice_model(
    model: PreTrainedModel, group: dist.ProcessGroup, flavour: Flavour, *, alone: bool = True
) -> Sliced:
    """Keep this rank's share of every planned module and place the borders.

    Args:
        model: a model whose parameters are whole, on any device.
        group: the tensor-parallel group.
        flavour: where the borders stand.
        alone: whether the group's other ranks are not there to add their parts.

    Raises:
        SliceError: the model has no plan, the plan leaves something out or has a style that is
            not known here, or a size does not divide.
    """
    styles = planned_styles(model)
    check_sizes(model, group.size())
    check_complete(model, styles, flavour)
    if flavour == "megatron":
        styles = without_gathers(model, styles)
    before = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    cut: set[int] = set()
    borders: dict[str, None] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in (*COLUMN, *GATHERED):
            cut_module(module, name, group, dim=0, blocks=blocks_of(model, name, style), cut=cut)
            linear = _linear(module, name)
            if flavour == "megatron" and module is head:
                parallel_head(model, linear, group, alone=alone)
                continue
            gathered = style in GATHERED
            column_linear(linear, group, copy=flavour == "hf", gathers=lambda it=gathered: it)
            if style == "fused_qkv":
                keep_heads(model.get_submodule(parent_of(name)), group.size())
            borders[parent_of(name)] = None
        elif style in (*ROW, *SPLIT):
            cut_module(module, name, group, dim=1, cut=cut, bias=False)
            row_linear(_linear(module, name), group, split=style in SPLIT)
        elif style in EMBEDDING:
            if not isinstance(module, nn.Embedding):
                raise SliceError(f"{name} is planned as {style} but is a {_kind(module)}")
            cut_module(module, name, group, dim=0, cut=cut)
            parallel_embedding(module, group, alone=alone)
        else:
            module.register_forward_pre_hook(_reducing_gradients(group))
    if flavour == "megatron":
        for name in borders:
            model.get_submodule(name).register_forward_pre_hook(_enter(group), with_kwargs=True)
    return Sliced(
        dict(Counter(styles.values())), before, sum(p.numel() for p in model.parameters())
    )


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise SliceError(f"{name} is planned as a sliced linear layer but is a {_kind(module)}")
    return module


def _enter(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a pre-hook that puts the region's border on the block's hidden states."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (copy_to_group(args[0], group), *args[1:]), kwargs
        if isinstance(kwargs.get("hidden_states"), Tensor):
            return args, {**kwargs, "hidden_states": copy_to_group(kwargs["hidden_states"], group)}
        raise SliceError(
            f"{type(module).__name__} takes no hidden states as first argument or by name; "
            "its tensor-parallel border cannot be placed: use --tp-flavour hf"
        )

    return hook


def _reducing_gradients(group: dist.ProcessGroup) -> Callable[..., None]:
    """Return a pre-hook that lets the gradients of a module's parameters be summed.

    Before each forward, since moving a model off the meta device makes new parameters.
    """

    def total(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    def hook(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not hasattr(parameter, _SUMMED):
                parameter.register_hook(total)
                setattr(parameter, _SUMMED, True)

    return hook
