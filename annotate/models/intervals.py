"""The interval of a prediction, for each node and for the step, and the errors that it stands for.

An interval contains four of five measured times on GPUs whose die family the fit had not seen. An
error has a part that all kernels of a class share on a GPU (libraries, clock under load) and a part
of each distinct call. The shared part does not average out over a class; that of GEMMs is measured
over those with as many rows, as a step has them. On a GPU of which whole steps were measured it is
at most that of the steps (`shared_in_steps`). Between classes it is independent: over the GPUs
left out, mean errors of GEMMs, attention and memory-bound kernels do not go together. The other
part averages over distinct calls, not over repetitions. Both grow with the distance of a GPU from
the fitted dies (`gpu_distance`).

`intervals` is the entry point: `kinds_of` names the kind of each prediction, the fit has the errors
of each kind, and `widening` enlarges them for a GPU far from the fitted ones.
"""

import math
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import is_known_by_shape
from onerank.annotate.models.attention_time import (
    has_few_queries,
    is_latent,
    is_measured_latent,
)
from onerank.annotate.models.call_gaps import ATTENTION_GAP, has_uncertain_gap
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import distance_from_fitted, same_die
from onerank.annotate.models.prediction_terms import (
    AS_MEASURED,
    BY_DATABASE,
    BY_TILES,
    PredictedDurations,
    Rule,
    TermRecord,
)
from onerank.annotate.models.tile_kernels import has_grouped_kernels
from onerank.annotate.op_costs.cost_record import Scales
from onerank.ir.arrays import F64, I64, U8, Mask, deduplicate, membership_mask

# Mean distance of the four die families, each left out: Ampere 0.98, Ada 1.30, Blackwell 0.95,
# Hopper 0. A workstation Blackwell is at 0.26.
_UNSEEN_ARCHITECTURE = 0.8

KINDS = (
    "kept",
    "gemm",
    "gemm_short",
    "gemm_same_die",
    "gemm_same_die_short",
    "gemm_same_die_long",
    "gemm_uncalibrated",
    "gemm_uncalibrated_short",
    "gemm_unmeasured",
    "gemm_unmeasured_short",
    "gemm_8bit",
    "gemm_8bit_same_die",
    "gemm_8bit_unmeasured",
    "gemm_8bit_unmeasured_short",
    "gemm_8bit_tensor_unmeasured",
    "gemm_4bit_unmeasured",
    "attention",
    "attention_same_die",
    "attention_unmeasured",
    "attention_other",
    "decode",
    "decode_unmeasured",
    "decode_unmeasured_short",
    "decode_other",
    "decode_flash2",
    "decode_flash_mla",
    "latent_other",
    "product",
    "product_short",
    "product_unmeasured",
    "retyped",
    "memory",
    "memory_short",
    "memory_other_die",
    "memory_other_die_short",
    "memory_same_die",
    "memory_same_die_short",
    "memory_unmeasured",
    "memory_unmeasured_short",
    "memory_unmeasured_long",
    "memory_unknown_layout",
    "memory_library_unmeasured",
    "memory_library_unmeasured_short",
    "resized_product",
    "resized_attention",
    "resized_memory",
    "looked_up",
    "looked_up_short_or_data_dependent",
    "looked_up_other_versions",
    "composed",
    "experts_unmeasured",
    "grouped_unmeasured",
)
"""Kinds of prediction with separate errors; "kept" has none.

A kind names what is known: the dtype; whether the call was measured on another GPU ("unmeasured":
it was not), or on an SKU of the same die; whether attention's kernel was measured on the target's
architecture ("other": it was not). "tensor" are 8-bit GEMMs with one scale for a tensor, "4bit" are
GEMMs in NVFP4, to which nothing is fitted, and "decode" is attention of a few queries, "latent"
that of a latent vector, for which Ampere and Ada run Triton's kernels. "flash2" and "flash_mla" are
decodes by the schedule of these kernels' thread blocks, whose errors are those of sizes that chose
no coefficient. "product" are GEMMs on vector units or without tiles. "short" are predictions under
`SHORT_NS`, which the launch determines, "long" those over `LONG_NS`: bandwidth alone determines
memory-bound kernels, and the clock that the power limit allows GEMMs. "memory_same_die" has the
errors of two A100s, which differ in their memory, and of a step on an H100 and an H200. "library"
are memory-bound kernels of other libraries than PyTorch: on an A100 and an H100 vLLM's norms,
activations and rotary embeddings take 1.3 to 2.0 times as long as their bytes, and PyTorch's
additions 0.8 to 1.0 times.

"memory_unknown_layout" are those of three axes or more in a graph without strides: a transposed
operand takes 1.8 to 2.7 times as long as a contiguous one.

"resized" kinds are of another size on one GPU and add to those of another GPU. Memory-bound kernels
without a measurement ("memory_unmeasured") are much less certain than measured ones. So are GEMMs
with misaligned rows, of which eight were measured, up to 1.5 times off. Unmeasured convolutions and
recurrent layers ("composed") have errors from DeepBench, of two GPUs that differ from the fitted
ones (benchmarks/predictions/deepbench.py), so they are not widened. Unmeasured experts of an MoE
layer are GEMMs by the tiles of a known kernel, whose errors were measured on four die families.
"grouped" are torch's grouped GEMMs where their tiles are known and were measured.
"""

