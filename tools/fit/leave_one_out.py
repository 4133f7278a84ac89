"""Evaluate predictions for GPUs whose die family is left out of the fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models import scale_measured
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.intervals import widening
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.op_costs.cost_record import GemmShape
from tools.fit.attention_kernel_cases import LEAST_ALONE, fit_attention_floor, kernel_cases
from tools.fit.case_errors import parted
from tools.fit.decode_cases import (
    Decodes,
    decode_cases,
    elsewhere,
    fit_decode,
    fit_latent,
    read_decodes,
)
from tools.fit.evaluate_fit import (
    Case,
    Described,
    as_by_datasheet,
    as_shipped,
    layer_times,
    read_layers,
    resized_attention_cases,
    resized_memory_cases,
    resized_product_cases,
    same_die_steps,
    step_cases,
    unmeasured_cases,
)
from tools.fit.evaluate_fit import attention_cases as attention_unmeasured
from tools.fit.evaluate_fit import database_cases as database_attention
from tools.fit.expert_cases import expert_cases, fit_experts, read_experts
from tools.fit.fit_tiles import ATTENTION_START, fit_attention, fit_gemm, hull_of, stored_ns
from tools.fit.measured_kernels import (
    Attention,
    Products,
    family,
    of_attention,
    of_layers,
    of_products,
    read_attention,
    read_other_products,
    read_products,
)
from tools.fit.narrow_gemm_cases import (
    Linears,
    fit_finely_scaled,
    four_bit_cases,
    linear_cases,
    read_linears,
    retyped_cases,
    tensor_scaled_cases,
)
from tools.fit.vector_cases import vector_cases

# Shares of the source's deviation that carry over, see `Coefficients`. Round figures, chosen on the
# GPUs of the dataset: the error is flat around them.
SAME_DIE = 0.8
PRODUCT_CARRIED = 0.15
NARROW_CARRIED = 0.3
ATTENTION_CARRIED = 0.5

# The same for experts of MoE layers, over pairs of die families of aiconfigurator's rows: 16.4% off
# with equal shares of the tokens, 19.4% with a power law of 1.2; with all of the deviation 21.5 and
# 23.8%, without any 16.4 and 23.8%.
EXPERTS_CARRIED = 0.5

# Time of attention by other kernels than its architecture's usual, over the model's: FlashInfer's,
# TensorRT-LLM's and Triton's. `other_attention` of all families is 1.54, rounded here. The errors
# of such kernels do not contain it: each family is predicted with the mean of the others
# (`kernel_cases`).
OTHER_ATTENTION = 1.5


def fits_without(
    products: Products,
    attention: Attention | None,
    linears: Sequence[Linears] = (),
    folder: Path | None = None,
) -> dict[str, Coefficients]:
    """Return die family -> the coefficients fitted without it; see `fitted`.

    With a folder also GPU and dataset of decoding -> coefficients with the decoding of its
    architecture from other datasets.
    """
    gpus = [load_gpu(name) for name in products.times_ns]
    families = sorted({family(gpu) for gpu in gpus})
    fits = {
        f: fitted(products, attention, [g for g in gpus if family(g) != f], linears, folder)
        for f in families
    }
    if folder is None:
        return fits
    return fits | decodes_without(fits, gpus, read_decodes(folder))


def decodes_without(
    fits: dict[str, Coefficients], gpus: Sequence[Gpu], decodes: Sequence[Decodes]
) -> dict[str, Coefficients]:
    """Return GPU and dataset -> coefficients with its architecture's decoding from the others."""
    seen: dict[str, Coefficients] = {}
    for each in decodes:
        if others := elsewhere(each, decodes):
            without = fits[family(each.gpu)]
            seen[each.name] = msgspec.structs.replace(
                without,
                decode=without.decode | fit_decode(others),
                latent_decode=fit_latent(others) if each.latent else without.latent_decode,
                architectures=tuple(sorted({gpu.architecture for gpu in gpus})),
                hull=hull_of(gpus),
            )
    return seen


_LARGE = 4096  # least m, n and k of the GEMMs that determine a sustained rate


