"""Kernels of CUDA source that a script compiles by `torch.cuda._compile_kernel`.

Nothing compiles them. The signature in the source shows which arguments a kernel reads (pointers to
const) and which it writes (other pointers).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from onerank.capture.no_device.operators.triton_kernels import KernelLaunch

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class CudaSourceKernel:
    """Stands for a compiled kernel, and records its launches.

    Args:
        source: CUDA source.
        name: of the kernel.
        record: receives its launches.
    """

    def __init__(self, source: str, name: str, record: Callable[[KernelLaunch], None]) -> None:
        self._name = name
        self._record = record
        self._written = _written_arguments(source, name)

    def __call__(
        self, grid: Any = None, block: Any = None, args: Sequence[Any] | None = None, **_: Any
    ) -> None:
        """Record a launch; the arguments are those of torch's `_CudaKernel`."""
        name = f"cuda::{self._name}"
        self._record(KernelLaunch.of_arguments(name, args or (), written=self._written))

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Do nothing: no cost depends on the size of shared memory."""


def _written_arguments(source: str, name: str) -> frozenset[int]:
    """Return the positions of a kernel's pointers to data that is not const.

    Empty if a macro or a template hides the signature; the kernel then reads every argument, and
    may write every tensor.
    """
    text = _COMMENT.sub("", source)
    signature = re.search(rf"__global__\b[^;{{}}]*?\b{re.escape(name)}\s*\(([^)]*)\)", text)
    if signature is None:
        return frozenset()
    arguments = signature[1].split(",")
    return frozenset(
        at
        for at, argument in enumerate(arguments)
        if "*" in argument and "const" not in argument.partition("*")[0].split()
    )
