"""Sequence parallelism of an encoder and the decoder that attends to it (T5, BART, Whisper).

Each is a stack of its own, and runs on a shard of its own sequence. The encoder's output stays a
shard: every layer of the decoder gathers it for its keys and values, and reduce-scatters its
gradient, as in Megatron-LM (linear_kv in megatron/core/transformer/attention.py). The decoder is
shown a place holder, since models take masks from its shape.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from onerank.capture.parallelize.model_structure import refuse_early_norm
from onerank.capture.parallelize.sliced_outputs import change_hidden_states, unusable
from onerank.capture.parallelize.tensor.block_boundaries import Border
from onerank.capture.parallelize.tensor.layer_stack import (
    adds_positions,
    begin_sequence,
    sum_on_shards,
)
from onerank.capture.parallelize.tensor.sequence_parallel import HeldShard
from onerank.ir.errors import SliceError

_ENCODED = "encoder_last_hidden_state"


@dataclass(frozen=True)
class StackRole:
    """An encoder or a decoder.

    Attributes:
        module: what is called.
        layers: qualified name of its list of layers.
        behind: its final norm; () where the layers end with theirs (BART).
        embedding: of its vocabulary; None where it has none (Whisper's encoder).
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
        """Whether embeddings are summed up before the first layers."""
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
        _one(model, module, name)
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
    same = len(stacks) == len(lists) == len(modules) and len({one.summed for one in stacks}) == 1
    if not same or outside or not head:
        raise SliceError(
            f"--sp: {type(model).__name__} has stacks of layers {', '.join(sorted(lists))}, head "
            f"{head or 'none'} and beside them {', '.join(outside) or 'nothing'}; the borders of "
            "the sequence are known for an encoder and a decoder that begin alike, with "
            "embeddings and a head that are all sliced or planned: leave --sp out"
        )
    return TwoStacks(*stacks)


def _one(model: PreTrainedModel, module: Any, layers: str) -> StackRole:
    before: list[nn.Module] = []
    behind: list[nn.Module] = []
    for name, child in module.named_children():
        if child is model.get_submodule(layers) or not any(True for _ in child.parameters()):
            continue
        norm = "norm" in name and "embedding" not in name  # of what was embedded (BART)
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
    alone: bool,
) -> Border:
    """Let both stacks run on shards of their sequences; return the border before the head.

    Args:
        model: whose layers are sliced.
        stacks: where its layers are.
        group: the tensor-parallel group.
        blocks: as for `shard_sequence`.
        alone: whether the group's other ranks are not there to add their parts.
    """
    for one in (stacks.encoder, stacks.decoder):
        layers = model.get_submodule(one.layers)
        first = next(iter(layers.children()))
        begin_sequence(one.module, first, one.embedding, group, summed=one.summed, alone=alone)
        sum_on_shards(model, one.layers, one.behind, group, blocks)
        refuse_early_norm(model, layers.children(), one.behind, "--sp")
    border = Border(group, sequence=True)

    def hold(shard: Tensor) -> Tensor:
        return HeldShard.of(shard, group)

    change_hidden_states(stacks.encoder.module, hold)
    change_hidden_states(stacks.decoder.module, border.enter)
    model.register_forward_hook(_hide)
    return border


def _hide(_: nn.Module, __: Any, output: Any) -> None:
    if isinstance(getattr(output, _ENCODED, None), HeldShard):
        setattr(output, _ENCODED, _NO_OUTPUT)


_NO_OUTPUT = unusable(
    f"--sp: the script reads {_ENCODED}, of which a rank has a shard of the sequence: let the "
    "model compute its loss (pass labels) and use output.loss, or leave --sp out"
)
