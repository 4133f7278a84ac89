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
    "composed",
)
"""Sorts of prediction, each with errors of its own; "kept" has none.

Those resized are of another size on one GPU, and come on top of those of another GPU. What streams
memory and was measured nowhere ("memory_alone") is by far less sure than what one GPU measured.
Convolutions and recurrent layers measured nowhere ("composed") have errors by DeepBench, of two
GPUs unlike those fitted to, see benchmarks/deepbench.py: they are not widened.
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


class Others(NamedTuple):
    """What figures that are set make of n times that are known of the target as described.

    Attributes:
        factor: time with them over time without, by a model, float64[n].
        rules: by which that model told, uint8[n].
        known: whether the time without was measured on the target, bool[n].
    """

    factor: F64
    rules: U8
    known: Mask

    @classmethod
    def none(cls, rules: U8) -> Self:
        """Return that of a target as described."""
        return cls(np.ones(len(rules)), rules, np.zeros(len(rules), dtype=bool))


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
    others: Others | None = None,
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
        others: what figures of the target that are set make of it; None where none is.
    """
    moved, _ = predicted
    kinds = kinds_of(kernels, predicted, source, target, doubt)
    if changed is not None:
        kinds = np.where(changed, kinds_of(kernels, predicted, None, target, doubt), kinds)
    sizes = np.zeros_like(kinds) if resized is None else sizes_of(kernels, resized)
    sorts = Sorts.of(kinds, sizes)
    if others is not None:
        sorts = sorts.with_others(kernels, moved, others, target, c)
    ends = node_intervals(moved, sorts, target, c, doubt)
    return ends, step_interval(moved, sorts, kernels.call, target, c, doubt=doubt)


class Sorts(NamedTuple):
    """The sorts of each prediction, whose errors add up as independent ones do.

    Attributes:
        gpu: of going to another GPU, or of looking up, as positions in `KINDS`, uint8[n].
        size: of going to another size.
        others: of going to the same GPU with figures that are set.
        part: part of the errors of the last that counts, float64[n].
    """

    gpu: U8
    size: U8
    others: U8
    part: F64

    @classmethod
    def of(cls, gpu: U8, size: U8 | None = None) -> Self:
        """Return those of predictions for a GPU as described; None: at the size measured."""
        none = np.zeros_like(gpu)
        return cls(gpu, none if size is None else size, none, np.ones(len(gpu)))

    def with_others(
        self, kernels: Kernels, moved: F64, others: Others, target: Gpu, c: Coefficients
    ) -> Self:
        """Return those with what figures that are set make of times known without them.

        The ratio errs as the model does between GPUs of one die, but by no more than it changes.
        """
        kinds = kinds_of(kernels, (moved, others.rules), target.as_described, target)
        matters = others.known & (others.factor != 1)
        kinds = np.where(matters, kinds, np.uint8(KINDS.index("kept"))).astype(np.uint8)
        most = _widened("high", target, c)[kinds]
        change = np.abs(np.log(others.factor))
        part = np.divide(change, most, out=np.zeros(len(most)), where=most > 0)
        return self._replace(others=kinds, part=np.minimum(part, 1.0))

    @property
    def each(self) -> tuple[tuple[U8, F64 | float], ...]:
        """The three sorts, and which part of the errors of each counts."""
        return (self.gpu, 1.0), (self.size, 1.0), (self.others, self.part)


def sizes_of(kernels: Kernels, resized: Mask) -> U8:
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
) -> U8:
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
    depthwise = kernels.matmul_class & ~kernels.matmul & np.isfinite(kernels.flops)
    multiplied = kernels.matmul_class & ~depthwise
    other = np.where(multiplied, KINDS.index("product"), KINDS.index(memory))
    kind = np.where(by_tiles, np.where(attention, soft, product), other)
    if source is None:
        kind = np.where(rules == Rule.PARTS, KINDS.index("composed"), kind)
    kind = np.where(rules == Rule.RETYPED, KINDS.index("retyped"), kind)
    if doubt is not None:
        loose = doubt.loosely | (moved <= TINY_NS)
        same = np.where(loose, KINDS.index("looked_up_loosely"), KINDS.index("looked_up"))
        told = np.where(doubt.otherwise, KINDS.index("looked_up_otherwise"), same)
        kind = np.where(np.isin(rules, BY_DATABASE), told, kind)
    kept = np.isin(rules, [*AS_MEASURED, Rule.DROPPED, Rule.RESIZED, Rule.MEASURED_WITH_OTHERS])
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
    if kind in (*BY_BANDWIDTH, "composed"):
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
    ends = (_widened(end, target, c) for end in ("low", "high"))
    low, high = (np.sqrt(sum((part * e[kinds]) ** 2 for kinds, part in sorts.each)) for e in ends)
    own = 0.0 if doubt is None else HALF_WIDTH * doubt.own
    return np.hypot(low, own), np.hypot(high, own)


def step_interval(
    moved: F64, sorts: Sorts, call: npt.NDArray[np.int64], target: Gpu, c: Coefficients, *,
    doubt: Doubt | None = None,
) -> Interval:  # fmt: skip
    """Return the interval of the sum of all nodes' times.

    Its standard deviation, in ln, is the root of shared^2 + own^2 over the sum: shared is the sum
    of each node's shared part, own the root of the squares of each distinct call's. What another
    size adds is as independent of what another GPU does, and so is what figures that are set do.
    """
    total = float(moved.sum())
    if not total:
        return Interval(0, 0)
    lookup = 0.0 if doubt is None else doubt.own
    shared, own = (_widened(part, target, c) for part in ("shared", "own"))
    squares = 0.0
    for (kinds, part), more in zip(sorts.each, (lookup, 0.0, 0.0), strict=True):
        _, distinct = combine([call, kinds])
        each = np.bincount(distinct, weights=np.hypot(part * own[kinds], more) * moved)
        squares += float((part * shared[kinds] * moved).sum()) ** 2 + float((each**2).sum())
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
