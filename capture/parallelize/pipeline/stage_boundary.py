"""The boundaries of a pipeline stage: sends, receives, and placeholders for other stages.

Some models scale the embedding, add positions or apply dropout before the first layer, and cap the
logits after the head. One stage does that; on the others a placeholder passes through these modules
without changing values or launching kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from onerank.ir.errors import SliceError


class Passing(Tensor):
    """A tensor on which what a model does to embeddings and logits has no effect.

    Any other function of it gives a plain tensor.
    """

    stands_for: Tensor | None = None

    @staticmethod
    def of(plain: Tensor, stands_for: Tensor | None = None) -> Tensor:
        """Return such a tensor; the memory and the autograd history are those of `plain`.

        With `stands_for` it is that tensor's place holder.
        """
        passing = plain.as_subclass(Passing)
        passing.stands_for = stands_for
        return passing

    @staticmethod
    def plain(value: Any) -> Any:
        """Return the plain tensor, or the one that a placeholder represents; other values
        unchanged.
        """
        if not isinstance(value, Passing):
            return value
        return value.as_subclass(Tensor) if value.stands_for is None else value.stands_for

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor itself for a function of embeddings or logits."""
        if func in _WITHOUT_EFFECT:
            found = [value for value in args if isinstance(value, Passing)]
            return max(found, key=Tensor.numel)  # not the empty one that stands for positions
        with _DISABLED():
            if args[0].dim() == 0 and (known := _of_loss(func, *args)) is not None:
                return known
            result = func(*args, **(kwargs or {}))
        if func in _VIEWS and result.shape == args[0].shape:
            return args[0]  # a place holder of a shard must not lose it
        if func is Tensor.detach:
            return Passing.of(result, cast("Passing", args[0]).stands_for)
        return result


def _of_loss(func: Callable[..., Any], loss: Tensor, *given: Any) -> Any:
    """Answer a model that takes a loss for logits, and computes one of them by itself."""
    if func is Tensor.size and given:
        return 1
    if func.__name__ == functional.cross_entropy.__name__:  # which a slice's head replaces
        return Passing.plain(loss)
    return loss if func in _VIEWS[:2] and len(given) > 1 else None  # [tokens, vocabulary]


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]

_VIEWS: tuple[Any, ...] = (Tensor.view, Tensor.reshape, Tensor.__getitem__)

_WITHOUT_EFFECT: tuple[Any, ...] = (
    *(Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, torch.div),
    *(Tensor.tanh, torch.tanh, functional.dropout),
    *(Tensor.to, Tensor.type_as, Tensor.float),
)


