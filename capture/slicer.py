"""Slice a Hugging Face model to one tensor-parallel rank, in place and with plain tensors.

What is sliced comes from the model's own tensor-parallel plan (module pattern -> style). Where
the borders stand is the flavour:

- `megatron`: one all-reduce per block and direction (4 a layer and step), embedding, head and
  loss parallel over the vocabulary;
- `hf`: as transformers distributes it itself, every column-parallel layer with a border of its
  own (7 a layer and step) and the head's logits gathered.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onerank.capture.parallel import (
    column_forward,
    copy_to_group,
    gather_from_group,
    gathered_column_forward,
    row_forward,
)
from onerank.capture.vocabulary import causal_loss, embedding_forward
from onerank.ir.errors import SliceError

Flavour = Literal["megatron", "hf"]

_COLUMN = ("colwise", "packed_colwise")
_HEAD = ("colwise_gather_output", "colwise_rep")
_ROW = ("rowwise",)
_EMBEDDING = ("embedding_rowwise",)
_REPLICATED = ("replicated_with_grad_allreduce",)
_STYLES = (*_COLUMN, *_HEAD, *_ROW, *_EMBEDDING, *_REPLICATED)


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
        SliceError: the model has no plan, the plan has a style that is not known here, or a
            size does not divide.
    """
    _check_sizes(model, group.size())
    styles = _planned_styles(model)
    before = sum(p.numel() for p in model.parameters())
    cut: set[int] = set()
    borders: dict[str, None] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in (*_COLUMN, *_HEAD):
            parts = 2 if style == "packed_colwise" else 1
            _shard(module, name, group, dim=0, parts=parts, cut=cut)
            if style in _HEAD:
                _head(model, module, group, flavour)
            else:
                _linear(module, name).forward = column_forward(
                    _linear(module, name), group, copy=flavour == "hf"
                )
                borders[name.rpartition(".")[0]] = None
        elif style in _ROW:
            _shard(module, name, group, dim=1, parts=1, cut=cut, bias=False)
            _linear(module, name).forward = row_forward(_linear(module, name), group)
        elif style in _EMBEDDING:
            if not isinstance(module, nn.Embedding):
                raise SliceError(f"{name} is planned as {style} but is a {type(module).__name__}")
            _shard(module, name, group, dim=0, parts=1, cut=cut)
            module.forward = embedding_forward(module, group, alone=alone)
        else:
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(_reduce_gradient(group))
    if flavour == "megatron":
        for name in borders:
            model.get_submodule(name).register_forward_pre_hook(_enter(group), with_kwargs=True)
    counts = {style: list(styles.values()).count(style) for style in dict.fromkeys(styles.values())}
    return Sliced(counts, before, sum(p.numel() for p in model.parameters()))


def _planned_styles(model: PreTrainedModel) -> dict[str, str]:
    """Return module name -> style for every module the plan matches."""
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise SliceError(
            f"{type(model).__name__} has no tensor-parallel plan: transformers declares none for "
            "it, so what to slice is not known. Models with one are, for example, Llama, Qwen, "
            "Mistral and Gemma"
        )
    embedding = model.get_input_embeddings()
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): plan[key] for key in plan}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((plan for key, plan in patterns.items() if key.fullmatch(name)), None)
        if style is None and module is embedding and isinstance(module, nn.Embedding):
            style = _EMBEDDING[0]  # older plans leave it out; the vocabulary is sliced all the same
        if style is None:
            continue
        if style not in _STYLES:
            raise SliceError(
                f"{type(model).__name__}: {name} is planned as {style!r}; the styles known here "
                f"are {', '.join(_STYLES)}. Mixture-of-experts models cannot be sliced yet"
            )
        styles[name] = style
    return styles


def _check_sizes(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    for attribute, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
        ("intermediate_size", "intermediate features"),
        ("vocab_size", "vocabulary entries"),
    ):
        value = getattr(config, attribute, None)
        if isinstance(value, int) and value % size:
            raise SliceError(
                f"--tp {size} must divide the model's {value} {what} "
                f"({value} = {size} x {value // size} + {value % size})"
            )


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise SliceError(
            f"{name} is planned as a sliced linear layer but is a {type(module).__name__}"
        )
    return module


def _shard(
    module: nn.Module,
    name: str,
    group: dist.ProcessGroup,
    *,
    dim: int,
    parts: int,
    cut: set[int],
    bias: bool = True,
) -> None:
    """Cut the module's parameters along `dim`, each of `parts` fused blocks by itself."""
    for key, parameter in module.named_parameters(recurse=False):
        if id(parameter) in cut or (key == "bias" and not bias):
            continue  # tied weights are cut once
        length = parameter.shape[dim]
        if length % (group.size() * parts):
            raise SliceError(
                f"--tp {group.size()} must divide {name}.{key}'s {length} "
                f"{'rows' if dim == 0 else 'columns'}"
                + (f" in {parts} fused parts" if parts > 1 else "")
            )
        with torch.no_grad():
            blocks = parameter.data.chunk(parts, dim=dim)
            mine = [block.chunk(group.size(), dim=dim)[group.rank()] for block in blocks]
            parameter.data = torch.cat(mine, dim=dim).contiguous()
            parameter.grad = None
        cut.add(id(parameter))
    for attribute, value in (("out_features", 0), ("in_features", 1), ("num_embeddings", 0)):
        if hasattr(module, attribute) and value == dim:
            setattr(module, attribute, module.get_parameter("weight").shape[dim])


def _head(
    model: PreTrainedModel, module: nn.Module, group: dist.ProcessGroup, flavour: Flavour
) -> None:
    """Slice the output layer: gathered for `hf`; for `megatron` sharded up to the loss.

    A caller that computes its own loss from the logits gets them gathered.
    """
    linear = _linear(module, "the output layer")
    if flavour == "hf":
        linear.forward = gathered_column_forward(linear, group)
        return
    linear.forward = column_forward(linear, group, copy=True)
    model.loss_function = causal_loss(group)

    def gather(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("labels") is None and isinstance(getattr(output, "logits", None), Tensor):
            output.logits = gather_from_group(output.logits, group)
        return output

    model.register_forward_hook(gather, with_kwargs=True)


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


def _reduce_gradient(group: dist.ProcessGroup) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)

    return hook
