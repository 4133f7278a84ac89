"""Sustained microbenchmarks of a GPU: the measured calls, and the GEMM shapes that calibrate it.

One GEMM predicts others to within some 10%, because libraries have better kernels for some sizes.
The mean over several shapes predicts all of them better.
"""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class SustainedCall:
    """A call that ran without a pause for two seconds.

    Attributes:
        unit: arithmetic of a GEMM: "bf16", "fp16", "tf32", "fp8" or "fp32"; "" for other calls.
        sizes: m, n and k of a GEMM.
        flops: FLOPs of one call; for other calls than GEMMs, its vector operations.
        nbytes: bytes of the operands and the result of one call, each counted once.
        median_ns: median time of one call.
        power_w: board power; None if not measured.
        sm_clock_mhz: median over the second half; None if not measured.
    """

    unit: str
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    median_ns: int
    power_w: float | None
    sm_clock_mhz: int | None = None


_SIZES = 4096, 8192, 16384

LARGE = tuple(product(_SIZES, _SIZES, _SIZES))
"""m, n and k of GEMMs whose rate is that of the matrix units under the power limit."""

SKINNY = tuple(product((16, 64), (8192, 16384), (8192, 16384)))
"""m, n and k of GEMMs whose rate is that of the memory: their weights exceed every cache."""
