"""Pipeline stages of encoder-decoder models (T5, BART, Whisper).

The first stages hold encoder layers, the others decoder layers. The last encoder stage sends the
encoder's output. Each decoder stage uses it for cross-attention and sends it on after the hidden
states. The output's gradient returns the same way, and each decoder stage adds its part. This is
Megatron-LM's `--pipeline-model-parallel-split-rank` (pretrain_t5.py; get_tensor_shapes and
backward_step in megatron/core/pipeline_parallel/schedules.py), which its newest T5 no longer has.

The first stage, the first decoder stage and the last stage hold the embeddings and the head. In T5
only the first layer of a stack holds the relative position bias; every stage of that stack gets a
copy, and the gradients of the copies are all-reduced, like those of tied weights.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.model_structure import by_name, refuse_early_norm, split_layers
from onerank.capture.parallelize.module_names import parent_of
from onerank.capture.parallelize.pipeline.stage import (
    EMBEDDING_GROUP,
    NewGroup,
    PipelineStage,
    dtype_of,
    feed_received_states,
    free_parameters,
    refuse_absent_outputs,
    share_weights,
)
from onerank.capture.parallelize.pipeline.stage_boundary import (
    EmptyEmbedding,
    PassthroughTensor,
    ReceivingEmbedding,
    SendingHead,
    SkippedNorm,
    StageBoundary,
)
from onerank.capture.parallelize.sliced_outputs import leave_hidden_states
from onerank.ir import Pipeline
from onerank.ir.errors import SliceError

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput


class EncoderDecoderInputs:
    """Receives the inputs of a stage, in shapes taken from the arguments of the model's call.

    Args:
        model: the model that the script calls.
        boundary: communication with the neighbouring stages.
        first_decoder_stage: whether the stage is the first of the decoder.
        last_stage: whether the stage is the last of the pipeline.
    """

    def __init__(
        self, model: Any, boundary: StageBoundary, *, first_decoder_stage: bool, last_stage: bool
    ) -> None:
        self.boundary, self.encoder = boundary, model.get_encoder()
        self.hidden: Tensor | None = None
        self._first_decoder_stage, self._last_stage = first_decoder_stage, last_stage
        self._decoded: tuple[int, ...] = ()
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def __deepcopy__(self, _: Any) -> "EncoderDecoderInputs":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    def replace_encoder(self, encoder: nn.Module) -> None:
        """Empty an encoder on a decoder stage; its forward returns the received encoder output."""
        for name, _ in [*encoder.named_children()]:
            delattr(encoder, name)
        encoder.forward = MethodType(self._receive, encoder)

    def encoder_shape(self, inputs: Tensor) -> tuple[int, int]:
        """Return the encoder's [batch, sequence], from token ids or features."""
        if inputs.is_floating_point():
            # Features (Whisper) are longer than the encoder's output: a convolution has a stride of
            # 2.
            return inputs.shape[0], self.encoder.config.max_source_positions
        return inputs.shape[0], inputs.shape[1]

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = by_name(model, args, kwargs)
        for name in ("encoder_outputs", "inputs_embeds", "decoder_inputs_embeds"):
            if arguments.get(name) is not None:
                raise SliceError(
                    f"--pp: {type(model).__name__} was called with {name}, which one stage "
                    "computes from token ids\n  call it with input_ids and labels",
                    code="pp-other-inputs",
                )
        decoded = arguments.get("decoder_input_ids")
        # Without decoder ids the model shifts the labels, whose shape stays.
        decoded = arguments.get("labels") if decoded is None else decoded
        if decoded is None:
            raise SliceError(
                f"--pp: {type(model).__name__} was called without labels or decoder_input_ids, so "
                "it computes no loss: call model(..., labels=...)",
                code="pp-no-labels",
            )
        self._decoded = tuple(decoded.shape)

    def _receive(self, _: Any, *args: Any, **kwargs: Any) -> "BaseModelOutput":
        from transformers.modeling_outputs import BaseModelOutput

        ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        shapes: list[tuple[int, ...]] = [self.encoder_shape(ids)]
        # The first decoder stage embeds its tokens itself.
        if not self._first_decoder_stage:
            shapes.insert(0, self._decoded)
        *hidden, encoder_output = self.boundary.receive_all(shapes, ids.device)
        if hidden:
            (self.hidden,) = hidden
            self.boundary.received_address = hidden[0].data_ptr()
        self.boundary.encoder_output = None if self._last_stage else encoder_output
        return BaseModelOutput(last_hidden_state=encoder_output)


