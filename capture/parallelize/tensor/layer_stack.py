"""The layer stacks of a model, and the shard of the sequence that each runs on.

An encoder and the decoder that attends to it (T5, BART, Whisper) are separate stacks with their own
sequences and shards. The encoder's output stays a shard: every decoder layer gathers it for its
keys and values and reduce-scatters its gradient, as in Megatron-LM (linear_kv in
megatron/core/transformer/attention.py). The decoder sees a placeholder of the whole length, because
models derive masks from its shape.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.experts.aux_loss import balance_over_sequence
from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.capture.parallelize.model_structure import refuse_early_norm, takes_one
from onerank.capture.parallelize.sliced_outputs import change_hidden_states, unusable
from onerank.capture.parallelize.tensor.linear import BlockBoundary, with_hidden_states
from onerank.capture.parallelize.tensor.replicated_grads import sum_gradients
from onerank.capture.parallelize.tensor.sequence_parallel import (
    SequencePlaceholder,
    scatter_sum_to_sequence,
    split_to_sequence,
)
from onerank.capture.parallelize.tensor.vocab_parallel import RandomFill
from onerank.ir.errors import SliceError

ROUTERS = ("gate", "router")
"""Names of the module that routes tokens to a layer's experts."""


@dataclass(frozen=True)
class Stack:
    """Where a model's repeated layers are.

    Attributes:
        name: qualified name of the list of layers.
        first: its first layer.
        last_norm: the module between the last layer and the head.
        embedding: the vocabulary's embedding.
        learns_positions: whether another embedding, or fixed positions, are added to it before the
            first layer.
    """

    name: str
    first: nn.Module
    last_norm: nn.Module
    embedding: nn.Embedding
    learns_positions: bool


def stack_of(model: nn.Module, rows: Collection[str], embedding: str, head: str) -> Stack:
    """Find the stack of layers that the row-parallel layers `rows` belong to.

    Raises:
        SliceError: the model is not an embedding, one stack of layers, norm and head.
    """
    names = {re.split(r"\.\d+\.", name)[0] for name in rows}
    outside = [
        name
        for name, module in model.named_modules()
        if not any(f"{name}.".startswith(f"{stack}.") for stack in names)
        and any(True for _ in module.parameters(recurse=False))
        and name not in (embedding, head)
    ]
    tables = [name for name in outside if isinstance(model.get_submodule(name), nn.Embedding)]
    norms = [name for name in outside if name not in tables]
    if not norms and len(names) == 1:
        norms = _without_weights(model, next(iter(names)))
    words = model.get_submodule(embedding) if embedding else None
    if len(names) != 1 or len(norms) != 1 or not head or not isinstance(words, nn.Embedding):
        raise SliceError(
            f"--sp: {type(model).__name__} has {len(names)} stacks of layers "
            f"({', '.join(sorted(names))}), embedding {embedding or 'none'}, head "
            f"{head or 'none'}, other modules: {', '.join(outside) or 'none'}\n  --sp supports "
            "an embedding, one stack, a norm and a head, all sliced or planned: leave --sp out",
            code="sp-model-structure",
        )
    (name,) = names
    return Stack(
        name=name,
        first=next(iter(model.get_submodule(name).children())),
        last_norm=model.get_submodule(norms[0]),
        embedding=words,
        learns_positions=bool(tables) or adds_positions(model),
    )


def adds_positions(model: nn.Module) -> bool:
    """Whether a model adds sinusoidal position embeddings without weights (XGLM)."""
    return any("PositionalEmbedding" in type(module).__name__ for module in model.modules())


def _without_weights(model: nn.Module, stack: str) -> list[str]:
    """Return the name of the norm without weights after a stack of layers (OLMo)."""
    trunk, _, stack_name = stack.rpartition(".")
    children = [name for name, _ in model.get_submodule(trunk).named_children()]
    behind = children[children.index(stack_name) + 1 :]
    named = [f"{trunk}.{name}".removeprefix(".") for name in behind]
    return [name for name in named if takes_one(model.get_submodule(name))][:1]


