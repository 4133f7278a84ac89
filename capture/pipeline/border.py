"""The ends of a pipeline stage: what it receives and sends, where the rest of the model was."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.pipeline.passing import Passing
from onerank.ir.errors import SliceError


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
        *batch, length = ids.shape
        if length % self.shards:
            raise SliceError(
                f"--sp: --tp {self.shards} must divide the sequence of {length} tokens ({length} = "
                f"{self.shards} x {length // self.shards} + {length % self.shards}): pad or cut "
                "the batch"
            )
        anchor = self.scalar(ids.device).requires_grad_()
        shape = (*batch, length // self.shards, self.hidden)
        received: Any = _Receive.apply(anchor, shape, self)
        self.address = received.data_ptr()
        return received

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
                "cannot be left to the last stage: leave --pp out"
            )
        if hidden.dtype != self.dtype:
            raise SliceError(
                f"stage {self.stage} would send hidden states of {hidden.dtype}; the next stage "
                f"expects {self.dtype}, the type of its parameters: keep the layers of one type"
            )
        # a stage that trains nothing gets its gradient too, as Megatron-LM's does
        anchor = None if hidden.requires_grad else self.scalar(hidden.device).requires_grad_()
        loss: Any = _Send.apply(hidden, anchor, self)
        return loss


class _Receive(torch.autograd.Function):
    """Receive from the stage before; backward, send it the gradient.

    The anchor makes the result part of the autograd graph; it gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], border: StageBorder) -> Tensor:
        ctx.border = border
        received = torch.empty(shape, dtype=border.dtype, device=anchor.device)
        dist.recv(received, group=border.group, group_src=border.stage - 1)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        border = ctx.border
        dist.send(grads[0].contiguous(), group=border.group, group_dst=border.stage - 1)
        return None, None, None


class _Send(torch.autograd.Function):
    """Send to the next stage and return a zero; backward, receive the gradient of what was sent.

    The anchor makes the loss part of the autograd graph where what was sent is not.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor | None, border: StageBorder) -> Tensor:
        ctx.border, ctx.like = border, (hidden.shape, hidden.dtype, hidden.device)
        dist.send(hidden.contiguous(), group=border.group, group_dst=border.stage + 1)
        return border.scalar(hidden.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        border, (shape, dtype, device) = ctx.border, ctx.like
        gradient = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(gradient, group=border.group, group_src=border.stage + 1)
        return (gradient if ctx.needs_input_grad[0] else None), None, None


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

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return Passing.of(torch.empty(0, device=ids.device))


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
            "leave --pp out"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return Passing.of(self._border.send(Passing.plain(hidden)))
