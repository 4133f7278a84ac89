"""Compare two tensors that should be equal."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

ABSOLUTE = 1e-5
RELATIVE = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
RELATIVE_OTHERS = 1e-5
"""`torch.allclose(atol=1e-5)` with its own rtol in fp32 and wider types, and those of
`torch.testing.assert_close` in bf16 and fp16."""

SLICES_RELATIVE = 1e-3
SLICES_FLOOR = 1e-6
ROUNDINGS = 2
"""Sums in another order: |found - expected| may be 1e-5 (of the tensor's largest element, where
that is above 1), or twice what another rounding of the model's weights changes, and must be below a
thousandth of the tensor's largest element, beyond a millionth of the largest gradient of the model:
some gradients are zero but for rounding (a key's bias)."""


class Comparison(msgspec.Struct, frozen=True):
    """Tensors of one sort, held against what they should be.

    Attributes:
        check: "profiled" (a step under the instruments against the same step without), "plain"
            (the same script twice, no instrument in either) or "slices" (the sliced model against
            the unsliced one).
        what: "loss", "outputs", "logits", "gradients" or "weights".
        module: class and name of the module, for gradients and weights; "" else.
        dtype: of the tensors.
        tensors: how many were compared.
        equal: of these, bit by bit the same.
        max_abs: largest |found - expected|.
        max_rel: the same, over the largest |expected| of its tensor.
        breaches: tensors that differ by more than the tolerance.
        worst: the tensor with the largest `max_rel`.
        tolerance: what was allowed, in words.
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
class Difference:
    """One tensor's difference from what it should be.

    Attributes:
        what: as in `Comparison`.
        module: as in `Comparison`.
        name: the tensor, for people.
        dtype: of what was found.
        equal: whether bit by bit the same.
        max_abs: as in `Comparison`.
        max_rel: as in `Comparison`.
        breach: whether it is too much.
    """

    what: str
    module: str
    name: str
    dtype: str
    equal: bool
    max_abs: float
    max_rel: float
    breach: bool


def repeated(what: str, name: str, found: Tensor, expected: Tensor, *, equal: bool) -> Difference:
    """Compare a tensor of a repeated computation: `torch.allclose`, NaN equal to NaN.

    `equal` says whether all its bits are the same, of which these may be samples.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return _unlike(what, "", name, found)
    relative = RELATIVE.get(found.dtype, RELATIVE_OTHERS)
    breach = not equal and not torch.allclose(
        found.double(), expected.double(), rtol=relative, atol=ABSOLUTE, equal_nan=True
    )
    return _difference(what, "", name, found, expected, equal=equal, breach=breach)


def reordered(
    what: str,
    module: str,
    name: str,
    found: Tensor,
    expected: Tensor,
    *,
    floor: float = 0.0,
    rounding: float = 0.0,
) -> Difference:
    """Compare an fp32 tensor with one whose sums ran in another order.

    `floor` is the largest absolute difference that means nothing; `rounding` is what rounding the
    weights changes in the tensor, 0 where that was not tried.
    """
    if found.shape != expected.shape:
        return _unlike(what, module, name, found)
    error, largest = _largest(found.double() - expected.double()), _largest(expected)
    near = max(ABSOLUTE * max(1.0, largest), ROUNDINGS * rounding)
    allowed = min(near, SLICES_RELATIVE * largest + floor)
    breach = not error <= allowed  # a NaN breaches
    equal = bool(torch.equal(found, expected))
    return _difference(what, module, name, found, expected, equal=equal, breach=breach)


def summed_up(check: str, tolerance: str, differences: Iterable[Difference]) -> list[Comparison]:
    """Return one row for each kind of tensor."""
    rows: dict[tuple[str, str, str], list[Difference]] = {}
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
            worst=max(members, key=lambda one: (one.breach, _order(one.max_rel))).name,
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
    found: Tensor,
    expected: Tensor,
    *,
    equal: bool,
    breach: bool,
) -> Difference:
    gap = (found.double() - expected.double()).abs()
    both = found.isnan() & expected.isnan()
    if found.numel() and bool(both.any()):
        gap = gap.masked_fill(both, 0.0)
    error = 0.0 if equal else _largest(gap)
    largest = _largest(expected.double().nan_to_num())
    relative = error / largest if largest else (math.inf if error else 0.0)
    dtype = str(found.dtype).removeprefix("torch.")
    return Difference(what, module, name, dtype, equal, error, relative, breach)


def _unlike(what: str, module: str, name: str, found: Tensor) -> Difference:
    dtype = str(found.dtype).removeprefix("torch.")
    return Difference(what, module, name, dtype, False, math.inf, math.inf, breach=True)
