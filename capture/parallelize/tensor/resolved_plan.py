"""A sharding plan resolved for one model: the style of each module, and where collectives stand.

Transformers' tensor-parallel plans omit modules that Megatron-LM slices or replicates: shared
experts (Qwen2-MoE), latent attention (DeepSeek-V3), attention (Phi-3.5-MoE, GPT-OSS), and modules
between sliced projections, such as per-head norms and sinks. The styles of those are added here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from onerank.capture.parallelize.experts.expert_parallel import dense_layers, expert_layers
from onerank.capture.parallelize.hugging_face import Conv1D, PreTrainedModel
from onerank.capture.parallelize.model_structure import ROUTERS, is_encoder_decoder
from onerank.capture.parallelize.module_names import layer_list_of, parent_of
from onerank.capture.parallelize.tensor.gathered_attention import gathered_attention
from onerank.capture.parallelize.tensor.layer_stack import (
    Stack,
    TwoStacks,
    stack_of,
    two_stacks_of,
)
from onerank.capture.parallelize.tensor.linear import BlockBoundary
from onerank.capture.parallelize.tensor.lora import LoraLinear, lora_linear_of
from onerank.capture.parallelize.tensor.mla import LatentSequence, latent_styles, rotary_width
from onerank.capture.parallelize.tensor.module_styles import (
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
    TensorParallelStyle,
    check_complete,
    check_exact,
    check_sizes,
    of_layers,
    planned_styles,
    without_gathers,
)
from onerank.capture.parallelize.tensor.plan_file import KEPT_WHOLE, ModuleRule, without_plan
from onerank.capture.parallelize.tensor.sequence_parallel import LayerInput
from onerank.capture.parallelize.tensor.shared_heads import SharedHeads, shared_heads
from onerank.capture.parallelize.tensor.stateful_layers import stateful_styles
from onerank.ir.errors import SliceError

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}

_GATES = ("gate_proj", "g_proj")  # in attention: a factor for each output feature, or each head

_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")

_GATED = ("gate_proj", "up_proj", "down_proj")

_PLAIN = ("up_proj", "down_proj")

_PACKED = "gate_up_proj"

_SINKS = {"sinks"}

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")

# Narrow layers of Gemma-3n and Gemma-4, for per-layer inputs and AltUp. They stay whole, as in
# vLLM.
_NARROW = (
    *("per_layer_input_gate", "per_layer_projection"),
    *("correction_coefs", "prediction_coefs", "modality_router"),
)
# The low-rank residual of Gemma-3n (LAuReL), which vLLM slices. The block also adds its input,
# whose gradient is whole, so the boundary is at the projection and not at the block.
_LOW_RANK = {"linear_left": UP[0], "linear_right": "rowwise"}

_MLP = {
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "down_proj": "rowwise",
    "input_linear": "packed_colwise",
    "output_linear": "rowwise",
}


def add_megatron_styles(
    model: PreTrainedModel,
    styles: dict[str, str],
    size: int,
    *,
    complete: bool,
    shares_group: bool = False,
) -> dict[str, str]:
    """Add styles of latent attention and, if `complete`, of every module the plan omits.

    Layers with states get those of `size` ranks, also where the plan has others; `shares_group` as
    for `stateful_styles`.
    """
    result = dict(styles)
    if complete:
        # A vision tower's list of layers may stay whole.
        stacks = {layer_list_of(name) for name in styles} | {
            layer_list_of(f"{name}.") for name, module in model.named_modules() if _attends(module)
        }
        for name, module in model.named_modules():
            if layer_list_of(f"{name}.") in stacks - {None}:
                gathered = result.get(f"{name}.q_proj") in GATHERED
                for key, style in _known_styles(model, module).items():
                    # After a gathered projection every rank norms all heads: gradients are whole.
                    if not (gathered and key in _NORMS):
                        # The plan's own style takes precedence.
                        result.setdefault(f"{name}.{key}".removesuffix("."), style)
        result |= stateful_styles(model, size, shares_group=shares_group)
    result |= latent_styles(model, styles, complete=complete)
    planned = (name for name, style in styles.items() if style in EXPERTS)
    for name in dict.fromkeys([*_experts(model), *planned]) if complete else ():
        result[name] = EXPERTS[0]
        block = parent_of(name)
        for child, module in model.get_submodule(block).named_children():
            if child not in _SHARED and isinstance(module, nn.Linear):
                # a router, or the gate of shared experts
                result.setdefault(f"{block}.{child}", WHOLE[0])
            for key, inner in module.named_children() if child in ROUTERS else ():
                if isinstance(inner, nn.Linear):
                    result.setdefault(f"{block}.{child}.{key}", WHOLE[0])
    return result


def _experts(model: nn.Module) -> list[str]:
    return [*expert_layers(model), *dense_layers(model)]


def _attends(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return all(isinstance(children.get(key), nn.Linear) for key in _ATTENTION)


def _known_styles(model: PreTrainedModel, module: nn.Module) -> dict[str, str]:
    """Return submodule name -> style for known submodules; "" is the module itself."""
    children = dict(module.named_children())
    if _attends(module):
        return _attention_styles(model, module, children)
    if type(module).__name__ == "XIELUActivation":
        return {"": REPLICATED[0]}  # two scalars for all features
    if _is_gated(children):
        return {key: _MLP[key] for key in _GATED}
    if _is_packed(children):
        return {_PACKED: "packed_colwise", "down_proj": _MLP["down_proj"]}
    if _is_plain(children):
        return {key: _MLP[key] for key in _PLAIN}
    styles: dict[str, str] = {}
    for shared in _SHARED:
        if isinstance(mlp := children.get(shared), nn.Module):
            keys = (key for key, _ in mlp.named_children() if key in _MLP)
            styles |= {f"{shared}.{key}": _MLP[key] for key in keys}
    if children.keys() >= _LOW_RANK.keys():
        # A norm after the sum over the ranks.
        whole = {key for key, child in children.items() if not isinstance(child, nn.Linear)}
        styles |= _LOW_RANK | dict.fromkeys(whole, WHOLE[0])
    return styles | {key: WHOLE[0] for key in _NARROW if isinstance(children.get(key), nn.Linear)}


def _is_gated(children: dict[str, Any]) -> bool:
    """Return whether the children are the projections of a gated MLP."""
    if not all(isinstance(children.get(key), nn.Linear) for key in _GATED):
        return False
    gate, up, down = (children[key] for key in _GATED)
    return gate.out_features == up.out_features == down.in_features


def _is_plain(children: dict[str, Any]) -> bool:
    """Return whether the children are the projections of an MLP without a gate, as Nemotron-H's."""
    if not all(isinstance(children.get(key), nn.Linear) for key in _PLAIN):
        return False
    return children["up_proj"].out_features == children["down_proj"].in_features


