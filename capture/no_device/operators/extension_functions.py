"""Functions of C++ extensions that no registered operator wraps, recorded as operators.

Such extensions bind their kernels to Python functions, which read the addresses of tensors. Each
function here writes a result that its caller allocated, so its arguments show all that a record
needs. Signatures are those of grouped_gemm 1.1.4 (`gmm` in csrc/grouped_gemm.cu) and DeepGEMM 2.6.1
(csrc/apis/gemm.hpp); FLOPs: `annotate/op_costs/library_operators.py`.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from onerank.capture.no_device.operators.triton_kernels import KernelLaunch
from onerank.capture.patch_registry import DEEP_GEMM
from onerank.capture.patches import after_import, patched

_GROUPED_GEMM_MODULE, _DEEP_GEMM_MODULE = "grouped_gemm_backend", "deep_gemm"

_Record = Callable[[KernelLaunch], None]


@contextlib.contextmanager
def recorded_extensions(record: _Record) -> Generator[None]:
    """Record calls of extensions' functions, once the script imports an extension.

    Args:
        record: records a launch.
    """

    def grouped_gemm() -> contextlib.AbstractContextManager[None]:
        def gmm(a: Tensor, b: Tensor, c: Tensor, batch_sizes: Tensor, *_: Any, **__: Any) -> None:
            reads = [a, b, batch_sizes]
            record(KernelLaunch("grouped_gemm::gmm", reads, [c], [*reads, c]))

        return patched(_GROUPED_GEMM_MODULE, {"gmm": gmm})

    def deep_gemm() -> contextlib.AbstractContextManager[None]:
        functions = {name: _deep_gemm_function(name, record) for name in DEEP_GEMM}
        return patched(_DEEP_GEMM_MODULE, functions)

    with (
        after_import(_GROUPED_GEMM_MODULE, grouped_gemm),
        after_import(_DEEP_GEMM_MODULE, deep_gemm),
    ):
        yield


def _deep_gemm_function(name: str, record: _Record) -> Callable[..., None]:
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
