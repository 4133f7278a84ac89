"""The forms of data parallelism, and which of them the options ask for."""

from typing import Literal

from onerank.capture.data.groups import data_ranks
from onerank.ir import World
from onerank.ir.errors import CaptureError

Form = Literal["ddp", "zero1", "zero2", "fsdp"]


def form_of(world: World, *, ddp: bool, fsdp: bool, zero: int | None) -> Form | None:
    """Return the form that the options ask for, None where they leave it open.

    Raises:
        CaptureError: options that exclude each other, or a form without data-parallel ranks.
    """
    asked = [name for name, on in (("--ddp", ddp), ("--fsdp", fsdp)) if on]
    if zero is not None:
        asked.append(f"--zero {zero}")
    if len(asked) > 1:
        raise CaptureError(
            f"{' and '.join(asked)}: each says how gradients and states are shared; give one "
            "(--fsdp is --zero 3)"
        )
    if zero not in (None, 1, 2, 3):
        raise CaptureError(
            f"--zero {zero}: expected 1 (optimizer states sharded), 2 (and gradients) or "
            "3 (and parameters, the same as --fsdp)"
        )
    if asked and len(data_ranks(world, 0)) == 1:
        raise CaptureError(
            f"{asked[0]} shares work among data-parallel ranks, and the world has {world}: "
            "give --dp D with D above 1"
        )
    if ddp:
        return "ddp"
    if fsdp or zero == 3:
        return "fsdp"
    if zero == 1:
        return "zero1"
    return "zero2" if zero == 2 else None
