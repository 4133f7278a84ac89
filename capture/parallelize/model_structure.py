"""The parts of a causal language model: embeddings, layers, norm, head."""

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from onerank.ir.errors import SliceError


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's forward is given, those it takes as `**kwargs` among the others."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # self
    return {**bound, **bound.pop("kwargs", {})}


_SHOWN = 3
"""Strange parts that a refusal names; an encoder has hundreds."""


@dataclass(frozen=True)
class Anatomy:
    """Parts of a causal language model.

    Attributes:
        trunk: the module that runs the layers.
        layers: its layers.
        embeddings: what comes before them, by name in the trunk.
        norms: what comes after them, by name in the trunk; one at most.
        head: the output embedding.
        tied: whether its weight is the input embedding's.
        hidden: features of the hidden states.
        types: kind of each layer, as the configuration has it; None where it has none.
    """

    trunk: Any
    layers: nn.ModuleList
    embeddings: dict[str, nn.Embedding]
    norms: dict[str, nn.Module]
    head: nn.Module
    tied: bool
    hidden: int
    types: list[str] | None


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """Find the parts.

    Raises:
        SliceError: something with parameters is none of them.
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
    strange: list[str] = []
    behind = False
    for name, child in trunk.named_children():
        if child is layers:
            behind = True
        elif not _has_weights(child):
            if behind and takes_one(child):
                plain[name] = child
        elif isinstance(child, nn.Embedding) and not behind:
            embeddings[name] = child
        elif (behind or name.startswith("final")) and not norms:  # OPT's stands before its layers
            norms[name] = child
        else:
            strange.append(f"{path}.{name}")
    norms = norms or dict([*plain.items()][:1])
    inside = set(trunk.modules()) | set(head.modules())
    for name, module in model.named_modules():
        if module not in inside or module is trunk:
            strange += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
    if strange or model.get_input_embeddings() not in embeddings.values():
        shown = ", ".join(strange[:_SHOWN]) or "the input embedding"
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        raise SliceError(
            f"{kind} cannot be cut into pipeline stages: expected embeddings, layers, a final norm "
            f"and a head, in this order; what is {shown}{more} for is not known: leave --pp out",
            code="pp-module-order",
        )
    tied = getattr(head, "weight", None) is model.get_input_embeddings().weight
    types = getattr(trunk.config, "layer_types", None)
    return Anatomy(trunk, layers, embeddings, norms, head, tied, config.hidden_size, types)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def takes_one(module: nn.Module) -> bool:
    """Whether a module takes only hidden states: a norm without weights (OLMo), no rotation."""
    alone = len(inspect.signature(module.forward).parameters) == 1
    return alone and not isinstance(module, nn.Dropout)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a model is an encoder and a decoder that attends to it (T5, BART, Whisper)."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def refuse_encoder_decoder(model: nn.Module, option: str) -> None:
    """Refuse a model of two stacks of layers for an option that is known for one.

    Raises:
        SliceError: the model is an encoder and its decoder (T5, BART, Whisper).
    """
    if is_encoder_decoder(model):
        raise SliceError(
            f"{option}: {type(model).__name__} is an encoder and a decoder that attends to it, and "
            f"{option} is known for one stack of layers: leave {option} out; --tp, --sp, --pp and "
            "the forms of --dp run it",
            code="encoder-decoder-unsupported",
        )


def refuse_early_norm(
    model: nn.Module, layers: Iterable[nn.Module], norms: Iterable[nn.Module], option: str
) -> None:
    """Refuse, as it runs, a model whose final norm runs before its layers as well (NanoChat)."""
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
                f"{option}: {type(model).__name__} runs its final norm before its layers as well, "
                f"and what is to run there of a slice is not known: leave {option} out",
                code="pp-norm-twice",
            )

    model.register_forward_pre_hook(start)
    for layer in layers:
        layer.register_forward_pre_hook(begin)
    for norm in norms:
        norm.register_forward_pre_hook(check)


def sorts_of(anatomy: Anatomy, counts: Sequence[int]) -> tuple[Hashable, ...]:
    """Return per stage what its work depends on: its place, and the kind of each of its layers."""
    shapes = [
        (type(layer), tuple((name, p.shape) for name, p in layer.named_parameters()))
        for layer in anatomy.layers
    ]
    types = anatomy.types or [""] * len(shapes)
    kinds = [*zip(shapes, types, strict=True)]
    keys: list[Hashable] = []
    for stage, count in enumerate(counts):
        first = sum(counts[:stage])
        keys.append((stage == 0, stage == len(counts) - 1, tuple(kinds[first : first + count])))
    return tuple(keys)
