"""Layers that keep a state of constant size for each sequence, besides or instead of a KV cache.

Linear attention (Qwen3-Next's gated delta rule, Kimi Linear), Mamba and short convolutions keep the
last inputs of a convolution, and a matrix that sums up all tokens. An engine's step runs a
convolution and a scan over the prefills of a step, and an update of the states for its decodes:
vLLM and SGLang split the tokens so (vllm/model_executor/layers/mamba, `GDNAttentionBackend`).

In transformers, all such layers call functions with the same few names for the convolution and the
scan. `keep_states` gives each layer a copy of its forward in which these names mean the operators
of `state_operators`, run for each part of the step.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.fake_tensors import is_fake
from onerank.capture.parallelize.tensor.stateful_layers import is_lightning_attention
from onerank.capture.serving import state_operators as _operators
from onerank.capture.serving.compositions import Composition
from onerank.ir.errors import CaptureError

# torch's dispatcher has no types.
_ops: Any = torch.ops

PARTS = "step_state"
"""Name of the module, below a layer with states, that updates them for a step's parts."""

_CONVOLUTION, _RECURRENCE = "convolution", "recurrence"

# Settings of a configuration that name the dtype of the recurrent state. Without one, it has the
# dtype of the cache, as in vLLM (`mamba_ssm_cache_dtype` "auto").
_STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")


@dataclass
class SequenceStates:
    """The states of the sequences of one engine step.

    Attributes:
        composition: the step's sequences.
        tensors: states by layer, part of the step, and kind; the first axis are the sequences.
        layer: index of the layer that runs.
        convolution: number of the convolution that runs, in a layer with several.
        part: the part of the step that runs alone; "" for all.
    """

    composition: Composition
    tensors: dict[tuple[int, str, str], Tensor] = field(
        default_factory=dict[tuple[int, str, str], Tensor]
    )
    layer: int = 0
    convolution: int = 0
    part: str = ""

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """The parts that run, as in `Composition.parts`."""
        return [each for each in self.composition.parts() if self.part in ("", each[0])]

    def room(
        self, part: str, kind: str, like: Tensor, shape: tuple[int, ...], dtype: Any
    ) -> Tensor:
        """Return a state of the running layer, allocated on the first call."""
        key = self.layer, part, kind
        if key not in self.tensors:
            self.tensors[key] = _new_state(kind, like.new_empty(0, dtype=dtype), shape)
        return self.tensors[key]

    def allocate(self, like: "SequenceStates") -> None:
        """Allocate the states of all layers; `like` has those of a step of decodes."""
        for part, count, _ in self.composition.parts():
            for (layer, _, kind), other in like.tensors.items():
                shape = count, *other.shape[1:]
                self.tensors[layer, part, kind] = _new_state(kind, other, shape)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Let the layers of a model update these states."""
        _Step.states = self
        try:
            yield
        finally:
            _Step.states = None

    def bytes_per_sequence(self) -> int:
        """Return the bytes of the states of one sequence, in all layers.

        The step must have one part only, prefill or decode.
        """
        return sum(tensor.nbytes // tensor.shape[0] for tensor in self.tensors.values())


def _new_state(kind: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if kind.startswith(_CONVOLUTION):
        return _operators.convolution_state(like, shape)
    return like.new_empty(shape).normal_()


class UpdatedState:
    """What a replaced function returns as the new state, which the operators have stored."""

    def to(self, *_: Any, **__: Any) -> "UpdatedState":
        """Return this: the operators chose the dtype."""
        return self


class _Step:
    """The states of the running step: models pass no argument of ours to their functions."""

    states: SequenceStates | None = None


def _running() -> SequenceStates:
    assert _Step.states is not None, "a step is running"
    return _Step.states


class _PartStates(nn.Module):
    """Convolution and scan of the prefills or of the decodes of a step; a module, for its scope."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, update: Callable[..., Any], *operands: Any) -> Any:
        """Return the result of an update of the states of a part."""
        return update(self.part, *operands)


