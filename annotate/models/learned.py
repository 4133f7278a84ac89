"""The learned model: GEMMs and attention from tiles, other kernels from the residual model."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import gemm_tiles as misaligned
from onerank.annotate.models import residual
from onerank.annotate.models.attention_tiles import attention_ns
from onerank.annotate.models.calibration import (
    Calibration,
    calibrated,
    calibrated_beside,
    without_what_ifs,
)
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.datasheet import predict as from_datasheet
from onerank.annotate.models.error_model import same_die, trust_in, trust_in_parts
from onerank.annotate.models.features import (
    F64,
    U8,
    KernelFeatures,
    KernelRates,
    Parts,
    matmul_ratio,
)
from onerank.annotate.models.gemm_tiles import Rates, Run, gemm_ns
from onerank.annotate.models.lower_bounds import no_less
from onerank.annotate.models.provenance import Rule
from onerank.annotate.unique_rows import combine


def predict_by_ratio(kernels: KernelFeatures, source: Gpu, target: Gpu) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels by the ratio rule.

    T_new = T * FLOPS_known / FLOPS_new if compute-bound, T * BW_known / BW_new if memory-bound.

    Rates are datasheet peaks of the kernel's dtype or, if a GPU has no units for it, of a wider one
    (counted; see `kernels`). A kernel is compute-bound if its FLOPs per byte exceed the source
    GPU's peak FLOPS over its peak bandwidth. For kernels with unknown FLOPs, GEMMs and attention
    use the 16-bit peak; others use bandwidth, since operators without formula are mostly fused
    pointwise work, sorting and scans, which stream memory. Both are counted. See `measured` for
    nodes that keep their duration.
    """
    by_memory = source.peak_bandwidth_bytes_per_s / target.peak_bandwidth_bytes_per_s
    rates, new_rates = kernels.rates(source), kernels.rates(target)
    peak, new_peak = rates.peak, new_rates.peak
    ridge = peak / source.peak_bandwidth_bytes_per_s
    compute = kernels.flops > kernels.bytes * ridge  # false where either is not known
    rated = np.isfinite(peak / new_peak)
    factor = np.where(compute & rated, peak / new_peak, by_memory)
    rule = np.where(compute, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where(compute & (rates.wider | new_rates.wider), Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & ~rated, Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes), Rule.BANDWIDTH_ONLY, rule)
    by_matmul = matmul_ratio(source, target, sustained=False)
    if by_matmul is not None:
        blind = kernels.matmul_class & np.isnan(kernels.flops)
        factor = np.where(blind, by_matmul, factor)
        rule = np.where(blind, Rule.MATMUL_WITHOUT_FLOPS, rule)
    factor = np.where(kernels.over_link, 1.0, factor)
    rule = np.where(kernels.over_link, Rule.KEPT, rule)
    return kernels.duration_ns * factor, rule.astype(np.uint8)


I64 = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]

_FITTED_TYPES = ("bfloat16", "float16", "tfloat32", "int8", "float8_e4m3fn", "float8_e5m2",
                 "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip

_ITEM_BYTES = 2  # of products that two microbenchmarks tell of

_ORDINARY = 1.0  # ln(measured / predicted) of a product that is nothing special


def predict_learned(
    kernels: KernelFeatures, source: Gpu, target: Gpu, coefficients: Coefficients | None = None
) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels.

    A GEMM's time on the target follows from its shape (see `gemm_tiles`) with fitted coefficients
    (see `coefficients`). The measurement on the source also counts, as ln(measured / predicted on
    the source):

    1. To a GPU of the same die (H100 and H200), the share `same_die` carries over for GEMMs,
    because libraries pick
       the same kernels, and all of it for attention.
    2. To another die, the share `product_carried` carries over, because libraries pick other
    kernels, and all of the
       excess beyond 1.0: such a kernel does more than the product, or has a bad layout. For forward
       attention the share is `attention_carried`. Where nothing was fitted, the deviation is the
       model's: for GEMMs in 8 bits the share is `eight_bit_carried`, for backward attention all.
    3. For a GPU far from the fitted ones, part of the prediction is the residual model's (see
    `likeness`). 4. For convolutions and recurrent layers, which are several GEMMs, all of it is.
    From a V100 to a T4 and back
       DeepBench's convolutions are 1.18 times off forward, 1.21 and 1.52 for the gradients of input
       and filter; with the residual model 1.29, 1.32 and 1.47 (benchmarks/deepbench.py).

    Attention becomes the kernel that the target runs (see `attention_kernels`). Everything else,
    and GEMMs in dtypes without matrix units, uses the residual model. No kernel is faster than the
    target's lower bound (see `least`).
    """
    c = coefficients or shipped()
    moved, rules = residual.predict(kernels, source, target)
    made, attention = by_tiles(kernels, target, c)
    here, _ = by_tiles(kernels, source, c, calibrated_beside(source, target, c.gemm))
    usable = np.isfinite(made) & np.isfinite(here) & (kernels.duration_ns > 0) & (moved > 0)
    rows_off = _held_by_rows(kernels, target, made)[usable]
    made, here, attention = made[usable], here[usable], attention[usable]
    whole = kernels.operator_ns[usable]
    sort = sorts_of(kernels, usable)
    kept = carried(np.log(whole / here), sort, source, target, c)
    by_shape = np.log(made / whole) + kept
    by_bound = np.log(moved[usable] / kernels.duration_ns[usable])
    trust = trust_in(target, c)
    factor = np.exp(trust * by_shape + (1 - trust) * by_bound)
    moved[usable] = kernels.duration_ns[usable] * factor
    rules[usable] = _rules(attention, rows_off, trust)
    if len(kernels.parts.call):
        there, here = by_parts(kernels, target, c), by_parts(kernels, source, c)
        usable = np.isfinite(there) & np.isfinite(here) & (kernels.duration_ns > 0)
        trust, own = trust_in_parts(target, c), kernels.duration_ns[usable]
        moved[usable] = (own * there[usable] / here[usable]) ** trust * moved[usable] ** (1 - trust)
        rules[usable] = Rule.PARTS
    for some, part in kernels.blocks():
        moved[some] = no_less(moved[some], part, source, part, target)
    return moved, rules


class Sort(IntEnum):
    """What the source's deviation is of."""

    PRODUCT = 0
    EIGHT_BIT = 1
    FORWARD = 2
    BACKWARD = 3


