"""A GPU whose rates reproduce the GEMMs that were measured on it.

A description's figures are off by some percent, and so are coefficients fitted to other GPUs. Where
two microbenchmarks were measured, the matrix-unit rate and the memory bandwidth are set so that the
tile model gives their mean times, whatever the description says.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import Figure, measured_of
from onerank.annotate.models.coefficients import GemmCoefficients
from onerank.annotate.models.error_model import same_die
from onerank.annotate.models.gemm_tiles import F64, Rates, gemm_ns
from onerank.ir.job.microbenchmarks import LARGE, SKINNY

_ROUNDS = 8  # each of the two rates changes the time of the other's products a little
_ITEM_BYTES = 2


class Calibration(NamedTuple):
    """A GPU whose bandwidth is that of its products, and a factor on its sustained rates."""

    gpu: Gpu
    compute: float


def calibrated(gpu: Gpu, c: GemmCoefficients) -> Calibration:
    """Return the GPU as its measured products have it; as described where none were measured.

    A what-if changes the described figures, and what was measured by as much.
    """
    names = "measured_gemm_tflops", "measured_skinny_gb_per_s"
    described = without_overrides(gpu)
    rate, peak = _rates(described)
    if not rate or not described.figures.keys() >= {*names}:
        return Calibration(gpu, 1.0)
    tflops, gb_per_s = (described.figures[name].value for name in names)
    large, skinny = shapes_of(LARGE), shapes_of(SKINNY)
    compute = memory = 1.0
    most = peak / rate, described.peak_bandwidth_bytes_per_s / described.bandwidth_bytes_per_s
    for _ in range(_ROUNDS):
        tried = _with_memory(described, memory)
        rates = Rates(*(np.array([one]) for one in (rate * compute, peak)))
        compute *= tflops * 1e12 / mean_rates(tried, rates, large, c).flops
        memory *= gb_per_s * 1e9 / mean_rates(tried, rates, skinny, c).bytes
        compute, memory = min(compute, most[0]), min(memory, most[1])
    return Calibration(_with_memory(gpu, memory), compute)


def calibrated_source(source: Gpu, target: Gpu, c: GemmCoefficients) -> Calibration:
    """Return the source of a prediction as measured products have it: its own, or the target's.

    Where the target is of the same die and reads memory faster than the model has it, so does the
    source.
    """
    name = "measured_skinny_gb_per_s"
    if not same_die(source, target) or name in source.figures or name not in target.figures:
        return calibrated(source, c)
    there = calibrated(target, c).gpu
    factor = there.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    return Calibration(_with_memory(source, factor), 1.0)


class MeanRates(NamedTuple):
    """Geometric means over products, per second."""

    flops: float
    bytes: float


def mean_rates(gpu: Gpu, rates: Rates, shapes: F64, c: GemmCoefficients) -> MeanRates:
    """Return what the model has products reach that run at one rate, float64[1] of `rates`."""
    every = Rates(*(np.repeat(rate, len(shapes)) for rate in rates))
    return rates_in(shapes, gemm_ns(gpu, every, shapes, c))


def rates_in(shapes: F64, times_ns: F64) -> MeanRates:
    """Return what products reached that took `times_ns`, float64[d]."""
    _, m, n, k, item, result = shapes.T
    flops, moved = 2 * m * n * k, item * (m * k + k * n) + result * m * n
    return MeanRates(*(float(np.exp(np.log(x / times_ns * 1e9).mean())) for x in (flops, moved)))


def shapes_of(sizes: Sequence[tuple[int, int, int]]) -> F64:
    """Return products in 16 bits as `tiles.gemm_ns` takes them, float64[d, 6]."""
    return np.array([(1, *size, _ITEM_BYTES, _ITEM_BYTES) for size in sizes], dtype=np.float64)


def _rates(gpu: Gpu) -> tuple[float, float]:
    """Return the sustained and the peak rate of products in 16 bits, 0 where there are no units."""
    for dtype in ("bfloat16", "float16"):
        rate, peak = gpu.tensor_flops_per_s(dtype), gpu.peak_tensor_flops_per_s(dtype)
        if rate and peak:
            return rate, peak
    return 0.0, 0.0


def without_overrides(gpu: Gpu) -> Gpu:
    """Return the GPU without what-ifs, but with what was measured or set to have been."""
    described = gpu.as_described
    if described is gpu:
        return gpu
    figures = dict(described.figures)
    for name, peak in measured_of(figures):
        if name in gpu.figures:
            factor = figures[peak].value / gpu.figures[peak].value
            value = gpu.figures[name].value * factor
            figures[name] = msgspec.structs.replace(gpu.figures[name], value=value)
    return msgspec.structs.replace(described, figures=figures)


def _with_memory(gpu: Gpu, factor: float) -> Gpu:
    """Return the GPU with so many times the bandwidth in reach, at most the datasheet's."""
    value = min(gpu.bandwidth_bytes_per_s * factor, gpu.peak_bandwidth_bytes_per_s) / 1e9
    copied = Figure(value, gpu.figures["memory_bandwidth_gb_per_s"].source, "measured")
    return msgspec.structs.replace(gpu, figures={**gpu.figures, "measured_copy_gb_per_s": copied})
