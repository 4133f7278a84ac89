"""The CUDA device to measure on."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

import torch

from onerank.ir.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device: as torch takes it, and its name as CUDA reports it."""

    torch: torch.device
    name: str


@contextlib.contextmanager
def on_device(index: int) -> Generator[Device]:
    """Make a CUDA device the current one; TF32 is as it was when the context ends.

    Raises:
        CaptureError: there is no such device.
    """
    count = torch.cuda.device_count()
    if not count:
        raise CaptureError(
            f"no GPU at hand: torch {torch.__version__} finds no CUDA device; run this on a "
            "machine with one, with a build of torch for CUDA"
        )
    if index >= count:
        raise CaptureError(f"no GPU {index}: this machine has 0 to {count - 1}")
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.cuda.set_device(index)
    try:
        yield Device(torch.device("cuda", index), torch.cuda.get_device_name(index))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
