"""What each module of a slice becomes, and where collectives stand between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from onerank.capture.parallelize.model_structure import is_encoder_decoder
from onerank.capture.parallelize.tensor.block_boundaries import Border
from onerank.capture.parallelize.tensor.encoder_decoder_stacks import TwoStacks, two_stacks_of
from onerank.capture.parallelize.tensor.extra_rules import with_unplanned
from onerank.capture.parallelize.tensor.layer_stack import Stack, stack_of
from onerank.capture.parallelize.tensor.lora import Adapted, adapted
from onerank.capture.parallelize.tensor.mla import LatentSequence, rotary_width
from onerank.capture.parallelize.tensor.module_styles import (
    COLUMN,
    EMBEDDING,
    EXPERTS,
    GATHERED,
    HEAD,
    LATENT,
    ROW,
    SPLIT,
    SPLIT_OUTPUT,
    UP,
    WHOLE,
    Flavour,
    check_complete,
    check_exact,
    check_sizes,
    parent_of,
    planned_styles,
    without_gathers,
)
from onerank.capture.parallelize.tensor.plan_file import KEPT_WHOLE, ModuleRule, without_plan
from onerank.capture.parallelize.tensor.sequence_parallel import OwnInput
from onerank.ir.errors import SliceError

_TIES = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class Layout:
    """What becomes of a model's modules. Names are qualified.

    Attributes:
        styles: style of each planned module.
        head: the sliced head; "" where there is none.
        stack: the layers that run on a shard of the sequence; None where all have the whole.
        borders: border before each block that has one.
        own_inputs: where the input of a layer is gathered that no block's border is for.
        adapted: layers with low-rank adapters.
    """

    styles: Mapping[str, str]
    head: str
    stack: Stack | TwoStacks | None
    borders: Mapping[str, Border]
    own_inputs: Mapping[str, LatentSequence | OwnInput]
    adapted: Mapping[str, Adapted]

    @property
    def cuts(self) -> list[str]:
        """What shares work by itself: blocks behind a border, and modules before which none is."""
        alone = (*EXPERTS, *UP, *ROW)
        return [*self.borders, *(name for name, style in self.styles.items() if style in alone)]


def layout_of(
    model: nn.Module,
    rules: dict[str, ModuleRule],
    group: dist.ProcessGroup,
    flavour: Flavour,
    *,
    sequence: bool,
) -> Layout:
    """Return what becomes of a model's modules; nothing is changed yet.

    Args:
        model: a model whose parameters are whole.
        rules: a plan's, by module; {} takes transformers' plan.
        group: the tensor-parallel group.
        flavour: where the borders stand.
        sequence: whether norms and residuals are sharded along the sequence.

    Raises:
        SliceError: as for `slice_model`.
    """
    styles = _styles(model, rules, group.size(), flavour)
    adapters = _adapted(model, styles, rules)
    styles |= {inner: WHOLE[0] for one in adapters.values() for inner in one.inner}
    check_complete(model, styles, flavour)
    if flavour == "megatron":
        styles = without_gathers(model, styles)
    _check_tied(model, styles)
    for name in adapters:
        _check_adapted(name, styles[name], rules, sequence=sequence)
    head = _head(model, styles)
    stack = _stack(model, styles, head, flavour) if sequence else None
    borders = _borders(styles, rules, group, flavour, head, sequence=sequence)
    own_inputs = _own_inputs(model, styles, group) if stack else {}
    return Layout(styles, head, stack, borders, own_inputs, adapters)


def _styles(
    model: nn.Module, rules: dict[str, ModuleRule], size: int, flavour: Flavour
) -> dict[str, str]:
    if isinstance(model, PreTrainedModel):
        check_sizes(model, size)
        check_exact(model)
    given = {name: rule.style for name, rule in rules.items() if rule.style}
    if any(rule.slices for rule in rules.values()):
        return given
    if isinstance(model, PreTrainedModel):
        own = with_unplanned(model, planned_styles(model), complete=flavour == "megatron")
        return own | given
    raise SliceError(without_plan(model))


def _adapted(
    model: nn.Module, styles: dict[str, str], rules: dict[str, ModuleRule]
) -> dict[str, Adapted]:
    """Return name -> adapters, for each planned layer that has some."""
    found: dict[str, Adapted] = {}
    for name in styles.keys() | {name for name, rule in rules.items() if rule.adapter}:
        rule = rules.get(name, ModuleRule())
        if (one := adapted(model.get_submodule(name), name, rule.adapter or ())) is None:
            continue
        if name not in styles:
            raise SliceError(f"the plan names adapters of {name}, which no plan gives a style")
        found[name] = one
    return found


def _check_adapted(name: str, style: str, rules: dict[str, ModuleRule], *, sequence: bool) -> None:
    narrows = rules.get(parent_of(name), ModuleRule()).narrow_input
    fused = style in ROW and len(rules.get(name, ModuleRule()).proportions) > 1
    if sequence or narrows or fused or style not in (*COLUMN, *ROW):
        why = "--sp" if sequence else "narrow_input" if narrows else f"style {style}"
        why = "parts of its input" if fused and not sequence else why
        raise SliceError(
            f"{name} has low-rank adapters, which are known beside colwise and rowwise layers of "
            f"whole inputs, not with {why}: leave "
            + ("--sp out" if sequence else "the adapter out")
        )


def _check_tied(model: nn.Module, styles: dict[str, str]) -> None:
    """Refuse a weight that one module is to share out, and another to have whole."""
    whole = (*KEPT_WHOLE, *WHOLE, *SPLIT_OUTPUT, *LATENT)
    sliced = {
        id(parameter): name
        for name, style in styles.items()
        if style not in whole
        for parameter in model.get_submodule(name).parameters(recurse=False)
    }
    for name, module in model.named_modules():
        if styles.get(name, whole[0]) not in whole or not isinstance(module, _TIES):
            continue  # others only keep what is another's (BERT's bias)
        for key, parameter in module.named_parameters(recurse=False):
            if (other := sliced.get(id(parameter))) is not None:
                raise SliceError(
                    f"{name} is to stay whole, and its {key} is that of {other}, which is planned "
                    f"as {styles[other]}: slice both, or let both stay whole"
                )


def _head(model: nn.Module, styles: dict[str, str]) -> str:
    """Return the name of the sliced head, "" if there is none."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    heads = [name for name, style in styles.items() if style == HEAD]
    sliced = [name for name, style in styles.items() if style not in KEPT_WHOLE]
    heads += [name for name in sliced if output is not None and model.get_submodule(name) is output]
    return heads[0] if heads else ""


def _stack(
    model: nn.Module, styles: dict[str, str], head: str, flavour: Flavour
) -> Stack | TwoStacks:
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
    if isinstance(model, PreTrainedModel) and is_encoder_decoder(model):
        return two_stacks_of(model, rows, embeddings, head)
    return stack_of(model, rows, embeddings[0] if len(embeddings) == 1 else "", head)


def _closed(styles: dict[str, str]) -> set[str]:
    """Return the blocks that end with a sum over the ranks."""
    return {parent_of(name) for name, style in styles.items() if style in (*ROW, *SPLIT)}


def _own_inputs(
    model: nn.Module, styles: dict[str, str], group: dist.ProcessGroup
) -> dict[str, LatentSequence | OwnInput]:
    """Return name -> where its input is gathered, for layers that no block's border is for."""
    latent = {
        name: LatentSequence(model.get_submodule(name), name, rotary_width(model, name), group)
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