def _is_packed(children: dict[str, Any]) -> bool:
    """Return whether the children are those of a gated MLP with gate and up projection fused."""
    if not all(isinstance(children.get(key), nn.Linear) for key in (_PACKED, "down_proj")):
        return False
    return children[_PACKED].out_features == 2 * children["down_proj"].in_features


def _attention_styles(
    model: PreTrainedModel, module: Any, children: dict[str, nn.Module]
) -> dict[str, str]:
    config: Any = model.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    heads = [count for name in names for count in of_layers(config, name)]
    width = getattr(module, "head_dim", None)
    styles = dict(_ATTENTION)
    factors = (module.q_proj.out_features, *of_layers(config, names[0]))
    for key in _GATES:
        gate = children.get(key)
        if isinstance(gate, nn.Linear) and gate.out_features in factors:
            styles[key] = "colwise"
    direct = {key for key, _ in module.named_parameters(recurse=False)}
    if direct and direct <= _SINKS:
        styles[""] = HEADS[0]
    for key in _NORMS:
        norm = children.get(key)
        shapes = {tuple(p.shape) for p in norm.parameters(recurse=False)} if norm else set()
        if shapes == {(width,)}:
            styles[key] = REPLICATED[0]
        elif shapes and shapes <= {(count, width) for count in heads}:
            styles[key] = HEADS[0]
    return styles


_TIES = (nn.Linear, nn.Embedding, Conv1D)