_AT = {kind: np.uint8(at) for at, kind in enumerate(KINDS)}

# Class of each of `KINDS`, whose kernels share an error on a GPU: the first word of its name.
_CLASSES = [kind.split("_", 1)[0] for kind in KINDS]
_CLASS = np.array([_CLASSES.index(name) for name in _CLASSES])

# Kind of a prediction from shapes -> its class in `Coefficients.shared_in_steps`. Kernels of other
# libraries and of unknown layout are not among them: served steps have few.
_IN_STEPS = {
    **dict.fromkeys(("gemm_unmeasured", "gemm_unmeasured_short"), "gemm"),
    "attention_unmeasured": "attention",
    **dict.fromkeys(("decode_unmeasured", "decode_unmeasured_short", "decode_flash2"), "attention"),
    **dict.fromkeys(
        ("memory_unmeasured", "memory_unmeasured_short", "memory_unmeasured_long"), "memory"
    ),
    "experts_unmeasured": "experts",
    "grouped_unmeasured": "experts",
}

# Kinds of GEMM predictions by rules without fitted coefficients.
_UNFITTED = ("retyped",)

_OTHER_VENDORS = {
    **dict.fromkeys(("memory", "memory_short"), 2.1),
    "memory_unmeasured": 2.4,
    "memory_unmeasured_short": 1.1,
    **dict.fromkeys(
        (
            *("memory_library_unmeasured", "memory_library_unmeasured_short"),
            *("memory_unknown_layout", "composed"),
        ),
        1.8,
    ),
}

# Widening of errors on GPUs of other vendors, to which nothing was fitted. `_OTHER_VENDORS` has
# factors on the errors of memory-bound kinds; `_FARTHER` is an additional distance from the fitted
# GPUs for GEMMs. Both were chosen so that 80% intervals contain 80% of the times of five models on
# an MI300X (public Kineto traces, AMD-AGI/TraceLens): predicted from an H100, 134 memory-bound
# shapes and 26 GEMMs; by shape alone, 46 memory-bound shapes over 10 us and 107 under. With the fit
# of 2026-11-26 they contain 88% of the GEMMs, and all three shapes of attention.
_FARTHER = 2.0

# The largest widening: that of GEMMs on an MI300X is 4.1, and nothing farther was measured. Far
# from the fitted GPUs a prediction is a roofline, whose error does not grow with the distance.
_WIDEST = 4.5

# Part of the time at the datasheet's peak below which no interval of a GEMM reaches. Boards clock
# up to 5% above the boost clock of the datasheet.
_LEAST_OF_PEAK = 0.9

# Errors that are no larger on a V100 and a T4, far outside the fitted GPUs, than on an A100.
_ON_ANY_NVIDIA = (
    *_OTHER_VENDORS,
    "memory_unmeasured_long",
    "memory_other_die",
    "memory_other_die_short",
    "memory_same_die",
    "memory_same_die_short",
    "product",
    "product_short",
    "product_unmeasured",
)

