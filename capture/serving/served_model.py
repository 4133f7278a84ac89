"""A Hugging Face model that computes the steps of an inference engine.

The engines put the new tokens of all sequences into one row, so linear layers see one matrix of
tokens. Attention runs for the prefills and for the decodes of a step, each against its KV cache.
Logits are computed for the last token of each sequence. This module lets a model of transformers
do the same, through the function that transformers looks up for its attention and the object that
it passes as its KV cache.
"""

import contextlib
import inspect
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.no_device.emulated_gpu import MOST_FLASH_HEAD
from onerank.capture.serving import latent_attention, sequence_states, sparse_attention
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.capture.serving.compositions import Composition
from onerank.capture.serving.sequence_states import SequenceStates
from onerank.ir.errors import CaptureError, OneRankError

_ATTENTION = "onerank_serving"

# torch's dispatcher has no types.
_ops: Any = torch.ops

_LEAST_FLASH_CAPABILITY = 8, 0


def read_config(path: Path) -> Any:
    """Return the configuration of a transformers model.

    Args:
        path: a `config.json`, or the directory with it.

    Raises:
        CaptureError: it is not a configuration of a causal language model that transformers knows,
            or its weights are quantised.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    file = path / "config.json" if path.is_dir() else path
    try:
        record: Any = msgspec.json.decode(file.read_bytes())
        kind = record["model_type"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or "is no JSON object with a model_type"
        raise CaptureError(
            f"{file}: {why}\n  expected the config.json of a transformers model",
            code="serve-no-config",
        ) from None
    try:
        config: Any = AutoConfig.for_model(**record)
    except Exception as error:
        # A configuration checks its values itself, with errors of many classes.
        raise CaptureError(
            f"{file}: transformers does not read this configuration of {kind!r}: {_cause(error)}",
            code="serve-model-unknown",
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportPrivateUsage]
        raise CaptureError(
            f"{file}: transformers has no causal language model for {kind!r}",
            code="serve-model-unknown",
        )
    if config.get_text_config().num_hidden_layers == 0:
        raise CaptureError(
            f"{file}: the model has no layers (num_hidden_layers is 0)", code="serve-model-unknown"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise CaptureError(
            f"{file}: quantised weights are not served\n  remove quantization_config to measure "
            "the model in the config's dtype",
            code="serve-quantised",
        )
    return config


def build_model(config: Any, device: str, *, shapes_only: bool) -> Any:
    """Return a causal language model with random weights in the configuration's dtype.

    Its weights have no storage on `meta` yet unless they are fake, so that a model larger than the
    device can be sliced first; `materialise` gives it storage.

    Args:
        config: configuration of the model.
        device: where weights without a device are created.
        shapes_only: whether tensors are fake, which need no memory.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(_ATTENTION, _attention_function)
    config.use_cache = True
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device(device if shapes_only else "meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_ATTENTION
            )
    except Exception as error:
        # Older models have a table of attention classes.
        if isinstance(error, KeyError) and error.args == (_ATTENTION,):
            raise _own_attention(type(config).__name__) from error
        # Models check their configuration themselves, with errors of many classes.
        raise CaptureError(
            f"transformers does not build a model of this {type(config).__name__}: "
            f"{type(error).__name__}: {_cause(error)}\n"
            "  check the sizes and lists of layers in the configuration",
            code="serve-model-unknown",
        ) from error
    return model.eval()


def _cause(error: Exception) -> str:
    """Return the first line of an error, with the next one if it only introduces that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    introduces = bool(lines) and lines[0].endswith(":")
    return " ".join(lines[: 2 if introduces else 1])


def adopt_model(model: Any) -> Any:
    """Return a model that a script built, for inference with the attention of an engine's steps."""
    from transformers import AttentionInterface, PretrainedConfig

    AttentionInterface.register(_ATTENTION, _attention_function)
    # Not `set_attn_implementation`: a pipeline stage has two copies of the configuration.
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = _ATTENTION  # pyright: ignore[reportPrivateUsage]
    return model.eval()