class StageBorder:
    """The ends of a stage: who is next to it, and what passes between them.

    Args:
        group: the pipeline's group; the stage is this rank's place in it.
        hidden: features of the hidden states.
        dtype: tells the type of the layers' parameters, in which hidden states are passed.
        shards: into how many the sequence is cut between the blocks; one is passed.
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
        self.address = 0  # of what was received last
        self.leaving = 0  # of what the last layer gave
        self.beside: Tensor | None = None  # what is sent along: the output of an encoder
        self._dtype = dtype
        self._scalars: dict[torch.device, Tensor] = {}

    def __deepcopy__(self, _: Any) -> "StageBorder":
        return self  # as functions are, when a model with its hooks is copied

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are passed in: the type of the layers' parameters."""
        return self._dtype()

    def scalar(self, device: torch.device) -> Tensor:
        """Return a zero of one element; filled once, in warm-up."""
        if device not in self._scalars:
            self._scalars[device] = torch.zeros((), device=device)
        return self._scalars[device].detach()

    def receive(self, ids: Tensor) -> Tensor:
        """Return the hidden states [batch, sequence / shards, hidden] of the stage before."""
        (received,) = self.receive_all([tuple(ids.shape)], ids.device)
        self.address = received.data_ptr()
        return received

    def receive_all(
        self, of: Sequence[tuple[int, ...]], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return what the stage before sends, one message for each shape of token ids in `of`."""
        anchor = self.scalar(device).requires_grad_()
        shapes = [(*batch, self._share(length), self.hidden) for *batch, length in of]
        received: Any = _Receive.apply(anchor, self, *shapes)
        return received

    def _share(self, length: int) -> int:
        if length % self.shards:
            raise SliceError(
                f"--sp: --tp {self.shards} must divide the sequence of {length} tokens ({length} = "
                f"{self.shards} x {length // self.shards} + {length % self.shards}): pad or cut "
                "the batch",
                code="sp-sequence-indivisible",
            )
        return length // self.shards

    def widened(self, hidden: Tensor) -> Tensor:
        """Return what has the shape of the whole sequence and stands for a shard of it.

        Models take positions and masks from the shape of what the embedding gives, and reshape
        what the layers give. The place holder has no memory of its own.
        """
        if self.shards == 1:
            return Passing.of(hidden)
        batch, part, width = hidden.shape
        whole = hidden.new_empty(()).expand(batch, part * self.shards, width)
        return Passing.of(whole.requires_grad_(hidden.requires_grad), stands_for=hidden)

    def left(self, _: nn.Module, __: Any, output: Any) -> None:
        """Take note of what the last layer gives."""
        first = output[0] if isinstance(output, tuple) else output
        self.leaving = first.data_ptr()

    def send(self, hidden: Tensor) -> Tensor:
        """Send hidden states to the next stage; return a loss whose backward is theirs."""
        if hidden.data_ptr() != self.leaving:
            raise SliceError(
                f"stage {self.stage} would send something else than its last layer gives: the "
                "model computes on hidden states between its layers and its head, in a way that "
                "cannot be left to the last stage: leave --pp out",
                code="pp-work-after-layer",
            )
        if hidden.dtype != self.dtype:
            raise SliceError(
                f"stage {self.stage} would send hidden states of {hidden.dtype}; the next stage "
                f"expects {self.dtype}, the type of its parameters: keep the layers of one type",
                code="pp-hidden-dtype",
            )
        beside = () if self.beside is None else (self.beside,)
        # a stage that trains nothing gets its gradient too, as Megatron-LM's does
        trains = any(one.requires_grad for one in (hidden, *beside))
        anchor = None if trains else self.scalar(hidden.device).requires_grad_()
        loss: Any = _Send.apply(anchor, self, hidden, *beside)
        return loss


class _Receive(torch.autograd.Function):
    """Receive from the stage before; backward, send it the gradients.

    The anchor makes the result part of the autograd graph; it gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, border: StageBorder, *shapes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ctx.border = border
        received = [
            torch.empty(shape, dtype=border.dtype, device=anchor.device) for shape in shapes
        ]
        for one in received:
            dist.recv(one, group=border.group, group_src=border.stage - 1)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        border = ctx.border
        for gradient in grads:
            dist.send(gradient.contiguous(), group=border.group, group_dst=border.stage - 1)
        return (None,) * (2 + len(grads))


class _Send(torch.autograd.Function):
    """Send to the next stage and return a zero; backward, receive the gradients of what was sent.

    The anchor makes the loss part of the autograd graph where what was sent is not.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, border: StageBorder, *leaving: Tensor) -> Tensor:
        ctx.border = border
        ctx.like = [(one.shape, one.dtype, one.device) for one in leaving]
        for one in leaving:
            dist.send(one.contiguous(), group=border.group, group_dst=border.stage + 1)
        return border.scalar(leaving[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        border, gradients = ctx.border, list[Tensor | None]()
        for number, (shape, dtype, device) in enumerate(ctx.like):
            gradient = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(gradient, group=border.group, group_src=border.stage + 1)
            gradients.append(gradient if ctx.needs_input_grad[2 + number] else None)
        return None, None, *gradients


class ReceivingEmbedding(nn.Module):
    """Stands where the embedding was: token ids [...] -> hidden states [..., hidden]."""

    def __init__(self, border: StageBorder, layers: nn.Module) -> None:
        super().__init__()
        self._border = border
        self._parameters_of = layers.parameters

    @property
    def weight(self) -> Tensor:
        """Nothing, where the layers are: models ask an embedding for its device (Llama-4)."""
        return next(self._parameters_of()).detach().new_empty(0)

    def forward(self, ids: Tensor) -> Tensor:
        return self._border.widened(self._border.receive(ids))


class NoEmbedding(nn.Module):
    """Stands where an embedding of positions was, whose sum is in what is received."""

    def forward(self, ids: Any, *_: Any, **__: Any) -> Tensor:
        # some are given a shape (Pegasus)
        return Passing.of(torch.empty(0, device=getattr(ids, "device", None)))


class NoNorm(nn.Module):
    """Stands where the final norm was: hidden states as they are, of a shard what stands for it."""

    def __init__(self, border: StageBorder) -> None:
        super().__init__()
        self._border = border

    def forward(self, hidden: Tensor) -> Tensor:
        return self._border.widened(hidden)


class SendingHead(nn.Module):
    """Stands where the head was: sends hidden states [..., hidden], in whose place is the loss."""

    def __init__(self, border: StageBorder) -> None:
        super().__init__()
        self._border = border

    @property
    def weight(self) -> Tensor:
        """The last stage has it."""
        raise SliceError(
            "--pp: the weight of the model's head is read, not the head called (a fused loss, as "
            "TRL's trainers and Liger have), and only the last stage has it: call the head, or "
            "leave --pp out",
            code="head-weight-read",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return Passing.of(self._border.send(Passing.plain(hidden)))