class _Parts(nn.Module):
    """The two kinds of state updates of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill = _PartStates("prefill")
        self.decode = _PartStates("decode")


@dataclass(frozen=True)
class _StatefulLayer:
    """What replaces the functions that a layer with states calls.

    Attributes:
        parts: the modules of the step's parts.
        recurrence_dtype: dtype of the recurrent state; None for that of the cache.
    """

    parts: _Parts
    recurrence_dtype: torch.dtype | None

    @classmethod
    def of(cls, module: nn.Module, recurrence_dtype: torch.dtype | None) -> "_StatefulLayer":
        """Give a layer the modules of a step's parts; return what replaces its functions."""
        parts = _Parts()
        setattr(module, PARTS, parts)
        return cls(parts, recurrence_dtype)

    def by_part(self, update: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        """Return the results of an update of each part of a step, joined.

        Args:
            update: (part, operands of the part) -> [sequences, tokens, ...].
            operands: [1, tokens of the step, ...], prefills first.
        """
        start, outputs = 0, list[Tensor]()
        for part, count, tokens in _running().parts:
            end = start + count * tokens
            of_part = [t[0, start:end].unflatten(0, (count, tokens)) for t in operands]
            out: Tensor = getattr(self.parts, part)(update, *of_part)
            outputs.append(out.flatten(0, 1))
            start = end
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.unsqueeze(0)

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute a depthwise convolution over the last tokens, as `causal_conv1d_fn`.

        Args:
            x: [1, channels, tokens].
            weight: [channels, width].
            bias: [channels].
            activation: "silu", or None.
        """
        if activation not in (None, "silu", "swish"):
            raise unsupported(f"the activation {activation} of a convolution")
        states, silu = _running(), activation is not None
        kind = f"{_CONVOLUTION}.{states.convolution}" if states.convolution else _CONVOLUTION

        def update(part: str, rows: Tensor) -> Tensor:
            count, channels = rows.shape[0], rows.shape[2]
            shape = count, channels, weight.shape[1] - 1
            state = states.room(part, kind, rows, shape, rows.dtype)
            if part == "prefill":
                return _ops.onerank_serving.causal_conv1d(
                    rows.contiguous(), weight, bias, state, silu
                )
            return _ops.onerank_serving.causal_conv1d_update(
                rows[:, 0].contiguous(), weight, bias, state, silu
            ).unsqueeze(1)

        return self.by_part(update, x.transpose(1, 2)).transpose(1, 2)

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, UpdatedState]:
        """Compute the gated delta rule, as `chunk_gated_delta_rule` and `chunk_kda`.

        Args:
            query: [1, tokens, key heads, k].
            key: as query.
            value: [1, tokens, heads, v].
            g: decay, [1, tokens, heads] or [1, tokens, heads, k].
            beta: [1, tokens, heads].
        """
        states = _running()
        # vLLM keeps the state of KDA in float32 (`kda_state_dtype`).
        dtype = torch.float32 if g.dim() == 4 else self.recurrence_dtype or value.dtype

        def update(part: str, *operands: Tensor) -> Tensor:
            q, k, v, decay, rate = (tensor.contiguous() for tensor in operands)
            shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
            state = states.room(part, _RECURRENCE, v, shape, dtype)
            if part == "decode":
                return _ops.onerank_serving.recurrent_gated_delta_rule(q, k, v, decay, rate, state)
            with _scratch(v, _operators.delta_scratch_bytes(q, v)):
                out, after = _ops.onerank_serving.chunk_gated_delta_rule(
                    q, k, v, decay, rate, state
                )
            state.copy_(after)
            return out

        return self.by_part(update, query, key, value, g, beta), UpdatedState()

    def mamba_scan(  # noqa: PLR0917
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, UpdatedState]:
        """Compute Mamba 2's scan, as `mamba_chunk_scan_combined`.

        Args:
            hidden_states: [1, tokens, heads, p].
            dt: [1, tokens, heads].
            A: [heads].
            B: [1, tokens, groups, s].
            C: as B.
            chunk_size: tokens of a chunk.
            D: [heads].
            z: must be None: engines apply the gate in the norm.
            dt_bias: [heads].
            dt_limit: limits of dt, which change no time.
        """
        if z is not None:
            raise unsupported("a gate inside the scan of Mamba 2")
        states = _running()
        dtype = self.recurrence_dtype or hidden_states.dtype

        def update(part: str, *operands: Tensor) -> Tensor:
            x, step, b, c = operands
            shape = x.shape[0], x.shape[2], x.shape[3], b.shape[3]
            state = states.room(part, _RECURRENCE, x, shape, dtype)
            if part == "decode":
                x, step, b, c = (tensor[:, 0] for tensor in operands)
                out = _ops.onerank_serving.selective_state_update(
                    x, step, A, b, c, D, dt_bias, state
                )
                return out.unsqueeze(1)
            with _scratch(x, _operators.mamba_scratch_bytes(x, b, chunk_size)):
                out, after = _ops.onerank_serving.mamba_chunk_scan(
                    x, step, A, b, c, D, dt_bias, state, chunk_size
                )
            state.copy_(after)
            return out

        return self.by_part(update, hidden_states, dt, B, C), UpdatedState()

    def selective_scan(  # noqa: PLR0917
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, UpdatedState]:
        """Compute Mamba 1's scan, as `selective_scan_fn`.

        Args:
            hidden_states: [1, channels, tokens].
            dt: as hidden_states.
            A: [channels, s].
            B: [1, s, tokens].
            C: as B.
            D: [channels].
            z: the gate, as hidden_states.
            delta_bias: [channels].
        """
        states = _running()
        dtype = self.recurrence_dtype or hidden_states.dtype

        def update(part: str, *operands: Tensor) -> Tensor:
            x, step, b, c, *gates = operands
            gate = gates[0] if gates else None
            shape = x.shape[0], x.shape[2], A.shape[1]
            state = states.room(part, _RECURRENCE, x, shape, dtype)
            if part == "prefill":
                return _ops.onerank_serving.selective_scan(
                    x, step, A, b, c, D, delta_bias, state, gate
                )
            x, step, b, c = (tensor[:, 0] for tensor in (x, step, b, c))
            gate = None if gate is None else gate[:, 0]
            return _ops.onerank_serving.selective_state_update(
                x, step, A, b, c, D, delta_bias, state, gate
            ).unsqueeze(1)

        rows = [hidden_states, dt, B, C, *([] if z is None else [z])]
        out = self.by_part(update, *(tensor.transpose(1, 2) for tensor in rows))
        return out.transpose(1, 2), UpdatedState()

    def mamba_mixer(
        self, module: Any, forward: FunctionType, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute a layer of Mamba 1 as vLLM's `MambaMixer` does.

        Only the projections into and out of the layer run for all tokens. The step, B and C depend
        on the convolution, and vLLM computes them for prefills and decodes apart.

        Args:
            module: the layer.
            forward: its forward, with this class's functions.
            hidden_states: [1, tokens, hidden].
            args: other arguments of the forward.
            kwargs: the same by name.
        """
        states = _running()
        if len(states.parts) == 1:
            return forward(module, hidden_states, *args, **kwargs)
        projected, start, outputs = module.in_proj(hidden_states), 0, list[Tensor]()
        for part, count, tokens in states.parts:
            rows = slice(start, start + count * tokens)
            of_part = _PartOfMixer(module, projected[:, rows])
            states.part = part
            outputs.append(forward(of_part, hidden_states[:, rows], *args, **kwargs))
            states.part, start = "", rows.stop
        # The scan writes channels first. As in vLLM, the joined results stay so: rows would be a
        # transposing copy, which takes several times as long.
        joined = torch.cat([output.transpose(1, 2) for output in outputs], dim=2)
        return module.out_proj(joined.transpose(1, 2))

    def lightning_attention(
        self, module: Any, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Compute a layer of MiniMax's lightning attention, in float32 as vLLM does.

        Args:
            module: the layer, a `MiniMaxLightningAttention`.
            hidden_states: [1, tokens, hidden].
        """
        states = _running()
        states.layer = module.layer_idx
        dtype = self.recurrence_dtype or hidden_states.dtype
        slopes = module.slope_rate.flatten()

        def update(part: str, *operands: Tensor) -> Tensor:
            q, k, v = operands
            shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
            state = states.room(part, _RECURRENCE, v, shape, dtype)
            if part == "decode":
                return _ops.onerank_serving.lightning_attention_update(q, k, v, slopes, state)
            # Engines' kernels read contiguous heads.
            q, k, v = (tensor.contiguous() for tensor in operands)
            with _scratch(v, _operators.lightning_scratch_bytes(v, state)):
                return _ops.onerank_serving.lightning_attention(q, k, v, slopes, state)

        activated = module.act_fn(module.qkv_proj(hidden_states).float())
        of_heads = activated.unflatten(-1, (module.num_attention_heads, 3, module.head_dim))
        out = self.by_part(update, *of_heads.unbind(-2)).flatten(2)
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj((gate * module.norm(out)).to(hidden_states.dtype)), None

    def recurrent_block(
        self,
        module: Any,
        layer: int,
        input_states: Tensor,
        position_ids: Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """Compute a recurrent block of RecurrentGemma.

        Args:
            module: the block, a `RecurrentGemmaRecurrentBlock`.
            layer: its index.
            input_states: [1, tokens, hidden].
            position_ids: [1, tokens].
        """
        states = _running()
        states.layer, states.convolution = layer, 0
        convolution = module.conv_1d
        rows = module.linear_x(input_states).transpose(1, 2)
        rows = self.convolve(rows, convolution.weight.squeeze(1), convolution.bias)
        # Its gates are transformers'; it scans by `linear_recurrence`.
        scanned = module.rg_lru(rows.transpose(1, 2), position_ids)
        return module.linear_out(scanned * module.act_fn(module.linear_y(input_states))), None

    def linear_recurrence(
        self, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: Any
    ) -> tuple[Tensor, UpdatedState]:
        """Compute the scan of RecurrentGemma, as its `_rnn_scan`.

        Args:
            hidden_states: [1, tokens, channels].
            recurrent_gate: the decay, as hidden_states.
            reset: whether a token is the first of its sequence, [1, tokens, 1].
        """
        states = _running()

        def update(part: str, x: Tensor, decay: Tensor) -> Tensor:
            # transformers keeps it in float32, too.
            state = states.room(part, _RECURRENCE, x, (x.shape[0], x.shape[2]), torch.float32)
            return _ops.onerank_serving.linear_recurrence(x.contiguous(), decay.contiguous(), state)

        return self.by_part(update, hidden_states, recurrent_gate * ~reset), UpdatedState()


class _PartOfMixer:
    """A layer of Mamba 1 between its projections, for a part of a step."""

    def __init__(self, module: nn.Module, projected: Tensor) -> None:
        self._module = module
        self._projected = projected

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer."""
        return getattr(self._module, name)

    def in_proj(self, _: Tensor) -> Tensor:
        """Return the projection, which was computed for all tokens."""
        return self._projected

    def out_proj(self, scanned: Tensor) -> Tensor:
        """Return the results of the scan; the projection is computed for all tokens."""
        return scanned


@contextlib.contextmanager
def _scratch(like: Tensor, size: int) -> Generator[None]:
    """Hold the memory that an operator's kernels allocate, where it runs on shapes alone.

    On a GPU, the packages' kernels allocate it themselves.
    """
    memory = like.new_empty(size, dtype=torch.uint8) if is_fake(like) else None
    yield
    del memory


# Function that a layer of transformers calls -> method that replaces it. The functions that update
# the states of decodes are not called: `StepCache` says that a layer has no state yet.
_REPLACED = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "mamba_scan",
    "mamba_selective_scan": "selective_scan",
}


# Class of the cache that MiniMax's model expects.
_OWN_CACHE = "MiniMaxCache"


def is_recurrent_block(module: nn.Module) -> bool:
    """Return whether a module is a recurrent block of RecurrentGemma, which keeps its states."""
    return all(hasattr(module, name) for name in ("rg_lru", "conv_1d", "linear_x", "linear_y"))


def keep_states(model: nn.Module) -> None:
    """Let the layers with a state per sequence update the states of an engine's step."""
    dtype = _recurrence_dtype(model)
    for name, module in list(model.named_modules()):
        forward = None if hasattr(module, PARTS) else _forward_with_states(name, module, dtype)
        if forward is not None:
            module.forward = forward


def _recurrence_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of recurrent states that a configuration names; None if it names none."""
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    named = next(filter(None, (getattr(text, setting, None) for setting in _STATE_DTYPES)), None)
    return named if isinstance(named, torch.dtype) else getattr(torch, named or "", None)


def _forward_with_states(
    name: str, module: Any, dtype: torch.dtype | None
) -> Callable[..., Any] | None:
    """Give a layer the modules of its states; return its new forward, None if it has no states.

    Args:
        name: qualified name of the module.
        module: any module of a model.
        dtype: of the recurrent state; None for that of the cache.
    """
    if is_recurrent_block(module):
        layer = _StatefulLayer.of(module, None)
        module.rg_lru._rnn_scan = layer.linear_recurrence
        # The block does not know the index of its layer.
        index = int(next(part for part in name.split(".") if part.isdigit()))
        return functools.partial(layer.recurrent_block, module, index)
    if is_lightning_attention(module):
        # Its forward contains the scan, so there is no name to replace.
        return functools.partial(_StatefulLayer.of(module, dtype).lightning_attention, module)
    forward = inspect.unwrap(type(module).forward)
    called = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
    if _OWN_CACHE in called:
        # It refuses other caches by their class.
        return MethodType(_copy(forward, {_OWN_CACHE: object}), module)
    names = _REPLACED.keys() & set(called)
    if not names:
        return None
    layer = _StatefulLayer.of(module, dtype)
    copied = _copy(forward, {name: getattr(layer, _REPLACED[name]) for name in names})
    if "mamba_selective_scan" not in names:
        return MethodType(copied, module)
    # Its projections run for the whole step.
    return functools.partial(layer.mamba_mixer, module, copied)


def _copy(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function in which global names have other meanings.

    The module of the function stays as it is, since other models call the same functions.
    """
    copy = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def stateful_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model to which `keep_states` gave states."""
    yield from (module for module in model.modules() if hasattr(module, PARTS))


def unsupported(what: str) -> CaptureError:
    """Return the error for a layer whose computation of states no operator stands for."""
    return CaptureError(
        f"the model computes {what}, for which capture serve has no kernel of engines\n"
        "  serve another model, such as Qwen3-Next or Bamba",
        code="serve-state-unsupported",
    )