class SendingDecoder(nn.Module):
    """Replaces the decoder on encoder stages: sends the hidden states and returns the loss."""

    def __init__(self, boundary: StageBoundary) -> None:
        super().__init__()
        self._boundary = boundary

    def forward(self, *_: Any, encoder_hidden_states: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        loss = PassthroughTensor.of(
            self._boundary.send(PassthroughTensor.plain(encoder_hidden_states))
        )
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=loss)


class ReceivedEmbedding(nn.Module):
    """Replaces the decoder's embedding: hidden states received with the encoder's output."""

    def __init__(self, inputs: EncoderDecoderInputs) -> None:
        super().__init__()
        self._inputs = inputs

    def forward(self, _: Tensor) -> Tensor:
        hidden, self._inputs.hidden = self._inputs.hidden, None
        assert hidden is not None
        return self._inputs.boundary.whole_sequence_placeholder(hidden)


class SkippedConvolution(nn.Module):
    """Replaces a convolution before an encoder's layers (Whisper).

    Args:
        convolution: the convolution to replace.
        inputs: receives the stage's inputs.
        receives: whether this convolution, the last, returns the received hidden states; else it
            returns its input.
    """

    def __init__(
        self, convolution: nn.Conv1d, inputs: EncoderDecoderInputs, *, receives: bool
    ) -> None:
        super().__init__()
        self.stride = convolution.stride
        self._inputs, self._receives = inputs, receives

    def forward(self, features: Tensor) -> Tensor:
        if not self._receives:
            return features.as_subclass(_PassthroughConvolved)
        boundary, plain = self._inputs.boundary, features.as_subclass(Tensor)
        shape = self._inputs.encoder_shape(plain)
        (received,) = boundary.receive_all([shape], plain.device)
        boundary.received_address = received.data_ptr()
        placeholder: Any = boundary.whole_sequence_placeholder(received)
        convolved = placeholder.as_subclass(_PassthroughConvolved)
        convolved.represents = placeholder.represents
        return convolved


class _PassthroughConvolved(PassthroughTensor):
    """A tensor that also ignores the activations and the permutation after convolutions."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor unchanged for GELU and permute."""
        if func in (nn.functional.gelu, Tensor.permute):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


_BIAS = "relative_attention_bias"

_HAS_BIAS = f"has_{_BIAS}"

_ENCODED = "encoder_last_hidden_state"


@dataclass(frozen=True)
class _Stack:
    """An encoder or decoder module and its parts by name."""

    module: Any
    layers: nn.ModuleList
    before: dict[str, nn.Module]
    norms: dict[str, nn.Module]

    @property
    def biases(self) -> list[str]:
        """Relative position biases that only the first layer holds, by name in the layer."""
        first, *others = [dict(layer.named_modules()) for layer in self.layers]
        return [name for name in first if name.endswith(_BIAS) and others and name not in others[0]]


def split_stacks(
    encoder: int, decoder: int, stages: int, requested: Sequence[int] = ()
) -> tuple[tuple[int, ...], int]:
    """Return the number of layers of each stage, and the number of encoder stages.

    Each stack gets stages in proportion to its layers, at least one, and is split evenly.

    Args:
        encoder: layers of the encoder.
        decoder: layers of the decoder.
        stages: number of stages.
        requested: layers of each stage; () selects the even split.

    Raises:
        SliceError: fewer layers than stages, or `requested` does not add up.
    """
    if requested:
        counts = split_layers(encoder + decoder, stages, requested)
        # A stage holds layers of one stack only, so one of them must end with the encoder.
        ends = [*itertools.accumulate(counts)]
        if encoder not in ends:
            raise SliceError(
                f"--pp-layers {','.join(map(str, requested))}: one stage would hold layers "
                f"of both encoder and decoder\n  the first stages must add up to the encoder's "
                f"{encoder} layers, the others to the decoder's {decoder}",
                code="pp-mixed-stage",
            )
        return counts, ends.index(encoder) + 1
    split_layers(encoder + decoder, stages)
    encoder_stages = round(stages * encoder / (encoder + decoder))
    # Every stage needs a layer, and each stack a stage.
    encoder_stages = min(max(encoder_stages, 1, stages - decoder), stages - 1, encoder)
    decoder_counts = split_layers(decoder, stages - encoder_stages)
    return split_layers(encoder, encoder_stages) + decoder_counts, encoder_stages


