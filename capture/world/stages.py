"""What the stages of torch.distributed.pipelining send and receive: activations or gradients.

A schedule joins what it sends of one micro-batch and receives of another to one batch, between
calls of the model. The stage that makes the batch knows what each part of it is for.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import stage

from onerank.capture.calls import WorkPhase
from onerank.capture.replaced import replaced

_stage: Any = stage
_Stage: Any = _stage._PipelineStageBase  # it has no public name

_MADE: dict[str, tuple[str, WorkPhase]] = {
    "get_fwd_recv_ops": ("recv", "forward"),
    "get_fwd_send_ops": ("send", "forward"),
    "get_bwd_recv_ops": ("recv", "backward"),
    "get_bwd_send_ops": ("send", "backward"),
}


class Purpose(NamedTuple):
    """What a send or receive is for: activations (forward) or gradients of a micro-batch."""

    phase: WorkPhase
    micro_batch: int | None


class Purposes:
    """What the sends and receives are for that stages have made, and nobody has issued yet."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Purpose] = {}

    def of(self, collective: str, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return what a call is for that is issued now; None where no stage made it."""
        return self._made.pop((collective, tensors[0].data_ptr()), None) if self._made else None

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """Note what stages make while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, made in _MADE.items():
                noting = self._noting(getattr(_Stage, name), *made)
                stack.enter_context(replaced(_Stage, name, noting))
            yield

    def _noting(
        self, original: Callable[..., list[dist.P2POp]], collective: str, phase: WorkPhase
    ) -> Callable[..., list[dist.P2POp]]:
        def ops(own: Any, micro_batch: int) -> list[dist.P2POp]:
            made = original(own, micro_batch)
            for op in made:
                self._made[collective, op.tensor.data_ptr()] = Purpose(phase, micro_batch)
            return made

        return ops