# Errors of measured times or of bytes, which do not grow with the distance from the fitted GPUs.
_WITHOUT_MODEL = (
    "resized_memory",
    "looked_up",
    "looked_up_short_or_data_dependent",
    "looked_up_other_versions",
)

SHORT_NS = 10_000
"""Shorter predictions have separate errors, because the launch determines their time."""

LONG_NS = 100_000
"""Longer memory-bound kernels without a measurement have separate errors.

By their shapes, four of five of PyTorch's are within 3 to 9% on V100, T4, A100, H100 and H200, and
within 10 to 30% from 10 to 100 us.
"""

TINY_NS = 3000
"""Look-ups of kernels up to this time have separate errors: cache and launch determine it."""


class Uncertainty(NamedTuple):
    """Uncertainty of n look-ups, in addition to that of their kind.

    Attributes:
        spread: standard deviation in ln of each, in addition to that of its kind, float64[n].
        other_versions: whether the row has other library versions than the trace, bool[n].
        data_dependent: whether the time depends on more than the key records, bool[n].
    """

    spread: F64
    other_versions: Mask
    data_dependent: Mask

    @classmethod
    def none(cls, count: int) -> Self:
        """Return no additional uncertainty, for predictions by a model."""
        return cls(np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count, dtype=bool))

    def merge(self, other: Self) -> Self:
        """Return the union of the uncertainties of look-ups of different nodes."""
        return type(self)(
            np.maximum(self.spread, other.spread),
            self.other_versions | other.other_versions,
            self.data_dependent | other.data_dependent,
        )

    def at(self, where: I64 | Mask) -> Self:
        """Return the uncertainty of the nodes at `where`."""
        return type(self)(
            self.spread[where], self.other_versions[where], self.data_dependent[where]
        )


def resize_kinds_of(kernels: KernelFeatures, resized: Mask) -> U8:
    """Return the kind of each prediction for another size, as positions in `KINDS`, uint8[n]."""
    attention = kernels.is_fused_attention
    product = np.where(kernels.matmul_class, _AT["resized_product"],
                       _AT["resized_memory"])  # fmt: skip
    kind = np.where(attention, _AT["resized_attention"], product)
    return np.where(resized, kind, _AT["kept"]).astype(np.uint8)


def kinds_of(
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    source: Gpu | None,
    target: Gpu,
    uncertainty: Uncertainty | None = None,
) -> U8:
    """Return the kind of each prediction, as positions in `KINDS`, uint8[n]."""
    predicted_ns, rules = predicted
    die = source is not None and same_die(source, target)
    by_tiles = membership_mask(rules, BY_TILES)
    product, without_tiles = _product_kinds(kernels, predicted_ns, source, target)
    memory = _memory_kinds(kernels, predicted_ns, source, target)
    depthwise = kernels.matmul_class & ~kernels.matmul & np.isfinite(kernels.flops)
    other = np.where(kernels.matmul_class & ~depthwise, without_tiles, memory)
    # Eight misaligned GEMMs were measured, up to 1.5 times off.
    if not die:
        product = np.where(rules == Rule.MISALIGNED, _AT["memory_library_unmeasured"], product)
    attention = _attention_kinds(kernels, predicted, source, target)
    kind = np.where(by_tiles, np.where(kernels.is_fused_attention, attention, product), other)
    if source is None:
        kind = np.where(rules == Rule.PARTS, _composed_kinds(kernels, target), kind)
    retyped = np.where(kernels.has_four_bit_operands, _AT["gemm_4bit_unmeasured"], _AT["retyped"])
    kind = np.where(rules == Rule.RETYPED, retyped, kind)
    looked_up = membership_mask(rules, BY_DATABASE)
    if uncertainty is not None and looked_up.any():
        loose = uncertainty.data_dependent | (predicted_ns <= TINY_NS)
        same = np.where(loose, _AT["looked_up_short_or_data_dependent"], _AT["looked_up"])
        database = np.where(uncertainty.other_versions, _AT["looked_up_other_versions"], same)
        kind = np.where(looked_up, database, kind)
    # Last, because these rules decide for any class of work.
    kept = membership_mask(
        rules, [*AS_MEASURED, Rule.DROPPED, Rule.RESIZED, Rule.MEASURED_WITH_OVERRIDES]
    )
    return np.where(kept, _AT["kept"], kind).astype(np.uint8)