def stage_encoder_decoder(
    model: Any,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    new_group: NewGroup,
    requested: Sequence[int] = (),
    *,
    shards: int = 1,
) -> PipelineStage:
    """Reduce an encoder-decoder model to one stage; arguments as for `stage_model`.

    Raises:
        SliceError: a stack is not embeddings, one list of layers and a norm, or there is only
            one stage.
    """
    stage, stages = group.rank(), group.size()
    encoder, decoder = (
        _stack(model, module) for module in (model.get_encoder(), model.get_decoder())
    )
    counts, split = split_stacks(len(encoder.layers), len(decoder.layers), stages, requested)
    stack, begin = (encoder, 0) if stage < split else (decoder, split)
    first = sum(counts[begin:stage])
    kept = slice(first, first + counts[stage])
    before = sum(p.numel() for p in model.parameters())
    work_keys = _work_keys(encoder, decoder, counts, split)
    list_name = next(name for name, module in model.named_modules() if module is stack.layers)
    head = model.get_output_embeddings()
    holders = _shared_weights(model, encoder, decoder, counts, split)
    dtype = functools.partial(dtype_of, stack.layers, next(stack.layers.parameters()).dtype)
    boundary = StageBoundary(group, model.config.d_model, dtype, shards)
    dropped = _keep_layers(stack, kept)
    if stage not in holders.get(EMBEDDING_GROUP, {0: None}):
        dropped += _drop_unused_embeddings(model)
    inputs = EncoderDecoderInputs(
        model, boundary, first_decoder_stage=stage == split, last_stage=stage == stages - 1
    )
    if stage < split:
        _replace(model, decoder.module, SendingDecoder(boundary))
        _replace(model, head, nn.Identity())
        dropped += [decoder.module, head]
    else:
        dropped += encoder.module.children()
        inputs.replace_encoder(encoder.module)
        if stage < stages - 1:
            _replace(model, head, SendingHead(boundary))
            dropped.append(head)
    if stage not in (0, split):
        dropped += _replace_embeddings(stack, boundary, inputs)
        feed_received_states(boundary, next(iter(stack.layers)))
    if stage < stages - 1:
        leave_hidden_states(stack.module)
        refuse_absent_outputs(model, boundary, (_ENCODED,) if stage < split else ())
        dropped += _record_stage_output(stack, boundary, last_encoder_stage=stage == split - 1)
    norms = [getattr(stack.module, name) for name in stack.norms]
    refuse_early_norm(model, stack.layers, norms, "--pp")
    tied = share_weights(holders, stage, ranks, new_group)
    free_parameters(dropped, model)
    after = sum(p.numel() for p in model.parameters())
    return PipelineStage(Pipeline(stage, counts), work_keys, list_name, before, after, tied)


def _keep_layers(stack: _Stack, kept: slice) -> list[nn.Module]:
    """Keep a stage's layers under their names; copy the first layer's position biases to it."""
    layers = [*stack.layers.named_children()]
    biases = {name: stack.layers[0].get_submodule(name) for name in stack.biases}
    dropped = [*layers[: kept.start], *layers[kept.stop :]]
    for name, _ in dropped:
        delattr(stack.layers, name)
    first = layers[kept.start][1]
    for name, bias in biases.items():
        attention = first.get_submodule(parent_of(name))
        setattr(attention, _BIAS, bias)
        # T5's attention computes the bias only if this is set.
        setattr(attention, _HAS_BIAS, True)
    return [layer for _, layer in dropped]


def _record_stage_output(
    stack: _Stack, boundary: StageBoundary, *, last_encoder_stage: bool
) -> list[nn.Module]:
    """Record a stage's output: of the encoder on its last stage, else of the last layer."""
    if last_encoder_stage:

        def record_encoder_output(module: nn.Module, args: Any, output: Any) -> None:
            boundary.record_output(module, args, output[0])

        stack.module.register_forward_hook(record_encoder_output)
        return []
    for name in stack.norms:
        setattr(stack.module, name, SkippedNorm(boundary))
    [*stack.layers][-1].register_forward_hook(boundary.record_output)
    return [*stack.norms.values()]