def materialise(model: Any, device: str) -> None:
    """Give a model on `meta` random weights on a device.

    Zeros would draw less power in a GPU's multipliers, and so raise its clocks.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    # `to_empty` creates a parameter for each module that has one.
    for (first, own), *others in tied.values():
        for module, name in others:
            setattr(module, name, getattr(first, own))
    initialisers: dict[int, Any] = {}
    for owner in model.modules():
        if hasattr(owner, "_init_weights"):
            # The innermost model of transformers initialises a module, as in transformers.
            initialisers.update(dict.fromkeys(map(id, owner.modules()), owner))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.02)
            else:
                parameter.data.fill_(0.0 if name == "bias" else 1.0)
        buffers = list(module.buffers(recurse=False))
        for buffer in buffers:
            # `_init_weights` does not compute all of them, and uninitialised memory may be NaN.
            buffer.fill_(1)
        if buffers:
            # transformers computes the frequencies of rotary embeddings here.
            initialisers[id(module)]._init_weights(module)


@dataclass
class StepCache:
    """The KV cache of one engine step, as transformers takes it.

    Keys and values of a step's prefills and decodes are tensors [sequences, heads, tokens, size]
    per layer. A layer with a window holds the tokens that the step sees: engines free the others.
    Of latent attention, the vectors are the keys of one head, without values. A repeated step
    writes the same places again.

    Attributes:
        composition: the step's sequences.
        tensors: keys and values by layer, part of the step, and whether they are values.
        windows: window of each layer that has one and that has run.
        states: states of constant size of linear attention, Mamba 2 and short convolutions.
        index: quantised keys of indexers by layer and part, [sequences, tokens, width].
        keys: new keys of the running step, by layer.
    """

    composition: Composition
    tensors: dict[tuple[int, str, bool], Tensor] = field(
        default_factory=dict[tuple[int, str, bool], Tensor]
    )
    windows: dict[int, AttentionWindow] = field(default_factory=dict[int, AttentionWindow])
    states: SequenceStates = field(init=False)
    index: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])
    keys: dict[int, weakref.ref[Tensor]] = field(default_factory=dict[int, weakref.ref[Tensor]])

    is_compileable = False

    def __post_init__(self) -> None:
        self.states = SequenceStates(self.composition)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; the attention function writes them to the cache."""
        _step.layer, _step.writes = layer_idx, True
        # Layers that share the keys of this one pass the same tensor to their attention. A strong
        # reference would keep the keys of all layers in memory.
        self.keys[layer_idx] = weakref.ref(keys)
        return keys, values

    def layer_of(self, keys: Tensor) -> int:
        """Return the layer whose cache has the keys that a layer attends to."""
        return next((layer for layer, own in self.keys.items() if own() is keys), _step.layer)

    def update_conv_state(
        self, rows: Tensor, layer_idx: int, *, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Return the new inputs of a convolution, whose operator has the earlier ones."""
        self.states.layer, self.states.convolution = layer_idx, state_idx
        return rows

    def update_recurrent_state(self, state: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the operator of a scan has updated the state.

        Raises:
            CaptureError: the layer has computed its state otherwise.
        """
        if not isinstance(state, sequence_states.UpdatedState):
            raise sequence_states.unsupported(
                f"the states of its layer {self.states.layer} by a function without an operator"
            )

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None: a layer with states then computes as in a prefill, for all parts."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False, as `get_conv_state` returns None; transformers 5.17 calls it."""
        return False

    def is_recording_past(self, *_: Any) -> bool:
        """Return False: no tokens are taken back."""
        return False

    def get_seq_length(self, *_: Any) -> int:
        """Return the longest context of the step."""
        return max(self.composition.prefill_context, self.composition.decode_context)

    def sequences(self, part: str) -> tuple[int, int]:
        """Return the sequences of a part of the step, and the tokens of each before the step.

        Args:
            part: "prefill" or "decode".
        """
        c = self.composition
        if part == "prefill":
            return c.prefills, c.prefill_context
        return c.decodes, c.decode_context

    def cached_before(self, part: str, layer: int) -> int:
        """Return the tokens of each sequence that a layer's cache holds before the step.

        Args:
            part: "prefill" or "decode".
            layer: index of the layer.
        """
        _, context = self.sequences(part)
        window = self.windows.get(layer)
        return context if window is None else window.seen_before(context)

    def allocate(self, like: "StepCache") -> None:
        """Allocate the keys and values of all layers, as engines do before their first step.

        Allocated layer by layer in a step, they would lie between its activations and leave gaps
        in the allocator's segments.

        Args:
            like: cache of a step of one decode, from which heads, sizes and windows are read.
        """
        self.windows.update(like.windows)
        self.states.allocate(like.states)
        for part, count, new in self.composition.parts():
            for (layer, _), other in like.index.items():
                tokens = self.cached_before(part, layer) + new
                self.index[layer, part] = other.new_zeros(count, tokens, other.shape[2])
            for (layer, _, value), other in like.tensors.items():
                tokens = self.cached_before(part, layer) + new
                shape = count, other.shape[1], tokens, other.shape[3]
                self.tensors[layer, part, value] = other.new_empty(shape).normal_()

    def restore(self) -> None:
        """Do nothing: a step overwrites what it wrote before."""

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Return all keys, values and states."""
        return *self.tensors.values(), *self.states.tensors.values(), *self.index.values()

    def bytes_per_token(self) -> dict[int, int]:
        """Return the bytes of one token of one sequence, by layer.

        The step must have one part only, prefill or decode; two would count twice.
        """
        sizes: dict[int, int] = {}
        for (layer, *_), tensor in self.tensors.items():
            size = tensor.nbytes // (tensor.shape[0] * tensor.shape[2])
            sizes[layer] = sizes.get(layer, 0) + size
        for (layer, _), tensor in self.index.items():
            sizes[layer] = sizes.get(layer, 0) + tensor.shape[2]
        return sizes

    def index_room(self, part: str, new: Tensor, scale_bytes: int) -> Tensor:
        """Return the cache of the running layer's indexer, allocated on the first call.

        Args:
            part: "prefill" or "decode".
            new: new keys, [sequences, new tokens, elements], of which it keeps a byte each.
            scale_bytes: bytes of a key's scale.
        """
        key = _step.layer, part
        if key not in self.index:
            count, tokens, width = new.shape
            shape = count, self.cached_before(part, _step.layer) + tokens, width + scale_bytes
            self.index[key] = new.new_zeros(shape, dtype=torch.uint8)
        return self.index[key]

    def room(self, part: str, new: Tensor, *, value: bool = False, width: int = 0) -> Tensor:
        """Return the keys or values of a part of the running layer, allocated on the first call.

        Args:
            part: "prefill" or "decode".
            new: the new ones, [sequences, heads, new tokens, size].
            value: whether they are values.
            width: elements of a token and head in the cache; 0: as many as the new ones have.
        """
        key = _step.layer, part, value
        if key not in self.tensors:
            count, heads, tokens, size = new.shape
            before = self.cached_before(part, _step.layer)
            shape = count, heads, before + tokens, width or size
            self.tensors[key] = torch.empty(shape, dtype=new.dtype, device=new.device).normal_()
        return self.tensors[key]


@dataclass
class _Step:
    """What the attention function needs to know of the step that runs.

    Attributes:
        cache: its KV cache; None while no step runs.
        layer: index of the layer that runs; of a layer that shares its keys, the layer that caches
            them.
        writes: whether the running layer caches its keys; one that shares those of an earlier layer
            does not.
        callers: receives the modules that call attention, while it is not None.
    """

    cache: StepCache | None = None
    layer: int = 0
    writes: bool = False
    callers: list[nn.Module] | None = None


# A global, because models pass no argument of ours on to the attention function.
_step = _Step()


class _CacheWrite(nn.Module):
    """Writes new keys and values to the KV cache; a module, to have a scope."""

    def forward(self, keys: Tensor, values: Tensor, new: tuple[Tensor, Tensor], at: int) -> None:
        """Write new keys and values from position `at` on."""
        for cached, added in zip((keys, values), new, strict=True):
            cached[:, :, at:].copy_(added)


class _PartAttention(nn.Module):
    """Attention of the prefills, or of the decodes, of a step; a module, to have a scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.cache_write = _CacheWrite()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: AttentionWindow | None,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens; tensors as in transformers."""
        cache = _step.cache
        assert cache is not None, "a step is running"
        count, _ = cache.sequences(self.part)
        # [1, heads, sequences * tokens, size] -> [sequences, heads, tokens, size]
        q, k, v = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in (query, key, value))
        keys = cache.room(self.part, k, value=False)
        values = cache.room(self.part, v, value=True)
        if _step.writes:
            self.cache_write(keys, values, (k, v), cache.cached_before(self.part, _step.layer))
        out = _attend(q, keys, values, scale, window)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


class _LatentWrite(nn.Module):
    """Writes latent vectors and rotary parts to the KV cache; a module, to have a scope."""

    def forward(self, cached: Tensor, latents: Tensor, rotary: Tensor) -> None:
        """Write new vectors, in one kernel as engines do."""
        torch.cat((latents, rotary), dim=-1, out=cached)


class _LatentPart(nn.Module):
    """Latent attention of the prefills, or of the decodes, of a step; a module, to have a scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.cache_write = _LatentWrite()

    def forward(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        weight: Tensor,
        scale: float | None,
        window: AttentionWindow | None,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens.

        Args:
            query: queries, [1, heads, tokens, width].
            new: latent vectors and rotary parts, [1, 1, tokens, width] each.
            weight: as `latent_attention.up_weight` returns it.
            scale: as in transformers.
            window: tokens that a query sees; None for all up to itself.
        """
        cache = _step.cache
        assert cache is not None, "a step is running"
        count, _ = cache.sequences(self.part)
        # [1, 1, sequences * tokens, width] -> [sequences, 1, tokens, width]
        latents, rotary = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in new)
        width = latents.shape[-1] + rotary.shape[-1]
        cached = cache.room(self.part, latents, width=width)
        before = cache.cached_before(self.part, _step.layer)
        self.cache_write(cached[:, :, before:], latents, rotary)
        if self.part == "decode":
            return latent_attention.decode(cached[:, 0], weight, query[0], scale).unsqueeze(0)
        queries = query[0].unflatten(1, (count, -1)).transpose(0, 1)
        keys, values = latent_attention.expand(cached[:, 0], weight, queries)
        out = _attend(queries, keys, values, scale, window)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


class _SparsePart(nn.Module):
    """Sparse latent attention of a part of a step; a module, to have a scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.cache_write = _LatentWrite()

    def forward(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        weight: Tensor,
        scale: float | None,
        indices: Tensor,
    ) -> Tensor:
        """Return [1, tokens, heads, size] of the part's tokens; arguments as `_LatentPart`.

        `indices` are the tokens that each query attends to, [sequences, new tokens, count].
        """
        cache = _step.cache
        assert cache is not None, "a step is running"
        count, _ = cache.sequences(self.part)
        latents, rotary = (t[0].unflatten(1, (count, -1)).transpose(0, 1) for t in new)
        rank, width = latents.shape[-1], latents.shape[-1] + rotary.shape[-1]
        cached = cache.room(self.part, latents, width=width)
        self.cache_write(
            cached[:, :, cache.cached_before(self.part, _step.layer) :], latents, rotary
        )

        def attend(joined: Tensor) -> Tensor:
            result: Tensor = _ops.onerank_serving.sparse_latent_attention(
                joined.unflatten(0, (count, -1)).contiguous(),
                *(cached[:, 0], indices, rank),
                query.shape[-1] ** -0.5 if scale is None else scale,
            )
            return result.flatten(0, 1)

        attended = latent_attention.absorbed_attention(query[0], weight, width - rank, attend)
        return attended.unsqueeze(0)


class _Parts(nn.Module):
    """The two kinds of attention of a layer."""

    def __init__(self, of_part: type[_PartAttention | _LatentPart | _SparsePart]) -> None:
        super().__init__()
        self.prefill = of_part("prefill")
        self.decode = of_part("decode")


PARTS = "step_attention"
"""Name of the module, below a layer's attention, that holds the attention of a step's parts."""


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    indices: dict[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a step, as a function of transformers' interface.

    Returns:
        [1, tokens, heads, size], prefills first, and no weights.
    """
    if _step.callers is not None:
        _step.callers.append(module)
        if not hasattr(module, PARTS):
            latent = latent_attention.keeps_latents(module)
            of_part = _SparsePart if latent and indices is not None else _LatentPart
            setattr(module, PARTS, _Parts(of_part if latent else _PartAttention))
    cache = _step.cache
    assert cache is not None, "a step is running"
    step, parts = cache.composition, getattr(module, PARTS)
    _step.layer = cache.layer_of(key)
    window = _window_of(module, sliding_window)
    if window is not None:
        cache.windows[_step.layer] = window
    chunk = step.prefills * step.prefill_tokens
    outputs: list[Tensor] = []
    for part, start, end in ((parts.prefill, 0, chunk), (parts.decode, chunk, step.new_tokens)):
        if start < end:
            q, k, v = (t[:, :, start:end] for t in (query, key, value))
            operands, seen = (q, k, v), window
            if isinstance(part, _LatentPart | _SparsePart):
                operands = q, (k, v), latent_attention.up_weight(module)
            if isinstance(part, _SparsePart):
                assert indices is not None, "the layer's first call had some"
                seen = indices[part.part]
            outputs.append(part(*operands, scaling, seen))
    _step.writes = False
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]), None


def _window_of(module: nn.Module, sliding_window: int | None) -> AttentionWindow | None:
    """Return the window of a layer's attention; None if a query sees all tokens up to itself."""
    if sliding_window is not None:
        return AttentionWindow(sliding_window)
    # transformers states the chunks of a layer in its mask, and passes this function no mask.
    config: Any = vars(module).get("config")
    types = getattr(config, "layer_types", None)
    if types and types[_step.layer] == "chunked_attention":
        return AttentionWindow(int(config.attention_chunk_size), chunked=True)
    return None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: AttentionWindow | None
) -> Tensor:
    """Return attention of queries that are the last tokens of the keys.

    The first query sees the first key: keys before its window are not in the cache.
    """
    tokens, cached = q.shape[2], k.shape[2]
    hiding = window if window is not None and tokens > 1 and cached > window.tokens else None
    if hiding is not None and hiding.chunked:
        return _attend_to_chunks(q, k, v, scale, hiding.tokens)
    size = q.shape[-1]
    flash = (
        q.is_cuda
        # FlashAttention 2 does not run on Turing and Volta.
        and torch.cuda.get_device_capability(q.device) >= _LEAST_FLASH_CAPABILITY
        and q.dtype in (torch.float16, torch.bfloat16)
        and size <= MOST_FLASH_HEAD
        and size % 8 == 0
        and v.shape[-1] == size
    )
    if flash and hiding is not None:
        # Queries see `left` keys before their own; the operator takes tokens before heads.
        left = hiding.tokens - 1
        out = torch.ops.aten._flash_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, v)),
            *(None, None, tokens, cached, 0.0, True, False),
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )[0]
        return out.transpose(1, 2)
    if flash:
        # The operator itself, since `scaled_dot_product_attention` would choose cuDNN on Hopper for
        # some compositions only. It aligns a causal mask with the last key, and shares key heads.
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, tokens > 1, False, scale=scale
        )[0]
    mask = None
    if (tokens > 1 and cached > tokens) or hiding is not None:
        mask = torch.ones(tokens, cached, dtype=torch.bool, device=q.device).tril(cached - tokens)
        if hiding is not None:
            mask = mask.triu(cached - tokens - hiding.tokens + 1)
    causal = mask is None and tokens > 1
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def _attend_to_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float | None, chunk: int) -> Tensor:
    """Return attention of queries that see the keys of their chunk up to their own.

    Engines give each chunk of a sequence to the kernel as a sequence.

    Args:
        q: queries of the last keys.
        k: keys; the first one starts a chunk, and a query sees it.
        v: values.
        scale: as for `_attend`.
        chunk: tokens of a chunk.
    """
    before = k.shape[2] - q.shape[2]
    outputs: list[Tensor] = []
    for start in range(0, k.shape[2], chunk):
        keys, values = (t[:, :, start : start + chunk] for t in (k, v))
        queries = q[:, :, max(0, start - before) : start - before + chunk]
        outputs.append(_attend(queries, keys, values, scale, None).transpose(1, 2))
    # In the layout of FlashAttention, [sequences, tokens, heads, size].
    return torch.cat(outputs, dim=1).transpose(1, 2)


