"""The style that a sharding plan gives to each module of a model.

Styles have transformers' names. A plan is an error if it omits a module, has an unknown style, or
if a size does not divide.
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from onerank.capture.parallelize.hugging_face import Conv1D, PreTrainedModel
from onerank.capture.parallelize.module_names import layer_list_of, name_pattern, parent_of
from onerank.capture.parallelize.tensor.linear import matrix_of
from onerank.capture.parallelize.tensor.plan_file import whole_plan, without_plan
from onerank.capture.parallelize.tensor.shard_parameters import LARGEST_SIZE
from onerank.ir.errors import SliceError, division

TensorParallelStyle = Literal["megatron", "hf"]

COLUMN = ("colwise", "packed_colwise", "fused_qkv")  # the last is ours, never a plan's
GATHERED = ("colwise_gather_output", "colwise_rep")
ROW = ("rowwise",)
SPLIT = ("rowwise_split_input", "rowwise_rep")
EMBEDDING = ("embedding_rowwise",)
HEAD = "head"
SPLIT_OUTPUT = ("embedding_split_output",)  # ours: whole, and of its output this rank's features
REPLICATED = ("replicated_with_grad_allreduce",)
EXPERTS = ("moe_tp_experts",)
IDENTITY = ("moe_identity_expert",)
LATENT = ("mla_kv_a_proj",)
# The module's own parameters have the heads, or the channels, as first dimension. `depthwise` is
# ours, for plan files.
HEADS = ("local_params", "depthwise")
UP = ("colwise_own_boundary",)  # ours: column-parallel, with a separate boundary in both styles
WHOLE = ("whole",)  # ours: Megatron-LM replicates it too
_STYLES = (
    *COLUMN[:2], *GATHERED, *ROW, *SPLIT, *EMBEDDING, *REPLICATED, *EXPERTS, *IDENTITY, *LATENT,
    *HEADS,
)  # fmt: skip


def planned_styles(model: PreTrainedModel, *, has_states: bool = False) -> dict[str, str]:
    """Return module name -> style for every module the plan matches.

    Args:
        model: the model.
        has_states: whether the model has layers with states that slicing knows. Their kind
            determines their styles, so a model of such layers alone needs no plan. Its vocabulary
            is sliced.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not plan and not has_states:
        raise SliceError(without_plan(model), code="tp-no-plan")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    planned = {name_pattern(key): style for key, style in plan.items()}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        style = next((each for pattern, each in planned.items() if pattern.fullmatch(name)), None)
        if style is None and module is embedding and isinstance(module, nn.Embedding):
            # Older plans omit it; the vocabulary is sliced nevertheless.
            style = EMBEDDING[0]
        if style is None and module is head and (tied or not plan):
            style = GATHERED[0]  # a tied weight is cut with the embedding's
        if style is None:
            continue
        if style not in _STYLES:
            raise SliceError(
                f"{type(model).__name__}: {name} is planned as {style!r}; supported "
                f"styles are {', '.join(_STYLES)}",
                code="tp-unknown-style",
            )
        styles[name] = style
    return styles


_DIVIDED = {
    "num_attention_heads": ("attention heads", "tp-indivisible-heads"),
    "num_key_value_heads": ("key-value heads", "tp-indivisible-heads"),
    "intermediate_size": ("intermediate features", "tp-indivisible-features"),
    "vocab_size": ("vocabulary entries", "tp-indivisible-vocabulary"),
}
"""Size of the configuration -> the noun of what it counts, and the code of its refusal."""


