"""Predictions for GPUs whose die family the fit has not seen, beside what was measured."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import polars as pl

from onerank.annotate import residual
from onerank.annotate.alter import by_roofline
from onerank.annotate.coefficients import AttentionCoefficients, Coefficients, Error
from onerank.annotate.datasheet import Alone
from onerank.annotate.fit import resized
from onerank.annotate.fit.case import VIDUR_FILE, Case
from onerank.annotate.fit.data import (
    Attention,
    Products,
    family,
    read_attention,
    read_products,
)
from onerank.annotate.fit.fitting import fit_gemm, hull_of
from onerank.annotate.fit.kernels import of_attention, of_memory, of_products
from onerank.annotate.gpu import Figure, Gpu, load_gpu
from onerank.annotate.learned import predict, predict_alone
from onerank.annotate.likeness import same_die
from onerank.annotate.model import Predict

ATTENTION = AttentionCoefficients(floor=2.5, efficiency=0.6, prologue_cycles=3000, overlap=3)
SAME_DIE = 0.85
RESIDUAL_SHARE = 0.25
ATTENTION_RESIDUAL_SHARE = 0.3
"""Round figures, chosen on the GPUs at hand: the error is flat around them."""

_LONG_NS = 10_000
_STREAMING = (16, 16384, 65536)  # 2.1 GB of weights: what a copy would show of the memory
_LARGE = (8192, 8192, 8192)


def fits_without(products: Products) -> dict[str, Coefficients]:
    """Return die family -> the coefficients fitted without it."""
    gpus = [load_gpu(name) for name in products.times_ns]
    families = sorted({family(gpu) for gpu in gpus})
    return {f: fitted(products, [g for g in gpus if family(g) != f]) for f in families}


def fitted(products: Products, gpus: Sequence[Gpu]) -> Coefficients:
    """Return coefficients fitted to `gpus`, without errors."""
    return Coefficients(
        provenance={},
        gemm=fit_gemm(products, gpus),
        attention=ATTENTION,
        same_die=SAME_DIE,
        residual_share=RESIDUAL_SHARE,
        attention_residual_share=ATTENTION_RESIDUAL_SHARE,
        hull=hull_of(gpus),
        errors={},
    )


def gemm_cases(
    products: Products, described: Callable[[Gpu], Gpu], model: Callable[[str], Predict]
) -> Iterator[Case]:
    """Yield every ordered pair of the GPUs that measured `products`.

    Args:
        products: what was measured.
        described: what is known of a target, from its shipped description.
        model: family that is left out -> the model to use.
    """
    gpus = [load_gpu(name) for name in products.times_ns]
    for source, target in permutations(gpus, 2):
        kernels = of_products(products, products.times_ns[source.name])
        made, _ = model(family(target))(kernels, source, described(target))
        kind = "gemm_same_die" if same_die(source, target) else "gemm"
        times = products.times_ns[target.name]
        yield Case(kind, source, target, times, made, products.shapes[:, 1])


def attention_cases(attention: Attention, model: Callable[[str], Predict]) -> Iterator[Case]:
    """Yield every ordered pair of the GPUs that measured `attention`."""
    gpus = [load_gpu(name) for name in attention.times_ns]
    for source, target in permutations(gpus, 2):
        kernels = of_attention(attention, attention.times_ns[source.name])
        made, _ = model(family(target))(kernels, source, target)
        kind = "attention_same_die" if same_die(source, target) else "attention"
        times = attention.times_ns[target.name]
        yield Case(kind, source, target, times, made, attention.shapes[:, 3])


def memory_cases(folder: Path, model: Predict = residual.predict) -> Iterator[Case]:
    """Yield both directions of norms, rotary embeddings, activations and additions, fp16.

    Nothing is left out, for nothing of the residual model is fitted.
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    index = ["model", "tp", "tokens", "op", "bytes"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    table = grouped.pivot(on="gpu", index=index, values="time_ms").drop_nulls()
    table = table.filter(pl.all_horizontal(pl.col("A100", "H100") > 0))
    times = {name: table[name].to_numpy().astype(np.float64) * 1e6 for name in ("A100", "H100")}
    moved = table["bytes"].to_numpy().astype(np.float64)
    for source, target in permutations(times, 2):
        gpus = load_gpu(source), load_gpu(target)
        made, _ = model(of_memory(times[source], moved), *gpus)
        yield Case("memory", *gpus, times[target], made, np.zeros(len(moved)))


def retyped_cases(folder: Path) -> Iterator[Case]:
    """Yield bf16 products as what they would take in fp8 on the GPU that measured both.

    Nothing is left out, for nothing of the rule is fitted.
    """
    wide, narrow = read_products(folder), read_products(folder, "fp8")
    place = {tuple(shape): row for row, shape in enumerate(wide.shapes[:, 1:4].tolist())}
    rows = np.array([place.get(tuple(shape), -1) for shape in narrow.shapes[:, 1:4].tolist()])
    both = np.flatnonzero(rows >= 0)
    before = replace(wide, shapes=wide.shapes[rows[both]])
    after = replace(narrow, shapes=narrow.shapes[both])
    for name, times in narrow.times_ns.items():
        gpu, measured = load_gpu(name), wide.times_ns[name][rows[both]]
        kernels = of_products(before, measured), of_products(after, measured)
        made = measured * by_roofline(*kernels, gpu)
        yield Case("retyped", gpu, gpu, times[both], made, after.shapes[:, 1])


def as_by_datasheet(gpus: Sequence[Gpu]) -> Callable[[Gpu], Gpu]:
    """Return the function that forgets what was measured on a target.

    Sustained fraction, achievable bandwidth and launch floor become the means over the families of
    the other GPUs.
    """

    def described(target: Gpu) -> Gpu:
        means = _means(gpus, family(target))
        figures = {
            name: figure
            for name, figure in target.figures.items()
            if not name.endswith("_sustained_fraction") or name.startswith("vector")
        }
        source = next(iter(target.sources))
        figures |= {name: Figure(value, source, "estimated") for name, value in means.items()}
        return msgspec.structs.replace(target, figures=figures)

    return described


def as_calibrated(gpus: Sequence[Gpu], products: Products) -> Callable[[Gpu], Gpu]:
    """Return the function that knows a target by its datasheet and two microbenchmarks.

    They are the product of 8192 x 8192 x 8192, and in the place of a copy one of 16 rows with
    2.1 GB of weights.
    """
    forget = as_by_datasheet(gpus)

    def described(target: Gpu) -> Gpu:
        shapes, times = products.shapes[:, 1:4], products.times_ns[target.name]
        (large,), (streaming,) = (
            times[(shapes == size).all(axis=1)] for size in (_LARGE, _STREAMING)
        )
        m, n, k = _STREAMING
        measured = {
            "measured_gemm_tflops": 2 * np.prod(_LARGE, dtype=float) / large / 1e3,
            "measured_copy_gbps": 2 * (m * k + k * n + m * n) / streaming,
        }
        source = next(iter(target.sources))
        figures = {n: Figure(float(v), source, "measured") for n, v in measured.items()}
        known = forget(target)
        return msgspec.structs.replace(known, figures={**known.figures, **figures})

    return described


def _means(gpus: Sequence[Gpu], without: str) -> dict[str, float]:
    own = "bf16_sustained_fraction"
    names = {own: own, "tensor_sustained_fraction": own}
    names |= {n: n for n in ("memory_achievable_fraction", "launch_floor_ns")}
    rest = [gpu for gpu in gpus if family(gpu) != without]
    families = sorted({family(gpu) for gpu in rest})
    return {
        name: fmean(fmean(g.figures[of].value for g in rest if family(g) == f) for f in families)
        for name, of in names.items()
    }


def errors_of(cases: Iterable[Case]) -> Error:
    """Return what the cases of one kind have in common."""
    every = list(cases)
    errors = [case.error for case in every]
    middles = np.array([np.mean(e) for e in errors])
    pooled = np.concatenate(errors)
    # a new GPU may be off either way, and the other direction of a pair is
    bound = np.quantile(np.abs(pooled), 0.8)
    squares = [float(np.mean((e - np.mean(e)) ** 2)) for e in errors]
    own = np.sqrt(np.mean(squares))
    # squares, not a deviation from their mean: the mean of the next GPU's error is not known
    shared = np.sqrt(np.mean(middles**2))
    figures = (round(float(x), 4) for x in (-bound, bound, shared, own))
    return Error(*figures, count=len(pooled))


def parted(case: Case) -> Iterator[Case]:
    """Yield a case of products parted into what is predicted to be short and the rest."""
    if case.kind != "gemm":
        yield case
        return
    short = case.predicted_ns < _LONG_NS
    for kind, mask in (("gemm_short", short), ("gemm", ~short)):
        yield Case(
            kind,
            case.source,
            case.target,
            case.measured_ns[mask],
            case.predicted_ns[mask],
            case.rows[mask],
        )


def every_case(folder: Path) -> list[Case]:
    """Return the cases of all kinds that intervals are made of."""
    products, attention = read_products(folder), read_attention(folder)
    fits = fits_without(products)
    gpus = [load_gpu(name) for name in products.times_ns]

    def learned(without: str) -> Predict:
        return lambda kernels, source, target: predict(kernels, source, target, fits[without])

    def alone(without: str) -> Alone:
        return lambda kernels, target: predict_alone(kernels, target, fits[without])

    cases = [p for c in gemm_cases(products, lambda gpu: gpu, learned) for p in parted(c)]
    for case in gemm_cases(products, as_by_datasheet(gpus), learned):
        cases.append(_named(case, "gemm_uncalibrated"))
    for case in gemm_cases(products, lambda gpu: gpu, lambda _: residual.predict):
        cases.append(_named(case, "product"))
    for case in gemm_cases(read_products(folder, "fp8"), lambda gpu: gpu, learned):
        cases.append(_named(case, "gemm_8bit"))
    return [
        *cases,
        *retyped_cases(folder),
        *attention_cases(attention, learned),
        *memory_cases(folder),
        *resized.product_cases(products, alone),
        *resized.attention_cases(attention, alone),
        *resized.memory_cases(folder),
    ]


def _named(case: Case, kind: str) -> Case:
    return Case(kind, case.source, case.target, case.measured_ns, case.predicted_ns, case.rows)
