"""Slice a model to one tensor-parallel rank, in place and with plain tensors.

What is sliced comes from a plan: the Hugging Face model's own tensor-parallel plan, one that comes
with onerank, or the user's plan file. Where the borders stand is the flavour:

- `megatron`: one all-reduce per block and direction (4 a layer and step), embedding, head and
  loss parallel over the vocabulary, fused projections sliced part by part; or, with sequence
  parallelism, all-gathers and reduce-scatters in their place (see `sequence`);
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
from transformers.pytorch_utils import Conv1D

from onerank.capture.borders import Border
from onerank.capture.gradients import sum_gradients
from onerank.capture.head import cross_entropy_head, loses_by_itself
from onerank.capture.latent import LatentSequence, rotary_width, sum_rotary
from onerank.capture.mixture import cut_experts
from onerank.capture.parallel import (
    column_linear,
    reduce_from_group,
    row_linear,
    split_to_group,
)
from onerank.capture.pipeline import Staged
from onerank.capture.planfile import ModuleRule, SlicingPlan, shipped_plan, without_plan
from onerank.capture.sequence import OwnInput, scatter_sum_to_sequence
from onerank.capture.shards import (
    cut_heads,
    cut_module,
    divide_attributes,
    keep_heads,
    slice_head_bias,
)
from onerank.capture.stack import Stack, shard_sequence, stack_of
from onerank.capture.styles import (
    COLUMN,
    EMBEDDING,
    EXPERTS,
    GATHERED,
    HEAD,
    HEADS,
    LATENT,
    REPLICATED,
    ROW,
    SPLIT,
    SPLIT_OUTPUT,
    UP,
    WHOLE,
    Flavour,
    blocks_of,
    check_complete,
    check_exact,
    check_sizes,
    parent_of,
    planned_styles,
    without_gathers,
)
from onerank.capture.unplanned import with_unplanned
from onerank.capture.vocabulary import parallel_embedding, parallel_head
from onerank.ir import RankClass
from onerank.ir.errors import SliceError


@dataclass(frozen=True)
class Sliced:
    """What was sliced.

    Attributes:
        modules: counts of modules by style.
        elements_before: parameters of the model.
        elements_after: parameters of the slice.
        stage: the pipeline stage it is; None where there is none.
        classes: classes of the world's equal ranks; () where what they do is not known before.
        duplicates: names of the parameters that a rank before this one holds too, of those that
            hold one replica of the model.
    """

    modules: dict[str, int]
    elements_before: int
    elements_after: int
    stage: Staged | None = None
    classes: tuple[RankClass, ...] = ()
    duplicates: frozenset[str] = frozenset()


def slice_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    flavour: Flavour,
    *,
    alone: bool = True,
    plan: SlicingPlan | None = None,
    sequence: bool = False,
) -> Sliced:
    """Keep this rank's share of every planned module and place the borders.

    Args:
        model: a model whose parameters are whole, on any device.
        group: the tensor-parallel group.
        flavour: where the borders stand.
        alone: whether the group's other ranks are not there to add their parts.
        plan: what to slice; None takes transformers' plan, or one that comes with onerank.
        sequence: whether norms and residuals are sharded along the sequence.

    Raises:
        SliceError: the model has no plan, the plan leaves something out or has a style that is
            not known here, or a size does not divide.
    """
    size = group.size()
    plan = plan or shipped_plan(model)
    rules = plan.rules_of(model) if plan else {}
    styles = _styles(model, rules, size, flavour)
    check_complete(model, styles, flavour)
    if flavour == "megatron":
        styles = without_gathers(model, styles)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    head = _head(model, styles)
    stack = _stack(model, styles, head, flavour) if sequence else None
    borders = _borders(styles, rules, group, flavour, head, sequence=sequence)
    alone_cut = (*EXPERTS, *UP, *ROW)  # by themselves, where no border stands before their block
    cuts = [*borders, *(name for name, style in styles.items() if style in alone_cut)]
    own_inputs = _own_inputs(model, styles, group) if stack else {}
    head_border = shard_sequence(model, stack, group, cuts, alone=alone) if stack else None
    cut: set[int] = set()
    for name, style in styles.items():
        module = model.get_submodule(name)
        if name == head and flavour == "megatron":
            cut_module(_linear(module, name), name, group, output=True, cut=cut)
            _place_head(model, module, group, alone=alone, border=head_border)
        elif style in (*COLUMN, *GATHERED, *UP, HEAD):
            fused = blocks_of(model, name, style, rules.get(name, ModuleRule()).proportions)
            blocks = fused if len(fused) > 1 else ()  # a tied head's weight is cut already
            cut_module(_linear(module, name), name, group, output=True, blocks=blocks, cut=cut)
            gathered = style in (*GATHERED, HEAD)
            border = own_inputs.get(name) or borders.get(parent_of(name))
            column_linear(
                module,
                group,
                copy=border is None,
                gathers=lambda it=gathered: it,
                linear=nn.functional.linear if border is None else border.linear,
            )
            if style == "fused_qkv":
                keep_heads(model.get_submodule(parent_of(name)), size)
        elif style in (*ROW, *SPLIT):
            cut_module(_linear(module, name), name, group, output=False, cut=cut)
            reduce = scatter_sum_to_sequence if stack else reduce_from_group
            row_linear(module, group, split=style in SPLIT, reduce=reduce)
            if stack:
                sum_gradients(module, group, ["bias"])
        elif style in EMBEDDING:
            if not isinstance(module, nn.Embedding):
                raise SliceError(f"{name} is planned as {style} but is a {_kind(module)}")
            cut_module(module, name, group, output=True, cut=cut)
            reduces = stack is None or stack.learns_positions
            parallel_embedding(module, group, alone=alone, reduce=reduces)
        else:
            _place_rest(model, module, name, style, group, sequence=sequence)
    for name, border in borders.items():
        border.place_before(model.get_submodule(name))
    for name, rule in rules.items():
        _tell_heads(model.get_submodule(name), name, rule, group)
    return Sliced(
        dict(Counter(s for s in styles.values() if s not in WHOLE)),
        sum(whole.values()),
        sum(p.numel() for p in model.parameters()),
        duplicates=frozenset(
            name
            for name, p in model.named_parameters()
            if group.rank() > 0 and p.numel() == whole[name]
        ),
    )


def _place_rest(
    model: Any,
    module: nn.Module,
    name: str,
    style: str,
    group: dist.ProcessGroup,
    *,
    sequence: bool,
) -> None:
    if style in REPLICATED:
        sum_gradients(module, group)
    elif style in EXPERTS:
        cut_experts(module, name, group, sequence=sequence)
    elif style in HEADS:
        cut_heads(module, name, group)
    elif style in SPLIT_OUTPUT:
        module.register_forward_hook(_splitting(group))
    elif style in LATENT and not sequence:
        sum_rotary(module, rotary_width(model), group)


def _tell_heads(module: nn.Module, name: str, rule: ModuleRule, group: dist.ProcessGroup) -> None:
    """Let a module count, and be given, what is of its own heads."""
    divide_attributes(module, name, rule.divide, group.size())
    if rule.head_bias:
        slice_head_bias(module, name, rule.head_bias, getattr(module, rule.divide[0]), group)


def _splitting(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return split_to_group(output, group)

    return hook


def _styles(
    model: nn.Module, rules: dict[str, ModuleRule], size: int, flavour: Flavour
) -> dict[str, str]:
    if isinstance(model, PreTrainedModel):
        check_sizes(model, size)
        check_exact(model)
    if rules:
        return {name: rule.style for name, rule in rules.items() if rule.style}
    if isinstance(model, PreTrainedModel):
        return with_unplanned(model, planned_styles(model), complete=flavour == "megatron")
    raise SliceError(without_plan(model))


def _head(model: nn.Module, styles: dict[str, str]) -> str:
    """Return the name of the sliced head, "" if there is none."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    heads = [name for name, style in styles.items() if style == HEAD]
    heads += [name for name in styles if output is not None and model.get_submodule(name) is output]
    return heads[0] if heads else ""