def _composed_kinds(kernels: KernelFeatures, target: Gpu) -> U8:
    """Return the kinds of calls that are several GEMMs, without a source, uint8[n]."""
    parts = kernels.parts
    experts, engines = (
        np.isin(kernels.call, calls) for calls in (parts.grouped_calls, parts.expert_calls)
    )
    by_expert = np.where(
        engines | (not has_grouped_kernels(target)),
        _AT["experts_unmeasured"],
        _AT["grouped_unmeasured"],
    )
    return np.where(experts, by_expert, _AT["composed"])


def _attention_kinds(
    kernels: KernelFeatures, predicted: PredictedDurations, source: Gpu | None, target: Gpu
) -> U8:
    """Return the kinds of attention, uint8[n]; arguments as for `kinds_of`."""
    predicted_ns, rules = predicted
    die = source is not None and same_die(source, target)
    few, latent = (of(kernels.attention)[kernels.call] for of in (has_few_queries, is_latent))
    # Between SKUs of a die the same attention kernel runs, whose deviation carries over whole.
    kind = _AT["attention_same_die" if die else "attention"]
    if source is None:
        known = is_known_by_shape(target)
        kind = _AT["attention_unmeasured" if known else "attention_other"]
        other = np.where(
            few,
            np.where(latent, _AT["latent_other"], _AT["decode_other"]),
            _AT["attention_other"],
        )
        without_figure = ~is_measured_latent(target, kernels.attention)[kernels.call] & ~few
        without_figure |= rules == Rule.OTHER_ATTENTION
        kind = np.where(without_figure, other, kind)
    if not die:
        decode_kind = _AT["decode"]
        if source is None:
            short = _AT["decode_unmeasured_short"]
            decode_kind = np.where(predicted_ns < SHORT_NS, short, _AT["decode_unmeasured"])
        kind = np.where(rules == Rule.DECODE, decode_kind, kind)
    scheduled = np.where(latent, _AT["decode_flash_mla"], _AT["decode_flash2"])
    return np.where(rules == Rule.SCHEDULED, scheduled, kind)


def _product_kinds(
    kernels: KernelFeatures, predicted_ns: F64, source: Gpu | None, target: Gpu
) -> tuple[U8, U8]:
    """Return the kinds of GEMMs by tiles, and of products without, uint8[n] each."""
    short, long = predicted_ns < SHORT_NS, predicted_ns >= LONG_NS

    def by_length(kind: str) -> U8:
        return np.where(short, _AT[f"{kind}_short"], _AT[kind])

    # The errors of 16-bit GEMMs are not those of vector units, whose tiles have no fit.
    vector = np.array([name == "float32" for name in kernels.dtypes], dtype=bool)[kernels.dtype]
    without_tiles = by_length("product")
    if source is None:
        without_tiles = np.full(len(short), _AT["product_unmeasured"])
        sixteen = by_length("gemm_unmeasured")
        fine = kernels.scales[kernels.call] != Scales.TENSOR
        narrow = np.where(
            fine, by_length("gemm_8bit_unmeasured"), _AT["gemm_8bit_tensor_unmeasured"]
        )
    elif same_die(source, target):
        sixteen = np.where(long, _AT["gemm_same_die_long"], by_length("gemm_same_die"))
        narrow = _AT["gemm_8bit_same_die"]
    else:
        sixteen = by_length("gemm" if target.calibrated else "gemm_uncalibrated")
        narrow = _AT["gemm_8bit"]
    product = np.where(
        vector, without_tiles, np.where(kernels.has_narrow_operands, narrow, sixteen)
    )
    # One GPU with units for 4 bits was measured, so their errors are those without a source.
    four = kernels.has_four_bit_operands
    return np.where(four, _AT["gemm_4bit_unmeasured"], product), without_tiles