def check_sizes(model: PreTrainedModel, size: int) -> None:
    """Refuse a tensor-parallel size that does not divide heads, features and vocabulary.

    A multiple of the number of key-value heads is supported: ranks share them (`shared_heads`).
    """
    config = model.config.get_text_config()
    counts = [
        (attribute, value)
        for attribute in _DIVIDED
        for value in of_layers(config, attribute)
        if isinstance(value, int) and value > 0
    ]
    for attribute, value in counts:
        if _fits(attribute, value, size):
            continue
        if attribute == "vocab_size":
            padded = -(-value // (128 * size)) * 128 * size
            remedy = (
                "pad them as Megatron-LM does, to a multiple of 128 a rank: "
                f"model.resize_token_embeddings({padded}), or vocab_size={padded}"
            )
        else:
            sizes = [
                n for n in range(1, LARGEST_SIZE + 1) if all(_fits(*count, n) for count in counts)
            ]
            remedy = f"sizes that fit the model: --tp {', '.join(map(str, sizes))}"
        or_multiple = " or be a multiple of" if attribute == "num_key_value_heads" else ""
        counted, code = _DIVIDED[attribute]
        raise SliceError(
            f"--tp {size} must divide{or_multiple} the model's {value} {counted} "
            f"({division(value, size)})\n  {remedy}",
            code=code,
        )


def _fits(attribute: str, count: int, size: int) -> bool:
    shares = attribute == "num_key_value_heads" and size % count == 0
    return count % size == 0 or shares


def of_layers(config: Any, attribute: str) -> list[Any]:
    """Return the distinct values of a configuration attribute, which may differ by layer."""
    per_layer = getattr(config, "per_layer_attributes", None) or ()
    if attribute not in per_layer:
        return [getattr(config, attribute, None)]
    layers = (config.per_layer_config[layer] for layer in range(config.num_hidden_layers))
    return list(dict.fromkeys(getattr(layer, attribute, None) for layer in layers))


def check_exact(model: PreTrainedModel) -> None:
    """Refuse a model that multiplies by parts of its weights outside its linear layers."""
    parts = getattr(model.config, "pretraining_tp", 1)
    if getattr(model.config, "slow_but_exact", False) and parts > 1:
        raise SliceError(
            f"{type(model).__name__} is configured with slow_but_exact and pretraining_tp = "
            f"{parts}: it sums products with slices of its weights itself, and the slices of --tp "
            "would not be summed: build it with slow_but_exact=False",
            code="tp-slow-but-exact",
        )


def check_complete(model: nn.Module, styles: dict[str, str], tp_style: TensorParallelStyle) -> None:
    """Refuse a plan that omits modules which the planned ones require to be sliced."""
    kind = type(model).__name__
    rows = [name for name, style in styles.items() if style in (*ROW, *SPLIT)]
    if not rows:
        raise SliceError(
            f"{kind}: its tensor-parallel plan names no row-parallel layer (it names "
            f"{', '.join(styles) or 'no module of the model'}): its layers would stay whole. "
            "Slice them by a plan file (--sharding-plan), or leave --tp out",
            code="tp-no-rowwise",
        )
    stacks = {f"{layer_list_of(name) or name}." for name in rows}
    blocks = {parent_of(name) for name, style in styles.items() if style in COLUMN} - {""}
    left_out: list[str] = []
    for name, module in model.named_modules():
        if name in styles or not any(True for _ in module.parameters(recurse=False)):
            continue
        block = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
        if block is not None:
            raise SliceError(
                f"{kind}: {name} has parameters between the sliced layers of {block}, and the "
                "tensor-parallel plan does not say what becomes of them: say so in a plan file "
                '(--sharding-plan), style = "replicated_with_grad_allreduce" where each rank has a '
                'part of its gradient, else "replicated"; or leave --tp out',
                code="tp-unplanned-parameters",
            )
        whole = isinstance(module, nn.Linear | Conv1D) and any(
            name.startswith(stack) for stack in stacks
        )
        if whole and tp_style == "megatron":
            left_out.append(name)
    if left_out:
        raise SliceError(
            f"{kind}: {left_out[0]} is in no tensor-parallel plan, so that every rank would "
            "compute it whole, unlike Megatron-LM. To keep it whole, give --sharding-plan FILE "
            "with these lines, which add to the model's plan:\n\n"
            f"{whole_plan(model, left_out)}",
            code="tp-unplanned-module",
        )


def without_gathers(model: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Slice fused projections part by part where the plan gathers their output."""
    result = dict(styles)
    for name, style in styles.items():
        block, _, leaf = name.rpartition(".")
        if style not in GATHERED or leaf not in _FUSED:
            continue
        partner, fused = _FUSED[leaf]
        if styles.get(f"{block}.{partner}") not in SPLIT:
            continue
        if fused != "fused_qkv" or qkv_widths(model.get_submodule(block)):
            result[name], result[f"{block}.{partner}"] = fused, ROW[0]
    return result


# fused projection -> the layer that consumes it, and the style that needs no gather
_FUSED = {
    "gate_up_proj": ("down_proj", "packed_colwise"),
    "qkv_proj": ("o_proj", "fused_qkv"),
}


def blocks_of(
    model: nn.Module, linear: nn.Module, name: str, style: str, proportions: Sequence[int] = (1,)
) -> Sequence[int]:
    """Return the output features of each fused part of a column-parallel layer."""
    if style == "fused_qkv":
        return qkv_widths(model.get_submodule(parent_of(name)))
    features = matrix_of(linear).shape[0]
    if style == "packed_colwise":
        return (features // 2, features - features // 2)
    return parts_of(name, features, proportions, "output")


def parts_of(
    name: str, features: int, proportions: Sequence[int], side: Literal["input", "output"]
) -> Sequence[int]:
    """Return the features of each fused part of a linear layer's input or output."""
    if features % sum(proportions):
        raise SliceError(
            f"{name} has {features} {side} features, which parts = {list(proportions)} do not "
            f"divide: their sum is {sum(proportions)}",
            code="plan-parts-indivisible",
        )
    return [features // sum(proportions) * part for part in proportions]


def qkv_widths(attention: Any) -> list[int]:
    """Return the rows of q, k and v in a fused projection laid out as Phi3's, else nothing."""
    heads = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    pairs, width = (getattr(attention, key, None) for key in ("num_key_value_heads", "head_dim"))
    if not (isinstance(heads, int) and isinstance(pairs, int) and isinstance(width, int)):
        return []
    widths = [heads * width, pairs * width, pairs * width]
    # An adapter may wrap the layer.
    fused = getattr(attention.qkv_proj, "base_layer", attention.qkv_proj)
    return widths if sum(widths) == fused.weight.shape[0] else []