@dataclass(frozen=True)
class ResolvedPlan:
    """Styles and collectives of a model's modules, by qualified name.

    Attributes:
        styles: style of each planned module.
        head: the sliced head; "" without one.
        stack: the layers that run on a shard of the sequence; None without sequence parallelism.
        boundaries: boundary of each block with column-parallel layers.
        layer_inputs: gathers the input of each layer that no block's boundary covers.
        adapted: layers with low-rank adapters.
        shared_heads: projections whose heads several ranks share.
    """

    styles: Mapping[str, str]
    head: str
    stack: Stack | TwoStacks | None
    boundaries: Mapping[str, BlockBoundary]
    layer_inputs: Mapping[str, LatentSequence | LayerInput]
    adapted: Mapping[str, LoraLinear]
    shared_heads: Mapping[str, SharedHeads]

    @property
    def ranks_per_head(self) -> dict[str, int]:
        """Ranks that share a key-value head, of each attention with fewer of them than ranks."""
        shared = self.shared_heads
        return {parent_of(name): heads.ranks_per_head for name, heads in shared.items()}

    @property
    def cuts(self) -> list[str]:
        """Names of the blocks behind a boundary, and of sliced modules that need no boundary."""
        unbounded = (*EXPERTS, *UP, *ROW)
        modules = (name for name, style in self.styles.items() if style in unbounded)
        return [*self.boundaries, *modules]


def resolve_plan(
    model: nn.Module,
    rules: dict[str, ModuleRule],
    group: dist.ProcessGroup,
    tp_style: TensorParallelStyle,
    *,
    sequence: bool,
    replicate_heads: bool = False,
) -> ResolvedPlan:
    """Resolve the styles and collectives of a model's modules; the model stays unchanged.

    Args:
        model: a model whose parameters are whole.
        rules: rules of a plan, by module; {} selects transformers' plan.
        group: the tensor-parallel group.
        tp_style: where the collectives stand.
        sequence: whether norms and residuals are sharded along the sequence.
        replicate_heads: as for `slice_model`.

    Raises:
        SliceError: as for `slice_model`.
    """
    styles = _styles(model, rules, group.size(), tp_style, shares_group=replicate_heads)
    adapters = _adapted(model, styles, rules)
    styles |= {inner: WHOLE[0] for lora in adapters.values() for inner in lora.inner}
    check_complete(model, styles, tp_style)
    if tp_style == "megatron":
        styles = without_gathers(model, styles)
        if replicate_heads:
            styles |= gathered_attention(model, styles, group.size())
    _check_tied(model, styles)
    for name in adapters:
        _check_adapted(name, styles[name], rules, sequence=sequence)
    head = _head(model, styles)
    stack = _stack(model, styles, head, tp_style) if sequence else None
    boundaries = _boundaries(styles, rules, group, tp_style, head, sequence=sequence)
    layer_inputs = _layer_inputs(model, styles, group) if stack else {}
    shared = shared_heads(
        model,
        styles,
        rules,
        adapters,
        group=group,
        tp_style=tp_style,
        replicated=replicate_heads,
    )
    return ResolvedPlan(styles, head, stack, boundaries, layer_inputs, adapters, shared)


def _styles(
    model: nn.Module,
    rules: dict[str, ModuleRule],
    size: int,
    tp_style: TensorParallelStyle,
    *,
    shares_group: bool,
) -> dict[str, str]:
    if isinstance(model, PreTrainedModel):
        check_sizes(model, size)
        check_exact(model)
    explicit = {name: rule.style for name, rule in rules.items() if rule.style}
    if any(rule.slices for rule in rules.values()):
        return explicit
    if isinstance(model, PreTrainedModel):
        complete = tp_style == "megatron"
        states = complete and bool(stateful_styles(model, size, shares_group=shares_group))
        defaults = add_megatron_styles(
            model,
            planned_styles(model, has_states=states),
            size,
            complete=complete,
            shares_group=shares_group,
        )
        # A rule of the user's plan replaces that of the model's.
        return defaults | explicit
    raise SliceError(without_plan(model), code="tp-no-plan")


def _adapted(
    model: nn.Module, styles: dict[str, str], rules: dict[str, ModuleRule]
) -> dict[str, LoraLinear]:
    """Return name -> adapted layer, for each planned layer with adapters."""
    layers: dict[str, LoraLinear] = {}
    # In the model's order and not a set's, so that each run reports the same layer.
    adapted = (name for name, rule in rules.items() if rule.adapter)
    for name in dict.fromkeys([*styles, *adapted]):
        rule = rules.get(name, ModuleRule())
        lora = lora_linear_of(model.get_submodule(name), name, rule.adapter or ())
        if lora is None:
            continue
        if name not in styles:
            raise SliceError(
                f"the plan names adapters of {name}, but no plan gives it a style",
                code="plan-adapter-unplanned",
            )
        layers[name] = lora
    return layers


