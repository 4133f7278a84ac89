"""What transformers' tensor-parallel plans leave out, and Megatron-LM slices or replicates.

Plans leave out shared experts (Qwen2-MoE), latent attention (DeepSeek-V3), attention (Phi-3.5-MoE,
GPT-OSS) or what lies between its sliced projections: norms of each head, a sink per head.
"""

import re
from typing import Any

from torch import nn
from transformers.activations import XIELUActivation
from transformers.modeling_utils import PreTrainedModel

from onerank.capture.parallelize.experts.expert_parallel import dense_layers, expert_layers
from onerank.capture.parallelize.tensor.layer_stack import ROUTERS
from onerank.capture.parallelize.tensor.mla import latent_styles
from onerank.capture.parallelize.tensor.module_styles import (
    EXPERTS,
    GATHERED,
    HEADS,
    REPLICATED,
    WHOLE,
    of_layers,
)

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_GATE = "gate_proj"  # of the attention's output, a factor for each of its features
_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
_GATED = ("gate_proj", "up_proj", "down_proj")
_PACKED = "gate_up_proj"
_SINKS = {"sinks"}
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_MLP = {
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "down_proj": "rowwise",
    "input_linear": "packed_colwise",
    "output_linear": "rowwise",
}


def with_unplanned(
    model: PreTrainedModel, styles: dict[str, str], *, complete: bool
) -> dict[str, str]:
    """Return module name -> style with latent attention's and, if `complete`, all left out."""
    result = dict(styles)
    if complete:
        stacks: set[str | None] = {_stack_of(name) for name in styles} | {
            _stack_of(f"{name}.") for name, module in model.named_modules() if _attends(module)
        }
        for name, module in model.named_modules():
            if _stack_of(f"{name}.") in stacks - {None}:
                gathered = result.get(f"{name}.q_proj") in GATHERED
                for key, style in _left_out(model, module).items():
                    if not (gathered and key in _NORMS):  # they have all heads, on every rank
                        result.setdefault(f"{name}.{key}".removesuffix("."), style)
    result |= latent_styles(model, styles, complete=complete)
    planned = (name for name, style in styles.items() if style in EXPERTS)
    for name in dict.fromkeys([*_experts(model), *planned]) if complete else ():
        result[name] = EXPERTS[0]
        block = name.rpartition(".")[0]
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


def _stack_of(name: str) -> str | None:
    """Return the list of layers that a module is in: a vision tower's may stay whole."""
    stack, *inside = re.split(r"\.\d+\.", name, maxsplit=1)
    return stack if inside else None


def _attends(module: nn.Module) -> bool:
    children = dict(module.named_children())
    return all(isinstance(children.get(key), nn.Linear) for key in _ATTENTION)


def _left_out(model: PreTrainedModel, module: nn.Module) -> dict[str, str]:
    """Return name of a part -> style for what is known by name in a module; "" is itself."""
    children = dict(module.named_children())
    if _attends(module):
        return _of_attention(model, module, children)
    if isinstance(module, XIELUActivation):
        return {"": REPLICATED[0]}  # two numbers for all features
    if _is_gated(children):
        return {key: _MLP[key] for key in _GATED}
    if _is_packed(children):
        return {_PACKED: "packed_colwise", "down_proj": _MLP["down_proj"]}
    styles: dict[str, str] = {}
    for shared in _SHARED:
        if isinstance(found := children.get(shared), nn.Module):
            keys = (key for key, _ in found.named_children() if key in _MLP)
            styles |= {f"{shared}.{key}": _MLP[key] for key in keys}
    return styles


def _is_gated(children: dict[str, Any]) -> bool:
    """Whether they are the projections of an MLP whose hidden features are those of its gate."""
    if not all(isinstance(children.get(key), nn.Linear) for key in _GATED):
        return False
    gate, up, down = (children[key] for key in _GATED)
    return gate.out_features == up.out_features == down.in_features


def _is_packed(children: dict[str, Any]) -> bool:
    """Whether they are the projections of an MLP whose gate is the first half of one of them."""
    if not all(isinstance(children.get(key), nn.Linear) for key in (_PACKED, "down_proj")):
        return False
    return children[_PACKED].out_features == 2 * children["down_proj"].in_features


def _of_attention(
    model: PreTrainedModel, module: Any, children: dict[str, nn.Module]
) -> dict[str, str]:
    config: Any = model.config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    heads = [count for name in names for count in of_layers(config, name)]
    width = getattr(module, "head_dim", None)
    styles = dict(_ATTENTION)
    gate = children.get(_GATE)
    if isinstance(gate, nn.Linear) and gate.out_features == module.q_proj.out_features:
        styles[_GATE] = "colwise"
    own = {key for key, _ in module.named_parameters(recurse=False)}
    if own and own <= _SINKS:
        styles[""] = HEADS[0]
    for key in _NORMS:
        norm = children.get(key)
        shapes = {tuple(p.shape) for p in norm.parameters(recurse=False)} if norm else set()
        if shapes == {(width,)}:
            styles[key] = REPLICATED[0]
        elif shapes and shapes <= {(count, width) for count in heads}:
            styles[key] = HEADS[0]
    return styles