@dataclass(frozen=True)
class RepeatableStep:
    """One step of the engine, which can be repeated.

    Attributes:
        model: the model.
        cache: its KV cache, which is allocated by the first call.
        arguments: arguments of the model.
    """

    model: Any
    cache: StepCache
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: Any,
        composition: Composition,
        vocabulary: int,
        device: str,
        *,
        has_head: bool = True,
    ) -> "RepeatableStep":
        """Return the step of a composition, with random tokens.

        Args:
            model: the model.
            composition: sequences of the step.
            vocabulary: number of tokens to draw from.
            device: the model's device.
            has_head: whether the model computes logits; other pipeline stages send all tokens.
        """
        c = composition
        tokens = torch.randint(0, vocabulary, (1, c.new_tokens), device=device)
        chunk = torch.arange(c.prefill_tokens, device=device) + c.prefill_context
        decodes = torch.full((c.decodes,), c.decode_context, device=device)
        positions = torch.cat([chunk.repeat(c.prefills), decodes]).unsqueeze(0)
        ends = torch.arange(1, c.prefills + 1, device=device) * c.prefill_tokens - 1
        first = c.prefills * c.prefill_tokens
        last = torch.cat([ends, torch.arange(first, c.new_tokens, device=device)])
        cache = StepCache(composition)
        # Engines take the logits of the last token of each sequence; of decodes alone, of all.
        keep: dict[str, Any] = {"logits_to_keep": last} if c.prefills and has_head else {}
        # transformers 5.24 renamed the argument, and warns of the old name in each call. Models
        # without attention have the third name.
        named = inspect.signature(model.forward).parameters
        name = next(
            (name for name in ("cache", "past_key_values", "cache_params") if name in named),
            "past_key_values",
        )
        arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
        arguments[name] = cache
        if sparse_attention.attended_tokens(model) is not None:
            # Layers index their mask, which the indexer and the attention of a step do not read.
            arguments["attention_mask"] = torch.zeros(1, 1, 1, 1, device=device)
        return cls(model, cache, {**arguments, "use_cache": True, **keep})

    def __call__(self) -> None:
        """Compute the step."""
        with torch.no_grad(), _running(self.cache), self.cache.states.running():
            self.model(**self.arguments)