def at_rate_of(products: Products, gpu: Gpu) -> Gpu:
    """Return a GPU with the sustained rate of its GEMMs in a benchmark set.

    Coefficients must not make up for the difference between a set's boards and a description's. A
    description may have the mean of several sets: an H200's GEMMs take 4% longer in the set of
    `coefficients.toml` than in the mean of four, and a fit with the mean rate lengthened the GEMMs
    of an H100 by 0.5%. As in the descriptions, the rate is the median of the large GEMMs.

    The GPU is unchanged if the set has no large GEMMs of it in bf16: only that rate is replaced.
    """
    columns = [GemmShape._fields.index(name) for name in ("m", "n", "k")]
    large = (products.shapes[:, columns] >= _LARGE).all(axis=1)
    peak = gpu.peak_tensor_flops_per_s(products.dtype)
    bf16 = products.dtype == "bfloat16"
    if not bf16 or gpu.name not in products.times_ns or not large.any() or not peak:
        return gpu
    flops = 2 * products.shapes[large][:, columns].prod(axis=1)
    achieved = float(np.median(flops / products.times_ns[gpu.name][large])) * 1e9
    share = round(achieved / peak, 3)  # as in the descriptions
    name = "bf16_sustained_fraction"
    figure = msgspec.structs.replace(gpu.figures[name], value=share)
    return msgspec.structs.replace(gpu, figures={**gpu.figures, name: figure})


def fitted(
    products: Products,
    attention: Attention | None,
    gpus: Sequence[Gpu],
    linears: Sequence[Linears] = (),
    folder: Path | None = None,
) -> Coefficients:
    """Return coefficients fitted to `gpus`, without errors.

    Without measured attention its coefficients are those of the fit's start, without measured
    linear layers in 8 bits theirs are the shipped ones, and without a folder with the attention of
    other kernels all architectures have the floors of FlashAttention.
    """
    at_rates = [at_rate_of(products, gpu) for gpu in gpus]
    gemm = fit_gemm(products, at_rates)
    narrow = [each for each in linears if each.gpu in gpus]
    scaled = shipped().finely_scaled, shipped().finely_scaled_elsewhere
    if narrow:
        scaled = fit_finely_scaled(narrow, gemm)
    fused = fit_attention(attention, at_rates) if attention else ATTENTION_START
    floors: dict[str, float] = {}
    if attention and folder:
        by_flash = {load_gpu(name).architecture for name in attention.times_ns}
        floors = fit_attention_floor(folder, fused, gpus, by_flash)
    decodes = [each for each in read_decodes(folder) if each.gpu in gpus] if folder else []
    layers = [each for each in read_experts(folder) if each.gpu in gpus] if folder else []
    return Coefficients(
        provenance={},
        gemm=gemm,
        finely_scaled=scaled[0],
        finely_scaled_elsewhere=scaled[1],
        experts=fit_experts(layers, gemm) if layers else shipped().experts,
        attention=fused,
        same_die=SAME_DIE,
        product_carried=PRODUCT_CARRIED,
        narrow_carried=NARROW_CARRIED,
        attention_carried=ATTENTION_CARRIED,
        experts_carried=EXPERTS_CARRIED,
        attention_floor=floors,
        decode=fit_decode(decodes) if decodes else shipped().decode,
        latent_decode=fit_latent(decodes) if decodes else shipped().latent_decode,
        other_attention=OTHER_ATTENTION,
        architectures=tuple(sorted({gpu.architecture for gpu in gpus})),
        hull=hull_of(gpus),
        errors={},
    )


def coefficients_without(fits: dict[str, Coefficients], name: str) -> Coefficients:
    """Return the coefficients fitted without a die family or a dataset.

    A family that is in no fit has those of the first fit.
    """
    return fits.get(name) or next(iter(fits.values()))


