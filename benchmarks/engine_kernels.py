"""Errors of the kernels of inference engines: decode attention, MLA, experts, quantisation.

    PYTHONPATH=. python benchmarks/engine_kernels.py DATA_DIRECTORY

DATA_DIRECTORY holds attention.parquet, latent.parquet, experts.parquet and quantisation.parquet,
which `tools.fit.public_sets` writes.

  mean      of |predicted / measured - 1| in percent
  bias      mean of ln(measured / predicted)
  roofline  mean error of the roofline of the target's description
  ratio     mean error of the ratio rule, from the same framework on another GPU; for experts the
            ratio of both rooflines

Attention has one query per sequence. "campaign": coefficients of other campaigns on the
architecture; "family": without the die family. The constants of latent attention in
`attention_time` were chosen on Hopper and Blackwell, both judged here. An MoE layer is the sum of
two grouped GEMMs, the gated activation and the sum over experts. No coefficient is fitted to it,
but the GEMM tiles are fitted to GEMMs of these GPUs. Sorting and routing count as one launch.
Kernels that quantise are counted over 10 us and under; calls that a cache serves are omitted.
"residual" is the residual model. `roofline` changes from the shape to the residual model at
deviations that were chosen on these pairs, among others.
"""

from functools import cache
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
from harness import given_folder

from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.learned import (
    predict_by_ratio,
    predict_from_description,
    predict_learned,
)
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.models.scale_measured import predict_by_residual
from onerank.ir.arrays import F64
from tools.fit.measured_kernels import Products, family, of_memory, of_products
from tools.fit.public_cases import (
    Decodes,
    decode_cases,
    elsewhere,
    fit_decode,
    fit_latent,
    quantisation_cases,
    read_decodes,
)

_LEFT_OUT = {"decode_unmeasured": "campaign", "decode_other": "family"}
LONG_NS = 10_000
_LAYER = ["tokens", "hidden", "inner", "chosen", "experts"]


def main() -> None:
    """Print the tables."""
    folder = given_folder(
        __doc__, "attention.parquet", "latent.parquet", "experts.parquet", "quantisation.parquet"
    )
    decodes = read_decodes(folder)
    for title, latent in (("decode attention", False), ("latent attention (MLA)", True)):
        attention(title, [each for each in decodes if each.latent == latent])
    experts(folder)
    quantisation(folder)


def attention(title: str, decodes: list[Decodes]) -> None:
    """Print the errors by shape, and from another GPU."""

    @cache
    def without(name: str) -> Coefficients:
        """Return the coefficients without a die family or a campaign on a GPU."""
        campaign = [each for each in decodes if each.name == name]
        others = (
            elsewhere(campaign[0], decodes)
            if campaign
            else [each for each in decodes if family(each.gpu) != name]
        )
        if decodes[0].latent:
            return msgspec.structs.replace(shipped(), latent_decode=fit_latent(others))
        known = fit_decode(decodes) if campaign else {}
        return msgspec.structs.replace(shipped(), decode=known | fit_decode(others))

    def by_shape(name: str) -> PredictFromDescription:
        return lambda kernels, gpu: predict_from_description(kernels, gpu, without(name))

    def measured(name: str) -> Predict:
        return lambda kernels, source, target: predict_learned(
            kernels, source, target, without(name)
        )

    cases = decode_cases(decodes, by_shape, measured)
    baseline = decode_cases(decodes, lambda _: predict_from_datasheet, lambda _: predict_by_ratio)
    pairs: list[str] = []
    print(f"\n{title}, by shape")
    print(f"{'target':15}{'calls':>6}  {'left out':9}{'mean':>6}{'bias':>7}{'roofline':>10}")
    for case, other in zip(cases, baseline, strict=True):
        errors = [error(each.predicted_ns, case.measured_ns) for each in (case, other)]
        if left_out := _LEFT_OUT.get(case.kind):
            print(f"{case.target.name:15}{len(case.measured_ns):6}  {left_out:9}", end="")
            print(f"{errors[0]:6.1f}{case.error.mean():+7.2f}{errors[1]:10.1f}")
        else:
            names = f"{case.source.name:15}{case.target.name:15}{len(case.measured_ns):6}"
            pairs.append(f"{names}{errors[0]:7.1f}{errors[1]:7.1f}")
    if pairs:
        print(f"\n{title}, from another GPU")
        print(f"{'source':15}{'target':15}{'calls':>6}{'mean':>7}{'ratio':>7}")
        print("\n".join(pairs))