def _memory_kinds(
    kernels: KernelFeatures, predicted_ns: F64, source: Gpu | None, target: Gpu
) -> U8:
    """Return the kinds of memory-bound kernels, uint8[n]; arguments as for `kinds_of`."""
    short = predicted_ns < SHORT_NS
    if source is None:
        kinds = ("memory_library_unmeasured", "memory_unmeasured")
    elif source.is_nvidia and target.is_nvidia:
        if same_die(source, target):
            return np.where(short, _AT["memory_same_die_short"], _AT["memory_same_die"])
        kinds = ("memory_other_die",) * 2
    else:
        kinds = ("memory",) * 2
    of_library, of_torch = (np.where(short, _AT[f"{kind}_short"], _AT[kind]) for kind in kinds)
    # Long softmax and norms take 1.3 to 2.4 times as long as their bytes on an MI300X.
    if source is None and target.is_nvidia:
        of_torch = np.where(predicted_ns >= LONG_NS, _AT["memory_unmeasured_long"], of_torch)
    if source is None:
        of_torch = np.where(kernels.unknown_layout, _AT["memory_unknown_layout"], of_torch)
    return np.where(kernels.from_torch, of_torch, of_library)


def less_known_gpu(source: Gpu | None, target: Gpu) -> Gpu:
    """Return the GPU whose distance from the fitted ones widens the error.

    This is the target, or the source if the source is another vendor's and the target NVIDIA's.

    Args:
        source: GPU that measured; None: not measured.
        target: GPU to predict.
    """
    if source is None or source.is_nvidia or not target.is_nvidia:
        return target
    return source


def widening(target: Gpu, c: Coefficients, kind: str) -> float:
    """Return the factor on the errors of a kind of prediction, for a GPU far from the fitted ones.

    With a die family left out of the fit, errors grew by about a quarter per unit of distance (see
    `distance_from_fitted`). A GPU of an architecture that the fit has not seen counts as at least
    as far as those families were in the mean: its specs may be within their range, its kernels are
    not. None was more than 1.3 outside, so errors grow faster beyond. `_UNFITTED` kinds are
    widened only beyond a distance of 1, since no fit favours a GPU. Look-ups on the GPU itself, and
    changes of size by bytes, are not widened. Nor are memory-bound kernels and fp32 GEMMs on
    NVIDIA GPUs: on a V100 and a T4, 2.3 and 3.3 outside, norms, softmax and elementwise kernels of
    30 us and more are as close to their roofline as on an A100, and fp32 GEMMs to their tiles.
    """
    if kind in _WITHOUT_MODEL:
        return 1.0
    if target.is_nvidia and kind in _ON_ANY_NVIDIA:
        return 1.0
    if kind in _OTHER_VENDORS:
        return _OTHER_VENDORS[kind]
    distance = distance_from_fitted(target, c)
    if kind in _UNFITTED:
        return max(1.0, distance)
    if target.architecture not in c.architectures:
        distance = max(distance, _UNSEEN_ARCHITECTURE)
    distance += 0.0 if target.is_nvidia else _FARTHER
    # A quarter per unit is measured as far as 1.3 outside; both branches meet at
    # 4/3. Faster growth beyond is an assumption, since nothing was measured there.
    return min(_WIDEST, max(1 + distance / 4, distance))


HALF_WIDTH = 1.2816
"""Standard deviations from the mean to the end of the central 80% of a normal distribution."""


class OverrideEffect(NamedTuple):
    """The effect of overridden figures on n times that are known for the target as described.

    Attributes:
        factor: time with overrides over time without, by a model, float64[n].
        rules: the model's rule, uint8[n].
        known: whether the time without overrides was measured on the target, bool[n].
    """

    factor: F64
    rules: U8
    known: Mask

    @classmethod
    def none(cls, rules: U8) -> Self:
        """Return the effect without overrides."""
        return cls(np.ones(len(rules)), rules, np.zeros(len(rules), dtype=bool))

    def at(self, where: I64 | Mask) -> Self:
        """Return the effect on the times at `where`."""
        return type(self)(self.factor[where], self.rules[where], self.known[where])


