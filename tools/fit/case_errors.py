"""Errors of predictions: the distribution of a kind, and the factor for families to come."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.models.coefficients import LENGTHS_NS, Coefficients, Error
from onerank.annotate.models.error_kinds import LONG_NS, SHORT_NS
from onerank.annotate.models.intervals import widening
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
    kind = listed[0].kind if listed else ""
    plain = Error(0.0, 1.0, 0.0, 0.0, 0, lengths=_lengths_of(listed))
    groups = _by_group(listed, lambda case: [_over(case, plain)])
    errors = [np.concatenate(group) for group in groups.values()]
    bound = few * _bound(errors, _HELD.get(kind, _FOUR_OF_FIVE))
    # Mean squares, not deviations from their mean: the mean of the next GPU's error is not known.
    # Families count equally, and cases of a family by their number of errors.
    shared, _ = _squares_of(listed, _errors_of_case)
    _, independent = _squares_of(listed, lambda case: _over(case, plain))
    count = sum(len(error) for errors in groups.values() for error in errors)
    figures = (-bound, bound, few * math.sqrt(shared), math.sqrt(independent))
    return Error(*(round(float(x), 4) for x in figures), count=count, lengths=plain.lengths)


def _errors_of_case(case: Case) -> F64:
    """Return the errors of a case without their widening."""
    return case.error / case.widening


def _over(case: Case, error: Error) -> F64:
    """Return the errors of a case over the upper bounds of their predictions."""
    bounds = error.high * error.of_length(case.predicted_ns)
    return _errors_of_case(case) / np.maximum(bounds, 1e-6)


# Least number of cases whose errors at a length count as much as those of all lengths.
_EQUAL_CASES = 200


def _lengths_of(cases: Sequence[Case]) -> tuple[float, ...]:
    """Return the factors of `Error.lengths`: bounds of the cases near each length over that of all.

    Families count equally, each by its errors over its own bound: they measured different lengths.
    A case between two lengths counts for both by its distance. The fewer cases a length has, the
    closer its factor is to 1. Empty: too few cases.
    """
    groups = _by_group(cases, lambda case: [np.abs(_errors_of_case(case))]).values()
    times = _by_group(cases, lambda case: [np.log(case.predicted_ns)]).values()
    errors, at = ([np.concatenate(group) for group in each] for each in (groups, times))
    if sum(map(len, errors)) < _LEAST_CASES:
        return ()
    errors = [each / max(_bound([each]), 1e-6) for each in errors]
    knots = np.log(LENGTHS_NS)
    at = [np.clip((each - knots[0]) / (knots[1] - knots[0]), 0, len(knots) - 1) for each in at]
    factors: list[float] = []
    for position, length_ns in enumerate(LENGTHS_NS):
        near = [np.maximum(0.0, 1 - np.abs(each - position)) for each in at]
        count = sum(float(each.sum()) for each in near)
        bound = _bound(errors, weights=near) if count >= 1 else 1.0
        factor = max(bound, 1e-6) ** (count / (count + _EQUAL_CASES))
        # Short kernels of one GPU take nearly one time, so the errors there are those of a floor.
        factors.append(max(factor, 1.0) if length_ns <= _FLOOR_NS else factor)
    return tuple(round(factor, 3) for factor in factors)


_FLOOR_NS = 25_000


# Weight of the errors on a die against those on all dies, of the logarithms. The interval score is
# flat between 0.7 and 1 (2026-11-28-interval-widths).
_OWN_DIE = 0.85


def errors_by_kind(
    cases: Sequence[Case], few: Mapping[str, float], deployed: Coefficients
) -> dict[str, Error]:
    """Return `errors_of` each kind, with the factors of each measured die.

    Kernels that took up to 10 us have the largest errors of those predicted near it, so the bound
    of all at that length holds few of them. Its factor grows until the bounds hold the share
    `_OF_EVERY_GPU` of them on every board.

    Args:
        cases: of any kinds.
        few: kind -> its factor of `few_families`.
        deployed: coefficients that have seen all dies: their distance widens no interval on these.
    """
    by_kind: dict[str, list[Case]] = {}
    for case in cases:
        seen = replace(case, widening=widening(case.target, deployed, case.kind))
        by_kind.setdefault(case.kind, []).append(seen)
    without = {kind: [c for c in cases if c.kind == kind] for kind in by_kind}
    errors = {
        kind: _with_dies(errors_of(without[kind], few[kind]), seen, few[kind])
        for kind, seen in by_kind.items()
    }
    for kind, error in errors.items():
        if kind == _any_length(kind) and error.lengths:
            short = [
                _up_to_10_us(case)
                for length in ("", "_short")
                for case in by_kind.get(f"{kind}{length}", ())
            ]
            errors[kind] = _with_short(short, kind, errors)
    return errors


def _with_dies(error: Error, cases: Sequence[Case], few: float) -> Error:
    """Return the error of one kind with the factors of each die.

    The boards of a die count equally, and on each the bound holds the share `_OF_EVERY_GPU`. A
    measured die does not need the factor for a further one.
    """
    kind = cases[0].kind
    boards: dict[str, dict[str, list[F64]]] = {}
    for case in cases:
        of_die = boards.setdefault(family(case.target), {})
        of_die.setdefault(case.target.name, []).append(np.abs(_over(case, error)))
    if len(boards) == 1:
        return error
    factors: dict[str, float] = {}
    for die, each in boards.items():
        groups = [np.concatenate(parts) for parts in each.values()]
        count = sum(map(len, groups))
        if count < _LEAST_CASES:
            continue
        share = _OWN_DIE * count / (count + _EQUAL_CASES)
        bound = _bound(groups, _HELD.get(kind, _FOUR_OF_FIVE))
        factor = bound**share * few ** (share - 1)
        enough = [group for group in groups if len(group) >= _LEAST_CASES]
        least = max((float(np.quantile(g, _OF_EVERY_GPU)) for g in enough), default=0.0)
        factors[die] = round(max(factor, least), 3)
    return msgspec.structs.replace(error, dies=factors)


_STEP = 1.05  # of the growth of short predictions' errors
_MOST_STEPS = 20


def _with_short(short: Sequence[Case], kind: str, errors: Mapping[str, Error]) -> Error:
    """Return the error of a kind with larger factors of lengths up to 10 us, if these need them.

    Args:
        short: cases of the kind, of any length, that took up to 10 us.
        kind: without a length.
        errors: kind -> error.
    """
    boards: dict[str, list[Case]] = {}
    for case in short:
        boards.setdefault(case.target.name, []).append(case)
    groups = [each for each in boards.values() if sum(len(c.error) for c in each) >= _LEAST_CASES]
    error = errors[kind]

    def held(case: Case) -> Mask:
        own = error if case.kind == kind else errors[case.kind]
        inside: Mask = np.abs(_over(case, own)) <= own.dies.get(family(case.target), 1.0)
        return inside

    for _ in range(_MOST_STEPS):
        if all(np.concatenate([*map(held, group)]).mean() >= _OF_EVERY_GPU for group in groups):
            break
        lengths = (
            round(factor * (_STEP if length_ns <= SHORT_NS else 1), 3)
            for factor, length_ns in zip(error.lengths, LENGTHS_NS, strict=True)
        )
        error = msgspec.structs.replace(error, lengths=tuple(lengths))
    return error


def _up_to_10_us(case: Case) -> Case:
    mask = case.measured_ns <= SHORT_NS
    chosen = {name: getattr(case, name)[mask] for name in ("measured_ns", "predicted_ns", "rows")}
    return replace(case, **chosen)


def _squares_of(cases: Sequence[Case], of_case: Callable[[Case], F64]) -> tuple[float, float]:
    """Return the mean squares of the shared and of the independent part over the families."""
    sharing = _by_group(cases, lambda case: _of_rows(case, of_case(case)))
    shared, independent = np.mean([_mean_squares(errors) for errors in sharing.values()], axis=0)
    return float(shared), float(independent)


def _of_rows(case: Case, errors: F64) -> list[F64]:
    """Return the errors of a case, grouped by the calls that share an error.

    The GEMMs of a step have as many rows as the step has tokens, so their errors are those of one
    regime: all stream weights, or the clock limits all of them. They do not average as those of
    GEMMs with any number of rows do. Other kinds share the error of the case.
    """
    if not case.kind.startswith("gemm"):
        return [errors]
    _, at = np.unique(case.rows, return_inverse=True)
    return [errors[at == group] for group in range(at.max() + 1)]


def _by_group(
    cases: Iterable[Case], values: Callable[[Case], list[npt.NDArray[Any]]]
) -> dict[str, list[npt.NDArray[Any]]]:
    """Return die family -> values of its cases; GPU -> values if one family has all."""
    listed = list(cases)
    families = {family(case.target) for case in listed}
    groups: dict[str, list[npt.NDArray[Any]]] = {}
    for case in listed:
        name = family(case.target) if len(families) > 1 else case.target.name
        groups.setdefault(name, []).extend(values(case))
    return groups


def _groups_of(case: Case) -> tuple[str, str]:
    """Return the names that a case's group can have in `_by_group`."""
    return family(case.target), case.target.name


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