def shard_sequence(
    model: nn.Module,
    stack: Stack,
    group: dist.ProcessGroup,
    blocks: Collection[str],
    *,
    peers_absent: bool,
) -> BlockBoundary:
    """Make the stack run on a shard of the sequence; return the boundary before the head.

    Up to the first layer hidden states keep the whole sequence, since models take positions and
    masks from their shape: the embedding's sum is reduced and scattered there. Where learned
    positions are added before, the sum is whole already and split, as in Megatron-LM
    (megatron/core/models/common/embeddings/language_model_embedding.py). The last norm runs on
    the shard; its output is gathered.

    Args:
        model: the model; its layers are sliced already.
        stack: its stack of layers.
        group: the tensor-parallel group.
        blocks: names of the blocks and experts that gather the sequence and so run on all of it.
        peers_absent: whether the group's other ranks do not run.
    """
    begin_sequence(
        model,
        stack.first,
        stack.embedding,
        group,
        summed=stack.learns_positions,
        peers_absent=peers_absent,
    )
    layers = model.get_submodule(stack.name)
    sum_on_shards(model, stack.name, [stack.last_norm], group, blocks)
    balance_over_sequence(model, group, peers_absent=peers_absent)
    boundary = BlockBoundary(group, sequence=True)

    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return boundary.enter(output)

    refuse_early_norm(model, layers.children(), [stack.last_norm], "--sp")

    stack.last_norm.register_forward_hook(gather)
    return boundary


def begin_sequence(
    called: nn.Module,
    first: nn.Module,
    embedding: nn.Embedding | None,
    group: dist.ProcessGroup,
    *,
    summed: bool,
    peers_absent: bool,
) -> None:
    """Make a stack of layers start with a shard of the sequence.

    Args:
        called: the module that receives the token ids.
        first: the first layer.
        embedding: the vocabulary's embedding; None without one.
        group: the tensor-parallel group.
        summed: whether the first layer gets the whole sum, else this rank's part of it.
        peers_absent: whether the group's other ranks do not run.
    """
    substitute = (
        RandomFill(embedding, group.rank()) if peers_absent and embedding is not None else None
    )

    def scatter(x: Tensor) -> Tensor:
        return scatter_sum_to_sequence(x, group, None if x.is_meta else substitute)

    def split(x: Tensor) -> Tensor:
        return split_to_sequence(x, group)

    if not summed:
        first.register_forward_pre_hook(_check_linear, with_kwargs=True)
        called.register_forward_pre_hook(_refuse_embedded, with_kwargs=True)
    first.register_forward_pre_hook(_changing(split if summed else scatter), with_kwargs=True)


def sum_on_shards(
    model: nn.Module,
    name: str,
    behind: Collection[nn.Module],
    group: dist.ProcessGroup,
    blocks: Collection[str],
) -> None:
    """Sum the gradients of the layers `name` and of the norms after them that run on a shard."""
    sharded = dict.fromkeys(behind)
    for inner, module in model.get_submodule(name).named_modules():
        qualified = f"{name}.{inner}"
        if not any(f"{qualified}.".startswith(f"{block}.") for block in blocks):
            above = qualified.rpartition(".")[0]
            routes = above.rpartition(".")[2] in ROUTERS  # reads only the weight (LongCat-Flash)
            sharded[module] = model.get_submodule(above) if routes else None
    for module, reader in sharded.items():
        if any(True for _ in module.parameters(recurse=False)):
            sum_gradients(module, group, reader=reader)


