"""Stages of an encoder and of the decoder that attends to it (T5, BART, Whisper).

The first stages have the encoder's layers, the others the decoder's. The last of the encoder sends
its output. Each stage of the decoder takes it as what to attend to, and sends it on behind its own
hidden states; so comes its gradient back, to which each adds its own. It is Megatron-LM's
`--pipeline-model-parallel-split-rank` (pretrain_t5.py; get_tensor_shapes and backward_step in
megatron/core/pipeline_parallel/schedules.py), which its newest T5 has no more.

The embeddings of encoder and decoder and the head lie on the first stage, the decoder's first and
the last. Where T5's first layer alone has the bias of relative positions, each stage has it; as of
what is tied, the gradients are summed.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from onerank.capture.anatomy import refuse_early_norm
from onerank.capture.outputs import leave_hidden_states
from onerank.capture.pipeline.beside import HeldEmbedding, NoConvolution, Passed, SendingDecoder
from onerank.capture.pipeline.border import (
    NoEmbedding,
    NoNorm,
    ReceivingEmbedding,
    SendingHead,
    StageBorder,
)
from onerank.capture.pipeline.stage import (
    EMBEDDING_GROUP,
    NewGroup,
    Staged,
    dtype_of,
    receive_first,
    release,
    split_layers,
    without_outputs,
)
from onerank.capture.pipeline.tied_embedding import TiedEmbedding
from onerank.ir import Pipeline
from onerank.ir.errors import SliceError

_BIAS = "relative_attention_bias"
_HAS_BIAS = f"has_{_BIAS}"
_ENCODED = "encoder_last_hidden_state"


@dataclass(frozen=True)
class _Stack:
    """An encoder or a decoder: its module, and what is in it, by name."""

    module: Any
    layers: nn.ModuleList
    before: dict[str, nn.Module]
    norms: dict[str, nn.Module]

    @property
    def biases(self) -> list[str]:
        """Names, in a layer, of the biases that the first layer has and the others have not."""
        first, *others = [dict(layer.named_modules()) for layer in self.layers]
        return [name for name in first if name.endswith(_BIAS) and others and name not in others[0]]


def split_stacks(
    encoder: int, decoder: int, stages: int, asked: Sequence[int] = ()
) -> tuple[tuple[int, ...], int]:
    """Return how many layers each stage has, and how many stages are the encoder's.

    Each stack is split evenly, over stages in proportion to its layers.

    Raises:
        SliceError: fewer layers than stages, or `asked` does not add up.
    """
    if asked:
        counts = split_layers(encoder + decoder, stages, asked)
        ends = [*itertools.accumulate(counts)]
        if encoder not in ends:
            raise SliceError(
                f"--pp-layers {','.join(map(str, asked))}: a stage would have layers of the "
                f"encoder and of the decoder; the first stages are to add up to the encoder's "
                f"{encoder} layers, the others to the decoder's {decoder}"
            )
        return counts, ends.index(encoder) + 1
    split_layers(encoder + decoder, stages)
    split = round(stages * encoder / (encoder + decoder))
    split = min(max(split, 1, stages - decoder), stages - 1, encoder)
    return split_layers(encoder, split) + split_layers(decoder, stages - split), split


def stage_encoder_decoder(
    model: Any,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    new_group: NewGroup,
    asked: Sequence[int] = (),
    *,
    shards: int = 1,
) -> Staged:
    """Keep the layers of this rank's stage, and place the borders; as for `stage_model`.

    Raises:
        SliceError: the model's stacks are not embeddings, one list of layers and a norm each, or
            there is one stage.
    """
    stage, stages = group.rank(), group.size()
    encoder, decoder = (_stack(model, one) for one in (model.get_encoder(), model.get_decoder()))
    counts, split = split_stacks(len(encoder.layers), len(decoder.layers), stages, asked)
    own, begin = (encoder, 0) if stage < split else (decoder, split)
    place = sum(counts[begin:stage])
    kept = slice(place, place + counts[stage])
    before = sum(p.numel() for p in model.parameters())
    alike = _sorts(encoder, decoder, counts, split)
    listed = next(name for name, module in model.named_modules() if module is own.layers)
    head = model.get_output_embeddings()
    holders = _holders(model, encoder, decoder, counts, split)
    dtype = functools.partial(dtype_of, own.layers, next(own.layers.parameters()).dtype)
    border = StageBorder(group, model.config.d_model, dtype, shards)
    dropped = _keep(own, kept)
    if stage not in holders.get(EMBEDDING_GROUP, {0: None}):
        dropped += _without_words(model)
    ends = Passed(model, border, at_first=stage == split, last=stage == stages - 1)
    if stage < split:
        _replace(model, decoder.module, SendingDecoder(border))
        _replace(model, head, nn.Identity())
        dropped += [decoder.module, head]
    else:
        dropped += encoder.module.children()
        ends.stand_for(encoder.module)
        if stage < stages - 1:
            _replace(model, head, SendingHead(border))
            dropped.append(head)
    if stage not in (0, split):
        dropped += _without_embeddings(own, border, ends)
        receive_first(border, next(iter(own.layers)))
    if stage < stages - 1:
        leave_hidden_states(own.module)
        without_outputs(model, border, (_ENCODED,) if stage < split else ())
        dropped += _leave(own, border, at_last=stage == split - 1)
    norms = [getattr(own.module, name) for name in own.norms]
    refuse_early_norm(model, own.layers, norms, "--pp")
    tied: list[TiedEmbedding] = []
    for name, held in holders.items():
        members = [ranks[at] for at in held] if stage in held else [ranks[stage]]
        several = new_group(name, members)  # on all stages: peers count their groups
        if stage in held:
            tied.append(TiedEmbedding(held[stage], several))
    release(dropped, model)
    after = sum(p.numel() for p in model.parameters())
    return Staged(Pipeline(stage, counts), alike, listed, before, after, tuple(tied))


def _keep(own: _Stack, kept: slice) -> list[nn.Module]:
    """Keep a stage's layers under their names, and what the first layer has for all."""
    layers = [*own.layers.named_children()]
    biases = {name: own.layers[0].get_submodule(name) for name in own.biases}
    dropped = [*layers[: kept.start], *layers[kept.stop :]]
    for name, _ in dropped:
        delattr(own.layers, name)
    first = layers[kept.start][1]
    for name, bias in biases.items():
        attention = first.get_submodule(name.rpartition(".")[0])
        setattr(attention, _BIAS, bias)
        setattr(attention, _HAS_BIAS, True)
    return [layer for _, layer in dropped]


