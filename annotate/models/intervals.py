"""How far off a prediction may be: an interval for each node and for the step.

The intervals are those in which four of five measured times lay on GPUs whose die family the fit
had not seen. An error has a part that all kernels on a GPU have in common (its clock under load,
its library) and a part of each distinct call. The first does not average out over a step, and is
taken as common to all sorts of work; the second averages over distinct calls, not over repetitions.
"""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.distinct import combine
from onerank.annotate.gpu import Gpu
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.kernels import (
    AS_MEASURED,
    BY_DATABASE,
    BY_TILES,
    F64,
    U8,
    Kernels,
    Mask,
    Rule,
)
from onerank.annotate.models.likeness import outside, same_die

I64 = npt.NDArray[np.int64]

KINDS = (
    "kept",
    "gemm",
    "gemm_short",
    "gemm_same_die",
    "gemm_uncalibrated",
    "gemm_uncalibrated_short",
    "gemm_8bit",
    "attention",
    "attention_same_die",
    "product",
    "retyped",
    "memory",
    "memory_alone",
    "resized_product",
    "resized_attention",
    "resized_memory",
    "looked_up",
    "looked_up_loosely",
    "looked_up_otherwise",
)
"""Sorts of prediction, each with errors of its own; "kept" has none.

Those resized are of another size on one GPU, and come on top of those of another GPU. What streams
memory and was measured nowhere ("memory_alone") is by far less sure than what one GPU measured.
"""

UNFITTED = ("retyped",)
"""Sorts of prediction of products by rules that hold no coefficient."""
BY_BANDWIDTH = ("memory", "memory_alone")
"""Sorts of prediction by bandwidth and launch floor, which know nothing of tiles."""
_OTHER_VENDORS = 1.7  # an estimate: on their GPUs none of these kernels was measured

_WITHOUT_MODEL = ("resized_memory", "looked_up", "looked_up_loosely", "looked_up_otherwise")

HALF_WIDTH = 1.2816
"""Standard deviations from the middle to the end of 80% of a normal law."""
SHORT_NS = 10_000
"""Products of less have errors of their own: the launch decides them."""
TINY_NS = 3000
"""Look-ups of kernels no longer than this are looser: the cache and the launch decide them."""


class Doubt(NamedTuple):
    """What is known of n look-ups beside their sort.

    Attributes:
        own: standard deviation in ln of each, beside that of its sort, float64[n].
        otherwise: whether the row was measured with other versions than the trace, bool[n].
        loosely: whether the time depends on more than the call tells, bool[n].
    """

    own: F64
    otherwise: Mask
    loosely: Mask

    @classmethod
    def none(cls, count: int) -> Self:
        """Return that of predictions by a model."""
        return cls(np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count, dtype=bool))

    def beside(self, other: Self) -> Self:
        """Return that of these look-ups and of others, of other nodes."""
        return type(self)(
            np.maximum(self.own, other.own),
            self.otherwise | other.otherwise,
            self.loosely | other.loosely,
        )

    def at(self, where: I64 | Mask) -> Self:
        """Return that of the nodes at `where`."""
        return type(self)(self.own[where], self.otherwise[where], self.loosely[where])


class Interval(NamedTuple):
    """Where four of five measured times of the step's compute lie, in ns."""

    low_ns: int
    high_ns: int


def intervals(
    kernels: Kernels,
    predicted: tuple[F64, U8],
    source: Gpu | None,
    target: Gpu,
    c: Coefficients,
    *,
    changed: Mask | None = None,
    resized: Mask | None = None,
    doubt: Doubt | None = None,
) -> tuple[tuple[F64, F64], Interval]:
    """Return ((low, high) of each node in ns, interval of the step).

    Args:
        kernels: what was re-costed.
        predicted: durations in ns and rules of a model, n of each.
        source: GPU they were measured on; None: nobody measured them.
        target: GPU they are predicted for.
        c: whose errors.
        changed: whether a node is another kernel, or has another type, than was measured: then it
            is no more certain on a GPU of the source's die, bool[n]; None: none is.
        resized: whether a node was measured at another size, bool[n]; None: none was.
        doubt: of look-ups; None where there are none.
    """
    moved, _ = predicted
    kinds = kinds_of(kernels, predicted, source, target, doubt)
    if changed is not None:
        kinds = np.where(changed, kinds_of(kernels, predicted, None, target, doubt), kinds)
    sizes = np.zeros_like(kinds) if resized is None else sizes_of(kernels, resized)
    sorts = Sorts(kinds, sizes)
    ends = node_intervals(moved, sorts, target, c, doubt)
    return ends, step_interval(moved, sorts, kernels.call, target, c, doubt=doubt)


class Sorts(NamedTuple):
    """The sort of each prediction: of going to another GPU, and of going to another size."""

    gpu: npt.NDArray[np.uint8]
    size: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, kinds: npt.NDArray[np.uint8]) -> Self:
        """Return the sorts of predictions at the size that was measured."""
        return cls(kinds, np.zeros_like(kinds))


def sizes_of(kernels: Kernels, resized: Mask) -> npt.NDArray[np.uint8]:
    """Return the sort of each prediction for another size, as positions in `KINDS`, uint8[n]."""
    attention = (kernels.attention[:, 0] > 0)[kernels.call]
    product = np.where(kernels.matmul_class, KINDS.index("resized_product"),
                       KINDS.index("resized_memory"))  # fmt: skip
    sort = np.where(attention, KINDS.index("resized_attention"), product)
    return np.where(resized, sort, KINDS.index("kept")).astype(np.uint8)


