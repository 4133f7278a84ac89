"""Errors of the kernels of inference engines: decode attention, MLA, experts, quantisation.

    python -m benchmarks.predictions.engine_kernels DATA_DIRECTORY

DATA_DIRECTORY holds the tables of `held_out`, which `tools.fit.public_sets` writes.

  mean      of |predicted / measured - 1| in percent
  bias      mean of ln(measured / predicted)
  roofline  mean error of the roofline of the target's description
  ratio     mean error of the ratio rule, from the same framework on another GPU; for experts the
            ratio of both rooflines

Attention has one query per sequence. "dataset": coefficients of other datasets on the
architecture; "family": without the die family. The constants of latent attention in
`attention_time` were chosen on Hopper and Blackwell, both judged here. A row of an MoE layer times
choosing the experts from the router's scores, sorting the tokens, two grouped GEMMs, the gated
activation and the sum over experts. The coefficients are those of the other die families, "plain"
has the tiles of cuBLAS and one launch for the rest. Layers whose active weights fit into the
last-level cache are omitted: a row repeats one layer. "inside" is the share in the interval of
experts from shapes. Kernels that quantise are counted over 10 us and under; calls that a cache
serves are omitted. Latent attention over whole prompts includes the kernels that rotate positions
and write the cache; "inside" is the share in the interval of its kind, and "seen" the error with
the shipped coefficients, which know the family. "residual" is the residual model. `roofline`
changes from the shape to the residual model at deviations that were chosen on these pairs, among
others.
"""

from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import given_folder
from onerank.annotate.models.coefficients import Coefficients, Experts, shipped
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.learned import (
    predict_from_description,
    predict_learned,
)
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.models.scale_by_ratio import predict_by_ratio
from onerank.annotate.models.scale_measured import predict_by_residual
from onerank.ir.arrays import F64
from tools.fit.decode_cases import (
    Decodes,
    decode_cases,
    elsewhere,
    fit_decode,
    fit_latent,
    read_decodes,
)
from tools.fit.expert_cases import (
    EXPERT_LIBRARIES,
    UNTUNED,
    ExpertLayers,
    read_experts,
    untuned_steps,
)
from tools.fit.latent_prefill_cases import latent_prefill_cases, read_latent_prefills
from tools.fit.leave_one_out import fits_without, models_without
from tools.fit.measured_kernels import family, read_attention, read_products
from tools.fit.vector_cases import quantisation_cases

_PLAIN = dict.fromkeys(EXPERT_LIBRARIES, Experts(0.0, 1.0, 0.0))

_BY_SHAPE = ("decode_unmeasured", "decode_other", "latent_other")
LONG_NS = 10_000


def main() -> None:
    """Print the tables."""
    folder = given_folder(
        __doc__,
        *("attention.parquet", "latent.parquet", "experts.parquet", "quantisation.parquet"),
        "gemm.parquet",
    )
    decodes = read_decodes(folder)
    for title, latent in (("decode attention", False), ("latent attention (MLA)", True)):
        attention(title, [each for each in decodes if each.latent == latent])
    fits = fits_without(read_products(folder), read_attention(folder), (), folder)
    latent_prefill(folder, fits)
    layers = read_experts(folder)
    experts(layers, fits)
    untuned([each for each in layers if each.kernel == UNTUNED])
    quantisation(folder)


