"""Random results for sums that lack rows of absent ranks, as of vocabulary-parallel embeddings.

A rank's part of a vocabulary-parallel embedding is zero for tokens of other ranks. Tokens at the
start of a sequence attend to no other token and would stay zero through every layer; each norm
would multiply their gradient by 1 / sqrt(eps). With 8 layers of hidden size 256, gradients reached
a norm of 2e14, and in bf16 one step made the parameters infinite. So the result of such a sum is
random, with the spread of this rank's part. Where an emulated collective moves the bytes anyway,
this takes no extra kernel.

Finding zero rows launches kernels and synchronises, so it happens only in the first two steps;
later calls are identified by their position in the step. The gradient of an embedding has zero rows
too, for tokens that are in no batch of this rank. A script's sum of gradients keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onerank.capture.collective_kernels.kernels import allocate_outside_torch
from onerank.capture.fake_tensors import is_fake
from onerank.capture.patches import live
from onerank.capture.script.optimizer_steps import in_backward
from onerank.ir.notes import Note

if TYPE_CHECKING:
    from onerank.capture.collective_record import CommCall

_WATCHED_STEPS = 2
# Random values per kind of sum, repeated over the result. Not a multiple of usual row widths, so
# that no two rows are equal.
_RANDOM_ELEMENTS = (1 << 19) + 8
_SEED = 0


class _Key(NamedTuple):
    collective: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class PartialSums:
    """Sums of a script's forward passes, identified by their index among those of a step."""

    def __init__(self, *, enabled: bool) -> None:
        """Start before the first step; unless `enabled`, no sum is random."""
        self._enabled = enabled
        self._steps = 0
        self._index = 0
        self._known: list[tuple[_Key, bool]] = []  # sums of the second step: whether they lack rows
        self._random: dict[_Key, Tensor] = {}
        self._mismatched = False  # a later step has left a sum that lacks rows unfilled

    def next_step(self) -> None:
        """Count a step of the script."""
        self._steps += 1
        self._index = 0
        if self._steps < _WATCHED_STEPS:
            self._known.clear()

    def note(self) -> Note | None:
        """Return the note about random sums; None if there are none."""
        count = sum(lacks for _, lacks in self._known)
        if not count:
            return None
        exception = ", except in steps whose sums differ from the second step's" * self._mismatched
        return Note(
            f"{count} sums in a step's forward lack rows that only absent ranks have, as of a "
            "vocabulary-parallel embedding: their results are random, with the spread of this "
            f"rank's part{exception}",
            code="partial-sums-random",
        )

    def may_lack_rows(self, result: Tensor) -> bool:
        """Return whether `filled_sum` must examine a sum: a cheap test that most sums fail."""
        return self._enabled and result.dim() > 1 and not in_backward()

    def filled_sum(self, call: CommCall, part: Tensor) -> Tensor | None:
        """Return random values for a sum that lacks rows; None if this rank's part can stay.

        Args:
            call: the record of the collective.
            part: this rank's part, [..., features].

        Returns:
            Random values with the spread of the part, [n], to be repeated over the result.
        """
        key = _Key(call.collective, call.group, tuple(part.shape), part.dtype, part.device)
        if self._steps < _WATCHED_STEPS:
            lacks = call.reduction == "sum" and _lacks_rows(part) and not _is_gradient(part)
            self._known.append((key, lacks))
            if lacks and key not in self._random:
                self._random[key] = _random_like(part)
        elif self._index < len(self._known) and self._known[self._index][0] == key:
            lacks = self._known[self._index][1]
            self._index += 1
        else:  # the step differs from the second, so later positions identify no call
            self._mismatched |= any(lacks for _, lacks in self._known[self._index :])
            lacks, self._index = False, len(self._known)
        return self._random[key] if lacks else None


@torch.no_grad()
def _lacks_rows(part: Tensor) -> bool:
    """Return whether some rows, but not all, are zero: other ranks may contribute these rows."""
    # torch has no norm of float8.
    wide = part.is_floating_point() and part.element_size() > 1
    if not wide or part.is_meta or part.numel() == 0 or not part.is_contiguous():
        return False
    if is_fake(part):
        return False  # without numbers nothing is zero, and a read would count as the script's
    if part.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # a graph capture forbids the synchronisation below
    zero = torch.linalg.vector_norm(part.data, float("inf"), dim=-1) == 0
    return bool(zero.any()) and not bool(zero.all())


@torch.no_grad()
def _is_gradient(part: Tensor) -> bool:
    """Return whether a sum is the gradient of a parameter: by memory, or by shape and zero rows."""
    rows, storage = _nonzero_rows(part), part.untyped_storage().data_ptr()
    for parameter in live(nn.Parameter):
        grad: Any = parameter.grad
        gradient = grad.to_local() if isinstance(grad, DTensor) else grad
        if gradient is None or gradient.layout != torch.strided or gradient.is_meta:
            continue
        if gradient.untyped_storage().data_ptr() == storage:
            return True
        if gradient.shape == part.shape and torch.equal(
            _nonzero_rows(gradient).to(rows.device), rows
        ):
            return True
    return False


def _nonzero_rows(part: Tensor) -> Tensor:
    """Return whether each row has a nonzero element, [...]."""
    return part.data.ne(0).any(dim=-1)


@torch.no_grad()
def _random_like(part: Tensor) -> Tensor:
    """Return normal values with the root mean square of the part's nonzero rows."""
    # Outside torch's allocator, whose history and peak belong to the job.
    values = allocate_outside_torch(min(part.numel(), _RANDOM_ELEMENTS), part.dtype, part.device)
    generator = torch.Generator(part.device).manual_seed(_SEED)
    spread = part[_nonzero_rows(part)].float().square().mean().sqrt()
    return values.normal_(generator=generator).mul_(spread)