def models_without(
    fits: dict[str, Coefficients],
) -> tuple[Callable[[str], PredictFromDescription], Callable[[str], Predict]]:
    """Return two functions of a die family, to the models of unmeasured and of measured kernels.

    The models have the coefficients fitted without the family.
    """

    def from_description(name: str) -> PredictFromDescription:
        c = coefficients_without(fits, name)
        return lambda kernels, target: predict_from_description(kernels, target, c)

    def learned(name: str) -> Predict:
        c = coefficients_without(fits, name)
        return lambda kernels, source, target: predict_learned(kernels, source, target, c)

    return from_description, learned


def drawn(products: Products, count: int = 6000) -> Products:
    """Return `count` GEMMs of `products`, drawn with a fixed seed: enough for their quantiles."""
    rows = np.random.default_rng(0).permutation(len(products.shapes))[:count]
    times_ns = {name: times[rows] for name, times in products.times_ns.items()}
    return replace(products, shapes=products.shapes[rows], times_ns=times_ns)


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


def other_set_cases(
    folder: Path,
    described: Described,
    by_shape: Callable[[str], PredictFromDescription],
    model: Callable[[str], Predict],
) -> Iterator[Case]:
    """Yield GEMMs in each of the other benchmark sets, by shape and from another GPU.

    A description has the sustained rate of one set. In another, with other boards and operands, a
    GPU has another rate, and that error is the same for all GEMMs that the clock limits.
    """
    for every in read_other_products(folder):
        products = drawn(every)
        yield from gemm_by_shape(products, by_shape, described)
        yield from gemm_cases(products, described, model)