def attention(title: str, decodes: list[Decodes]) -> None:
    """Print the errors by shape, and from another GPU."""

    @cache
    def without(name: str) -> Coefficients:
        """Return the coefficients without a die family or a dataset on a GPU."""
        dataset = [each for each in decodes if each.name == name]
        others = (
            elsewhere(dataset[0], decodes)
            if dataset
            else [each for each in decodes if family(each.gpu) != name]
        )
        if decodes[0].latent:
            return msgspec.structs.replace(shipped(), latent_decode=fit_latent(others))
        known = fit_decode(decodes) if dataset else {}
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
        if case.kind in _BY_SHAPE:
            left_out = "dataset" if case.without else "family"
            print(f"{case.target.name:15}{len(case.measured_ns):6}  {left_out:9}", end="")
            print(f"{errors[0]:6.1f}{case.error.mean():+7.2f}{errors[1]:10.1f}")
        else:
            names = f"{case.source.name:15}{case.target.name:15}{len(case.measured_ns):6}"
            pairs.append(f"{names}{errors[0]:7.1f}{errors[1]:7.1f}")
    if pairs:
        print(f"\n{title}, from another GPU")
        print(f"{'source':15}{'target':15}{'calls':>6}{'mean':>7}{'ratio':>7}")
        print("\n".join(pairs))