def _stack(model: nn.Module, module: Any) -> _Stack:
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    children = {
        name: child
        for name, child in module.named_children()
        if child not in lists and any(True for _ in child.parameters())
    }
    norms = {n: child for n, child in children.items() if "norm" in n and "embedding" not in n}
    before = {n: child for n, child in children.items() if n not in norms}
    known = all(
        isinstance(child, nn.Embedding | nn.LayerNorm | nn.Conv1d) for child in before.values()
    )
    if len(lists) != 1 or len(norms) > 1 or not known:
        raise SliceError(
            f"{type(model).__name__} cannot be cut into pipeline stages: expected embeddings, one "
            f"list of layers and a norm in {type(module).__name__}; found "
            f"{', '.join(children)} and {len(lists)} lists: leave --pp out",
            code="pp-model-structure",
        )
    return _Stack(module, lists[0], before, norms)


def _work_keys(
    encoder: _Stack, decoder: _Stack, counts: Sequence[int], split: int
) -> tuple[Hashable, ...]:
    """Return a key per stage; stages with equal keys do the same work."""
    keys: list[Hashable] = []
    for stage, count in enumerate(counts):
        stack, begin = (encoder, 0) if stage < split else (decoder, split)
        start = sum(counts[begin:stage])
        shapes = tuple(
            tuple((n, p.shape) for n, p in layer.named_parameters() if _BIAS not in n)
            for layer in list(stack.layers)[start : start + count]
        )
        # The first and last stage of each stack hold or send more than the stages between them.
        ends = (0, split - 1, split, len(counts) - 1)
        keys.append((stage < split, *(stage == end for end in ends), shapes))
    return tuple(keys)


def _shared_weights(
    model: Any, encoder: _Stack, decoder: _Stack, counts: Sequence[int], split: int
) -> dict[str, dict[int, Any]]:
    """Return group name -> stage -> module with a weight that several stages share."""
    # Models tie all of these (T5), some or none, so shared weights are found by identity.
    last_stage = len(counts) - 1
    embeddings = {0: encoder.before.get("embed_tokens"), split: decoder.before.get("embed_tokens")}
    places = [*embeddings.items(), (last_stage, model.get_output_embeddings())]
    weight = next(table.weight for _, table in places if table is not None)
    if not any(table is not None and table.weight is weight for _, table in places[1:]):
        weight = getattr(embeddings[split], "weight", None)
    sharing = {
        stage: table
        for stage, table in reversed(places)
        if table is not None and table.weight is weight
    }
    holders: dict[str, dict[int, Any]] = {}
    if len(sharing) > 1:
        holders[EMBEDDING_GROUP] = dict(sorted(sharing.items()))
    for name, stack, stages in (
        ("encoder_positions", encoder, range(split)),
        ("decoder_positions", decoder, range(split, last_stage + 1)),
    ):
        for bias in stack.biases if len(stages) > 1 else ():
            holders[name] = dict.fromkeys(stages, stack.layers[0].get_submodule(bias))
    return holders


def _drop_unused_embeddings(model: Any) -> list[nn.Module]:
    """Remove modules that only name a tied embedding (`shared`) and are unused in forwards."""
    used = {*model.get_encoder().modules(), *model.get_decoder().modules()}
    unused = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module not in used
    ]
    for module in unused:
        _replace(model, module, EmptyEmbedding())
    return [*unused]


def _replace_embeddings(
    stack: _Stack, boundary: StageBoundary, inputs: EncoderDecoderInputs
) -> list[nn.Module]:
    for name, child in stack.before.items():
        if name == "embed_tokens":
            replacement: nn.Module = (
                ReceivingEmbedding(boundary, stack.layers)
                if stack.module is inputs.encoder
                else ReceivedEmbedding(inputs)
            )
        elif isinstance(child, nn.Conv1d):
            replacement = SkippedConvolution(child, inputs, receives=name == "conv2")
        else:
            replacement = EmptyEmbedding() if isinstance(child, nn.Embedding) else nn.Identity()
            # Whisper's decoder reads the number of positions from its embedding.
            vars(replacement)["num_embeddings"] = getattr(child, "num_embeddings", 0)
        setattr(stack.module, name, replacement)
    return [*stack.before.values()]


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