def kinds_of(
    kernels: Kernels,
    predicted: tuple[F64, U8],
    source: Gpu | None,
    target: Gpu,
    doubt: Doubt | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the sort of each prediction, as positions in `KINDS`, uint8[n]."""
    moved, rules = predicted
    die = source is not None and same_die(source, target)
    by_tiles = np.isin(rules, BY_TILES)
    attention = (kernels.attention[:, 0] > 0)[kernels.call]
    gemm = "gemm" if target.calibrated else "gemm_uncalibrated"
    product = np.where(moved < SHORT_NS, KINDS.index(f"{gemm}_short"), KINDS.index(gemm))
    eight_bit = (kernels.gemm[:, 4] == 1)[kernels.call]
    product = np.where(eight_bit, KINDS.index("gemm_8bit"), product)
    if die:
        product = np.where(eight_bit, product, KINDS.index("gemm_same_die"))
    soft = KINDS.index("attention_same_die" if die else "attention")
    memory = "memory_alone" if source is None else "memory"
    other = np.where(kernels.matmul_class, KINDS.index("product"), KINDS.index(memory))
    kind = np.where(by_tiles, np.where(attention, soft, product), other)
    kind = np.where(rules == Rule.RETYPED, KINDS.index("retyped"), kind)
    if doubt is not None:
        loose = doubt.loosely | (moved <= TINY_NS)
        same = np.where(loose, KINDS.index("looked_up_loosely"), KINDS.index("looked_up"))
        told = np.where(doubt.otherwise, KINDS.index("looked_up_otherwise"), same)
        kind = np.where(np.isin(rules, BY_DATABASE), told, kind)
    kept = np.isin(rules, [*AS_MEASURED, Rule.DROPPED, Rule.RESIZED])
    return np.where(kept, KINDS.index("kept"), kind).astype(np.uint8)


def widening(target: Gpu, c: Coefficients, kind: str) -> float:
    """Return the factor on the errors of a sort of prediction for a GPU unlike those fitted to.

    With a die family left out of the fit, errors grew by about a quarter for each unit that it was
    outside, see `likeness`; none was more than 1.3 outside, so beyond they grow faster. The rules
    for `UNFITTED` know no GPU better than another; what was looked up on the GPU itself, or goes
    from one size to another by its bytes, is not widened. Nor is what goes by bandwidth, on GPUs of
    the vendor of those measured: on a V100 and a T4, 2.3 and 3.3 outside, norms, softmax and
    elementwise kernels of 30 us and more are as near their roofline as on an A100.
    """
    if kind in _WITHOUT_MODEL:
        return 1.0
    if kind in BY_BANDWIDTH:
        return 1.0 if target.vendor.casefold() == "nvidia" else _OTHER_VENDORS
    distance = outside(target, c)
    return max(1.0, distance) if kind in UNFITTED else max(1 + distance / 4, distance)


def node_intervals(
    moved: F64, sorts: Sorts, target: Gpu, c: Coefficients, doubt: Doubt | None = None
) -> tuple[F64, F64]:
    """Return the low and the high end of each node's time in ns."""
    low, high = half_widths(sorts, target, c, doubt)
    return moved * np.exp(-low), moved * np.exp(high)


def half_widths(
    sorts: Sorts, target: Gpu, c: Coefficients, doubt: Doubt | None = None
) -> tuple[F64, F64]:
    """Return how far below and above each prediction its interval reaches, in ln."""
    own = 0.0 if doubt is None else HALF_WIDTH * doubt.own
    ends = (_widened(end, target, c) for end in ("low", "high"))
    low, high = (np.hypot(np.hypot(e[sorts.gpu], e[sorts.size]), own) for e in ends)
    return low, high


def step_interval(
    moved: F64, sorts: Sorts, call: npt.NDArray[np.int64], target: Gpu, c: Coefficients, *,
    doubt: Doubt | None = None,
) -> Interval:  # fmt: skip
    """Return the interval of the sum of all nodes' times.

    Its standard deviation, in ln, is the root of shared^2 + own^2 over the sum: shared is the sum
    of each node's shared part, own the root of the squares of each distinct call's. What another
    size adds is as independent of what another GPU does.
    """
    total = float(moved.sum())
    if not total:
        return Interval(0, 0)
    lookup = 0.0 if doubt is None else doubt.own
    shared, own = (_widened(part, target, c) for part in ("shared", "own"))
    squares = 0.0
    for kinds, more in ((sorts.gpu, lookup), (sorts.size, 0.0)):
        _, distinct = combine([call, kinds])
        each = np.bincount(distinct, weights=np.hypot(own[kinds], more) * moved)
        squares += float((shared[kinds] * moved).sum()) ** 2 + float((each**2).sum())
    factor = float(np.exp(HALF_WIDTH * np.sqrt(squares) / total))
    return Interval(round(total / factor), round(total * factor))


def _widened(part: str, target: Gpu, c: Coefficients) -> F64:
    """Return a field of `Error` for each of `KINDS`."""
    return np.array(
        [
            0.0 if kind == "kept" else getattr(c.errors[kind], part) * widening(target, c, kind)
            for kind in KINDS
        ]
    )
