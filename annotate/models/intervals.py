"""The interval of a prediction, for each node and for the step, and the errors that it stands for.

An interval contains four of five measured times on GPUs whose die family the fit had not seen. An
error has a part that all kernels of a class share on a GPU (libraries, clock under load) and a part
of each distinct call. The shared part does not average out over a class; that of GEMMs is measured
over those with as many rows, as a step has them. On a GPU of which whole steps were measured it is
at most that of the steps (`shared_in_steps`). Between classes it is independent: over the GPUs
left out, mean errors of GEMMs, attention and memory-bound kernels do not go together. The other
part averages over distinct calls, not over repetitions. Both grow with the distance of a GPU from
the fitted dies (`gpu_distance`).

`intervals` is the entry point: `error_kinds` names the kind of each prediction, the fit has the
errors of each kind, by the predicted length and by die, and `widening` enlarges them for a GPU far
from the fitted ones.
"""

import math
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.error_kinds import (
    KIND_AT,
    KINDS,
    Uncertainty,
    kinds_of,
    resize_kinds_of,
)
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import distance_from_fitted, has_measured_die
from onerank.annotate.models.kernel_gaps import ATTENTION_GAP, has_uncertain_gap
from onerank.annotate.models.prediction_terms import (
    BY_DATABASE,
    PredictedDurations,
    TermRecord,
)
from onerank.ir.arrays import F64, I64, U8, Mask, deduplicate

# Mean distance of the four die families, each left out: Ampere 0.98, Ada 1.30, Blackwell 0.95,
# Hopper 0. A workstation Blackwell is at 0.26.
_UNSEEN_ARCHITECTURE = 0.8

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
)

# Errors of GEMMs on vector units, which do not grow with the distance, but with how far a board
# sustains less than at its boost clock.
_ON_VECTOR_UNITS = ("product", "product_short", "product_unmeasured")

# Part of the peak that float32 GEMMs reach at the boost clock: up to 0.82 on an H100, 0.80 on a
# V100, and 0.87 on a T4, which sustains 0.51 within its 70 W (NeuSight's batched GEMMs).
_AT_BOOST = 0.85

# Errors of measured times or of bytes, which do not grow with the distance from the fitted GPUs.
_WITHOUT_MODEL = (
    "resized_memory",
    "looked_up",
    "looked_up_short_or_data_dependent",
    "looked_up_other_versions",
)


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
    changes of size by bytes, are not widened. Nor are memory-bound kernels on NVIDIA GPUs: on a
    V100 and a T4, 2.3 and 3.3 outside, norms, softmax and elementwise kernels of 30 us and more are
    as close to their roofline as on an A100. So are fp32 GEMMs to their tiles on a V100, but not on
    a T4, whose power limit holds some kernels more than others (see `_below_boost`).
    """
    if kind in _WITHOUT_MODEL:
        return 1.0
    if target.is_nvidia and kind in _ON_ANY_NVIDIA:
        return 1.0
    if target.is_nvidia and kind in _ON_VECTOR_UNITS:
        return 1 + _below_boost(target)
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


def _below_boost(target: Gpu) -> float:
    """Return how far the float32 GEMMs of a board are from those at its boost clock, in ln.

    A board that its power limit holds below the boost clock runs each kernel at a rate between the
    two: kernels that draw less power, or that ran on a cool board, are nearer to the boost clock.
    """
    rate, peak = (
        of("float32") for of in (target.tensor_flops_per_s, target.peak_tensor_flops_per_s)
    )
    return max(0.0, math.log(_AT_BOOST * peak / rate)) if rate and peak else 0.0


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
            text = _interval_text(row, ends, predicted, errors, less_known, c, uncertainty)
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
    predicted: PredictedDurations,
    errors: "ErrorKinds",
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
    error, of_die = c.errors[kind], _die_factor(gpu, c, kind)
    at_length = float(error.of_length(predicted.duration_ns[[row]])[0])
    factor = widening(gpu, c, kind) * of_die * at_length
    if int(predicted.rules[row]) in BY_DATABASE:
        own_width = HALF_WIDTH * float(uncertainty.spread[row]) if uncertainty is not None else 0.0
        return (
            f"{ends_ns}x e^+-({factor * error.high:.4f}^2 + {own_width:.4f}^2)^0.5, of "
            f"{error.count:,} calls {_MEASURED_BY.get(kind, 'of ' + kind)}, and of this one{more}"
        )
    where = "" if of_die == 1 else f", most of them {gpu.architecture} GPUs"
    return (
        f"{ends_ns}x e^({factor:.4f} x {error.low:+.4f}) to x e^({factor:.4f} x "
        f"{error.high:+.4f}), the errors of {kind} over {error.count:,} predictions for GPUs whose "
        f"die family was left out of the fit{where}{more}"
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
        half_width = _widened("high", target, c)[kinds] * length_factors(kinds, predicted_ns, c)
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
    low, high = half_widths(predicted_ns, errors, target, c, uncertainty)
    return predicted_ns * np.exp(-low), predicted_ns * np.exp(high)


def half_widths(
    predicted_ns: F64,
    errors: ErrorKinds,
    target: Gpu,
    c: Coefficients,
    uncertainty: Uncertainty | None = None,
) -> tuple[F64, F64]:
    """Return the distance in ln from each prediction down and up to the ends of its interval."""
    ends = (_widened(end, target, c) for end in ("low", "high"))
    kinds_with_error = [each for each in errors.each if each[0].any()] or [errors.each[0]]
    parts = [
        (kinds, part * length_factors(kinds, predicted_ns, c)) for kinds, part in kinds_with_error
    ]
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
        own = part * independent[kinds] * length_factors(kinds, predicted_ns, c)
        of_each = np.hypot(own, more) if np.any(more) else own
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
        shared[KIND_AT[kind]] = min(shared[KIND_AT[kind]], of_class[name])
    return shared


def _widened(part: str, target: Gpu, c: Coefficients) -> F64:
    """Return a field of `Error` for each of `KINDS`."""
    return np.array(
        [
            getattr(c.errors[kind], part) * widening(target, c, kind) * _die_factor(target, c, kind)
            if kind != "kept"
            else 0.0
            for kind in KINDS
        ]
    )


def _die_factor(target: Gpu, c: Coefficients, kind: str) -> float:
    """Return the errors of a kind on a GPU's die over those on all; 1 if none was measured."""
    of_die = c.errors[kind].dies.get(target.architecture, 1.0)
    return of_die if has_measured_die(target, c) else 1.0


def length_factors(kinds: U8, predicted_ns: F64, c: Coefficients) -> F64:
    """Return the factors on the errors of these kinds at these predicted times, float64[n]."""
    factors = np.ones(len(kinds))
    for kind in np.unique(kinds):
        if kind != KIND_AT["kept"]:
            rows = kinds == kind
            factors[rows] = c.errors[KINDS[kind]].of_length(predicted_ns[rows])
    return factors
