"""Pipeline stages of encoder-decoder models (T5, BART, Whisper).

The first stages hold encoder layers, the others decoder layers. The last encoder stage sends its
output. Each decoder stage uses it for cross-attention and forwards it after its own hidden states.
Its gradient returns the same way, and each stage adds its part. This is Megatron-LM's
`--pipeline-model-parallel-split-rank` (pretrain_t5.py; get_tensor_shapes and backward_step in
megatron/core/pipeline_parallel/schedules.py), which its newest T5 no longer has.

The embeddings and the head lie on the first stage, the first decoder stage and the last stage. In
T5 only the first layer holds the relative position bias; every stage gets a copy, and the gradients
of copies are summed, like those of tied weights.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from onerank.capture.parallelize.model_structure import by_name, refuse_early_norm
from onerank.capture.parallelize.pipeline.stage import (
    EMBEDDING_GROUP,
    NewGroup,
    PipelineStage,
    TiedEmbedding,
    dtype_of,
    receive_first,
    release,
    split_layers,
    without_outputs,
)
from onerank.capture.parallelize.pipeline.stage_boundary import (
    NoEmbedding,
    NoNorm,
    PassthroughTensor,
    ReceivingEmbedding,
    SendingHead,
    StageBoundary,
)
from onerank.capture.parallelize.sliced_outputs import leave_hidden_states
from onerank.ir import Pipeline
from onerank.ir.errors import SliceError


class EncoderDecoderInputs:
    """What a call's stage receives, given what the script calls the model with.

    Args:
        model: what is called.
        boundary: the stage's ends.
        at_first: whether the stage is the decoder's first.
        last: whether it is the last.
    """

    def __init__(self, model: Any, boundary: StageBoundary, *, at_first: bool, last: bool) -> None:
        self.boundary, self.encoder = boundary, model.get_encoder()
        self.hidden: Tensor | None = None
        self._at_first, self._last = at_first, last
        self._decoded: tuple[int, ...] = ()
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def __deepcopy__(self, _: Any) -> "EncoderDecoderInputs":
        return self  # as functions are, when a model with its hooks is copied

    def stand_for(self, encoder: nn.Module) -> None:
        """Let an encoder whose layers other stages have give what they sent."""
        for name, _ in [*encoder.named_children()]:
            delattr(encoder, name)
        encoder.forward = MethodType(self._receive, encoder)

    def encoded(self, given: Tensor) -> tuple[int, int]:
        """Return [batch, sequence] of the encoder, from its token ids or features."""
        if given.is_floating_point():
            return given.shape[0], self.encoder.config.max_source_positions
        return given.shape[0], given.shape[1]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = by_name(model, args, kwargs)
        for name in ("encoder_outputs", "inputs_embeds", "decoder_inputs_embeds"):
            if given.get(name) is not None:
                raise SliceError(
                    f"--pp: {type(model).__name__} was called with {name}, which one stage makes "
                    "of token ids: call it with those, and labels",
                    code="pp-other-inputs",
                )
        decoded = given.get("decoder_input_ids")
        decoded = given.get("labels") if decoded is None else decoded
        if decoded is None:
            raise SliceError(
                f"--pp: {type(model).__name__} was called without labels or decoder_input_ids, so "
                "that it has no loss: call model(..., labels=...)",
                code="pp-no-labels",
            )
        self._decoded = tuple(decoded.shape)

    def _receive(self, _: Any, *args: Any, **kwargs: Any) -> BaseModelOutput:
        ids = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        shapes: list[tuple[int, ...]] = [self.encoded(ids)]
        if not self._at_first:
            shapes.insert(0, self._decoded)
        *hidden, encoded = self.boundary.receive_all(shapes, ids.device)
        if hidden:
            (self.hidden,) = hidden
            self.boundary.address = hidden[0].data_ptr()
        self.boundary.beside = None if self._last else encoded
        return BaseModelOutput(last_hidden_state=encoded)  # pyright: ignore[reportArgumentType]


class SendingDecoder(nn.Module):
    """Stands where the decoder was: sends the encoder's hidden states; its output is the loss."""

    def __init__(self, boundary: StageBoundary) -> None:
        super().__init__()
        self._boundary = boundary

    def forward(self, *_: Any, encoder_hidden_states: Tensor, **__: Any) -> Any:
        loss = PassthroughTensor.of(
            self._boundary.send(PassthroughTensor.plain(encoder_hidden_states))
        )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=loss)  # pyright: ignore


