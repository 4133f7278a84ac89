"""Sequence parallelism of a model's layer stacks: where a shard of the sequence begins and ends.

The embedding's partial sums are reduce-scattered before the first layer, and the output of the last
norm is all-gathered, as in Megatron-LM with --sequence-parallel.

An encoder and the decoder that attends to it (T5, BART, Whisper) are separate stacks with separate
sequences and shards. The encoder's output stays a shard: every decoder layer all-gathers it for its
keys and values and reduce-scatters its gradient, as in Megatron-LM (linear_kv in
megatron/core/transformer/attention.py). The decoder sees a placeholder of the whole length, because
models derive masks from its shape.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.experts.aux_loss import balance_over_sequence
from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.capture.parallelize.model_structure import refuse_early_norm, takes_one
from onerank.capture.parallelize.module_names import layer_list_of, parent_of
from onerank.capture.parallelize.sliced_outputs import change_hidden_states, unusable
from onerank.capture.parallelize.tensor.linear import BlockBoundary, with_hidden_states
from onerank.capture.parallelize.tensor.replicated_grads import sum_sharded_gradients
from onerank.capture.parallelize.tensor.sequence_parallel import (
    SequencePlaceholder,
    scatter_sum_to_sequence,
    split_to_sequence,
)
from onerank.capture.parallelize.tensor.vocab_parallel import RandomFill
from onerank.ir.errors import SliceError


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
    names = {layer_list_of(name) or name for name in rows}
    outside = [
        name
        for name, module in model.named_modules()
        if not any(f"{name}.".startswith(f"{stack}.") for stack in names)
        and any(True for _ in module.parameters(recurse=False))
        and name not in (embedding, head)
    ]
    other_embeddings = [
        name for name in outside if isinstance(model.get_submodule(name), nn.Embedding)
    ]
    norms = [name for name in outside if name not in other_embeddings]
    if not norms and len(names) == 1:
        norms = _norm_without_weights(model, next(iter(names)))
    token_embedding = model.get_submodule(embedding) if embedding else None
    if (
        len(names) != 1
        or len(norms) != 1
        or not head
        or not isinstance(token_embedding, nn.Embedding)
    ):
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
        embedding=token_embedding,
        learns_positions=bool(other_embeddings) or adds_positions(model),
    )


def adds_positions(model: nn.Module) -> bool:
    """Return whether a model adds sinusoidal position embeddings without weights (XGLM)."""
    return any("PositionalEmbedding" in type(module).__name__ for module in model.modules())


def _norm_without_weights(model: nn.Module, stack: str) -> list[str]:
    """Return the name of the norm without weights after a stack of layers (OLMo)."""
    trunk, _, stack_name = stack.rpartition(".")
    children = [name for name, _ in model.get_submodule(trunk).named_children()]
    following = children[children.index(stack_name) + 1 :]
    qualified_names = [f"{trunk}.{name}".removeprefix(".") for name in following]
    return [name for name in qualified_names if takes_one(model.get_submodule(name))][:1]


def shard_sequence(
    model: nn.Module,
    stack: Stack,
    group: dist.ProcessGroup,
    blocks: Collection[str],
    *,
    peers_absent: bool,
) -> BlockBoundary:
    """Make the stack run on a shard of the sequence; return the boundary before the head.

    Before the first layer hidden states have the length of the whole sequence, because models
    derive positions and masks from their shape; the embedding's partial sums are reduce-scattered
    there. If learned positions are added to the embedding, its sum is all-reduced first and then
    split, as in Megatron-LM (megatron/core/models/common/embeddings/language_model_embedding.py).
    The last norm runs on the shard; its output is all-gathered.

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
        reduced=stack.learns_positions,
        peers_absent=peers_absent,
    )
    layers = model.get_submodule(stack.name)
    sum_sharded_gradients(model, stack.name, [stack.last_norm], group, blocks)
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
    reduced: bool,
    peers_absent: bool,
) -> None:
    """Make a stack of layers start with a shard of the sequence.

    Args:
        called: the module that receives the token ids.
        first: the first layer.
        embedding: the vocabulary's embedding; None without one.
        group: the tensor-parallel group.
        reduced: whether the first layer gets the embedding's whole sum, else this rank's part.
        peers_absent: whether the group's other ranks do not run.
    """
    # Absent peers add no rows: the embedding of a token of theirs would stay zero.
    substitute = (
        RandomFill(embedding, group.rank()) if peers_absent and embedding is not None else None
    )

    def scatter(x: Tensor) -> Tensor:
        fills = substitute is not None and substitute.applies_to(x)
        return scatter_sum_to_sequence(x, group, substitute if fills else None)

    def split(x: Tensor) -> Tensor:
        return split_to_sequence(x, group)

    # Only partial sums must reach the first layer unchanged; a whole sum may pass through anything.
    if not reduced:
        first.register_forward_pre_hook(_refuse_nonlinear_nodes, with_kwargs=True)
        called.register_forward_pre_hook(_refuse_inputs_embeds, with_kwargs=True)
    first.register_forward_pre_hook(
        _change_hidden_states_hook(split if reduced else scatter), with_kwargs=True
    )