def _changing(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_hidden_states(module, args, kwargs, change)

    return hook


def _check_linear(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse partial sums of the embedding that went through a non-linear operation.

    The check reads the autograd graph, so it sees nothing in compiled models or without gradients.
    """

    def check(hidden: Tensor) -> Tensor:
        nodes: list[Any] = [] if torch.compiler.is_compiling() else [hidden.grad_fn]
        seen: set[Any] = {None}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() in _NOT_LINEAR:
                raise SliceError(
                    f"--sp: {node.name()} changes the embedding before the first layer, "
                    f"{type(layer).__name__}, which sums the ranks' partial embeddings\n"
                    "  leave --sp out",
                    code="sp-work-before-layer",
                )
            nodes += [following for following, _ in node.next_functions]
        return hidden

    with_hidden_states(layer, args, kwargs, check)


_NOT_LINEAR = (
    *("AddBackward0", "SubBackward0", "PowBackward0", "TanhBackward0"),
    *("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0"),
)


def _refuse_embedded(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("inputs_embeds") is not None:
        raise SliceError(
            f"--sp: {type(module).__name__} was given inputs_embeds; under sequence parallelism "
            "the embedding's sum is reduced at the first layer\n"
            "  pass input_ids, or leave --sp out",
            code="sp-inputs-embeds",
        )


_ENCODED = "encoder_last_hidden_state"


@dataclass(frozen=True)
class StackRole:
    """An encoder or a decoder.

    Attributes:
        module: the encoder or decoder module.
        layers: qualified name of its list of layers.
        behind: its final norm; () if each layer ends with a norm (BART).
        embedding: the vocabulary's embedding; None without one (Whisper's encoder).
        summed: whether something is added to the embedding before the first layer.
    """

    module: nn.Module
    layers: str
    behind: tuple[nn.Module, ...]
    embedding: nn.Embedding | None
    summed: bool


@dataclass(frozen=True)
class TwoStacks:
    """An encoder and the decoder that attends to it."""

    encoder: StackRole
    decoder: StackRole

    @property
    def learns_positions(self) -> bool:
        """Whether position embeddings are added before the first layers."""
        return self.encoder.summed or self.decoder.summed


def two_stacks_of(
    model: PreTrainedModel, rows: Collection[str], embeddings: Collection[str], head: str
) -> TwoStacks:
    """Find the stacks that the row-parallel layers `rows` belong to.

    Raises:
        SliceError: the model is not an encoder and a decoder with embeddings and a head.
    """
    named = {module: name for name, module in model.named_modules()}
    modules: list[Any] = [model.get_encoder(), model.get_decoder()]
    lists = {re.split(r"\.\d+\.", name)[0] for name in rows}
    stacks = [
        _stack_role(model, module, name)
        for module in modules
        for name in lists
        if name.rpartition(".")[0] == named.get(module)
    ]
    of_parts = tuple(f"{named.get(module)}." for module in modules)
    outside = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not name.startswith(of_parts)
        and name not in (*embeddings, head)
    ]
    same = (
        len(stacks) == len(lists) == len(modules) and len({stack.summed for stack in stacks}) == 1
    )
    if not same or outside or not head:
        raise SliceError(
            f"--sp: {type(model).__name__} has stacks of layers {', '.join(sorted(lists))}, head "
            f"{head or 'none'}, other modules: {', '.join(outside) or 'none'}\n  --sp supports "
            "an encoder and a decoder that begin in the same way, with embeddings and a head that "
            "are all sliced or planned: leave --sp out",
            code="sp-model-structure",
        )
    return TwoStacks(*stacks)


def _stack_role(model: PreTrainedModel, module: Any, layers: str) -> StackRole:
    before: list[nn.Module] = []
    behind: list[nn.Module] = []
    for name, child in module.named_children():
        if child is model.get_submodule(layers) or not any(True for _ in child.parameters()):
            continue
        norm = "norm" in name and "embedding" not in name  # BART has an embedding norm too
        (behind if norm else before).append(child)
    words = getattr(module, "embed_tokens", None)
    summed = any(child is not words for child in before) or adds_positions(module)
    embedding = words if isinstance(words, nn.Embedding) else None
    return StackRole(module, layers, tuple(behind), embedding, summed)


def shard_sequences(
    model: nn.Module,
    stacks: TwoStacks,
    group: dist.ProcessGroup,
    blocks: Collection[str],
    *,
    peers_absent: bool,
) -> BlockBoundary:
    """Make both stacks run on shards of their sequences; return the boundary before the head.

    Args:
        model: the model; its layers are sliced already.
        stacks: its encoder and decoder.
        group: the tensor-parallel group.
        blocks: as for `shard_sequence`.
        peers_absent: whether the group's other ranks do not run.
    """
    for stack in (stacks.encoder, stacks.decoder):
        layers = model.get_submodule(stack.layers)
        first = next(iter(layers.children()))
        begin_sequence(
            stack.module,
            first,
            stack.embedding,
            group,
            summed=stack.summed,
            peers_absent=peers_absent,
        )
        sum_on_shards(model, stack.layers, stack.behind, group, blocks)
        refuse_early_norm(model, layers.children(), stack.behind, "--sp")
    boundary = BlockBoundary(group, sequence=True)

    def placeholder(shard: Tensor) -> Tensor:
        return SequencePlaceholder.of(shard, group)

    change_hidden_states(stacks.encoder.module, placeholder)
    change_hidden_states(stacks.decoder.module, boundary.enter)
    model.register_forward_hook(_hide)
    return boundary


def _hide(_: nn.Module, __: Any, output: Any) -> None:
    if isinstance(getattr(output, _ENCODED, None), SequencePlaceholder):
        setattr(output, _ENCODED, _NO_OUTPUT)


_NO_OUTPUT = unusable(
    f"--sp: the script reads {_ENCODED}, of which a rank has a shard of the sequence\n"
    "  let the model compute its loss (pass labels) and use output.loss, or leave --sp out"
)
