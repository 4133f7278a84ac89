"""Errors of predictions: the distribution of a kind, and the factor for families to come."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.annotate.models.coefficients import Error
from onerank.annotate.models.error_kinds import LONG_NS, SHORT_NS
from onerank.ir.arrays import F64, Mask
from tools.fit.evaluate_fit import (
    Case,
)
from tools.fit.measured_kernels import (
    family,
)

_PARTED = (
    *("gemm", "gemm_same_die", "gemm_uncalibrated", "gemm_unmeasured", "gemm_8bit_unmeasured"),
    *("product", "memory", "memory_other_die", "memory_same_die", "memory_unmeasured"),
    *("memory_library_unmeasured", "decode_unmeasured"),
)
_WITH_LONG = ("gemm_same_die", "memory_unmeasured")


def errors_of(cases: Iterable[Case], few: float = 1.0) -> Error:
    """Return the error distribution of the cases of one kind, for GPUs near those of the fit.

    Args:
        cases: predictions for families, dtypes or kernels that were left out.
        few: the kind's factor of `few_families`.
    """
    # An interval is widened by this factor when it is applied, so the stored errors are without it.
    listed = list(cases)
    groups = _by_group(listed)
    kind = listed[0].kind if listed else ""
    errors = [np.concatenate(group) for group in groups.values()]
    bound = few * _bound(errors, _HELD.get(kind, _FOUR_OF_FIVE))
    # Mean squares, not deviations from their mean: the mean of the next GPU's error is not known.
    # Families count equally, and cases of a family by their number of errors.
    sharing = _by_group(listed, _of_rows)
    squares = np.mean([_mean_squares(errors) for errors in sharing.values()], axis=0)
    shared, independent = few * np.sqrt(squares[0]), np.sqrt(squares[1])
    count = sum(len(error) for errors in groups.values() for error in errors)
    figures = (round(float(x), 4) for x in (-bound, bound, shared, independent))
    return Error(*figures, count=count)


def _errors_of_case(case: Case) -> list[F64]:
    """Return the errors of a case without their widening, as one array."""
    return [case.error / case.widening]


def _of_rows(case: Case) -> list[F64]:
    """Return the errors of a case without their widening, of the calls that share an error.

    The GEMMs of a step have as many rows as the step has tokens, so their errors are those of one
    regime: all stream weights, or the clock limits all of them. They do not average as those of
    GEMMs with any number of rows do. Other kinds share the error of the case.
    """
    (errors,) = _errors_of_case(case)
    if not case.kind.startswith("gemm"):
        return [errors]
    _, at = np.unique(case.rows, return_inverse=True)
    return [errors[at == group] for group in range(at.max() + 1)]


def _by_group(
    cases: Iterable[Case], values: Callable[[Case], list[npt.NDArray[Any]]] = _errors_of_case
) -> dict[str, list[npt.NDArray[Any]]]:
    """Return die family -> values of its cases; GPU -> values if one family has all."""
    listed = list(cases)
    families = {family(case.target) for case in listed}
    groups: dict[str, list[npt.NDArray[Any]]] = {}
    for case in listed:
        name = family(case.target) if len(families) > 1 else case.target.name
        groups.setdefault(name, []).extend(values(case))
    return groups


def _mean_squares(errors: Sequence[F64]) -> tuple[float, float]:
    """Return the mean square of the errors that groups share, and that of the deviations from them.

    The mean of few errors varies by chance, which is no shared error: a group's part of it, the
    variance over the number of errors, is subtracted. Groups of one error are left out if others
    exist, since they do not show the two parts.
    """
    several = [error for error in errors if len(error) > 1] or errors
    lengths = np.array([len(error) for error in several])
    means = np.array([np.mean(error) for error in several])
    variances = np.array([np.var(error) for error in several])
    by_chance = variances / np.maximum(lengths - 1, 1)
    shared = max(0.0, float(np.average(means**2 - by_chance, weights=lengths)))
    return shared, float(np.average(variances, weights=lengths))


_FOUR_OF_FIVE = 0.8
# An unknown layout is one of two, and the share of strided kernels is that of the captured steps:
# the bound holds both layouts.
_HELD = {"memory_unknown_layout": 0.95}


def _bound(groups: Sequence[F64], held: float = _FOUR_OF_FIVE) -> float:
    """Return the bound of a share of the absolute values, in which every group has the same weight.

    It is symmetric: the error of a new GPU may have either sign, as both directions of a pair have.
    """
    absolute = [np.abs(group) for group in groups]
    values = np.concatenate(absolute)
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in absolute])
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order[np.searchsorted(share, held)]])


# Least share of the errors on a GPU of a left-out family that a bound holds. A goal, not a
# measurement: an interval stated as 80% should hold two thirds of the times of any GPU.
_OF_EVERY_GPU = 2 / 3

# Least number of a GPU's cases in a group: the quantile of fewer is that of a few shapes.
_LEAST_CASES = 100


def few_families(cases: Iterable[Case]) -> dict[str, float]:
    """Return kind -> the factor with which its bound holds for a further family.

    A bound of few families is too narrow for the next one. Each family in turn is left out of the
    bound of its kind, too. Times the factor, which is at least 1, the bounds of the others contain
    80% of its errors in the mean over kinds and families. On each GPU they contain two thirds of
    the errors of each kind, and over the kinds of all lengths two thirds of those of kernels that
    took more than 10 us, and of the others.
    """
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        by_kind.setdefault(case.kind, []).append(case)
    every: list[F64] = []
    # Group of cases of a GPU -> kind -> errors over its bound. `predicted` groups them by kind,
    # which depends on the predicted length, `measured` by whether they took more than 10 us.
    predicted: dict[tuple[str, str, bool], dict[str, list[F64]]] = {}
    measured: dict[tuple[str, str, bool], dict[str, list[F64]]] = {}
    for kind, of_kind in by_kind.items():
        groups = {name: np.concatenate(each) for name, each in _by_group(of_kind).items()}
        if len(groups) == 1:
            continue
        bounds = {
            name: _bound([other for o, other in groups.items() if o != name]) for name in groups
        }
        every += [np.abs(group) / bounds[name] for name, group in groups.items()]
        for case in of_kind:
            bound = bounds.get(family(case.target)) or bounds[case.target.name]
            ratio = np.abs(case.error) / case.widening / bound
            gpu = case.target.name
            predicted.setdefault((kind, gpu, True), {}).setdefault(kind, []).append(ratio)
            for long in (True, False):
                group = measured.setdefault((_any_length(kind), gpu, long), {})
                group.setdefault(kind, []).append(ratio[(case.measured_ns > SHORT_NS) == long])
    # The mean of the shares grows with the factor, so the factor is a quantile in which every
    # kind and family has the same weight.
    mean = max(1.0, _bound(every)) if every else 1.0
    factors = dict.fromkeys(by_kind, mean)
    for groups in (predicted, measured):
        least = dict(factors)
        for (name, _, long), group in groups.items():
            ratios = {kind: np.concatenate(group[kind]) / factors[kind] for kind in group}
            if sum(map(len, ratios.values())) < _LEAST_CASES:
                continue
            for kind, factor in _growth(ratios, _kind_of_length(name, long=long)).items():
                least[kind] = max(least[kind], factor * factors[kind])
        factors = least
    return factors


def _growth(ratios: dict[str, F64], kind: str) -> dict[str, float]:
    """Return kind -> the factor with which the bounds of a group hold enough of its errors.

    Args:
        ratios: kind -> errors of the group's predictions over their bound.
        kind: kind of the group's measured length. It grows alone if that suffices; else the errors
            are of calls whose predicted length is another, and all kinds grow.
    """
    count = math.ceil(_OF_EVERY_GPU * sum(map(len, ratios.values())))
    own = np.sort(ratios.get(kind, np.empty(0)))
    lacking = count - sum(int((each <= 1).sum()) for k, each in ratios.items() if k != kind)
    if lacking <= len(own):
        return {kind: float(own[lacking - 1])} if lacking > 0 else {}
    return dict.fromkeys(ratios, float(np.sort(np.concatenate([*ratios.values()]))[count - 1]))


def _kind_of_length(kind: str, *, long: bool) -> str:
    """Return a kind with the length of times over 10 us, or of shorter ones."""
    return f"{kind}_short" if kind in _PARTED and not long else kind


def _any_length(kind: str) -> str:
    """Return a kind without its length."""
    return kind.removesuffix("_short").removesuffix("_long")


def _by_length(kind: str, times_ns: F64) -> dict[str, Mask]:
    """Return kind with its length -> whether each time is of this length; all if it has none."""
    if kind not in _PARTED:
        return {kind: np.ones(len(times_ns), dtype=bool)}
    short = times_ns < SHORT_NS
    long = times_ns >= (LONG_NS if kind in _WITH_LONG else np.inf)
    return {f"{kind}_short": short, kind: ~short & ~long, f"{kind}_long": long}


def parted(case: Case) -> Iterator[Case]:
    """Yield a case as several if its kind has errors by the length of a prediction."""
    for kind, mask in _by_length(case.kind, case.predicted_ns).items():
        if not mask.any():
            continue
        yield replace(
            case,
            kind=kind,
            measured_ns=case.measured_ns[mask],
            predicted_ns=case.predicted_ns[mask],
            rows=case.rows[mask],
        )