def latent_prefill(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print the errors of latent attention over whole prompts, by shape."""
    by_shape, _ = models_without(fits)
    measured = read_latent_prefills(folder)
    cases = [*latent_prefill_cases(measured, by_shape)]
    seen = latent_prefill_cases(measured, lambda _: predict_from_description)
    roofline = latent_prefill_cases(measured, lambda _: predict_from_datasheet)
    print("\nlatent attention (MLA) over whole prompts, by shape, family left out")
    print(f"{'target':15}{'dataset':18}{'heads':>8}{'calls':>6}", end="")
    print(f"{'mean':>7}{'bias':>7}{'inside':>8}{'seen':>7}{'roofline':>10}")
    for each, case, shown, other in zip(measured, cases, seen, roofline, strict=True):
        deviation, width = np.abs(case.error), shipped().errors[case.kind].high
        heads = "576/512" if each.absorbed else "192/128"
        print(f"{each.gpu.name:15}{each.dataset:18}{heads:>8}{len(deviation):6}", end="")
        print(f"{error(case.predicted_ns, case.measured_ns):7.1f}{case.error.mean():+7.2f}", end="")
        print(f"{(deviation < width).mean() * 100:8.1f}", end="")
        print(f"{error(shown.predicted_ns, case.measured_ns):7.1f}", end="")
        print(f"{error(other.predicted_ns, case.measured_ns):10.1f}")


def experts(measured: list[ExpertLayers], fits: dict[str, Coefficients]) -> None:
    """Print the errors of MoE layers by shape, and from another GPU."""
    interval = shipped().errors["experts_unmeasured"].high
    print("\nexperts of an MoE layer, by shape, family left out")
    print(f"{'target':15}{'dataset':18}{'kernel':36}{'calls':>6}", end="")
    print(f"{'mean':>7}{'bias':>7}{'inside':>8}{'plain':>7}{'roofline':>10}")
    for each in measured:
        c, kernels, gpu = fits[family(each.gpu)], each.features(), each.gpu
        plain = msgspec.structs.replace(c, experts=_PLAIN)
        predicted_ns, plain_ns = (
            predict_from_description(kernels, gpu, coefficients)[0] for coefficients in (c, plain)
        )
        deviation = np.log(each.times_ns / predicted_ns)
        print(f"{gpu.name:15}{each.dataset:18}{each.kernel[:35]:36}{len(each.times_ns):6}", end="")
        print(f"{error(predicted_ns, each.times_ns):7.1f}{deviation.mean():+7.2f}", end="")
        print(f"{(np.abs(deviation) < interval).mean() * 100:8.1f}", end="")
        print(f"{error(plain_ns, each.times_ns):7.1f}", end="")
        print(f"{error(predict_from_datasheet(kernels, gpu)[0], each.times_ns):10.1f}")
    print("\nexperts of an MoE layer, from another GPU, family of the target left out")
    print(f"{'source':15}{'target':15}{'kernel':36}{'calls':>6}{'mean':>7}{'ratio':>7}")
    of_target: dict[str, list[tuple[float, float]]] = {}
    for before, after in permutations(measured, 2):
        if before.kernel != after.kernel or before.gpu == after.gpu or UNTUNED in before.kernel:
            continue
        times_ns = dict(zip(after.layers, after.times_ns, strict=True))
        both = [at for at, layer in enumerate(before.layers) if layer in times_ns]
        source = replace(
            before,
            layers=[before.layers[at] for at in both],
            times_ns=before.times_ns[both],
        )
        measured_ns = np.array([times_ns[layer] for layer in source.layers])
        c, kernels = fits[family(after.gpu)], source.features()
        learned = predict_learned(kernels, before.gpu, after.gpu, c)[0]
        ratio = predict_by_ratio(kernels, before.gpu, after.gpu)[0]
        print(f"{before.gpu.name:15}{after.gpu.name:15}{before.kernel[:35]:36}", end="")
        errors = error(learned, measured_ns), error(ratio, measured_ns)
        print(f"{len(both):6}{errors[0]:7.1f}{errors[1]:7.1f}")
        source_die = "the same die" if same_die(before.gpu, after.gpu) else "another die"
        of_target.setdefault(f"{after.gpu.name}, from {source_die}", []).append(errors)
    print("\nmeans over the sources and kernels of a target")
    for name, pairs in of_target.items():
        learned, ratio = np.mean(pairs, axis=0)
        print(f"{name:66}{len(pairs):6}{learned:7.1f}{ratio:7.1f}")


def untuned(measured: list[ExpertLayers]) -> None:
    """Print the cycles of a step of FlashInfer's kernels without their tuner, on each GPU.

    The error of a GPU is that with another's cycles.
    """
    cycles = [
        float(np.median(each.times_ns / untuned_steps(each))) * each.gpu.clock_hz * 1e-9
        for each in measured
    ]
    print(f"\n{UNTUNED}: cycles of a tile of 128 x 16 for 64 elements along k")
    print(f"{'target':15}{'calls':>6}{'cycles':>8}{'mean':>7}")
    for (each, its), (_, others) in permutations(zip(measured, cycles, strict=True), 2):
        of_step_ns = others / each.gpu.clock_hz * 1e9
        off = error(of_step_ns * untuned_steps(each), each.times_ns)
        print(f"{each.gpu.name:15}{len(each.layers):6}{its:8.0f}{off:7.1f}")


def quantisation(folder: Path) -> None:
    """Print the errors of kernels that quantise 16 bits to 8, from another GPU."""
    models = (predict_learned, predict_by_residual, predict_by_ratio)
    heads = "".join(f"{name:>10}" for name in ("mean", "residual", "ratio"))
    print("\nkernels that quantise, from another GPU")
    print(f"{'kernels':28}{'source':10}{'target':10}{'over':>6}{heads}{'under':>8}{heads}")
    every = [[*quantisation_cases(folder, model)] for model in models]
    rows: list[list[float]] = []
    for cases in zip(*every, strict=True):
        name, case = cases[0]
        print(f"{name:28}{case.source.name:10}{case.target.name:10}", end="")
        row: list[float] = []
        for long, width in ((True, 6), (False, 8)):
            chosen = (case.measured_ns > LONG_NS) == long
            errors = [
                error(each.predicted_ns[chosen], each.measured_ns[chosen])
                if chosen.any()
                else float("nan")
                for _, each in cases
            ]
            row += errors
            print(f"{chosen.sum():{width}}" + "".join(f"{each:10.1f}" for each in errors), end="")
        print()
        rows.append(row)
    means = np.nanmean(rows, axis=0)
    print(f"{'mean':48}{'':6}" + "".join(f"{each:10.1f}" for each in means[:3]), end="")
    print(f"{'':8}" + "".join(f"{each:10.1f}" for each in means[3:]))


def error(predicted_ns: F64, measured_ns: F64) -> float:
    """Return the mean error in percent."""
    return float(np.abs(predicted_ns / measured_ns - 1).mean() * 100)


if __name__ == "__main__":
    main()
