"""Products of grouped_gemm and DeepGEMM, which write a result that their caller allocated.

Signatures are those of grouped_gemm 1.1.4 (`gmm` in csrc/grouped_gemm.cu) and DeepGEMM 2.6.1
(csrc/apis/gemm.hpp); FLOPs: `annotate/op_costs/library_operators/`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from onerank.capture.no_device.extensions.emulated_modules import Extension, Launch
from onerank.capture.no_device.operators.triton_kernels import KernelLaunch
from onerank.capture.patch_registry import DEEP_GEMM
from onerank.capture.patches import after_import, patched

_DEEP_GEMM_MODULE = "deep_gemm"


def _gmm(
    launch: Launch, a: Tensor, b: Tensor, c: Tensor, batch_sizes: Tensor, *_: Any, **__: Any
) -> None:
    launch("gmm", [a, b, batch_sizes], [c])


GROUPED_GEMM = Extension("grouped_gemm_backend", "grouped_gemm", "grouped_gemm", {"gmm": _gmm})


def recorded_deep_gemm(record: Callable[[KernelLaunch], None]) -> AbstractContextManager[None]:
    """Record calls of DeepGEMM's functions, once the script imports the package.

    They are functions of a package, so they are replaced there.

    Args:
        record: records a launch.
    """

    def install() -> AbstractContextManager[None]:
        functions = {name: _deep_gemm_function(name, record) for name in DEEP_GEMM}
        return patched(_DEEP_GEMM_MODULE, functions)

    return after_import(_DEEP_GEMM_MODULE, install)


def _deep_gemm_function(name: str, record: Callable[[KernelLaunch], None]) -> Callable[..., None]:
    """Return a function `name(a, b, d, ...)` that multiplies a and b into d.

    An operand in 8 bits is a pair: its numbers and their scales.
    """

    def multiply(a: Any, b: Any, d: Tensor, *rest: Any, c: Tensor | None = None, **_: Any) -> None:
        pairs = [each if isinstance(each, tuple | list) else (each, None) for each in (a, b)]
        others = [each for each in (*rest, c) if isinstance(each, Tensor)]
        reads = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], *others]
        tensors = [each for each in (*reads, d) if isinstance(each, Tensor)]
        record(KernelLaunch(f"deep_gemm::{name}", reads, [d], tensors))

    multiply.__name__ = name
    return multiply