def _leave(own: _Stack, border: StageBorder, *, at_last: bool) -> list[nn.Module]:
    """Take note of what a stage gives: at the encoder's last its output, else the last layer's."""
    if at_last:

        def encoded(module: nn.Module, given: Any, output: Any) -> None:
            border.left(module, given, output[0])

        own.module.register_forward_hook(encoded)
        return []
    for name in own.norms:
        setattr(own.module, name, NoNorm(border))
    [*own.layers][-1].register_forward_hook(border.left)
    return [*own.norms.values()]


def _stack(model: nn.Module, module: Any) -> _Stack:
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    found = {
        name: child
        for name, child in module.named_children()
        if child not in lists and any(True for _ in child.parameters())
    }
    norms = {n: child for n, child in found.items() if "norm" in n and "embedding" not in n}
    before = {n: child for n, child in found.items() if n not in norms}
    known = all(isinstance(one, nn.Embedding | nn.LayerNorm | nn.Conv1d) for one in before.values())
    if len(lists) != 1 or len(norms) > 1 or not known:
        raise SliceError(
            f"{type(model).__name__} cannot be cut into pipeline stages: expected embeddings, one "
            f"list of layers and a norm in {type(module).__name__}; found {', '.join(found)} and "
            f"{len(lists)} lists: leave --pp out"
        )
    return _Stack(module, lists[0], before, norms)


def _sorts(
    encoder: _Stack, decoder: _Stack, counts: Sequence[int], split: int
) -> tuple[Hashable, ...]:
    """Return per stage what its work depends on."""
    keys: list[Hashable] = []
    for stage, count in enumerate(counts):
        stack, begin = (encoder, 0) if stage < split else (decoder, split)
        start = sum(counts[begin:stage])
        shapes = tuple(
            tuple((n, p.shape) for n, p in layer.named_parameters() if _BIAS not in n)
            for layer in list(stack.layers)[start : start + count]
        )
        ends = (0, split - 1, split, len(counts) - 1)
        keys.append((stage < split, *(stage == end for end in ends), shapes))
    return tuple(keys)


def _holders(
    model: Any, encoder: _Stack, decoder: _Stack, counts: Sequence[int], split: int
) -> dict[str, dict[int, Any]]:
    """Return name of a group -> stage -> what has a weight that several stages have."""
    last = len(counts) - 1
    words = {0: encoder.before.get("embed_tokens"), split: decoder.before.get("embed_tokens")}
    places = [*words.items(), (last, model.get_output_embeddings())]
    weight = next(one.weight for _, one in places if one is not None)
    if not any(one is not None and one.weight is weight for _, one in places[1:]):
        weight = getattr(words[split], "weight", None)
    same = {at: one for at, one in reversed(places) if one is not None and one.weight is weight}
    holders: dict[str, dict[int, Any]] = {}
    if len(same) > 1:
        holders[EMBEDDING_GROUP] = dict(sorted(same.items()))
    for name, stack, run in (
        ("encoder_positions", encoder, range(split)),
        ("decoder_positions", decoder, range(split, last + 1)),
    ):
        for bias in stack.biases if len(run) > 1 else ():
            holders[name] = dict.fromkeys(run, stack.layers[0].get_submodule(bias))
    return holders


def _without_words(model: Any) -> list[nn.Module]:
    """Take away what names a tied embedding (`shared`), which forwards do not use."""
    used = {*model.get_encoder().modules(), *model.get_decoder().modules()}
    unused = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module not in used
    ]
    for module in unused:
        _replace(model, module, NoEmbedding())
    return [*unused]


def _without_embeddings(own: _Stack, border: StageBorder, passed: Passed) -> list[nn.Module]:
    for name, child in own.before.items():
        if name == "embed_tokens":
            stand_in: nn.Module = (
                ReceivingEmbedding(border, own.layers)
                if own.module is passed.encoder
                else HeldEmbedding(passed)
            )
        elif isinstance(child, nn.Conv1d):
            stand_in = NoConvolution(child, passed, receives=name == "conv2")
        else:
            stand_in = NoEmbedding() if isinstance(child, nn.Embedding) else nn.Identity()
            vars(stand_in)["num_embeddings"] = getattr(child, "num_embeddings", 0)  # Whisper asks
        setattr(own.module, name, stand_in)
    return [*own.before.values()]


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