def _stack(model: nn.Module, styles: dict[str, str], head: str, flavour: Flavour) -> Stack:
    if flavour != "megatron":
        raise SliceError("--sp is Megatron-LM's sequence parallelism: use --tp-flavour megatron")
    closed = _closed(styles)
    for name, style in styles.items():
        if style in (*GATHERED, *SPLIT) and name != head and parent_of(name) not in closed:
            raise SliceError(
                f"--sp: {name} is planned as {style}, and how it goes with a shard of the "
                "sequence is not known: leave --sp out"
            )
    embeddings = [name for name, style in styles.items() if style in EMBEDDING]
    rows = [name for name, style in styles.items() if style in (*ROW, *SPLIT)]
    return stack_of(model, rows, embeddings[0] if len(embeddings) == 1 else "", head)


def _closed(styles: dict[str, str]) -> set[str]:
    """Return the blocks that end with a sum over the ranks."""
    return {parent_of(name) for name, style in styles.items() if style in (*ROW, *SPLIT)}


def _own_inputs(
    model: nn.Module, styles: dict[str, str], group: dist.ProcessGroup
) -> dict[str, LatentSequence | OwnInput]:
    """Return name -> where its input is gathered, for layers that no block's border is for."""
    latent = {
        name: LatentSequence(model.get_submodule(name), name, rotary_width(model), group)
        for name in (parent_of(name) for name, style in styles.items() if style in LATENT)
    }
    alone = [name for name, style in styles.items() if style in UP]
    return {name: latent.get(parent_of(name)) or OwnInput(group) for name in alone}


def _borders(
    styles: dict[str, str],
    rules: dict[str, ModuleRule],
    group: dist.ProcessGroup,
    flavour: Flavour,
    head: str,
    *,
    sequence: bool,
) -> dict[str, Border]:
    """Return block name -> border, for each block that has one."""
    borders: dict[str, Border] = {}
    closed = _closed(styles)
    for name, style in styles.items():
        block = parent_of(name)
        narrows = block in rules and rules[block].narrow_input
        if style in GATHERED and block not in closed:
            continue  # whole behind it again: what follows has a border of its own
        if name == head or style not in (*COLUMN, *GATHERED) or block in borders:
            continue
        if flavour == "megatron" or narrows:
            borders[block] = Border(group, sequence=sequence, narrows=narrows)
    return borders


def _place_head(
    model: nn.Module,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    alone: bool,
    border: Border | None,
) -> None:
    if isinstance(model, PreTrainedModel) and not loses_by_itself(model):
        parallel_head(model, head, group, alone=alone, border=border)
    else:
        cross_entropy_head(model, head, group, alone=alone, border=border)
    if border is not None:
        border.leave_after(head)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _linear(module: nn.Module, name: str) -> nn.Module:
    if not isinstance(module, nn.Linear | Conv1D):
        raise SliceError(f"{name} is planned as a sliced linear layer but is a {_kind(module)}")
    plain = nn.Linear.forward, Conv1D.forward
    if type(module).forward not in plain:  # adapters, quantised weights
        extra = [key for key, _ in module.named_parameters() if key not in ("weight", "bias")]
        raise SliceError(
            f"{name} is a {_kind(module)}, whose forward is its own"
            + (f" (it has {', '.join(extra)} beside weight and bias)" if extra else "")
            + ": a slice would run as a plain linear layer. Use torch's nn.Linear there, or leave "
            "--tp out"
        )
    return module
