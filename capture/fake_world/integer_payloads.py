"""Integers that another rank sends as tensors: shapes, token ids, masks.

A script that exchanges shapes, or whose first rank loads the batch for a group, depends on these
values. They are found like objects, by running the script as the sender
(`onerank.capture.fake_world.senders`). Tensors of other dtypes are carried along if such a sender
broadcasts them, from the second step on: an uninitialised loss mask would zero all gradients. No
run is made for them alone; parameters are broadcast before the first step ends.

torch's own integer messages (DDP's bucket sizes, DTensor's generator states) are equal on all
ranks, so no run is made for them either.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onerank.capture.fake_world.collective_launch import raw
from onerank.capture.fake_world.object_collectives import Address, group_address
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.collective_record import Group
    from onerank.capture.fake_world.recorder import Recorder

LARGEST_BYTES = 2**20
"""What a call may carry by value; a batch of token ids fits."""

_WAY = (
    *("onerank.capture", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch.utils._contextlib", "torch._ops"),
)
"""Modules between who asks for a call and its emulation."""


class IntegerPayloads:
    """What the ranks' integer tensors hold, as far as the script itself asks for it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loading: set[tuple[int, Address]] = set()

    def broadcast(self, group: Group, root: int, tensors: Sequence[Tensor]) -> None:
        """Give tensors the root's values; else they stay, with a warning."""
        to, source = group_address(group.ranks), group.ranks[root]
        whole = _whole(tensors)
        any_dtype = self._recorder.steps > 0 and (source, to) in self._loading and _numbers(tensors)
        if group.rank == root:
            self.send(to, tensors, any_dtype=any_dtype)
        else:
            self.receive("broadcast", source, to, tensors, any_dtype=any_dtype)
        if whole and _small(tensors) and _asked():
            self._loading.add((source, to))

    def scatter(
        self, group: Group, root: int, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Give outputs what the root has for this rank; return whether that could be known."""
        to = group_address(group.ranks)
        if group.rank == root:
            self.send(to, [tensor for row in rows for tensor in row])
            return True
        source = group.ranks[root]
        return self.receive("scatter", source, to, outputs, part=(group.rank, group.size))

    def send(self, to: Address, tensors: Sequence[Tensor], *, any_dtype: bool = False) -> None:
        """Record the integers that a receiver may request; with `any_dtype` values of any type."""
        messages = self._recorder.messages
        if messages is None or not messages.collects_sends or not (any_dtype or _whole(tensors)):
            return
        if _small(tensors) and _asked():
            messages.send(to, [_bytes(tensor) for tensor in tensors])

    def receive(
        self,
        function: str,
        source: int,
        to: Address | None,
        tensors: Sequence[Tensor],
        part: tuple[int, int] = (0, 1),
        *,
        any_dtype: bool = False,
    ) -> bool:
        """Give tensors the values that rank `source` sends; return whether they could be known.

        Args:
            function: what the script called.
            source: global rank of the sender.
            to: address of the message; None is this process's rank.
            tensors: what is received.
            part: which of how many equal parts of the message.
            any_dtype: whether to receive every data type, as in a message with integers; else only
                integers.
        """
        messages = self._recorder.messages
        place, parts = part
        if messages is None or not (any_dtype or _whole(tensors)) or not (asked := _asked()):
            return False
        try:
            if not _small(tensors, parts):
                raise CaptureError(
                    f"values are carried up to {LARGEST_BYTES} bytes a call",
                    code="payload-too-large",
                )
            given = messages.receive(source, to)[place::parts]
            _check(source, given, tensors)
        except CaptureError as error:
            own = f"rank {self._recorder.rank} keeps its own"
            if function != "broadcast":
                own = f"rank {self._recorder.rank} takes zeros"
            warnings.warn(
                f"{function}: rank {source} is not there to send its tensors; {own} ({error})",
                stacklevel=asked,
            )
            return False
        for tensor, data in zip(tensors, given, strict=True):
            values = _tensor(data, tensor.dtype, pinned=tensor.is_cuda)
            raw(tensor).copy_(values.view(tensor.shape), non_blocking=True)
        return True


def _whole(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors hold integers, and any."""
    return _numbers(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)


def _numbers(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors hold anything."""
    return not any(t.is_meta for t in tensors) and any(tensor.numel() for tensor in tensors)


def _small(tensors: Sequence[Tensor], parts: int = 1) -> bool:
    """Whether tensors, `parts` times over, are no more than a call carries by value."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return parts * size <= LARGEST_BYTES


def _asked() -> int:
    """Return how many frames above the caller the script, or a library of its own, made the call.

    0 where torch did so for itself, or autograd's threads.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    depth = 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_WAY):
            return 0 if module.startswith("torch.") else depth
        frame, depth = frame.f_back, depth + 1
    return 0


def _bytes(tensor: Tensor) -> bytes:
    flat = raw(tensor).reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().tobytes()


@lru_cache(maxsize=64)
def _tensor(data: bytes, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return values on the host; pinned, so that a copy does not hold up the launches."""
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    return values.pin_memory() if pinned else values


def _check(source: int, given: Sequence[object], tensors: Sequence[Tensor]) -> None:
    found = [len(data) if isinstance(data, bytes) else type(data).__name__ for data in given]
    expected = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if found != expected:
        raise CaptureError(
            f"rank {source} sends {found} bytes, and {expected} are received", code="payload-size"
        )