def _bound(
    groups: Sequence[F64], held: float = _FOUR_OF_FIVE, weights: Sequence[F64] | None = None
) -> float:
    """Return the bound of a share of the absolute values, in which every group has the same weight.

    It is symmetric: the error of a new GPU may have either sign, as both directions of a pair have.

    Args:
        groups: errors.
        held: share that the bound holds.
        weights: of each error in its group; None: equal ones.
    """
    values = np.concatenate([np.abs(group) for group in groups])
    parts = [np.ones(len(each)) for each in groups] if weights is None else weights
    each = np.concatenate([part / len(part) for part in parts])
    order = np.argsort(values)
    share = np.cumsum(each[order]) / each.sum()
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
        names = [*_by_group(of_kind, lambda case: [case.error])]
        if len(names) == 1:
            continue
        bounds = {
            name: errors_of(case for case in of_kind if name not in _groups_of(case))
            for name in names
        }
        by_family: dict[str, list[F64]] = {}
        for case in of_kind:
            name = next(name for name in _groups_of(case) if name in bounds)
            ratio = np.abs(_over(case, bounds[name]))
            by_family.setdefault(name, []).append(ratio)
            gpu = case.target.name
            predicted.setdefault((kind, gpu, True), {}).setdefault(kind, []).append(ratio)
            for long in (True, False):
                group = measured.setdefault((_any_length(kind), gpu, long), {})
                group.setdefault(kind, []).append(ratio[(case.measured_ns > SHORT_NS) == long])
        every += [np.concatenate(each) for each in by_family.values()]
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