def gemm_by_shape(
    products: Products,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield GEMMs by their shapes, by GPU; `model`: family that is left out -> the model."""
    for name, times_ns in products.times_ns.items():
        gpu = load_gpu(name)
        predicted_ns, _ = model(family(gpu))(of_products(products, times_ns), described(gpu))
        yield Case("gemm_unmeasured", gpu, gpu, times_ns, predicted_ns, products.shapes[:, 1])


def attention_cases(
    attention: Attention, model: Callable[[str], Predict], described: Described = as_shipped
) -> Iterator[Case]:
    """Yield every ordered pair of the GPUs that measured `attention`.

    The dataset's times include writing keys and values to a cache, which a trace has as separate
    kernels; here their time is subtracted by its bytes on both GPUs.
    """
    gpus = [load_gpu(name) for name in attention.times_ns]
    for source, target in permutations(gpus, 2):
        times = attention.times_ns[source.name]
        attention_ns = np.maximum(times - stored_ns(source, attention.shapes), LEAST_ALONE * times)
        kernels = of_attention(attention, attention_ns)
        predicted_ns, _ = model(family(target))(kernels, source, described(target))
        predicted_ns = predicted_ns + stored_ns(target, attention.shapes)
        kind = "attention_same_die" if same_die(source, target) else "attention"
        times = attention.times_ns[target.name]
        yield Case(kind, source, target, times, predicted_ns, attention.shapes[:, 3])


def memory_cases(
    folder: Path, model: Predict = predict_learned, described: Described = as_shipped
) -> Iterator[Case]:
    """Yield both directions of norms, rotary embeddings, activations and additions, fp16.

    No family is excluded, because nothing of these predictions is fitted.
    """
    layers = read_layers(folder)
    index = ["model", "tp", "tokens", "op", "bytes"]
    for source, target in permutations(layers, 2):
        gpus = load_gpu(source), load_gpu(target)
        table = layers[source].join(layers[target], on=index, suffix="_target")
        kernels = of_layers(layer_times(table), table)
        predicted_ns, _ = model(kernels, gpus[0], described(gpus[1]))
        measured_ns = layer_times(table, "time_ms_target")
        kind = "memory" if model is scale_measured.predict_by_residual else "memory_other_die"
        yield Case(kind, *gpus, measured_ns, predicted_ns, np.zeros(len(table)))


def datasheet_cases(folder: Path, fits: dict[str, Coefficients]) -> Iterator[Case]:
    """Yield the cases of targets that are known only by their datasheet figures.

    The estimates of the other figures, like the coefficients, come from the other die families.
    Kernels at another size or in another dtype on one GPU, and calls of several GEMMs, have no
    cases: those errors are of a ratio on one GPU, or were measured on GPUs outside these data.
    """
    products, attention = drawn(read_products(folder)), read_attention(folder)
    described = as_by_datasheet([load_gpu(name) for name in products.times_ns])
    from_description, learned = models_without(fits)
    # Other GPUs known by their datasheet have the kind `gemm_uncalibrated` in `every_case`.
    cases = [c for c in gemm_cases(products, described, learned) if c.kind == "gemm_same_die"]
    of_sets = other_set_cases(folder, described, from_description, learned)
    cases += [c for c in of_sets if c.kind != "gemm"]
    for case in gemm_cases(products, described, lambda _: scale_measured.predict_by_residual):
        cases.append(replace(case, kind="product"))
    cases += gemm_by_shape(products, from_description, described)
    cases += linear_cases(read_linears(folder), from_description, learned, described)
    cases += tensor_scaled_cases(folder, from_description, described)
    cases += four_bit_cases(folder, from_description, described)
    cases += attention_cases(attention, learned, described)
    for model in (predict_learned, scale_measured.predict_by_residual):
        cases += memory_cases(folder, model, described)
    cases += [*unmeasured_cases(folder, described), *step_cases(described)]
    cases += vector_cases(folder, described=described)
    cases += attention_unmeasured(attention, from_description, described)
    cases += database_attention(from_description, described)
    cases += kernel_cases(folder, from_description, described)
    cases += decode_cases(read_decodes(folder), from_description, learned, described)
    for part in [part for case in cases for part in parted(case)]:
        factor = widening(part.target, fits_of(fits, part), part.kind)
        yield replace(part, widening=factor, by_datasheet=True)


def every_case(folder: Path, fits: dict[str, Coefficients] | None = None) -> list[Case]:
    """Return the cases of all kinds of errors; `fits` None: those of `fits_without`."""
    products, attention = read_products(folder), read_attention(folder)
    fits = fits or fits_without(products, attention, read_linears(folder), folder)
    gpus = [load_gpu(name) for name in products.times_ns]
    every_product, products = products, drawn(products)
    from_description, learned = models_without(fits)
    cases = [*gemm_cases(products, as_shipped, learned)]
    cases += other_set_cases(folder, as_shipped, from_description, learned)
    cases += same_die_steps(learned)
    for case in gemm_cases(products, as_by_datasheet(gpus), learned):
        cases.append(replace(case, kind="gemm_uncalibrated"))
    cases += gemm_by_shape(products, from_description)
    for case in gemm_cases(products, lambda gpu: gpu, lambda _: scale_measured.predict_by_residual):
        cases.append(replace(case, kind="product"))
    cases += linear_cases(read_linears(folder), from_description, learned)
    cases += tensor_scaled_cases(folder, from_description)
    cases += four_bit_cases(folder, from_description)
    cases += vector_cases(folder)
    # To a cut of the same die or another vendor's GPU, memory-bound kernels have the residual
    # model, whose errors were measured between dies.
    residual = vector_cases(folder, scale_measured.predict_by_residual)
    cases += [replace(case, kind="memory") for case in residual if case.kind == "memory_other_die"]
    cases += [*memory_cases(folder), *memory_cases(folder, scale_measured.predict_by_residual)]
    cases += retyped_cases(folder, from_description)
    cases += attention_cases(attention, learned)
    cases += resized_product_cases(every_product, from_description)
    cases += resized_attention_cases(attention, from_description)
    cases += resized_memory_cases(folder)
    cases += [
        *attention_unmeasured(attention, from_description),
        *database_attention(from_description),
        *kernel_cases(folder, from_description),
        *decode_cases(read_decodes(folder), from_description, learned),
        *expert_cases(read_experts(folder), from_description),
        *unmeasured_cases(folder),
        *step_cases(),
    ]
    parts = [part for case in cases for part in parted(case)]
    return [replace(c, widening=widening(c.target, fits_of(fits, c), c.kind)) for c in parts]


def fits_of(fits: dict[str, Coefficients], case: Case) -> Coefficients:
    """Return the coefficients that a case's prediction has."""
    return coefficients_without(fits, case.without or family(case.target))
