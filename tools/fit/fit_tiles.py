"""Fit the coefficients of the tile model to measured GEMMs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_time import attention_ns
from onerank.annotate.models.coefficients import (
    AttentionCoefficients,
    GemmCoefficients,
)
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, cache_misses, gemm_ns
from onerank.annotate.models.gpu_distance import properties
from onerank.ir.arrays import F64
from tools.fit.measured_kernels import Attention, Products, family

_optimize: Any = scipy.optimize  # it has no types

_STEP = 1e-2  # step of the finite differences, in the logarithms of the coefficients

_SCALE = 0.1  # error in ln above which a residual's cost is linear, not quadratic

_PULL = 0.005  # weight of the pull to the start


def fit_robustly(residuals: Callable[[F64], F64], start: F64) -> F64:
    """Return the x near `start` that minimises sum 2*s^2*(sqrt(1 + (r/s)^2) - 1), s = 0.1.

    SciPy's soft-L1 loss: a shape for which a library has a bad kernel on one GPU does not dominate.
    The measurements do not determine every coefficient; a weak quadratic pull towards `start`
    determines the others.

    Args:
        residuals: x, float64[p], to residuals, float64[d].
        start: initial value, float64[p].
    """
    count = len(start)
    pull = _PULL * np.sqrt(len(residuals(start)))

    def pulled(x: F64) -> F64:
        return np.concatenate([residuals(x), pull * (x - start)])

    def slopes(x: F64) -> F64:
        here = residuals(x)
        axes: F64 = _STEP * np.eye(count)
        columns = [(residuals(x + axis) - here) / _STEP for axis in axes]
        return np.concatenate([np.array(columns).T, pull * np.eye(count)])

    # SciPy applies one loss to all residuals, so the pull is excluded by hand: it stays quadratic.
    def loss(squares: F64) -> F64:
        root = np.sqrt(1 + squares)
        rho = np.array([2 * (root - 1), 1 / root, -0.5 / root**3])
        rho[:, -count:] = squares[-count:], np.ones(count), np.zeros(count)
        return rho

    solution = _optimize.least_squares(
        pulled, start, jac=slopes, loss=loss, f_scale=_SCALE, ftol=1e-5
    )
    return np.asarray(solution.x, dtype=np.float64)


def robust_loss(error: F64) -> float:
    """Return the mean loss of errors in ln: up to a factor that of `fit_robustly`."""
    return float(np.mean(np.sqrt(1 + (error / _SCALE) ** 2) - 1))


START = GemmCoefficients(
    synchronous=1.2,
    asynchronous=1.2,
    tile=20,
    prologue_cycles=1000,
    step_cycles=50,
    epilogue_cycles=1000,
    overlap=4,
    write_overlap=1.5,
    l2_bytes_per_cycle=64,
    split_ns=2000,
    burst=0.5,
    floor=1.0,
    call_gap=0.32,  # measured, not fitted: `provenance.call_gap` in the coefficients' file
    choice=0.1,
    ramp_cycles=500,
)
"""Start of every fit: round figures, equal for both generations."""

ATTENTION_START = AttentionCoefficients(floor=2, efficiency=0.7, prologue_cycles=3000, overlap=3)

_SEED = 2  # of the drawn shapes; `provenance.gemm` in the coefficients' file names it

_FITTED = tuple(name for name in GemmCoefficients.__struct_fields__ if name != "call_gap")


def fit_gemm(products: Products, gpus: Sequence[Gpu], *, shapes: int = 1500) -> GemmCoefficients:
    """Return the coefficients that fit the GEMMs measured on `gpus`.

    Every die family has the same weight.

    Args:
        products: GEMMs measured on these GPUs, and possibly on others.
        gpus: the GPUs to fit to.
        shapes: number of shapes to draw.
    """
    rng = np.random.default_rng(_SEED)
    drawn = rng.permutation(len(products.shapes))[:shapes]
    families = [family(gpu) for gpu in gpus]
    parts: list[tuple[GemmTarget, F64, float]] = []
    for gpu, name in zip(gpus, families, strict=True):
        rates = rates_of(gpu, products.dtype, len(drawn))
        # Residuals are squared, so the root gives each family the weight of one GPU.
        weight = families.count(name) ** -0.5
        run = GemmTarget(gpu, rates, per_call=True)
        parts.append((run, np.log(products.times_ns[gpu.name][drawn]), weight))
    shapes_drawn = products.shapes[drawn]

    def residuals(x: F64) -> F64:
        coefficients = from_vector(x)
        return np.concatenate(
            [
                weight * (np.log(gemm_ns(run, shapes_drawn, coefficients)) - measured)
                for run, measured, weight in parts
            ]
        )

    return from_vector(fit_robustly(residuals, to_vector(START)))


def fit_attention(attention: Attention, gpus: Sequence[Gpu]) -> AttentionCoefficients:
    """Return the coefficients that fit forward attention on those of `gpus` that measured it.

    Every die family has the same weight.
    """
    measured_gpus = [gpu for gpu in gpus if gpu.name in attention.times_ns]
    families = [family(gpu) for gpu in measured_gpus]
    shapes = attention.shapes
    if not measured_gpus:
        return ATTENTION_START
    logs = [np.log(attention.times_ns[gpu.name]) for gpu in measured_gpus]
    rates = [rates_of(gpu, "bfloat16", len(shapes)) for gpu in measured_gpus]

    def residuals(x: F64) -> F64:
        c = AttentionCoefficients(*np.exp(x).tolist())
        predicted_ns = [
            attention_ns(gpu, rate, shapes, c) + stored_ns(gpu, shapes)
            for gpu, rate in zip(measured_gpus, rates, strict=True)
        ]
        parts = zip(predicted_ns, logs, families, strict=True)
        # Weights of families as in `fit_gemm`.
        return np.concatenate([families.count(f) ** -0.5 * (np.log(m) - t) for m, t, f in parts])

    start = [getattr(ATTENTION_START, n) for n in AttentionCoefficients.__struct_fields__]
    return AttentionCoefficients(*np.exp(fit_robustly(residuals, np.log(start))).tolist())


def stored_ns(gpu: Gpu, shapes: F64) -> F64:
    """Return the time to write the keys and values of attention to a cache, float64[d].

    Args:
        gpu: the GPU.
        shapes: as for `attention_time.attention_ns`.
    """
    batch, heads, key_heads, rows, keys, d, dv, *_ = shapes.T
    moved = 2 * 2 * batch * keys * key_heads * (d + dv)  # read and written, 16 bits
    used = moved + 2 * batch * rows * heads * (d + dv)
    missed = moved * cache_misses(gpu, used)
    return gpu.launch_floor_ns + missed * 1e9 / gpu.bandwidth_bytes_per_s


def rates_of(gpu: Gpu, dtype: str, count: int) -> Rates:
    """Return a GPU's rates for `count` GEMMs of one dtype."""
    sustained, peak = gpu.tensor_flops_per_s(dtype), gpu.peak_tensor_flops_per_s(dtype)
    assert sustained, f"{gpu.name} has no {dtype} rate"
    assert peak, f"{gpu.name} has no {dtype} rate"
    return Rates(np.full(count, sustained), np.full(count, peak))


def hull_of(gpus: Sequence[Gpu]) -> dict[str, tuple[float, float]]:
    """Return the range of each property over the GPUs."""
    rows = [properties(gpu) for gpu in gpus]
    return {name: (min(r[name] for r in rows), max(r[name] for r in rows)) for name in rows[0]}


def to_vector(c: GemmCoefficients) -> F64:
    """Return the logarithms of all fitted coefficients, float64[p]."""
    # All fitted coefficients are positive, and in logarithms no step of the solver can change that.
    return np.log([getattr(c, name) for name in _FITTED])


def from_vector(x: F64) -> GemmCoefficients:
    """Return the coefficients of their logarithms, see `to_vector`."""
    fitted = dict(zip(_FITTED, np.exp(x).tolist(), strict=True))
    return GemmCoefficients(call_gap=START.call_gap, **fitted)
