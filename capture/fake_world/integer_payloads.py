"""Integers that another rank sends as tensors: shapes, token ids, masks.

A script that exchanges shapes, or whose first rank loads the batch for a group, depends on these
values. They are learned like objects, by a run of the script as the sender
(`onerank.capture.fake_world.senders`). From the second step on, the same run also provides tensors
of other dtypes that such a sender broadcasts.

torch's own integer messages (DDP's bucket sizes, DTensor's generator states) are equal on all
ranks, so they need no run.
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

from onerank.capture.fake_world.call_log import Address
from onerank.capture.fake_world.collective_launch import raw
from onerank.capture.fake_world.object_collectives import group_address
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.collective_record import Group
    from onerank.capture.fake_world.call_log import CallLog

LARGEST_BYTES = 2**20
"""Largest payload whose values are learned; a batch of token ids fits."""

_FRAMES_BELOW_THE_SCRIPT = (
    *("onerank.capture", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch.utils._contextlib", "torch._ops"),
)
"""Modules whose frames lie between the caller of a collective and its emulation."""


class IntegerPayloads:
    """Values of small integer tensors in collectives that the script itself calls."""

    def __init__(self, recorder: CallLog) -> None:
        self._recorder = recorder
        # (sender, group) pairs that broadcast integers: such a sender loads the group's batch.
        self._loading: set[tuple[int, Address]] = set()

    def broadcast(self, group: Group, root: int, tensors: Sequence[Tensor]) -> None:
        """Fill tensors with the root's values; if these are unknown, warn and keep the tensors'."""
        to, source = group_address(group.ranks), group.ranks[root]
        integers = _are_integers(tensors)
        # A loss mask filled with zeros would zero all gradients, so the tensors of other dtypes in
        # a batch are learned too. Not in the first step, where parameters are broadcast.
        loaded = (source, to) in self._loading and _have_values(tensors)
        any_dtype = self._recorder.steps > 0 and loaded
        if group.rank == root:
            self.send(to, tensors, any_dtype=any_dtype)
        else:
            self.receive("broadcast", source, to, tensors, any_dtype=any_dtype)
        if integers and _are_small(tensors) and _script_depth():
            self._loading.add((source, to))

    def scatter(
        self, group: Group, root: int, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Fill outputs with the root's values for this rank; return whether they are known."""
        to = group_address(group.ranks)
        if group.rank == root:
            self.send(to, [tensor for row in rows for tensor in row])
            return True
        source = group.ranks[root]
        return self.receive("scatter", source, to, outputs, part=(group.rank, group.size))

    def send(self, to: Address, tensors: Sequence[Tensor], *, any_dtype: bool = False) -> None:
        """Record the integers, or with `any_dtype` any values, that a receiver may request."""
        messages = self._recorder.messages
        if (
            messages is None
            or not messages.collects_sends
            or not (any_dtype or _are_integers(tensors))
        ):
            return
        if _are_small(tensors) and _script_depth():
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
        """Fill tensors with the values that rank `source` sends; return whether they are known.

        Args:
            function: name of the collective, for the warning.
            source: global rank of the sender.
            to: address of the message; None is this process's rank.
            tensors: the tensors to fill.
            part: (index, count): take every count-th tensor of the message, from the index on.
            any_dtype: whether to fill tensors of every dtype; otherwise only integers.
        """
        messages = self._recorder.messages
        index, parts = part
        if messages is None or not (any_dtype or _are_integers(tensors)):
            return False
        if not (depth := _script_depth()):
            return False
        try:
            if not _are_small(tensors, parts):
                raise CaptureError(
                    f"values are learned for calls of up to {LARGEST_BYTES} bytes",
                    code="payload-too-large",
                )
            payloads = messages.receive(source, to)[index::parts]
            _check(source, payloads, tensors)
        except CaptureError as error:
            consequence = "keeps its own values" if function == "broadcast" else "receives zeros"
            warnings.warn(
                f"{function}: the tensors of rank {source}, an absent rank, are unknown; rank "
                f"{self._recorder.rank} {consequence} ({error})",
                stacklevel=depth,
            )
            return False
        for tensor, data in zip(tensors, payloads, strict=True):
            values = _tensor(data, tensor.dtype, pinned=tensor.is_cuda)
            raw(tensor).copy_(values.view(tensor.shape), non_blocking=True)
        return True


def _are_integers(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have elements, and all are integers or flags."""
    return _have_values(tensors) and not any(
        t.is_floating_point() or t.is_complex() for t in tensors
    )


def _have_values(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have elements, and none is a meta tensor."""
    return not any(t.is_meta for t in tensors) and any(tensor.numel() for tensor in tensors)


def _are_small(tensors: Sequence[Tensor], parts: int = 1) -> bool:
    """Whether `parts` times the tensors' bytes are at most `LARGEST_BYTES`."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return parts * size <= LARGEST_BYTES


def _script_depth() -> int:
    """Return how many frames above the caller the script or one of its libraries made the call.

    Returns 0 if torch made the call for itself, or from an autograd thread.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    depth = 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_FRAMES_BELOW_THE_SCRIPT):
            return 0 if module.startswith("torch.") else depth
        frame, depth = frame.f_back, depth + 1
    return 0


def _bytes(tensor: Tensor) -> bytes:
    flat = raw(tensor).reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().tobytes()


@lru_cache(maxsize=64)
def _tensor(data: bytes, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return values on the host."""
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    # From pageable memory the copy to the GPU would block the host, and delay launches.
    return values.pin_memory() if pinned else values


def _check(source: int, payloads: Sequence[object], tensors: Sequence[Tensor]) -> None:
    sizes = [len(data) if isinstance(data, bytes) else type(data).__name__ for data in payloads]
    expected = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sizes != expected:
        raise CaptureError(
            f"rank {source} sends tensors of {sizes} bytes, but the receiver expects {expected}",
            code="payload-size",
        )
