"""The boundaries of a pipeline stage: sends, receives, and placeholders for other stages.

Some models scale the embedding, add positions or apply dropout before the first layer, and cap the
logits after the head. Only the first or the last stage computes these operations. On other stages a
placeholder passes through them unchanged, and no kernel is launched.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.fake_tensors import as_subclass
from onerank.capture.parallelize.autograd_collectives import shard_length
from onerank.ir.errors import SliceError


class PassthroughTensor(Tensor):
    """A tensor that ignores the functions that models apply to embeddings and logits.

    These are scaling, sums, dropout, casts and tanh (`_IGNORED_FUNCTIONS`). Any other function
    returns a plain tensor.

    Attributes:
        represents: the tensor that a placeholder of another shape represents; None if this tensor
            holds the values itself.
    """

    represents: Tensor | None = None

    @staticmethod
    def of(plain: Tensor, represents: Tensor | None = None) -> Tensor:
        """Return `plain` as this class, with the same memory and autograd history.

        With `represents` the result is a placeholder for that tensor.
        """
        wrapped: Any = as_subclass(plain, PassthroughTensor)
        wrapped.represents = represents
        return wrapped

    @staticmethod
    def plain(value: Any) -> Any:
        """Unwrap a placeholder to the tensor it represents; return other values unchanged."""
        if not isinstance(value, PassthroughTensor):
            return value
        return as_subclass(value, Tensor) if value.represents is None else value.represents

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor unchanged for functions that models apply to embeddings or logits."""
        if func in _IGNORED_FUNCTIONS:
            wrapped = [value for value in args if isinstance(value, PassthroughTensor)]
            # Models add position embeddings to the hidden states: that of EmptyEmbedding is empty.
            return max(wrapped, key=Tensor.numel)
        with _DISABLED():
            if args[0].dim() == 0 and (result := _call_on_loss(func, *args)) is not None:
                return result
            result = func(*args, **(kwargs or {}))
        # Other views change the shape, and then the tensor represents nothing.
        if func in _VIEWS and result.shape == args[0].shape:
            return args[0]  # keeps `represents`
        if func is Tensor.detach:
            return PassthroughTensor.of(result, cast("PassthroughTensor", args[0]).represents)
        return result


def _call_on_loss(func: Callable[..., Any], loss: Tensor, *args: Any) -> Any:
    """Let a model that computes its own loss treat the scalar loss as logits; None otherwise."""
    if func is Tensor.size and args:
        return 1
    # By name, because a sliced head replaces the function.
    if func.__name__ == functional.cross_entropy.__name__:
        return PassthroughTensor.plain(loss)
    return loss if func in _VIEWS[:2] and len(args) > 1 else None  # [tokens, vocabulary]


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass

_VIEWS: tuple[Any, ...] = (Tensor.view, Tensor.reshape, Tensor.__getitem__)

_IGNORED_FUNCTIONS: tuple[Any, ...] = (
    *(Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, torch.div),
    *(Tensor.tanh, torch.tanh, functional.dropout),
    *(Tensor.to, Tensor.type_as, Tensor.float),
)