def experts(folder: Path) -> None:
    """Print the errors of MoE layers by shape, and from another GPU."""
    rows = pl.read_parquet(folder / "experts.parquet")
    groups = rows.group_by("gpu", "campaign", "kernel", maintain_order=True)
    layers = {
        tuple(map(str, name)): table.group_by(_LAYER).agg(pl.col("time_us").median()).sort(_LAYER)
        for name, table in groups
    }
    print("\nexperts of an MoE layer, by shape")
    print(f"{'target':15}{'campaign':18}{'kernel':36}{'calls':>6}", end="")
    print(f"{'mean':>7}{'bias':>7}{'roofline':>10}")
    for (name, campaign, kernel), table in sorted(layers.items()):
        measured_ns = table["time_us"].to_numpy() * 1000
        tiles_ns, roofline_ns = layer_ns(table, load_gpu(name))
        print(f"{name:15}{campaign:18}{kernel[:35]:36}{len(table):6}", end="")
        print(f"{error(tiles_ns, measured_ns):7.1f}", end="")
        print(f"{np.log(measured_ns / tiles_ns).mean():+7.2f}", end="")
        print(f"{error(roofline_ns, measured_ns):10.1f}")
    print("\nexperts of an MoE layer, from another GPU")
    print(f"{'source':15}{'target':15}{'kernel':36}{'calls':>6}{'mean':>7}{'ratio':>7}")
    for before, after in permutations(layers, 2):
        if before[2] != after[2] or before[0] == after[0]:
            continue
        both = layers[before].join(layers[after], on=_LAYER, suffix="_target").sort(_LAYER)
        source_ns, measured_ns = (
            both[column].to_numpy() * 1000 for column in ("time_us", "time_us_target")
        )
        times = [layer_ns(both, load_gpu(name)) for name in (before[0], after[0])]
        errors = [
            error(source_ns * there / here, measured_ns) for here, there in zip(*times, strict=True)
        ]
        print(f"{before[0]:15}{after[0]:15}{before[2][:35]:36}{len(both):6}", end="")
        print(f"{errors[0]:7.1f}{errors[1]:7.1f}")


def quantisation(folder: Path) -> None:
    """Print the errors of kernels that quantise 16 bits to 8, from another GPU."""
    models = (predict_learned, predict_by_residual, predict_by_ratio)
    print("\nkernels that quantise, from another GPU")
    print(f"{'source':10}{'target':10}{'over':>6}{'mean':>7}{'residual':>10}{'ratio':>7}", end="")
    print(f"{'under':>8}{'mean':>7}{'residual':>10}{'ratio':>7}")
    every = [[*quantisation_cases(folder, model)] for model in models]
    for pair in dict.fromkeys((case.source.name, case.target.name) for case in every[0]):
        print(f"{pair[0]:10}{pair[1]:10}", end="")
        for long, width in ((True, 6), (False, 8)):
            errors: list[float] = []
            count = 0
            for cases in every:
                of_pair = [c for c in cases if (c.source.name, c.target.name) == pair]
                measured_ns = np.concatenate([c.measured_ns for c in of_pair])
                predicted_ns = np.concatenate([c.predicted_ns for c in of_pair])
                chosen = (measured_ns > LONG_NS) == long
                count = int(chosen.sum())
                errors.append(error(predicted_ns[chosen], measured_ns[chosen]))
            print(f"{count:{width}}{errors[0]:7.1f}{errors[1]:10.1f}{errors[2]:7.1f}", end="")
        print()


def layer_ns(table: pl.DataFrame, gpu: Gpu) -> tuple[F64, F64]:
    """Return the times of MoE layers on a GPU by GEMM tiles and by the roofline, float64[d]."""
    tokens, hidden, inner, chosen, count = (
        table[column].to_numpy().astype(np.float64) for column in _LAYER
    )
    rows = tokens * chosen
    active, two = np.minimum(count, rows), np.full(len(table), 2.0)
    each = np.ceil(rows / active)
    activation = of_memory(two, 2 * 3 * rows * inner)
    sums = of_memory(two, 2 * (rows + tokens) * hidden)
    others_ns = gpu.launch_floor_ns + predict_from_datasheet(activation, gpu)[0]
    others_ns += predict_from_datasheet(sums, gpu)[0]
    by_tiles, by_roofline = others_ns.copy(), others_ns.copy()
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        shapes = np.stack([active, each, n, k, two, two], axis=1)
        grouped = of_products(Products("bfloat16", shapes, {}), two)
        by_tiles += predict_from_description(grouped, gpu)[0]
        by_roofline += predict_from_datasheet(grouped, gpu)[0]
    return by_tiles, by_roofline


def error(predicted_ns: F64, measured_ns: F64) -> float:
    """Return the mean error in percent."""
    return float(np.abs(predicted_ns / measured_ns - 1).mean() * 100)


if __name__ == "__main__":
    main()