def sorts_of(kernels: KernelFeatures, rows: Mask) -> npt.NDArray[np.int_]:
    """Return a `Sort` for each of the `rows`: attention, its backward pass, width of operands."""
    call = kernels.call[rows]
    attention, backward = (kernels.attention[call, column] > 0 for column in (0, 8))
    product = np.where(kernels.gemm[call, 4] == 1, Sort.EIGHT_BIT, Sort.PRODUCT)
    return np.where(attention, np.where(backward, Sort.BACKWARD, Sort.FORWARD), product)


def carried(
    deviation: F64, sort: npt.NDArray[np.int_], source: Gpu, target: Gpu, c: Coefficients
) -> F64:
    """Return the share of ln(measured / predicted on the source) that carries over to the target.

    Args:
        deviation: float64[d].
        sort: a `Sort` for each.
        source: GPU it was measured on.
        target: GPU to predict.
        c: fitted coefficients.
    """
    if source.board == target.board:  # what if one of its figures were another
        return deviation
    forward = attention_share(source, target, c)
    if same_die(source, target):
        product = eight_bit = c.same_die * deviation
    else:
        ordinary = np.clip(deviation, -_ORDINARY, _ORDINARY)
        product = deviation - (1 - c.product_carried) * ordinary
        eight_bit = deviation - (1 - c.eight_bit_carried) * ordinary
    return np.choose(sort, [product, eight_bit, forward * deviation, deviation])


def attention_share(source: Gpu, target: Gpu, c: Coefficients) -> float:
    """Return the part of forward attention's deviation that the target shares."""
    alike = source.board == target.board or same_die(source, target)
    return 1.0 if alike else c.attention_carried


def predict_alone(
    kernels: KernelFeatures, target: Gpu, coefficients: Coefficients | None = None
) -> tuple[F64, U8]:
    """Return (durations in ns, rules) of unmeasured kernels, from shapes only."""
    c = coefficients or shipped()
    moved, rules = from_datasheet(kernels, target)
    made, attention = by_tiles(kernels, target, c)
    usable = np.isfinite(made)
    trust = trust_in(target, c)
    moved[usable] = made[usable] ** trust * moved[usable] ** (1 - trust)
    rules[usable] = _rules(attention[usable], _held_by_rows(kernels, target, made)[usable], trust)
    composed = by_parts(kernels, target, c)
    usable = np.isfinite(composed)
    trust = trust_in_parts(target, c)
    moved[usable] = composed[usable] ** trust * moved[usable] ** (1 - trust)
    rules[usable] = Rule.PARTS
    return moved, rules


def _rules(attention: Mask, rows_off: Mask, trust: float) -> U8:
    if trust < 0.75:
        return np.full(len(attention), Rule.OUTSIDE, dtype=np.uint8)
    product = np.where(rows_off, Rule.MISALIGNED, Rule.GEMM_TILES)
    return np.where(attention, Rule.ATTENTION_TILES, product).astype(np.uint8)


def _held_by_rows(kernels: KernelFeatures, gpu: Gpu, made: F64) -> Mask:
    """Return whether where its rows begin is what makes a product's time."""
    least = misaligned.least_ns(gpu, kernels.gemm)[kernels.call]
    return (least > 0) & (least >= made)