class StageBoundary:
    """Communication of a pipeline stage with its neighbours.

    Sends and receives block, in the order of Megatron-LM's schedule without interleaving: one
    message per tensor, hidden states before the encoder's output.

    Args:
        group: the pipeline group; this rank's index in it is the stage.
        hidden: hidden size.
        dtype: returns the current dtype of the layers' parameters, which is also the dtype of the
            messages.
        shards: number of shards of the sequence; stages exchange one shard.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden: int,
        dtype: Callable[[], torch.dtype],
        shards: int,
    ) -> None:
        self.group = group
        self.stage = group.rank()
        self.hidden = hidden
        self.shards = shards
        # Tensors are compared by data pointer: views and placeholders of a tensor are new objects.
        self.received_address = 0  # of the tensor received last
        self.output_address = 0  # of the last layer's output
        self.encoder_output: Tensor | None = None  # encoder output, sent after the hidden states
        self.infers = False  # whether the running forward computes logits without gradients
        self._inferred: Tensor | None = None  # the last layer's output while `infers`
        self._logits: dict[tuple[torch.device, int], Tensor] = {}
        self._dtype = dtype
        self._scalars: dict[torch.device, Tensor] = {}

    def __deepcopy__(self, _: Any) -> "StageBoundary":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that hidden states are sent in: that of the layers' parameters."""
        return self._dtype()

    def scalar(self, device: torch.device) -> Tensor:
        """Return a scalar zero; its kernel runs once per device, during warm-up."""
        if device not in self._scalars:
            self._scalars[device] = torch.zeros((), device=device)
        # A new tensor for each call, because callers set `requires_grad` on it.
        return self._scalars[device].detach()

    def receive(self, ids: Tensor) -> Tensor:
        """Receive hidden states [batch, sequence / shards, hidden] from the previous stage."""
        (received,) = self.receive_all([tuple(ids.shape)], ids.device)
        self.received_address = received.data_ptr()
        return received

    def receive_all(
        self, id_shapes: Sequence[tuple[int, ...]], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Receive one message from the previous stage for each shape of token ids.

        Args:
            id_shapes: [batch, sequence] of each message's token ids.
            device: device of the received tensors.

        Returns:
            Hidden states [batch, sequence / shards, hidden] for each shape.

        Raises:
            SliceError: the number of shards does not divide a sequence.
        """
        anchor = self.scalar(device).requires_grad_()
        shapes = [
            (*batch, shard_length(length, self.shards), self.hidden) for *batch, length in id_shapes
        ]
        received: Any = _Receive.apply(anchor, self, *shapes)
        return received

    def whole_sequence_placeholder(self, hidden: Tensor) -> Tensor:
        """Return a placeholder with the shape of the whole sequence for one shard.

        Models derive positions and masks from the shape of the embedding's output and reshape the
        layers' output. The placeholder allocates one element.
        """
        if self.shards == 1:
            return PassthroughTensor.of(hidden)
        batch, part, width = hidden.shape
        whole = hidden.new_empty(()).expand(batch, part * self.shards, width)
        return PassthroughTensor.of(whole.requires_grad_(hidden.requires_grad), represents=hidden)

    def record_output(self, _: nn.Module, __: Any, output: Any) -> None:
        """Record the last layer's output, as a forward hook."""
        first = output[0] if isinstance(output, tuple) else output
        self.output_address = first.data_ptr()
        if self.infers:
            self._inferred = first

    def send_inferred(self, selected: Tensor, vocabulary: int) -> Tensor:
        """Send the last layer's output; return placeholders for logits [..., vocabulary].

        The last stage computes the logits, and sends the chosen tokens back, which no forward
        shows. The placeholders let a generation continue; they take no memory per token.

        Args:
            selected: the hidden states whose logits the model wants: those of the last token.
            vocabulary: size of the vocabulary, or of this rank's part.
        """
        output = self._inferred
        self._inferred = None
        # A model may select tokens between layers and head; anything else would change the values.
        if output is None or storage_address(selected) != storage_address(output):
            self._refuse_changed_output()
        assert output is not None
        dist.send(output.contiguous(), group=self.group, group_dst=self.stage + 1)
        key = (selected.device, vocabulary)
        if key not in self._logits:
            # Increasing, so that the chosen token is the last one: a stop token ends a generation,
            # and the first tokens are often some.
            self._logits[key] = torch.arange(vocabulary, device=key[0], dtype=self.dtype)
        return self._logits[key].expand(*selected.shape[:-1], vocabulary)

    def send(self, hidden: Tensor) -> Tensor:
        """Send hidden states to the next stage; return a zero loss, a scalar.

        The backward of the loss receives the gradients of the hidden states.

        Raises:
            SliceError: the model changed the last layer's output, or its dtype differs from that
                of the parameters.
        """
        if hidden.data_ptr() != self.output_address:
            self._refuse_changed_output()
        if hidden.dtype != self.dtype:
            raise SliceError(
                f"stage {self.stage} would send hidden states of {hidden.dtype}; the next stage "
                f"expects {self.dtype}, the dtype of its parameters: keep all layers in one dtype",
                code="pp-hidden-dtype",
            )
        encoder_output = () if self.encoder_output is None else (self.encoder_output,)
        # A stage without trained parameters receives gradients too, as in Megatron-LM.
        trains = any(x.requires_grad for x in (hidden, *encoder_output))
        anchor = None if trains else self.scalar(hidden.device).requires_grad_()
        loss: Any = _Send.apply(anchor, self, hidden, *encoder_output)
        return loss

    def _refuse_changed_output(self) -> NoReturn:
        raise SliceError(
            f"stage {self.stage} would send a tensor that is not its last layer's output: "
            "the model changes hidden states between layers and head, and the change cannot "
            "be left to the last stage\n  leave --pp out",
            code="pp-work-after-layer",
        )


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


class _Receive(torch.autograd.Function):
    """Receive from the previous stage; the backward sends it the gradients.

    The anchor requires a gradient, so that the result does too; it gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, boundary: StageBoundary, *shapes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.boundary = boundary
        received = [
            torch.empty(shape, dtype=boundary.dtype, device=anchor.device) for shape in shapes
        ]
        for tensor in received:
            dist.recv(tensor, group=boundary.group, group_src=boundary.stage - 1)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        boundary = ctx.boundary
        for gradient in grads:
            dist.send(gradient.contiguous(), group=boundary.group, group_dst=boundary.stage - 1)
        return (None,) * (2 + len(grads))


class _Send(torch.autograd.Function):
    """Send to the next stage and return a zero; the backward receives the tensors' gradients.

    The anchor makes the loss part of the autograd graph if no sent tensor requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor | None, boundary: StageBoundary, *outgoing: Tensor
    ) -> Tensor:
        ctx.boundary = boundary
        ctx.sent_tensors = [(x.shape, x.dtype, x.device) for x in outgoing]
        for tensor in outgoing:
            dist.send(tensor.contiguous(), group=boundary.group, group_dst=boundary.stage + 1)
        return boundary.scalar(outgoing[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        boundary, gradients = ctx.boundary, list[Tensor | None]()
        for index, (shape, dtype, device) in enumerate(ctx.sent_tensors):
            gradient = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(gradient, group=boundary.group, group_src=boundary.stage + 1)
            # Received in any case, because the next stage sends one for every tensor.
            gradients.append(gradient if ctx.needs_input_grad[2 + index] else None)
        return None, None, *gradients


class ReceivingEmbedding(nn.Module):
    """Replaces the token embedding: token ids [...] -> received hidden states [..., hidden]."""

    def __init__(self, boundary: StageBoundary, layers: nn.Module) -> None:
        super().__init__()
        self._boundary = boundary
        self._parameters_of = layers.parameters

    @property
    def weight(self) -> Tensor:
        """An empty tensor on the layers' device, which models read off the embedding (Llama-4)."""
        return next(self._parameters_of()).detach().new_empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        return self._boundary.whole_sequence_placeholder(self._boundary.receive(ids))


class EmptyEmbedding(nn.Module):
    """Replaces a position embedding; the received hidden states already contain positions."""

    def forward(self, ids: Any, *_: Any, **__: Any) -> Tensor:
        # Pegasus passes a shape, not a tensor
        return PassthroughTensor.of(torch.empty(0, device=getattr(ids, "device", None)))


class SkippedNorm(nn.Module):
    """Replaces the final norm: returns hidden states unchanged, or a placeholder for a shard."""

    def __init__(self, boundary: StageBoundary) -> None:
        super().__init__()
        self._boundary = boundary

    def forward(self, hidden: Tensor) -> Tensor:
        return self._boundary.whole_sequence_placeholder(hidden)


class SendingHead(nn.Module):
    """Replaces the head: sends hidden states [..., hidden] and returns the zero loss.

    Args:
        boundary: the stage's boundary.
        vocabulary: rows of the head, whose logits a forward without gradients returns.
    """

    def __init__(self, boundary: StageBoundary, vocabulary: int = 0) -> None:
        super().__init__()
        self._boundary = boundary
        self._vocabulary = vocabulary

    @property
    def weight(self) -> Tensor:
        """Not available; raises an error, because only the last stage holds the head."""
        raise SliceError(
            "--pp: the script reads the head's weight instead of calling the head (fused losses of "
            "TRL and Liger do), and only the last stage holds it\n"
            "  call the head, or leave --pp out",
            code="head-weight-read",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = PassthroughTensor.plain(hidden)
        if self._boundary.infers:
            # A passthrough, because only the last stage scales and caps logits.
            return PassthroughTensor.of(self._boundary.send_inferred(hidden, self._vocabulary))
        return PassthroughTensor.of(self._boundary.send(hidden))
