"""Coefficients of the tile model from measured products."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onerank.annotate.coefficients import GemmCoefficients, Pipeline
from onerank.annotate.fit.data import Products, family
from onerank.annotate.fit.solve import least_squares
from onerank.annotate.gpu import Gpu
from onerank.annotate.likeness import properties
from onerank.annotate.tiles import Rates, gemm_ns

F64 = npt.NDArray[np.float64]

_NEUTRAL = Pipeline(tile=20, prologue_cycles=1000, epilogue_cycles=1000, overlap=4)
START = GemmCoefficients(
    synchronous=_NEUTRAL,
    asynchronous=_NEUTRAL,
    l2_bytes_per_cycle=64,
    split_ns=2000,
    burst=0.5,
    floor=1.0,
    choice=0.1,
    ramp_cycles=500,
)
"""Where every fit begins: round figures, the same for all generations."""

_SHORTEST_NS = 8000
_SHARED = ("l2_bytes_per_cycle", "split_ns", "floor", "choice", "ramp_cycles")
_PIPELINE = ("tile", "prologue_cycles", "epilogue_cycles", "overlap")


def fit_gemm(
    products: Products, gpus: Sequence[Gpu], *, shapes: int = 1500, seed: int = 2
) -> GemmCoefficients:
    """Return the coefficients that fit the products measured on `gpus`.

    Every die family has the same weight. Kernels under 8 us are left out: the launch floor is the
    description's.

    Args:
        products: measured on these GPUs and, it may be, on others.
        gpus: the GPUs to fit to.
        shapes: how many of the shapes are drawn.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.permutation(len(products.shapes))[:shapes]
    families = [family(gpu) for gpu in gpus]
    parts: list[tuple[Gpu, Rates, F64, F64, float]] = []
    for gpu, name in zip(gpus, families, strict=True):
        times = products.times_ns[gpu.name][drawn]
        kept = times > _SHORTEST_NS
        rates = rates_of(gpu, products.dtype, int(kept.sum()))
        weight = families.count(name) ** -0.5
        parts.append((gpu, rates, products.shapes[drawn][kept], np.log(times[kept]), weight))

    def residuals(x: F64) -> F64:
        made = _from_vector(x)
        return np.concatenate([w * (np.log(gemm_ns(g, r, s, made)) - t) for g, r, s, t, w in parts])

    return _from_vector(least_squares(residuals, _to_vector(START)))


def rates_of(gpu: Gpu, dtype: str, count: int) -> Rates:
    """Return a GPU's rates for `count` products of one data type."""
    sustained, peak = gpu.tensor_flops_per_s(dtype), gpu.peak_tensor_flops_per_s(dtype)
    assert sustained, f"{gpu.name} has no {dtype} rate"
    assert peak, f"{gpu.name} has no {dtype} rate"
    return Rates(np.full(count, sustained), np.full(count, peak))


def hull_of(gpus: Sequence[Gpu]) -> dict[str, tuple[float, float]]:
    """Return the least and the most of what the GPUs are like."""
    rows = [properties(gpu) for gpu in gpus]
    return {name: (min(r[name] for r in rows), max(r[name] for r in rows)) for name in rows[0]}


def _to_vector(c: GemmCoefficients) -> F64:
    pipelines = [getattr(p, n) for p in (c.synchronous, c.asynchronous) for n in _PIPELINE]
    return np.array([c.burst, *np.log([*(getattr(c, n) for n in _SHARED), *pipelines])])


def _from_vector(x: F64) -> GemmCoefficients:
    burst, *logs = x.tolist()
    values = np.exp(logs).tolist()
    shared = dict(zip(_SHARED, values, strict=False))
    rest = values[len(_SHARED) :]
    first, second = (dict(zip(_PIPELINE, rest[i : i + 4], strict=True)) for i in (0, 4))
    return GemmCoefficients(Pipeline(**first), Pipeline(**second), burst=burst, **shared)