def _check_adapted(name: str, style: str, rules: dict[str, ModuleRule], *, sequence: bool) -> None:
    narrows = rules.get(parent_of(name), ModuleRule()).narrow_input
    fused = style in ROW and len(rules.get(name, ModuleRule()).proportions) > 1
    if sequence or narrows or fused or style not in (*COLUMN, *ROW):
        why = "--sp" if sequence else "narrow_input" if narrows else f"style {style}"
        why = "parts of its input" if fused and not sequence else why
        raise SliceError(
            f"{name} has low-rank adapters, which are supported on colwise and rowwise layers "
            f"with whole inputs, not with {why}: leave "
            + ("--sp out" if sequence else "the adapter out"),
            code="lora-style",
        )


def _check_tied(model: nn.Module, styles: dict[str, str]) -> None:
    """Refuse a tied weight that one module slices and another keeps whole."""
    whole = (*KEPT_WHOLE, *WHOLE, *SPLIT_OUTPUT, *LATENT)
    sliced = {
        id(parameter): name
        for name, style in styles.items()
        if style not in whole
        for parameter in model.get_submodule(name).parameters(recurse=False)
    }
    for name, module in model.named_modules():
        if styles.get(name, whole[0]) not in whole or not isinstance(module, _TIES):
            continue  # other modules only keep a reference (BERT's bias)
        for key, parameter in module.named_parameters(recurse=False):
            if (other := sliced.get(id(parameter))) is not None:
                raise SliceError(
                    f"{name} stays whole, but its {key} is tied to {other}, which is planned "
                    f"as {styles[other]}: slice both, or keep both whole",
                    code="plan-tied-parameters",
                )


def _head(model: nn.Module, styles: dict[str, str]) -> str:
    """Return the name of the sliced head, or "" without one."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    heads = [name for name, style in styles.items() if style == HEAD]
    sliced = [name for name, style in styles.items() if style not in KEPT_WHOLE]
    heads += [name for name in sliced if output is not None and model.get_submodule(name) is output]
    return heads[0] if heads else ""


def _stack(
    model: nn.Module, styles: dict[str, str], head: str, tp_style: TensorParallelStyle
) -> Stack | TwoStacks:
    if tp_style != "megatron":
        raise SliceError(
            "--sp is Megatron-LM's sequence parallelism: use --tp-style megatron", code="sp-style"
        )
    closed = _closed(styles)
    for name, style in styles.items():
        if style in (*GATHERED, *SPLIT) and name != head and parent_of(name) not in closed:
            raise SliceError(
                f"--sp: {name} is planned as {style}, which --sp does not support on a "
                "shard of the sequence: leave --sp out",
                code="sp-module-style",
            )
    embeddings = [name for name, style in styles.items() if style in EMBEDDING]
    rows = [name for name, style in styles.items() if style in (*ROW, *SPLIT)]
    if isinstance(model, PreTrainedModel) and is_encoder_decoder(model):
        return two_stacks_of(model, rows, embeddings, head)
    return stack_of(model, rows, embeddings[0] if len(embeddings) == 1 else "", head)


def _closed(styles: dict[str, str]) -> set[str]:
    """Return the blocks that end with a sum over the ranks."""
    return {parent_of(name) for name, style in styles.items() if style in (*ROW, *SPLIT)}


def _layer_inputs(
    model: nn.Module, styles: dict[str, str], group: dist.ProcessGroup
) -> dict[str, LatentSequence | LayerInput]:
    """Return name -> input gatherer, for layers that no block's boundary covers."""
    latent = {
        name: LatentSequence(model.get_submodule(name), name, rotary_width(model, name), group)
        for name in (parent_of(name) for name, style in styles.items() if style in LATENT)
    }
    projections = [name for name, style in styles.items() if style in UP]
    return {name: latent.get(parent_of(name)) or LayerInput(group) for name in projections}


def _boundaries(
    styles: dict[str, str],
    rules: dict[str, ModuleRule],
    group: dist.ProcessGroup,
    tp_style: TensorParallelStyle,
    head: str,
    *,
    sequence: bool,
) -> dict[str, BlockBoundary]:
    """Return block name -> boundary, for each block that has one."""
    boundaries: dict[str, BlockBoundary] = {}
    closed = _closed(styles)
    for name, style in styles.items():
        block = parent_of(name)
        narrows = block in rules and rules[block].narrow_input
        if style in GATHERED and block not in closed:
            # The gathered output is whole again: the next layer gets its own boundary.
            continue
        if name == head or style not in (*COLUMN, *GATHERED) or block in boundaries:
            continue
        if tp_style == "megatron" or narrows:
            boundaries[block] = BlockBoundary(group, sequence=sequence, narrows=narrows)
    return boundaries