class HeldEmbedding(nn.Module):
    """Stands where the decoder's embedding was: what was received with the encoder's output."""

    def __init__(self, passed: EncoderDecoderInputs) -> None:
        super().__init__()
        self._passed = passed

    def forward(self, _: Tensor) -> Tensor:
        hidden, self._passed.hidden = self._passed.hidden, None
        assert hidden is not None
        return self._passed.boundary.widened(hidden)


class NoConvolution(nn.Module):
    """Stands where a convolution before an encoder's layers was; the last receives."""

    def __init__(
        self, instead_of: nn.Conv1d, passed: EncoderDecoderInputs, *, receives: bool
    ) -> None:
        super().__init__()
        self.stride = instead_of.stride
        self._passed, self._receives = passed, receives

    def forward(self, features: Tensor) -> Tensor:
        if not self._receives:
            return features.as_subclass(_Convolved)
        boundary, plain = self._passed.boundary, features.as_subclass(Tensor)
        shape = self._passed.encoded(plain)
        (received,) = boundary.receive_all([shape], plain.device)
        boundary.address = received.data_ptr()
        widened: Any = boundary.widened(received)
        convolved = widened.as_subclass(_Convolved)
        convolved.stands_for = widened.stands_for
        return convolved


class _Convolved(PassthroughTensor):
    """What passes through the activations behind convolutions, and is turned already."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor itself for these."""
        if func in (nn.functional.gelu, Tensor.permute):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


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
                f"{encoder} layers, the others to the decoder's {decoder}",
                code="pp-mixed-stage",
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
) -> PipelineStage:
    """Keep the layers of this rank's stage, and place the boundaries; as for `stage_model`.

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
    boundary = StageBoundary(group, model.config.d_model, dtype, shards)
    dropped = _keep(own, kept)
    if stage not in holders.get(EMBEDDING_GROUP, {0: None}):
        dropped += _without_words(model)
    ends = EncoderDecoderInputs(model, boundary, at_first=stage == split, last=stage == stages - 1)
    if stage < split:
        _replace(model, decoder.module, SendingDecoder(boundary))
        _replace(model, head, nn.Identity())
        dropped += [decoder.module, head]
    else:
        dropped += encoder.module.children()
        ends.stand_for(encoder.module)
        if stage < stages - 1:
            _replace(model, head, SendingHead(boundary))
            dropped.append(head)
    if stage not in (0, split):
        dropped += _without_embeddings(own, boundary, ends)
        receive_first(boundary, next(iter(own.layers)))
    if stage < stages - 1:
        leave_hidden_states(own.module)
        without_outputs(model, boundary, (_ENCODED,) if stage < split else ())
        dropped += _leave(own, boundary, at_last=stage == split - 1)
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
    return PipelineStage(Pipeline(stage, counts), alike, listed, before, after, tuple(tied))


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


def _leave(own: _Stack, boundary: StageBoundary, *, at_last: bool) -> list[nn.Module]:
    """Take note of what a stage gives: at the encoder's last its output, else the last layer's."""
    if at_last:

        def encoded(module: nn.Module, given: Any, output: Any) -> None:
            boundary.left(module, given, output[0])

        own.module.register_forward_hook(encoded)
        return []
    for name in own.norms:
        setattr(own.module, name, NoNorm(boundary))
    [*own.layers][-1].register_forward_hook(boundary.left)
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
            f"{len(lists)} lists: leave --pp out",
            code="pp-model-structure",
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


def _without_embeddings(
    own: _Stack, boundary: StageBoundary, passed: EncoderDecoderInputs
) -> list[nn.Module]:
    for name, child in own.before.items():
        if name == "embed_tokens":
            stand_in: nn.Module = (
                ReceivingEmbedding(boundary, own.layers)
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
