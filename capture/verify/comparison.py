"""Compare tensors that should be equal, and summarise the differences."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

ABSOLUTE = 1e-5
RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
RELATIVE_OTHERS = 1e-5
"""Tolerances of repeated steps: `torch.allclose` with atol 1e-5. The rtol of fp32 and wider types
is its default; the rtol of bf16 and fp16 is that of `torch.testing.assert_close`."""

# Tolerance of slices, whose sums run in another order. |actual - expected| may be 1e-5 x max(1,
# largest element), or twice the rounding noise of the weights if that is larger. It must also be at
# most a thousandth of the tensor's largest element, plus a millionth of the model's largest
# gradient: some gradients are zero except for rounding (a key's bias).
SLICES_RELATIVE = 1e-3
SLICES_FLOOR = 1e-6
ROUNDINGS = 2


class Comparison(msgspec.Struct, frozen=True):
    """Differences of the tensors of one kind from their expected values.

    Attributes:
        check: "profiled" (a step with a profiler against the same step without one), "plain" (the
            same step in two runs, neither with a profiler) or "slices" (the sliced model against
            the whole one).
        what: "loss", "outputs", "logits", "gradients" or "weights".
        module: class and name of the module for gradients of slices, otherwise "".
        dtype: dtype of the tensors.
        tensors: number of compared tensors.
        equal: number of tensors that are equal bit by bit.
        max_abs: largest |actual - expected|.
        max_rel: largest |actual - expected| over the largest |expected| of its tensor.
        breaches: number of tensors that differ by more than the tolerance.
        worst: the breaching tensor with the largest `max_rel`; without a breach, of all tensors.
        tolerance: the tolerance in words.
    """

    check: str
    what: str
    module: str
    dtype: str
    tensors: int
    equal: int
    max_abs: float
    max_rel: float
    breaches: int
    worst: str
    tolerance: str


@dataclass(frozen=True)
class TensorDifference:
    """One tensor's difference from its expected value.

    Attributes:
        what: as in `Comparison`.
        module: as in `Comparison`.
        name: label of the tensor in the report.
        dtype: dtype of the actual tensor.
        equal: whether the tensors are equal bit by bit.
        max_abs: as in `Comparison`.
        max_rel: as in `Comparison`.
        breach: whether the difference exceeds the tolerance.
    """

    what: str
    module: str
    name: str
    dtype: str
    equal: bool
    max_abs: float
    max_rel: float
    breach: bool


def compare_repeated(
    what: str, name: str, actual: Tensor, expected: Tensor, *, equal: bool
) -> TensorDifference:
    """Compare a tensor of a repeated step by `torch.allclose`, with NaN equal to NaN.

    The tensors may be samples; `equal` states whether the whole tensors are equal bit by bit.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return _mismatched(what, "", name, actual)
    relative = RELATIVE.get(actual.dtype, RELATIVE_OTHERS)
    breach = not equal and not torch.allclose(
        actual.double(), expected.double(), rtol=relative, atol=ABSOLUTE, equal_nan=True
    )
    return _difference(what, "", name, actual, expected, equal=equal, breach=breach)


def compare_reordered(
    what: str,
    module: str,
    name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    floor: float = 0.0,
    rounding: float = 0.0,
) -> TensorDifference:
    """Compare an fp32 tensor with one whose sums ran in another order.

    Args:
        what: as in `Comparison`.
        module: as in `Comparison`.
        name: label of the tensor in the report.
        actual: the computed tensor.
        expected: the reference.
        floor: absolute difference that is always allowed within the relative limit.
        rounding: rounding noise of the tensor (`slice_check.rounding_noise`), 0 if not measured.
    """
    if actual.shape != expected.shape:
        return _mismatched(what, module, name, actual)
    error, largest = _largest(actual.double() - expected.double()), _largest(expected)
    noise = max(ABSOLUTE * max(1.0, largest), ROUNDINGS * rounding)
    # The smaller of both: noise alone would allow a wrong small tensor, the relative limit alone a
    # wrong large one.
    allowed = min(noise, SLICES_RELATIVE * largest + floor)
    # Not `error > allowed`: NaN must be a breach.
    breach = not error <= allowed
    equal = torch.equal(actual, expected)
    return _difference(what, module, name, actual, expected, equal=equal, breach=breach)


def summarize(
    check: str, tolerance: str, differences: Iterable[TensorDifference]
) -> list[Comparison]:
    """Return one row for each kind of tensor, module and dtype."""
    rows: dict[tuple[str, str, str], list[TensorDifference]] = {}
    for difference in differences:
        rows.setdefault((difference.what, difference.module, difference.dtype), []).append(
            difference
        )
    return [
        Comparison(
            check=check,
            what=what,
            module=module,
            dtype=dtype,
            tensors=len(members),
            equal=sum(member.equal for member in members),
            max_abs=max(_order(member.max_abs) for member in members),
            max_rel=max(_order(member.max_rel) for member in members),
            breaches=sum(member.breach for member in members),
            worst=max(members, key=lambda member: (member.breach, _order(member.max_rel))).name,
            tolerance=tolerance,
        )
        for (what, module, dtype), members in rows.items()
    ]


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _difference(
    what: str,
    module: str,
    name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    equal: bool,
    breach: bool,
) -> TensorDifference:
    errors = (actual.double() - expected.double()).abs()
    both_nan = actual.isnan() & expected.isnan()
    if actual.numel() and bool(both_nan.any()):
        errors = errors.masked_fill(both_nan, 0.0)
    error = 0.0 if equal else _largest(errors)
    # One NaN would make every relative error NaN.
    largest = _largest(expected.double().nan_to_num())
    relative = error / largest if largest else (math.inf if error else 0.0)
    dtype = str(actual.dtype).removeprefix("torch.")
    return TensorDifference(what, module, name, dtype, equal, error, relative, breach)


def _mismatched(what: str, module: str, name: str, actual: Tensor) -> TensorDifference:
    dtype = str(actual.dtype).removeprefix("torch.")
    return TensorDifference(what, module, name, dtype, False, math.inf, math.inf, breach=True)
