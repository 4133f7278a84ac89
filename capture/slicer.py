"""Slice a Hugging Face model to one tensor-parallel rank, in place and with plain tensors.

What is sliced comes from the model's own tensor-parallel plan (module pattern -> style). Where
the borders stand is the flavour:

- `megatron`: one all-reduce per block and direction (4 a layer and step), embedding, head and
  loss parallel over the vocabulary, fused projections sliced part by part;
- `hf`: as transformers distributes it itself, every column-parallel layer with a border of its
  own (7 a layer and step), fused projections and the head's logits gathered.

Where a plan gathers for another reason (OLMo2 normalises queries over all heads), so do both.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onerank.capture.parallel import column_linear, copy_to_group, row_linear
from onerank.capture.vocabulary import parallel_embedding, parallel_head
from onerank.ir.errors import SliceError

Flavour = Literal["megatron", "hf"]

_COLUMN = ("colwise", "packed_colwise", "fused_qkv")  # the last is ours, never a plan's
_GATHERED = ("colwise_gather_output", "colwise_rep")
_ROW = ("rowwise",)
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_EMBEDDING = ("embedding_rowwise",)
_REPLICATED = ("replicated_with_grad_allreduce",)
_SUMMED = "_onerank_gradient_is_summed"
_STYLES = (*_COLUMN[:2], *_GATHERED, *_ROW, *_SPLIT, *_EMBEDDING, *_REPLICATED)


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
    styles = _planned_styles(model)
    _check_sizes(model, group.size())
    _check_complete(model, styles, flavour)
    if flavour == "megatron":
        styles = _without_gathers(model, styles)
    before = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    cut: set[int] = set()
    borders: dict[str, None] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in (*_COLUMN, *_GATHERED):
            _shard(module, name, group, dim=0, blocks=_blocks(model, name, style), cut=cut)
            linear = _linear(module, name)
            if flavour == "megatron" and module is head:
                parallel_head(model, linear, group, alone=alone)
                continue
            gathered = style in _GATHERED
            column_linear(linear, group, copy=flavour == "hf", gathers=lambda it=gathered: it)
            if style == "fused_qkv":
                _keep_heads(model.get_submodule(_parent(name)), group.size())
            borders[_parent(name)] = None
        elif style in (*_ROW, *_SPLIT):
            _shard(module, name, group, dim=1, cut=cut, bias=False)
            row_linear(_linear(module, name), group, split=style in _SPLIT)
        elif style in _EMBEDDING:
            if not isinstance(module, nn.Embedding):
                raise SliceError(f"{name} is planned as {style} but is a {_kind(module)}")
            _shard(module, name, group, dim=0, cut=cut)
            parallel_embedding(module, group, alone=alone)
        else:
            module.register_forward_pre_hook(_reducing_gradients(group))
    if flavour == "megatron":
        for name in borders:
            model.get_submodule(name).register_forward_pre_hook(_enter(group), with_kwargs=True)
    return Sliced(
        dict(Counter(styles.values())), before, sum(p.numel() for p in model.parameters())
    )


def _planned_styles(model: PreTrainedModel) -> dict[str, str]:
    """Return module name -> style for every module the plan matches."""
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise SliceError(
            f"{type(model).__name__} has no tensor-parallel plan: transformers declares none for "
            "it, so what to slice is not known. Models with one are, for example, Llama, Qwen, "
            "Mistral and Gemma"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): plan[key] for key in plan}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((plan for key, plan in patterns.items() if key.fullmatch(name)), None)
        if style is None and module is embedding and isinstance(module, nn.Embedding):
            style = _EMBEDDING[0]  # older plans leave it out; the vocabulary is sliced all the same
        if style is None and module is head and tied:
            style = _GATHERED[0]  # its weight is cut with the embedding's
        if style is None:
            continue
        if style not in _STYLES:
            raise SliceError(
                f"{type(model).__name__}: {name} is planned as {style!r}; the styles known here "
                f"are {', '.join(_STYLES)}. Mixture-of-experts models and multi-head latent "
                "attention cannot be sliced yet"
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


def _check_complete(model: PreTrainedModel, styles: dict[str, str], flavour: Flavour) -> None:
    """Refuse a plan that leaves out what must be sliced with the rest."""
    kind = type(model).__name__
    rows = [name for name, style in styles.items() if style in (*_ROW, *_SPLIT)]
    if not rows:
        raise SliceError(
            f"{kind}: its tensor-parallel plan names no row-parallel layer (it names "
            f"{', '.join(styles) or 'no module of the model'}): its layers would stay whole"
        )
    stacks = {re.split(r"\.\d+\.", name)[0] + "." for name in rows}
    blocks = {_parent(name) for name, style in styles.items() if style in _COLUMN} - {""}
    for name, module in model.named_modules():
        if name in styles or not any(True for _ in module.parameters(recurse=False)):
            continue
        block = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
        if block is not None:
            raise SliceError(
                f"{kind}: {name} has parameters between the sliced layers of {block}, and the "
                "tensor-parallel plan does not say what becomes of them"
            )
        whole = isinstance(module, nn.Linear) and any(name.startswith(stack) for stack in stacks)
        if whole and flavour == "megatron":
            raise SliceError(
                f"{kind}: {name} is in no tensor-parallel plan, so that every rank would compute "
                "it whole, which Megatron-LM would not do: use --tp-flavour hf"
            )


def _without_gathers(model: PreTrainedModel, styles: dict[str, str]) -> dict[str, str]:
    """Slice fused projections part by part where the plan gathers their output."""
    result = dict(styles)
    for name, style in styles.items():
        block, _, leaf = name.rpartition(".")
        if style not in _GATHERED or leaf not in _FUSED:
            continue
        partner, fused = _FUSED[leaf]
        if styles.get(f"{block}.{partner}") not in _SPLIT:
            continue
        if fused != "fused_qkv" or _qkv_widths(model.get_submodule(block)):
            result[name], result[f"{block}.{partner}"] = fused, _ROW[0]
    return result


# fused projection -> the layer that consumes it, and the style that needs no gather
_FUSED = {
    "gate_up_proj": ("down_proj", "packed_colwise"),
    "qkv_proj": ("o_proj", "fused_qkv"),
}


def _qkv_widths(attention: Any) -> list[int]:
    """Return the rows of q, k and v in a fused projection laid out as Phi3's, else nothing."""
    heads = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    pairs, width = (getattr(attention, key, None) for key in ("num_key_value_heads", "head_dim"))
    if not (isinstance(heads, int) and isinstance(pairs, int) and isinstance(width, int)):
        return []
    widths = [heads * width, pairs * width, pairs * width]
    return widths if sum(widths) == attention.qkv_proj.weight.shape[0] else []


def _keep_heads(attention: Any, size: int) -> None:
    """Tell an attention module, which finds q, k and v by these counts, how many it has left."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= size
    attention.config.num_key_value_heads //= size
    attention.num_key_value_heads //= size


def _blocks(model: PreTrainedModel, name: str, style: str) -> Sequence[int]:
    """Return the rows of each fused part of a column-parallel layer."""
    rows: int = model.get_submodule(name).get_parameter("weight").shape[0]
    if style == "fused_qkv":
        return _qkv_widths(model.get_submodule(_parent(name)))
    return (rows // 2, rows - rows // 2) if style == "packed_colwise" else (rows,)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise SliceError(f"{name} is planned as a sliced linear layer but is a {_kind(module)}")
    return module


def _shard(
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