@contextlib.contextmanager
def _running(cache: StepCache) -> Generator[None]:
    _step.cache = cache
    try:
        yield
    finally:
        _step.cache = None


def give_attention_scopes(step: RepeatableStep) -> None:
    """Run a step once and add the modules of attention to the modules that call it.

    Latent attention then passes its vectors to them, as engines cache them. Layers with states get
    theirs.

    Raises:
        CaptureError: the model has layers that neither use transformers' attention interface nor
            call its functions of states, or does not run.
    """
    model = step.model
    latent_attention.keep_latents(model)
    sequence_states.keep_states(model)
    sparse_attention.keep_indices(model)
    _step.callers = callers = []
    try:
        step()
    except OneRankError:  # a refusal keeps its own code
        raise
    except Exception as error:
        # A model with another kind of cache fails before its attention, with any exception.
        if not callers and not step.cache.states.tensors:
            raise _own_attention(type(model).__name__, error) from error
        raise CaptureError(
            f"{type(model).__name__} does not run a step of an engine: {type(error).__name__}: "
            f"{_cause(error)}",
            code="serve-step-failed",
        ) from error
    finally:
        _step.callers = None
    if not callers and not step.cache.states.tensors:
        raise _own_attention(type(model).__name__)


# Types of layers that cache nothing.
_WITHOUT_CACHE = {"mlp", "moe"}


def check_layer_types(step: RepeatableStep) -> None:
    """Refuse a model of which a type of layers has neither attended nor updated a state.

    Such layers keep their states in their modules, for the batch of the last call of the model.

    Args:
        step: a step that has run, of a model with all its layers.
    """
    types: Sequence[str] = getattr(step.model.config.get_text_config(), "layer_types", None) or ()
    tensors = (*step.cache.tensors, *step.cache.states.tensors)
    cached = {types[layer] for layer, *_ in tensors if layer < len(types)}
    left = {*types} - cached - _WITHOUT_CACHE
    if left:
        raise sequence_states.unsupported(
            f"the states of its layers of {', '.join(sorted(left))} in their modules"
        )


def _own_attention(name: str, error: Exception | None = None) -> CaptureError:
    cause = "" if error is None else f" ({type(error).__name__}: {_cause(error)})"
    return CaptureError(
        f"{name} does not look up its attention in transformers' AttentionInterface, or needs "
        "another cache than one of keys and values, as an indexer and linear attention do, so its "
        f"cache cannot be composed of several sequences{cause}\n"
        "  serve another model, such as Llama",
        code="serve-own-attention",
    )