class Interval(NamedTuple):
    """80% interval of the summed kernel times of a step, in ns."""

    p10_ns: int
    p90_ns: int

    def widened(self, total_ns: int, spread: float) -> Self:
        """Return the interval of a step whose size varies too.

        Args:
            total_ns: predicted time, inside the interval.
            spread: standard deviation, in ln, of the step's time by its size; independent of the
                errors of the prediction.
        """
        if not spread or not self.p10_ns:
            return self
        low, high = math.log(total_ns / self.p10_ns), math.log(self.p90_ns / total_ns)
        # Independent errors: their squares add up, in ln.
        low, high = (math.hypot(end, HALF_WIDTH * spread) for end in (low, high))
        return type(self)(round(total_ns * math.exp(-low)), round(total_ns * math.exp(high)))


def intervals(
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    source: Gpu | None,
    target: Gpu,
    c: Coefficients,
    *,
    changed: Mask | None = None,
    resized: Mask | None = None,
    uncertainty: Uncertainty | None = None,
    overrides: OverrideEffect | None = None,
    record: TermRecord | None = None,
) -> tuple[tuple[F64, F64], Interval]:
    """Return ((low, high) of each node in ns, interval of their sum).

    The interval of the sum lies within the sums of all low ends and all high ends.

    Args:
        kernels: the re-costed kernels.
        predicted: their predicted durations.
        source: GPU they were measured on; None: not measured.
        target: GPU they are predicted for.
        c: coefficients with errors.
        changed: whether a node is another kernel or has another dtype than measured, bool[n]; None:
            no node. Such a node is no more certain on a GPU of the source's die.
        resized: whether a node was measured at another size, bool[n]; None: no node.
        uncertainty: uncertainty of look-ups; None without look-ups.
        overrides: effect of overridden figures; None without overrides.
        record: takes the intervals of its kernels as facts.
    """
    predicted_ns, rules = predicted
    c = c.for_gpus(source, target)
    kinds = kinds_of(kernels, predicted, source, target, uncertainty)
    if changed is not None and changed.any():
        # Another kernel was not measured on any GPU, so its errors are those without a source.
        kinds = np.where(changed, kinds_of(kernels, predicted, None, target, uncertainty), kinds)
    sizes = np.zeros_like(kinds) if resized is None else resize_kinds_of(kernels, resized)
    errors = ErrorKinds.of(kinds, sizes)
    if overrides is not None:
        errors = errors.with_overrides(kernels, predicted_ns, overrides, target, c)
    less_known = less_known_gpu(source, target)
    low_ns, high_ns = node_intervals(predicted_ns, errors, less_known, c, uncertainty)
    if source is None and not kernels.per_call:
        # The gap may be none there: then the duration is the time per call.
        floors = np.where(kernels.is_fused_attention, ATTENTION_GAP, c.gemm.call_gap)
        gap_ns = has_uncertain_gap(rules, target) * floors * target.launch_floor_ns
        high_ns = high_ns * (1 + gap_ns / np.maximum(predicted_ns, 1.0))
    ends = np.maximum(low_ns, _least_ns(kernels, predicted_ns, target)), high_ns
    if record is not None:
        for row in record.rows.tolist():
            text = _interval_text(
                row, ends, errors, Rule(int(rules[row])), less_known, c, uncertainty
            )
            if text:
                record.facts[row].append(("80% interval", text))
    # The interval of the sum is narrower than the sum of ends, because errors of distinct calls
    # average.
    compute = compute_interval(
        predicted_ns, errors, kernels.call, less_known, c, uncertainty=uncertainty
    )
    # The error of the sum is at most the sum of the errors.
    least, most = (round(float(end.sum())) for end in ends)
    return ends, Interval(max(compute.p10_ns, least), min(compute.p90_ns, most))


