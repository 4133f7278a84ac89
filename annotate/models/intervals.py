"""The interval of a prediction, for each node and for the step.

An interval contains four of five measured times on GPUs whose die family the fit had not seen. An
error has a part that all kernels on a GPU share (clock under load, libraries) and a part of each
distinct call. The shared part does not average out over a step and is taken as common to all
classes of work. The other part averages over distinct calls, not over repetitions.
"""

import math
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.error_model import (
    KINDS,
    Uncertainty,
    kinds_of,
    less_known_gpu,
    resize_kinds_of,
    widening,
)
from onerank.annotate.models.features import F64, U8, KernelFeatures, Mask
from onerank.annotate.models.provenance import BY_DATABASE, Rule
from onerank.annotate.models.terms import TermRecord
from onerank.annotate.unique_rows import combine

I64 = npt.NDArray[np.int64]

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
    """80% interval of the step's compute time, in ns."""

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
        low, high = (math.hypot(end, HALF_WIDTH * spread) for end in (low, high))
        return type(self)(round(total_ns * math.exp(-low)), round(total_ns * math.exp(high)))


def intervals(
    kernels: KernelFeatures,
    predicted: tuple[F64, U8],
    source: Gpu | None,
    target: Gpu,
    c: Coefficients,
    *,
    changed: Mask | None = None,
    resized: Mask | None = None,
    doubt: Uncertainty | None = None,
    overrides: OverrideEffect | None = None,
    record: TermRecord | None = None,
) -> tuple[tuple[F64, F64], Interval]:
    """Return ((low, high) of each node in ns, interval of the step).

    The step's interval lies within the sums of all low ends and all high ends.

    Args:
        kernels: the re-costed kernels.
        predicted: predicted durations in ns and their rules, n of each.
        source: GPU they were measured on; None: not measured.
        target: GPU they are predicted for.
        c: coefficients with errors.
        changed: whether a node is another kernel or has another dtype than measured, bool[n]; None:
            no node. Such a node is no more certain on a GPU of the source's die.
        resized: whether a node was measured at another size, bool[n]; None: no node.
        doubt: uncertainty of look-ups; None without look-ups.
        overrides: effect of overridden figures; None without overrides.
        record: takes the intervals of its kernels as facts.
    """
    predicted_ns, rules = predicted
    c = c.for_gpus(source, target)
    kinds = kinds_of(kernels, predicted, source, target, doubt)
    if changed is not None and changed.any():
        # Another kernel was not measured on any GPU, so its errors are those without a source.
        kinds = np.where(changed, kinds_of(kernels, predicted, None, target, doubt), kinds)
    sizes = np.zeros_like(kinds) if resized is None else resize_kinds_of(kernels, resized)
    errors = ErrorKinds.of(kinds, sizes)
    if overrides is not None:
        errors = errors.with_overrides(kernels, predicted_ns, overrides, target, c)
    less_known = less_known_gpu(source, target)
    ends = node_intervals(predicted_ns, errors, less_known, c, doubt)
    if record is not None:
        for row in record.rows.tolist():
            text = _interval_text(row, ends, errors, Rule(int(rules[row])), less_known, c, doubt)
            if text:
                record.facts[row].append(("80% interval", text))
    step = step_interval(predicted_ns, errors, kernels.call, less_known, c, doubt=doubt)
    # All calls together err by at most what each errs alone.
    least, most = (round(float(end.sum())) for end in ends)
    return ends, Interval(max(step.p10_ns, least), min(step.p90_ns, most))


_MEASURED_BY = {
    "composed": "of DeepBench, on a V100 and a T4",
    "looked_up": "of captured steps, looked up in rows of the same versions",
    "looked_up_loosely": "of captured steps, up to 3 us or dependent on data, looked up in rows of "
    "the same versions",
    "looked_up_otherwise": "measured in two campaigns on the same GPU",
}


def _interval_text(  # noqa: PLR0917
    row: int,
    ends: tuple[F64, F64],
    errors: "ErrorKinds",
    rule: Rule,
    gpu: Gpu,
    c: Coefficients,
    doubt: Uncertainty | None,
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
        own_width = HALF_WIDTH * float(doubt.spread[row]) if doubt is not None else 0.0
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
        kinds = kinds_of(kernels, (predicted_ns, overrides.rules), target.as_described, target)
        matters = overrides.known & (overrides.factor != 1)
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
    doubt: Uncertainty | None = None,
) -> tuple[F64, F64]:
    """Return the low and the high end of each node's time in ns."""
    low, high = half_widths(errors, target, c, doubt)
    return predicted_ns * np.exp(-low), predicted_ns * np.exp(high)


def half_widths(
    errors: ErrorKinds, target: Gpu, c: Coefficients, doubt: Uncertainty | None = None
) -> tuple[F64, F64]:
    """Return the distance in ln from each prediction down and up to the ends of its interval."""
    ends = (_widened(end, target, c) for end in ("low", "high"))
    parts = [(kinds, part) for kinds, part in errors.each if kinds.any()] or [errors.each[0]]
    low, high = (np.sqrt(sum((part * e[kinds]) ** 2 for kinds, part in parts)) for e in ends)
    if doubt is None or not doubt.spread.any():
        return low, high
    own_width = HALF_WIDTH * doubt.spread
    return np.hypot(low, own_width), np.hypot(high, own_width)


def step_interval(
    predicted_ns: F64, errors: ErrorKinds, call: I64, target: Gpu, c: Coefficients, *,
    doubt: Uncertainty | None = None,
) -> Interval:  # fmt: skip
    """Return the interval of the sum of all nodes' times.

    Its standard deviation, in ln, is sqrt(shared^2 + independent^2) over the sum: shared is the sum
    of the nodes' shared parts, independent the root of the summed squares of the distinct calls'
    parts. Errors of another GPU, another size and overrides are independent of each other.
    """
    total = float(predicted_ns.sum())
    if not total:
        return Interval(0, 0)
    lookup = doubt.spread if doubt is not None and doubt.spread.any() else 0.0
    shared, independent = (_widened(part, target, c) for part in ("shared", "independent"))
    variance = 0.0
    for (kinds, part), more in zip(errors.each, (lookup, 0.0, 0.0), strict=True):
        if not (kinds.any() or np.any(more)):  # all are "kept"
            continue
        # A call that repeats errs by the same factor each time, so its times add up first.
        _, distinct = combine([call, kinds])
        of_each = (
            np.hypot(part * independent[kinds], more) if np.any(more) else part * independent[kinds]
        )
        each = np.bincount(distinct, weights=of_each * predicted_ns)
        variance += float((part * shared[kinds] * predicted_ns).sum()) ** 2 + float((each**2).sum())
    factor = float(np.exp(HALF_WIDTH * np.sqrt(variance) / total))
    return Interval(round(total / factor), round(total * factor))


def _widened(part: str, target: Gpu, c: Coefficients) -> F64:
    """Return a field of `Error` for each of `KINDS`."""
    return np.array(
        [
            0.0 if kind == "kept" else getattr(c.errors[kind], part) * widening(target, c, kind)
            for kind in KINDS
        ]
    )