def by_tiles(
    kernels: KernelFeatures, gpu: Gpu, c: Coefficients, measured: Calibration | None = None
) -> tuple[F64, Mask]:
    """Return (time of each node's whole operator in ns, whether it is attention).

    nan where the model has nothing to say: no shape, or no matrix units for the data type. Each
    distinct call is worked out once. Products in 16 bits go by the GPU as `measured` ones have it,
    or as its own.
    """
    made = np.full(len(kernels.call), np.nan)
    has_gemm: Mask = np.all(kernels.gemm > 0, axis=1)
    has_attention: Mask = np.all(kernels.attention[:, :7] > 0, axis=1)
    attention: Mask = has_attention[kernels.call]
    where, first, inverse = _distinct(kernels, has_attention | has_gemm)
    if not len(where):
        return made, attention
    kernels = kernels.only(where[first])
    times = np.full(len(first), np.nan)
    rates, call = kernels.rates(gpu), kernels.call
    able, soft = _able(kernels, rates), has_attention[call]
    hard, soft = np.flatnonzero(able & ~soft), able & soft
    fused = Rates(rates.sustained[soft], rates.peak[soft])
    before = without_what_ifs(gpu)
    was = kernels.rates(before)
    described = before, Rates(was.sustained[soft], was.peak[soft])
    shapes = kernels.attention[call[soft]]
    times[soft] = attention_ns(gpu, fused, shapes, c.attention, described)
    times[hard] = _products_ns(kernels, gpu, (hard, kernels.gemm[call[hard]]), c, measured)
    times[hard] = np.maximum(times[hard], misaligned.least_ns(gpu, kernels.gemm)[call[hard]])
    made[where] = times[inverse]
    return made, attention


def _distinct(kernels: KernelFeatures, calls: Mask) -> tuple[I64, I64, I64]:
    """Return (products of some calls, the first of each distinct one, which each is).

    Distinct are call and data type.
    """
    where = np.flatnonzero(kernels.matmul & calls[kernels.call])
    return where, *combine([kernels.call[where], kernels.dtype[where]])


def by_parts(kernels: KernelFeatures, gpu: Gpu, c: Coefficients) -> F64:
    """Return the time of each operator that is made of several GEMMs, in ns.

    nan for other operators, and if the tiles do not apply. GEMMs run one after another, each with
    its additional launches.
    """
    made = np.full(len(kernels.call), np.nan)
    composed = np.zeros(len(kernels.gemm), dtype=bool)
    composed[kernels.parts.call] = True
    where, first, inverse = _distinct(kernels, composed)
    if not len(where):
        return made
    kernels = kernels.only(where[first])
    able = np.flatnonzero(_able(kernels, kernels.rates(gpu)))
    parts, owner, once = parts_ns(kernels, gpu, able, c)
    each = parts.times * (once + parts.launches * gpu.launch_floor_ns)
    times = np.full(len(first), np.nan)
    times[able] = np.bincount(owner, weights=each, minlength=len(able))
    made[where] = times[inverse]
    return made


def parts_ns(
    kernels: KernelFeatures, gpu: Gpu, rows: I64, c: Coefficients
) -> tuple[Parts, I64, F64]:
    """Return (products of some nodes, of which of `rows` each is, its time done once in ns)."""
    parts, owner = kernels.parts.of_calls(kernels.call[rows])
    return parts, owner, _products_ns(kernels, gpu, (rows[owner], parts.shapes), c)


def _able(kernels: KernelFeatures, rates: KernelRates) -> Mask:
    """Return whether the tiles know a node's products: their type, and its units on the GPU."""
    typed = np.array([name in _FITTED_TYPES for name in kernels.dtypes], dtype=bool)[kernels.dtype]
    return kernels.matmul & typed & ~rates.wider & np.isfinite(rates.sustained)


def _products_ns(
    kernels: KernelFeatures, gpu: Gpu, products: tuple[I64, F64], c: Coefficients,
    measured: Calibration | None = None,
) -> F64:  # fmt: skip
    """Return the times of products, (node of each, shapes), float64[d]."""
    rows, shapes = products
    times = np.empty(len(rows))
    rates, before = kernels.rates(gpu), without_what_ifs(gpu)
    sixteen_bit: Mask = shapes[:, 4] == _ITEM_BYTES
    for of, at, was in (
        (sixteen_bit, measured or calibrated(gpu, c.gemm), calibrated(before, c.gemm)),
        (~sixteen_bit, Calibration(gpu, 1.0), Calibration(before, 1.0)),
    ):
        described = None
        if before.figures != gpu.figures:
            described = _run(was, kernels.rates(before), rows[of])
        times[of] = gemm_ns(*_run(at, rates, rows[of]), shapes[of], c.gemm, described)
    return times


def _run(at: Calibration, rates: KernelRates, rows: I64) -> Run:
    """Return where the products of some nodes run, at the rates of a calibrated GPU."""
    sustained, peak = rates.sustained[rows], rates.peak[rows]
    return Run(at.gpu, Rates(np.minimum(peak, sustained * at.compute), peak))
