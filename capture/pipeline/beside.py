"""What stands in a stage for an encoder, or for the decoder that attends to it."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from onerank.capture.arguments import by_name
from onerank.capture.pipeline.border import StageBorder
from onerank.capture.pipeline.passing import Passing
from onerank.ir.errors import SliceError


class Passed:
    """What a call's stage receives, given what the script calls the model with.

    Args:
        model: what is called.
        border: the stage's ends.
        at_first: whether the stage is the decoder's first.
        last: whether it is the last.
    """

    def __init__(self, model: Any, border: StageBorder, *, at_first: bool, last: bool) -> None:
        self.border, self.encoder = border, model.get_encoder()
        self.hidden: Tensor | None = None
        self._at_first, self._last = at_first, last
        self._decoded: tuple[int, ...] = ()
        model.register_forward_pre_hook(self._enter, with_kwargs=True)

    def __deepcopy__(self, _: Any) -> "Passed":
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
                    "of token ids: call it with those, and labels"
                )
        decoded = given.get("decoder_input_ids")
        decoded = given.get("labels") if decoded is None else decoded
        if decoded is None:
            raise SliceError(
                f"--pp: {type(model).__name__} was called without labels or decoder_input_ids, so "
                "that it has no loss: call model(..., labels=...)"
            )
        self._decoded = tuple(decoded.shape)

    def _receive(self, _: Any, *args: Any, **kwargs: Any) -> BaseModelOutput:
        ids = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        shapes: list[tuple[int, ...]] = [self.encoded(ids)]
        if not self._at_first:
            shapes.insert(0, self._decoded)
        *hidden, encoded = self.border.receive_all(shapes, ids.device)
        if hidden:
            (self.hidden,) = hidden
            self.border.address = hidden[0].data_ptr()
        self.border.beside = None if self._last else encoded
        return BaseModelOutput(last_hidden_state=encoded)  # pyright: ignore[reportArgumentType]


class SendingDecoder(nn.Module):
    """Stands where the decoder was: sends the encoder's hidden states; its output is the loss."""

    def __init__(self, border: StageBorder) -> None:
        super().__init__()
        self._border = border

    def forward(self, *_: Any, encoder_hidden_states: Tensor, **__: Any) -> Any:
        loss = Passing.of(self._border.send(Passing.plain(encoder_hidden_states)))
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=loss)  # pyright: ignore


class HeldEmbedding(nn.Module):
    """Stands where the decoder's embedding was: what was received with the encoder's output."""

    def __init__(self, passed: Passed) -> None:
        super().__init__()
        self._passed = passed

    def forward(self, _: Tensor) -> Tensor:
        hidden, self._passed.hidden = self._passed.hidden, None
        assert hidden is not None
        return self._passed.border.widened(hidden)


class NoConvolution(nn.Module):
    """Stands where a convolution before an encoder's layers was; the last receives."""

    def __init__(self, instead_of: nn.Conv1d, passed: Passed, *, receives: bool) -> None:
        super().__init__()
        self.stride = instead_of.stride
        self._passed, self._receives = passed, receives

    def forward(self, features: Tensor) -> Tensor:
        if not self._receives:
            return features.as_subclass(_Convolved)
        border, plain = self._passed.border, features.as_subclass(Tensor)
        shape = self._passed.encoded(plain)
        (received,) = border.receive_all([shape], plain.device)
        border.address = received.data_ptr()
        widened: Any = border.widened(received)
        convolved = widened.as_subclass(_Convolved)
        convolved.stands_for = widened.stands_for
        return convolved


class _Convolved(Passing):
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
