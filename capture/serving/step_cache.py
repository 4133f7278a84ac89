"""The KV cache of an engine's step, as transformers takes it."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.serving import sequence_states
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.capture.serving.compositions import Composition
from onerank.capture.serving.sequence_states import SequenceStates


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
        running_step.layer, running_step.writes = layer_idx, True
        # Layers that share the keys of this one pass the same tensor to their attention. A strong
        # reference would keep the keys of all layers in memory.
        self.keys[layer_idx] = weakref.ref(keys)
        return keys, values

    def layer_of(self, keys: Tensor) -> int:
        """Return the layer whose cache has the keys that a layer attends to."""
        return next(
            (layer for layer, own in self.keys.items() if own() is keys), running_step.layer
        )

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
        key = running_step.layer, part
        if key not in self.index:
            count, tokens, width = new.shape
            shape = (
                count,
                self.cached_before(part, running_step.layer) + tokens,
                width + scale_bytes,
            )
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
        key = running_step.layer, part, value
        if key not in self.tensors:
            count, heads, tokens, size = new.shape
            before = self.cached_before(part, running_step.layer)
            shape = count, heads, before + tokens, width or size
            self.tensors[key] = torch.empty(shape, dtype=new.dtype, device=new.device).normal_()
        return self.tensors[key]


@dataclass
class RunningStep:
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
running_step = RunningStep()
