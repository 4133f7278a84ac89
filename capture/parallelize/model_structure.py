"""The parts of a causal language model: embeddings, layers, norm, head; its pipeline stages."""

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.ir.errors import SliceError

ROUTERS = ("gate", "router")
"""Names of the module that routes tokens to a layer's experts."""


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model's forward by name, `**kwargs` included."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # self
    return {**bound, **bound.pop("kwargs", {})}


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that a wrapper of torch.compile wraps; another module as it is."""
    wrapped = module._modules.get("_orig_mod")
    return module if wrapped is None else wrapped


_SHOWN = 3  # unknown parts that an error names; an encoder has hundreds


@dataclass(frozen=True)
class ModelParts:
    """Parts of a causal language model.

    Attributes:
        trunk: the module that runs the layers.
        layers: its layers.
        embeddings: modules before the layers, by name in the trunk.
        norms: modules after the layers, by name in the trunk; at most one.
        head: the output embedding.
        tied: whether the head shares the input embedding's weight.
        hidden: features of the hidden states.
        types: kind of each layer in the configuration (`layer_types`); None if absent.
    """

    trunk: Any
    layers: nn.ModuleList
    embeddings: dict[str, nn.Embedding]
    norms: dict[str, nn.Module]
    head: nn.Module
    tied: bool
    hidden: int
    types: list[str] | None


def model_parts_of(model: PreTrainedModel) -> ModelParts:
    """Return the parts of a causal language model.

    Raises:
        SliceError: a module with parameters is not one of the known parts.
    """
    kind = type(model).__name__
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module, child)
        for name, module in model.named_modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    head = model.get_output_embeddings()
    if not lists or head is None:
        raise SliceError(
            f"{kind} cannot be cut into pipeline stages: expected a causal language model with a "
            f"list of its {count} layers and a head; found "
            f"{'no such list' if not lists else 'no head'}: leave --pp out",
            code="pp-model-structure",
        )
    path, trunk, layers = lists[0]  # parents come before what is inside them
    embeddings: dict[str, nn.Embedding] = {}
    norms: dict[str, nn.Module] = {}
    plain: dict[str, nn.Module] = {}
    unknown: list[str] = []
    after_layers = False
    for name, child in trunk.named_children():
        if child is layers:
            after_layers = True
        elif not _has_weights(child):
            if after_layers and takes_one(child):
                plain[name] = child
        elif isinstance(child, nn.Embedding) and not after_layers:
            embeddings[name] = child
        # OPT registers its final norm before its layers.
        elif (after_layers or name.startswith("final")) and not norms:
            norms[name] = child
        else:
            unknown.append(f"{path}.{name}")
    # A norm without weights counts only if no module with weights is one.
    norms = norms or dict([*plain.items()][:1])
    inside = set(trunk.modules()) | set(head.modules())
    for name, module in model.named_modules():
        if module not in inside or module is trunk:
            unknown += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
    if unknown or model.get_input_embeddings() not in embeddings.values():
        shown = ", ".join(unknown[:_SHOWN]) or "the input embedding"
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise SliceError(
            f"{kind} cannot be cut into pipeline stages: expected embeddings, layers, a final norm "
            f"and a head, in this order; found {shown}{more} of unknown purpose: leave --pp out",
            code="pp-module-order",
        )
    tied = getattr(head, "weight", None) is model.get_input_embeddings().weight
    types = getattr(trunk.config, "layer_types", None)
    return ModelParts(trunk, layers, embeddings, norms, head, tied, config.hidden_size, types)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def takes_one(module: nn.Module) -> bool:
    """Return whether a module may be a norm without weights (OLMo): one input, no dropout."""
    # rotary embeddings take positions as a second argument
    has_one_input = len(inspect.signature(module.forward).parameters) == 1
    return has_one_input and not isinstance(module, nn.Dropout)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a model is an encoder and a decoder that attends to it (T5, BART, Whisper)."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def refuse_encoder_decoder(model: nn.Module, option: str) -> None:
    """Refuse an encoder-decoder model for an option that supports one stack of layers.

    Raises:
        SliceError: the model is an encoder and its decoder (T5, BART, Whisper).
    """
    if is_encoder_decoder(model):
        raise SliceError(
            f"{option}: {type(model).__name__} is an encoder-decoder model; {option} supports one "
            f"stack of layers\n  leave {option} out; --tp, --sp, --pp and data parallelism "
            "support the model",
            code="encoder-decoder-unsupported",
        )


def refuse_early_norm(
    model: nn.Module, layers: Iterable[nn.Module], norms: Iterable[nn.Module], option: str
) -> None:
    """Refuse, at its first forward, a model that also runs its final norm before its layers.

    NanoChat does.
    """
    begun = False

    def start(*_: Any) -> None:
        nonlocal begun
        begun = False

    def begin(*_: Any) -> None:
        nonlocal begun
        begun = True

    def check(*_: Any) -> None:
        if not begun:
            raise SliceError(
                f"{option}: {type(model).__name__} also runs its final norm before its layers, "
                f"where a slice has no equivalent: leave {option} out",
                code="pp-norm-twice",
            )

    model.register_forward_pre_hook(start)
    for layer in layers:
        layer.register_forward_pre_hook(begin)
    for norm in norms:
        norm.register_forward_pre_hook(check)


def split_layers(total: int, stages: int, requested: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the layers of each stage: `requested`, or an even split with the remainder first.

    Raises:
        SliceError: fewer layers than stages, or `requested` does not add up.
    """
    if requested:
        if len(requested) != stages or sum(requested) != total or min(requested) < 1:
            terms = " + ".join(map(str, requested))
            raise SliceError(
                f"--pp-layers {','.join(map(str, requested))}: expected {stages} numbers (--pp "
                f"{stages}), each at least 1, that add up to the model's {total} layers; found "
                f"{len(requested)}, {terms} = {sum(requested)}",
                code="pp-layers-malformed",
            )
        return tuple(requested)
    if total < stages:
        raise SliceError(
            f"--pp {stages}: the model has {total} layers, so {stages - total} stages would "
            f"be empty; use at most --pp {total}",
            code="pp-too-many-stages",
        )
    return tuple(total // stages + (stage < total % stages) for stage in range(stages))


def stage_keys(parts: ModelParts, counts: Sequence[int]) -> tuple[Hashable, ...]:
    """Return a key per stage: equal keys mean equal work (position and kinds of layers)."""
    shapes = [
        (type(layer), tuple((name, p.shape) for name, p in layer.named_parameters()))
        for layer in parts.layers
    ]
    types = parts.types or [""] * len(shapes)
    kinds = [*zip(shapes, types, strict=True)]
    keys: list[Hashable] = []
    for stage, count in enumerate(counts):
        first = sum(counts[:stage])
        keys.append((stage == 0, stage == len(counts) - 1, tuple(kinds[first : first + count])))
    return tuple(keys)
