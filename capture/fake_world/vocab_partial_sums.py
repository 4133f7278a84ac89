"""Rows of a partial sum that only absent peers would have filled.

A rank's part of a vocabulary-parallel embedding is zero for tokens of other ranks. Tokens at the
start of a sequence attend to no other token and would stay zero through every layer; each norm
would multiply their gradient by 1 / sqrt(eps). With 8 layers of hidden size 256, gradients reached
a norm of 2e14, and in bf16 one step made the parameters infinite. So such rows are filled, without
an extra kernel where an emulated collective moves the bytes anyway.

Finding the rows takes kernels and synchronises, so it happens only in the first two steps; later
calls are identified by their position in the step. An embedding's gradient has such rows too, for
tokens that no batch of this rank holds. They stay zero where a script sums gradients by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onerank.capture.collective_kernels.cuda_driver import allocate_outside_torch
from onerank.capture.patches import live
from onerank.capture.script.step_hooks import in_backward

if TYPE_CHECKING:
    from onerank.capture.collective_record import CommCall

_WATCHED_STEPS = 2
_ELEMENTS = (1 << 19) + 8  # repeated, in rows of any usual width none is like another
_SEED = 0


class _Key(NamedTuple):
    collective: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class PartialSums:
    """The sums of a script's forwards, by their place among those of a step."""

    def __init__(self, *, watching: bool) -> None:
        """Prepare; without `watching` no sum is made up."""
        self._watching = watching
        self._steps = 0
        self._place = 0
        self._known: list[tuple[_Key, bool]] = []
        self._made_up: dict[_Key, Tensor] = {}
        self._lost = False

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        self._steps += 1
        self._place = 0
        if self._steps < _WATCHED_STEPS:
            self._known.clear()

    def note(self) -> str | None:
        """Return the note on made-up sums; None if there are none."""
        count = sum(lacks for _, lacks in self._known)
        if not count:
            return None
        lost = "; in steps that communicate otherwise than the second they are not" * self._lost
        return (
            f"{count} sums in a step's forward lack rows that only absent ranks have, as of a "
            "vocabulary-parallel embedding: their results are made up, random numbers of the "
            f"spread of this rank's part{lost}"
        )

    def may_lack_rows(self, result: Tensor) -> bool:
        """Whether a sum of this shape, now, is one to ask about; the host has little time here."""
        return self._watching and result.dim() > 1 and not in_backward()

    def filled_sum(self, call: CommCall, part: Tensor, operation: Any) -> Tensor | None:
        """Return what to take for the sum in place of this rank's part; None for the part itself.

        Args:
            call: what sums.
            part: this rank's part, [..., features].
            operation: the reduction, as `c10d` operators are given it.

        Returns:
            Values at random, of the spread of the part, [n]: to be repeated over the result.
        """
        key = _Key(call.collective, call.group, tuple(part.shape), part.dtype, part.device)
        if self._steps < _WATCHED_STEPS:
            summed = operation.op() == dist.ReduceOp.SUM
            lacks = summed and _lacks_rows(part) and not _is_gradient(part)
            self._known.append((key, lacks))
            if lacks and key not in self._made_up:
                self._made_up[key] = _like(part)
        elif self._place < len(self._known) and self._known[self._place][0] == key:
            lacks = self._known[self._place][1]
            self._place += 1
        else:  # a step unlike the second: nothing is known of its other calls
            self._lost |= any(lacks for _, lacks in self._known[self._place :])
            lacks, self._place = False, len(self._known)
        return self._made_up[key] if lacks else None


@torch.no_grad()
def _lacks_rows(part: Tensor) -> bool:
    """Whether some rows are zero, and not all: then those of the sum may well be, too."""
    wide = part.is_floating_point() and part.element_size() > 1  # no float8 kernel takes a norm
    if not wide or part.is_meta or part.numel() == 0 or not part.is_contiguous():
        return False
    if part.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    zero = torch.linalg.vector_norm(part.data, float("inf"), dim=-1) == 0
    return bool(zero.any()) and not bool(zero.all())


@torch.no_grad()
def _is_gradient(part: Tensor) -> bool:
    """Whether it is some parameter's gradient, a part or a copy of one."""
    own, storage = _rows(part), part.untyped_storage().data_ptr()
    for parameter in live(nn.Parameter):
        whole: Any = parameter.grad
        gradient = whole.to_local() if isinstance(whole, DTensor) else whole
        if gradient is None or gradient.layout != torch.strided or gradient.is_meta:
            continue
        if gradient.untyped_storage().data_ptr() == storage:
            return True
        if gradient.shape == part.shape and torch.equal(_rows(gradient).to(own.device), own):
            return True
    return False


def _rows(part: Tensor) -> Tensor:
    """Tell of each row whether it is more than zeros."""
    return part.data.ne(0).any(dim=-1)


@torch.no_grad()
def _like(part: Tensor) -> Tensor:
    """Return values with the spread of the part's rows that are not zero."""
    values = allocate_outside_torch(min(part.numel(), _ELEMENTS), part.dtype, part.device)
    generator = torch.Generator(part.device).manual_seed(_SEED)
    spread = part[_rows(part)].float().square().mean().sqrt()
    return values.normal_(generator=generator).mul_(spread)