def _least_ns(kernels: KernelFeatures, predicted_ns: F64, target: Gpu) -> F64:
    """Return the time below which no interval reaches in ns, float64[n]; 0 except for GEMMs.

    FLOPs of attention count whole tiles of a mask, and kernels skip a part of them. A prediction
    below that time is of a kernel that was measured below it.
    """
    least_ns = _LEAST_OF_PEAK * 1e9 * kernels.flops / kernels.rates(target).peak
    gemm = kernels.matmul & ~kernels.is_fused_attention & (least_ns < predicted_ns)
    return np.where(gemm, least_ns, 0.0)


_MEASURED_BY = {
    "composed": "of DeepBench, on a V100 and a T4",
    "looked_up": "of captured steps, looked up in rows of the same versions",
    "looked_up_short_or_data_dependent": "of captured steps, up to 3 us or dependent on data, "
    "looked up in rows of the same versions",
    "looked_up_other_versions": "measured in two benchmark sets on the same GPU",
}


def _interval_text(  # noqa: PLR0917
    row: int,
    ends: tuple[F64, F64],
    errors: "ErrorKinds",
    rule: Rule,
    gpu: Gpu,
    c: Coefficients,
    uncertainty: Uncertainty | None,
) -> str:
    """Return the interval of the kernel at `row` with its origin; "" if it has none."""
    kind, size, other = (KINDS[int(kinds[row])] for kinds, _ in errors.each)
    if kind == size == other == "kept":
        return ""
    ends_ns = f"{ends[0][row]:,.0f} to {ends[1][row]:,.0f} ns: "
    if kind == size == "kept":
        return (
            f"{ends_ns}{errors.part[row]:.2f} of the errors of {other} from one GPU to another of "
            "its die: the error is at most the change"
        )
    others = [k for k in (size, other) if k != "kept"]
    more = f", and those of {' and '.join(others)}" if others else ""
    if kind == "kept":
        kind, more = size, ""
    error, factor = c.errors[kind], widening(gpu, c, kind)
    if rule in BY_DATABASE:
        own_width = HALF_WIDTH * float(uncertainty.spread[row]) if uncertainty is not None else 0.0
        return (
            f"{ends_ns}x e^+-({error.high:.4f}^2 + {own_width:.4f}^2)^0.5, of {error.count:,} "
            f"calls {_MEASURED_BY.get(kind, 'of ' + kind)}, and of this one{more}"
        )
    return (
        f"{ends_ns}x e^({factor:.4f} x {error.low:+.4f}) to x e^({factor:.4f} x "
        f"{error.high:+.4f}), the errors of {kind} over {error.count:,} predictions for GPUs whose "
        f"die family was left out of the fit{more}"
    )


class ErrorKinds(NamedTuple):
    """The kinds of errors of each prediction; independent, so their squares add up.

    Attributes:
        gpu: of a prediction for another GPU or of a look-up, as positions in `KINDS`, uint8[n].
        size: of a prediction for another size, uint8[n].
        overrides: of a prediction for the same GPU with overridden figures, uint8[n].
        part: share of the overrides' errors that counts, float64[n].
    """

    gpu: U8
    size: U8
    overrides: U8
    part: F64

    @classmethod
    def of(cls, gpu: U8, size: U8 | None = None) -> Self:
        """Return the kinds without overrides; `size` None: all at the measured size."""
        none = np.zeros_like(gpu)
        return cls(gpu, none if size is None else size, none, np.ones(len(gpu)))

    def with_overrides(
        self,
        kernels: KernelFeatures,
        predicted_ns: F64,
        overrides: OverrideEffect,
        target: Gpu,
        c: Coefficients,
    ) -> Self:
        """Return the kinds of times that are known without overrides, after overrides.

        The model's ratio has its errors between GPUs of one die, but at most the change itself.
        """
        if not overrides.known.any():
            return self
        by_model = PredictedDurations(predicted_ns, overrides.rules)
        kinds = kinds_of(kernels, by_model, target.as_described, target)
        matters = overrides.known & (overrides.factor != 1)
        # A factor of exactly 1 means that no overridden figure
        # acts on the kernel, so its time stays certain.
        kinds = np.where(matters, kinds, np.uint8(KINDS.index("kept"))).astype(np.uint8)
        half_width = _widened("high", target, c)[kinds]
        change = np.abs(np.log(overrides.factor))
        part = np.divide(change, half_width, out=np.zeros(len(half_width)), where=half_width > 0)
        return self._replace(overrides=kinds, part=np.minimum(part, 1.0))

    @property
    def each(self) -> tuple[tuple[U8, F64 | float], ...]:
        """The three kinds, each with the share of its errors that counts."""
        return (self.gpu, 1.0), (self.size, 1.0), (self.overrides, self.part)


