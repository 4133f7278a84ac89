"""Calibrate a GPU's rates so that the tile model reproduces two microbenchmarks measured on it.

A description's figures are off by some percent, and so are coefficients fitted to other GPUs. Two
microbenchmarks, of large and of skinny GEMMs, determine the matrix-unit rate and the memory
bandwidth with which the tile model gives their mean rates. Known by these two only, with its die
family left out of the fit, a GPU's bf16 GEMMs over 10 us are predicted from their shapes within
7.9% on average (benchmarks/results/2026-11-23-gemm-calibration-size.txt).
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import Figure, measured_of
from onerank.annotate.models.coefficients import GemmCoefficients
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns
from onerank.annotate.models.gpu_distance import same_die
from onerank.ir.arrays import F64
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES

# The compute rate changes the time of skinny GEMMs a little, and the bandwidth that of large ones,
# so both are adjusted together. After 10 rounds the factors of the five GPUs of the fit are within
# 0.01% of those after 40.
_ROUNDS = 10
_ITEM_BYTES = 2  # the microbenchmarks multiply 16-bit operands


class Calibration(NamedTuple):
    """A calibrated GPU.

    Attributes:
        gpu: the GPU with its calibrated memory bandwidth.
        compute: factor on its sustained matrix rates.
    """

    gpu: Gpu
    compute: float


def calibrated(gpu: Gpu, c: GemmCoefficients) -> Calibration:
    """Return the GPU calibrated to its microbenchmarks; unchanged if it has none.

    An overridden figure scales the measured figures by the same factor.
    """
    names = "measured_gemm_tflops", "measured_skinny_gb_per_s"
    described = without_overrides(gpu)
    rate, peak = _rates(described)
    if not rate or not described.figures.keys() >= {*names}:
        return Calibration(gpu, 1.0)
    tflops, gb_per_s = (described.figures[name].value for name in names)
    large, skinny = gemm_shapes(LARGE_SHAPES), gemm_shapes(SKINNY_SHAPES)
    compute = memory = 1.0
    limits = peak / rate, described.peak_bandwidth_bytes_per_s / described.bandwidth_bytes_per_s
    # The limits apply in every round: clipped only at the end, a measurement above what the model
    # has at the peak would multiply the factor in each round.
    for _ in range(_ROUNDS):
        trial = _with_memory(described, memory)
        rates = Rates(*(np.array([rate_per_s]) for rate_per_s in (rate * compute, peak)))
        compute *= tflops * 1e12 / mean_rates(trial, rates, large, c).flops
        memory *= gb_per_s * 1e9 / mean_rates(trial, rates, skinny, c).bytes
        compute, memory = min(compute, limits[0]), min(memory, limits[1])
    return Calibration(_with_memory(gpu, memory), compute)


def calibrated_source(source: Gpu, target: Gpu, c: GemmCoefficients) -> Calibration:
    """Return the source of a prediction, calibrated to its microbenchmarks or the target's.

    If only the target has them and is of the same die, its factor on the memory bandwidth also
    applies to the source.
    """
    name = "measured_skinny_gb_per_s"
    if not same_die(source, target) or name in source.figures or name not in target.figures:
        return calibrated(source, c)
    calibrated_target = calibrated(target, c).gpu
    factor = calibrated_target.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    return Calibration(_with_memory(source, factor), 1.0)


class MeanRates(NamedTuple):
    """Geometric means over products, per second."""

    flops: float
    bytes: float


def mean_rates(gpu: Gpu, rates: Rates, shapes: F64, c: GemmCoefficients) -> MeanRates:
    """Return the mean rates that the tile model predicts for GEMMs.

    Args:
        gpu: where they run.
        rates: rates of all of them, float64[1] each.
        shapes: as for `gemm_tiles.gemm_ns`.
        c: fitted coefficients.
    """
    repeated = Rates(*(np.repeat(rate, len(shapes)) for rate in rates))
    return rates_in(shapes, gemm_ns(GemmTarget(gpu, repeated, per_call=True), shapes, c))


def rates_in(shapes: F64, times_ns: F64) -> MeanRates:
    """Return the mean rates of GEMMs that took `times_ns`, float64[d]."""
    _, m, n, k, item, result = shapes.T
    flops, moved = 2 * m * n * k, item * (m * k + k * n) + result * m * n
    return MeanRates(*(float(np.exp(np.log(x / times_ns * 1e9).mean())) for x in (flops, moved)))


def gemm_shapes(sizes: Sequence[tuple[int, int, int]]) -> F64:
    """Return the shapes of 16-bit GEMMs (m, n, k) in the form of `gemm_tiles.gemm_ns`."""
    return np.array([(1, *size, _ITEM_BYTES, _ITEM_BYTES) for size in sizes], dtype=np.float64)


def _rates(gpu: Gpu) -> tuple[float, float]:
    """Return the sustained and the peak FLOP/s of 16-bit GEMMs; 0 without tensor cores."""
    for dtype in ("bfloat16", "float16"):
        rate, peak = gpu.tensor_flops_per_s(dtype), gpu.peak_tensor_flops_per_s(dtype)
        if rate and peak:
            return rate, peak
    return 0.0, 0.0


def without_overrides(gpu: Gpu) -> Gpu:
    """Return the GPU as described, but with its present measured figures.

    Overridden measurements count as measured; those of an overridden peak are scaled back.
    """
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
    """Return the GPU with `factor` times its achievable bandwidth, at most the datasheet's."""
    value = min(gpu.bandwidth_bytes_per_s * factor, gpu.peak_bandwidth_bytes_per_s) / 1e9
    copied = Figure(value, gpu.figures["memory_bandwidth_gb_per_s"].source, "measured")
    return msgspec.structs.replace(gpu, figures={**gpu.figures, "measured_copy_gb_per_s": copied})
