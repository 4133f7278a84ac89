"""Evaluate predictions for GPUs whose die family is left out of the fit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models import scale_measured
from onerank.annotate.models.coefficients import Coefficients, Error
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.features import F64, KernelFeatures
from onerank.annotate.models.intervals import SHORT_NS, same_die, widening
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.passes.swap_kernels import roofline_ratio
from tools.fit.evaluate_fit import (
    VIDUR_FILE,
    Case,
    Described,
    as_by_datasheet,
    as_shipped,
    resized_attention_cases,
    resized_memory_cases,
    resized_product_cases,
    unmeasured_cases,
)
from tools.fit.evaluate_fit import attention_cases as attention_unmeasured
from tools.fit.evaluate_fit import database_cases as database_attention
from tools.fit.fit_tiles import ATTENTION_START, fit_attention, fit_gemm, hull_of, stored_ns
from tools.fit.measured_kernels import (
    Attention,
    Products,
    family,
    of_attention,
    of_layers,
    of_products,
    read_attention,
    read_products,
)

# Shares of the source's deviation that carry over, see `Coefficients`. Round figures, chosen on the
# GPUs of the campaign: the error is flat around them.
SAME_DIE = 0.8
PRODUCT_CARRIED = 0.15
EIGHT_BIT_CARRIED = 0.7
ATTENTION_CARRIED = 0.5

# Least share of attention in a measured time that includes writing keys and values to a cache.
_LEAST_ALONE = 0.2


def fits_without(products: Products, attention: Attention | None) -> dict[str, Coefficients]:
    """Return die family -> the coefficients fitted without it."""
    gpus = [load_gpu(name) for name in products.times_ns]
    families = sorted({family(gpu) for gpu in gpus})
    return {f: fitted(products, attention, [g for g in gpus if family(g) != f]) for f in families}


def fitted(products: Products, attention: Attention | None, gpus: Sequence[Gpu]) -> Coefficients:
    """Return coefficients fitted to `gpus`, without errors.

    Without measured attention its coefficients are those of the fit's start.
    """
    return Coefficients(
        provenance={},
        gemm=fit_gemm(products, gpus),
        attention=fit_attention(attention, gpus) if attention else ATTENTION_START,
        same_die=SAME_DIE,
        product_carried=PRODUCT_CARRIED,
        eight_bit_carried=EIGHT_BIT_CARRIED,
        attention_carried=ATTENTION_CARRIED,
        hull=hull_of(gpus),
        errors={},
    )


def gemm_cases(
    products: Products, described: Described, model: Callable[[str], Predict]
) -> Iterator[Case]:
    """Yield every ordered pair of the GPUs that measured `products`.

    Args:
        products: the measured GEMMs.
        described: returns the description of a target that the prediction may use.
        model: family that is left out -> the model to use.
    """
    gpus = [load_gpu(name) for name in products.times_ns]
    for source, target in permutations(gpus, 2):
        kernels = of_products(products, products.times_ns[source.name])
        predicted_ns, _ = model(family(target))(kernels, source, described(target))
        kind = "gemm_same_die" if same_die(source, target) else "gemm"
        times = products.times_ns[target.name]
        yield Case(kind, source, target, times, predicted_ns, products.shapes[:, 1])


def attention_cases(
    attention: Attention, model: Callable[[str], Predict], described: Described = as_shipped
) -> Iterator[Case]:
    """Yield every ordered pair of the GPUs that measured `attention`.

    The campaign's times include writing keys and values to a cache, which a trace has as separate
    kernels; here their time is subtracted by its bytes on both GPUs.
    """
    gpus = [load_gpu(name) for name in attention.times_ns]
    for source, target in permutations(gpus, 2):
        times = attention.times_ns[source.name]
        attention_ns = np.maximum(times - stored_ns(source, attention.shapes), _LEAST_ALONE * times)
        kernels = of_attention(attention, attention_ns)
        predicted_ns, _ = model(family(target))(kernels, source, described(target))
        predicted_ns = predicted_ns + stored_ns(target, attention.shapes)
        kind = "attention_same_die" if same_die(source, target) else "attention"
        times = attention.times_ns[target.name]
        yield Case(kind, source, target, times, predicted_ns, attention.shapes[:, 3])


def memory_cases(
    folder: Path, model: Predict = scale_measured.predict, described: Described = as_shipped
) -> Iterator[Case]:
    """Yield both directions of norms, rotary embeddings, activations and additions, fp16.

    No family is excluded, because nothing of the residual model is fitted.
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    index = ["model", "tp", "tokens", "op", "bytes"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    table = grouped.pivot(on="gpu", index=index, values="time_ms").drop_nulls()
    table = table.filter(pl.all_horizontal(pl.col("A100", "H100") > 0))
    times = {name: table[name].to_numpy().astype(np.float64) * 1e6 for name in ("A100", "H100")}
    for source, target in permutations(times, 2):
        gpus = load_gpu(source), load_gpu(target)
        predicted_ns, _ = model(of_layers(times[source], table), gpus[0], described(gpus[1]))
        yield Case("memory", *gpus, times[target], predicted_ns, np.zeros(len(table)))


Factor = Callable[[KernelFeatures, KernelFeatures, Gpu], F64]

"""Factor on the times of kernels for another dtype, of (before, after, GPU)."""


def retyped_cases(folder: Path, factor: Factor = roofline_ratio) -> Iterator[Case]:
    """Yield predictions of fp8 GEMMs from bf16 ones on the GPU that measured both.

    No family is excluded, because nothing of the shipped rule is fitted.
    """
    wide, narrow = read_products(folder), read_products(folder, "fp8")
    place = {tuple(shape): row for row, shape in enumerate(wide.shapes[:, 1:4].tolist())}
    rows = np.array([place.get(tuple(shape), -1) for shape in narrow.shapes[:, 1:4].tolist()])
    # The campaign measured some sizes in one type only.
    both = np.flatnonzero(rows >= 0)
    before = replace(wide, shapes=wide.shapes[rows[both]])
    after = replace(narrow, shapes=narrow.shapes[both])
    for name, times in narrow.times_ns.items():
        gpu, measured = load_gpu(name), wide.times_ns[name][rows[both]]
        kernels = of_products(before, measured), of_products(after, measured)
        predicted_ns = measured * factor(*kernels, gpu)
        yield Case("retyped", gpu, gpu, times[both], predicted_ns, after.shapes[:, 1])


def errors_of(cases: Iterable[Case]) -> Error:
    """Return the error distribution of the cases of one kind, for GPUs near those of the fit."""
    # An interval is widened by this factor when it is applied, so the stored errors are without it.
    errors = [case.error / case.widening for case in cases]
    means = np.array([np.mean(e) for e in errors])
    pooled = np.concatenate(errors)
    # The error of a new GPU may have either sign, as the two directions of a pair have.
    bound = np.quantile(np.abs(pooled), 0.8)
    squares = [float(np.mean((e - np.mean(e)) ** 2)) for e in errors]
    independent = np.sqrt(np.mean(squares))
    # Mean squares, not deviations from their mean: the mean of the next GPU's error is not known.
    shared = np.sqrt(np.mean(means**2))
    figures = (round(float(x), 4) for x in (-bound, bound, shared, independent))
    return Error(*figures, count=len(pooled))


def parted(case: Case) -> Iterator[Case]:
    """Yield a case of GEMMs as two: those predicted to be short, and the rest."""
    if case.kind not in ("gemm", "gemm_uncalibrated"):
        yield case
        return
    short = case.predicted_ns < SHORT_NS
    for kind, mask in ((f"{case.kind}_short", short), (case.kind, ~short)):
        yield replace(
            case,
            kind=kind,
            measured_ns=case.measured_ns[mask],
            predicted_ns=case.predicted_ns[mask],
            rows=case.rows[mask],
        )


def datasheet_cases(folder: Path, fits: dict[str, Coefficients]) -> Iterator[Case]:
    """Yield the cases of targets that are known only by their datasheet figures.

    The estimates of the other figures, like the coefficients, come from the other die families.
    Kernels at another size or in another dtype on one GPU, and calls of several GEMMs, have no
    cases: those errors are of a ratio on one GPU, or were measured on GPUs outside these data.
    """
    products, attention = read_products(folder), read_attention(folder)
    described = as_by_datasheet([load_gpu(name) for name in products.times_ns])

    def learned(without: str) -> Predict:
        return lambda kernels, source, target: predict_learned(
            kernels, source, target, fits[without]
        )

    def from_description(without: str) -> PredictFromDescription:
        return lambda kernels, target: predict_from_description(kernels, target, fits[without])

    # Other GPUs known by their datasheet have the kind `gemm_uncalibrated` in `every_case`.
    cases = [c for c in gemm_cases(products, described, learned) if c.kind == "gemm_same_die"]
    for case in gemm_cases(products, described, lambda _: scale_measured.predict):
        cases.append(replace(case, kind="product"))
    for case in gemm_cases(read_products(folder, "fp8"), described, learned):
        cases.append(replace(case, kind="gemm_8bit"))
    cases += attention_cases(attention, learned, described)
    cases += memory_cases(folder, described=described)
    cases += unmeasured_cases(folder, described)
    cases += attention_unmeasured(attention, from_description, described)
    cases += database_attention(from_description, described)
    for case in cases:
        factor = widening(case.target, fits[family(case.target)], case.kind)
        yield replace(case, widening=factor, by_datasheet=True)


def every_case(folder: Path, fits: dict[str, Coefficients] | None = None) -> list[Case]:
    """Return the cases of all kinds of errors; `fits` None: those of `fits_without`."""
    products, attention = read_products(folder), read_attention(folder)
    fits = fits or fits_without(products, attention)
    gpus = [load_gpu(name) for name in products.times_ns]

    def learned(without: str) -> Predict:
        return lambda kernels, source, target: predict_learned(
            kernels, source, target, fits[without]
        )

    def from_description(without: str) -> PredictFromDescription:
        return lambda kernels, target: predict_from_description(kernels, target, fits[without])

    cases = [p for c in gemm_cases(products, lambda gpu: gpu, learned) for p in parted(c)]
    for case in gemm_cases(products, as_by_datasheet(gpus), learned):
        cases += parted(replace(case, kind="gemm_uncalibrated"))
    for case in gemm_cases(products, lambda gpu: gpu, lambda _: scale_measured.predict):
        cases.append(replace(case, kind="product"))
    for case in gemm_cases(read_products(folder, "fp8"), lambda gpu: gpu, learned):
        cases.append(replace(case, kind="gemm_8bit"))
    cases += [*retyped_cases(folder), *attention_cases(attention, learned), *memory_cases(folder)]
    cases += resized_product_cases(products, from_description)
    cases += resized_attention_cases(attention, from_description)
    cases += resized_memory_cases(folder)
    cases += [
        *attention_unmeasured(attention, from_description),
        *database_attention(from_description),
    ]
    return [replace(c, widening=widening(c.target, fits[family(c.target)], c.kind)) for c in cases]