def node_intervals(
    predicted_ns: F64,
    errors: ErrorKinds,
    target: Gpu,
    c: Coefficients,
    uncertainty: Uncertainty | None = None,
) -> tuple[F64, F64]:
    """Return the low and the high end of each node's time in ns."""
    low, high = half_widths(errors, target, c, uncertainty)
    return predicted_ns * np.exp(-low), predicted_ns * np.exp(high)


def half_widths(
    errors: ErrorKinds, target: Gpu, c: Coefficients, uncertainty: Uncertainty | None = None
) -> tuple[F64, F64]:
    """Return the distance in ln from each prediction down and up to the ends of its interval."""
    ends = (_widened(end, target, c) for end in ("low", "high"))
    parts = [(kinds, part) for kinds, part in errors.each if kinds.any()] or [errors.each[0]]
    low, high = (np.sqrt(sum((part * e[kinds]) ** 2 for kinds, part in parts)) for e in ends)
    if uncertainty is None or not uncertainty.spread.any():
        return low, high
    own_width = HALF_WIDTH * uncertainty.spread
    return np.hypot(low, own_width), np.hypot(high, own_width)


def compute_interval(
    predicted_ns: F64, errors: ErrorKinds, call: I64, target: Gpu, c: Coefficients, *,
    uncertainty: Uncertainty | None = None,
) -> Interval:  # fmt: skip
    """Return the interval of the sum of all nodes' times.

    Its standard deviation, in ln, is sqrt(shared^2 + independent^2) over the sum. The shared parts
    add up within a class; shared is the root of the classes' summed squares, independent that of
    the distinct calls'. Errors of another GPU, another size and overrides are independent of each
    other.
    """
    total = float(predicted_ns.sum())
    if not total:
        return Interval(0, 0)
    lookup = uncertainty.spread if uncertainty is not None and uncertainty.spread.any() else 0.0
    independent, shared = _widened("independent", target, c), _shared(target, c)
    variance = 0.0
    for (kinds, part), more in zip(errors.each, (lookup, 0.0, 0.0), strict=True):
        if not (kinds.any() or np.any(more)):  # all are "kept"
            continue
        # A call that repeats errs by the same factor each time, so its times add up first.
        _, distinct = deduplicate([call, kinds])
        of_each = (
            np.hypot(part * independent[kinds], more) if np.any(more) else part * independent[kinds]
        )
        each = np.bincount(distinct, weights=of_each * predicted_ns)
        in_class = np.bincount(_CLASS[kinds], weights=part * shared[kinds] * predicted_ns)
        variance += float((in_class**2).sum()) + float((each**2).sum())
    factor = float(np.exp(HALF_WIDTH * np.sqrt(variance) / total))
    return Interval(round(total / factor), round(total * factor))


def _shared(target: Gpu, c: Coefficients) -> F64:
    """Return the shared part of the errors of each of `KINDS`.

    The errors of a left-out die family also contain what the fit knows about a GPU of a family that
    it has seen. Where whole steps were measured, the part that a class of kernels shares is at most
    that of the steps. With overridden figures outside the range of the fit it is another GPU.
    """
    shared = _widened("shared", target, c)
    of_class = c.shared_in_steps.get(target.board)
    if of_class is None or target.by_datasheet or distance_from_fitted(target, c):
        return shared
    for kind, name in _IN_STEPS.items():
        shared[_AT[kind]] = min(shared[_AT[kind]], of_class[name])
    return shared


def _widened(part: str, target: Gpu, c: Coefficients) -> F64:
    """Return a field of `Error` for each of `KINDS`."""
    return np.array(
        [
            0.0 if kind == "kept" else getattr(c.errors[kind], part) * widening(target, c, kind)
            for kind in KINDS
        ]
    )