def _change_hidden_states_hook(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_hidden_states(module, args, kwargs, change)

    return hook


def _refuse_nonlinear_nodes(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
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
            if node.name() in _NONLINEAR_NODES:
                raise SliceError(
                    f"--sp: {node.name()} changes the embedding before the first layer, "
                    f"{type(layer).__name__}, which sums the ranks' partial embeddings\n"
                    "  leave --sp out",
                    code="sp-work-before-layer",
                )
            nodes += [next_node for next_node, _ in node.next_functions]
        return hidden

    with_hidden_states(layer, args, kwargs, check)


# The sum over ranks of f(part) is f(sum) only if f is linear. Additions count as non-linear: a term
# that every rank adds to its part would be summed once per rank.
_NONLINEAR_NODES = (
    *("AddBackward0", "SubBackward0", "PowBackward0", "TanhBackward0"),
    *("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0"),
)


def _refuse_inputs_embeds(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("inputs_embeds") is not None:
        raise SliceError(
            f"--sp: {type(module).__name__} was given inputs_embeds; under sequence parallelism "
            "the embedding's sum is reduced at the first layer\n"
            "  pass input_ids, or leave --sp out",
            code="sp-inputs-embeds",
        )


_ENCODER_OUTPUT = "encoder_last_hidden_state"


@dataclass(frozen=True)
class StackRole:
    """An encoder or a decoder.

    Attributes:
        module: the encoder or decoder module.
        layers: qualified name of its list of layers.
        final_norms: its final norm; () if each layer ends with a norm (BART).
        embedding: the vocabulary's embedding; None without one (Whisper's encoder).
        adds_to_embedding: whether something is added to the embedding before the first layer.
    """

    module: nn.Module
    layers: str
    final_norms: tuple[nn.Module, ...]
    embedding: nn.Embedding | None
    adds_to_embedding: bool


@dataclass(frozen=True)
class TwoStacks:
    """An encoder and the decoder that attends to it."""

    encoder: StackRole
    decoder: StackRole

    @property
    def learns_positions(self) -> bool:
        """Whether position embeddings are added before the first layers."""
        return self.encoder.adds_to_embedding or self.decoder.adds_to_embedding


def two_stacks_of(
    model: PreTrainedModel, rows: Collection[str], embeddings: Collection[str], head: str
) -> TwoStacks:
    """Find the stacks that the row-parallel layers `rows` belong to.

    Raises:
        SliceError: the model is not an encoder and a decoder with embeddings and a head.
    """
    names = {module: name for name, module in model.named_modules()}
    modules: list[Any] = [model.get_encoder(), model.get_decoder()]
    list_names = {layer_list_of(name) or name for name in rows}
    stacks = [
        _stack_role(model, module, name)
        for module in modules
        for name in list_names
        if parent_of(name) == names.get(module)
    ]
    stack_prefixes = tuple(f"{names.get(module)}." for module in modules)
    outside = [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not name.startswith(stack_prefixes)
        and name not in (*embeddings, head)
    ]
    supported = (
        len(stacks) == len(list_names) == len(modules)
        and len({stack.adds_to_embedding for stack in stacks}) == 1
    )
    if not supported or outside or not head:
        raise SliceError(
            f"--sp: {type(model).__name__} has stacks of layers {', '.join(sorted(list_names))}, "
            f"head {head or 'none'}, other modules: {', '.join(outside) or 'none'}\n  --sp needs "
            "an encoder and a decoder that begin in the same way, with embeddings and a head that "
            "are all sliced or planned: leave --sp out",
            code="sp-model-structure",
        )
    return TwoStacks(*stacks)


def _stack_role(model: PreTrainedModel, module: Any, layers: str) -> StackRole:
    before: list[nn.Module] = []
    final_norms: list[nn.Module] = []
    for name, child in module.named_children():
        if child is model.get_submodule(layers) or not any(True for _ in child.parameters()):
            continue
        # BART has an embedding norm too.
        norm = "norm" in name and "embedding" not in name
        (final_norms if norm else before).append(child)
    token_embedding = getattr(module, "embed_tokens", None)
    adds_to_embedding = any(child is not token_embedding for child in before) or adds_positions(
        module
    )
    embedding = token_embedding if isinstance(token_embedding, nn.Embedding) else None
    return StackRole(module, layers, tuple(final_norms), embedding, adds_to_embedding)


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
            reduced=stack.adds_to_embedding,
            peers_absent=peers_absent,
        )
        sum_sharded_gradients(model, stack.layers, stack.final_norms, group, blocks)
        refuse_early_norm(model, layers.children(), stack.final_norms, "--sp")
    boundary = BlockBoundary(group, sequence=True)

    def placeholder(shard: Tensor) -> Tensor:
        return SequencePlaceholder.of(shard, group)

    change_hidden_states(stacks.encoder.module, placeholder)
    change_hidden_states(stacks.decoder.module, boundary.enter)
    model.register_forward_hook(_hide_encoder_output)
    return boundary


def _hide_encoder_output(_: nn.Module, __: Any, output: Any) -> None:
    if isinstance(getattr(output, _ENCODER_OUTPUT, None), SequencePlaceholder):
        setattr(output, _ENCODER_OUTPUT, _REFUSED_OUTPUT)


_REFUSED_OUTPUT = unusable(
    f"--sp: the script reads {_ENCODER_OUTPUT}, of which a rank has a shard of the sequence\n"
    "  let the model compute its loss (pass labels) and use output.loss, or leave --sp out"
)
