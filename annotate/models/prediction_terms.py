"""How a duration was predicted: the rule, counts by evidence, and the named terms.

The terms are a tree whose root is the predicted duration. The models compute columns for all
kernels. A `TermRecord` selects the kernels whose terms are kept, for `annotate --explain`; each
step of a prediction adds a level to their trees from the columns that it just computed. Without a
record nothing is kept, so re-costing a large graph has no cost for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np

from onerank.ir import Evidence, Graph
from onerank.ir.arrays import F64, I64, U8, Mask


def by_evidence(graph: Graph, index: I64, amounts: I64 | None = None) -> dict[str, int]:
    """Return evidence ("measured") -> sum over the nodes at `index` that have it.

    Args:
        graph: graph of the nodes.
        index: indices of the nodes, int64[n].
        amounts: values to sum, int64[n]; None: count the nodes.
    """
    codes = graph.nodes.evidence[index]
    if amounts is None:
        amounts = np.ones(len(index), dtype=np.int64)
    return {e.name.lower(): int(amounts[codes == e].sum()) for e in Evidence if (codes == e).any()}


class Rule(IntEnum):
    """The rule that predicted a node's duration."""

    KEPT = 0
    COMPUTE = 1
    MEMORY = 2
    FLOOR = 3
    MATMUL_WITHOUT_FLOPS = 4
    BANDWIDTH_ONLY = 5
    NO_RATE = 6
    FLOOR_ONLY = 7
    DROPPED = 8
    WIDER_RATE = 9
    NO_DURATION = 10
    GEMM_TILES = 11
    ATTENTION_TILES = 12
    OUTSIDE = 13
    SAME_GPU = 14
    RETYPED = 15
    RESIZED = 16
    LOOKED_UP = 17
    LOOKED_UP_ON_BOTH = 18
    BETWEEN = 19
    RESIZED_BY_ROWS = 20
    RESIZED_BETWEEN = 21
    MEASURED_WITH_OVERRIDES = 22
    LOOKED_UP_WITH_OVERRIDES = 23
    PARTS = 24
    ISSUE = 25
    MISALIGNED = 26
    OTHER_ATTENTION = 27
    DECODE = 28
    CHAIN = 29
    SCHEDULED = 30

    @property
    def label(self) -> str:
        """The rule as text for a report."""
        return _LABELS[self]


class PredictedDurations(NamedTuple):
    """Predicted durations of n kernels.

    Attributes:
        duration_ns: durations, float64[n].
        rules: the `Rule` that predicted each, uint8[n].
    """

    duration_ns: F64
    rules: U8


# The labels are keys of the "rules" object in the JSON output: rewording one breaks its readers.
_LABELS = {
    Rule.KEPT: "kept as measured (copies that cross the host link, communication)",
    Rule.COMPUTE: "compute-bound",
    Rule.MEMORY: "memory-bound",
    Rule.FLOOR: "not longer than the launch floor",
    Rule.MATMUL_WITHOUT_FLOPS: "GEMM or attention, FLOPs unknown: 16-bit matmul rate",
    Rule.BANDWIDTH_ONLY: "FLOPs and bytes unknown: memory bandwidth",
    Rule.NO_RATE: "no matmul rate for the data type: memory bandwidth",
    Rule.FLOOR_ONLY: "no shapes: launch floor alone",
    Rule.DROPPED: "dropped: launches nothing",
    Rule.WIDER_RATE: "compute-bound, no matmul units for the data type: rate of a wider type",
    Rule.GEMM_TILES: "GEMM by its tiles",
    Rule.ATTENTION_TILES: "attention by its tiles",
    Rule.OUTSIDE: "GEMM or attention by its tiles and the residual model: the GPU is "
    "far from the fitted ones",
    Rule.RETYPED: "GEMM in another data type, by the model's ratio of both",
    Rule.RESIZED: "measured at another size on this GPU, times the model's ratio of both sizes",
    Rule.LOOKED_UP: "looked up: this call was measured on this GPU",
    Rule.LOOKED_UP_ON_BOTH: "looked up on both GPUs: half of the source's deviation carries over",
    Rule.BETWEEN: "interpolated between calls measured on this GPU",
    Rule.RESIZED_BY_ROWS: "measured at another size, times the looked-up ratio of both sizes",
    Rule.RESIZED_BETWEEN: "measured at another size, times the interpolated ratio of both sizes",
    Rule.MEASURED_WITH_OVERRIDES: "measured on this GPU, times the model's ratio with and without "
    "overrides",
    Rule.LOOKED_UP_WITH_OVERRIDES: "looked up on this GPU, times the model's ratio with and "
    "without overrides",
    Rule.PARTS: "convolution, recurrent layer or grouped GEMM, by the tiles of its GEMMs",
    Rule.ISSUE: "bound by SM cycles per element",
    Rule.CHAIN: "bound by loads that wait for each other: few rows",
    Rule.MISALIGNED: "GEMM whose rows begin off 16 bytes: an older generation's kernel",
    Rule.OTHER_ATTENTION: "attention by its tiles, by a kernel without figures on the architecture",
    Rule.DECODE: "attention of a few queries, by the keys and values that it reads",
    Rule.SCHEDULED: "attention of a few queries, by the schedule of its kernel's thread blocks",
    Rule.SAME_GPU: "as measured: on this GPU",
    Rule.NO_DURATION: "kept: the trace has no duration to scale",
}

AS_MEASURED = (Rule.KEPT, Rule.NO_DURATION, Rule.SAME_GPU)
"""Rules that keep the measured duration, if there is one."""

OF_ATTENTION = (Rule.ATTENTION_TILES, Rule.OTHER_ATTENTION, Rule.DECODE, Rule.SCHEDULED)
"""Rules of fused attention near the fitted GPUs."""

BY_TILES = (Rule.GEMM_TILES, *OF_ATTENTION, Rule.OUTSIDE, Rule.MISALIGNED)
"""Rules of GEMMs and attention that use the tile model."""

BY_DATABASE = (
    *(Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH, Rule.BETWEEN),
    *(Rule.RESIZED_BY_ROWS, Rule.RESIZED_BETWEEN, Rule.LOOKED_UP_WITH_OVERRIDES),
)
"""Rules that use a kernel database's measurement on the target."""


class Operation(Enum):
    """How the value of a term follows from its operands."""

    QUANTITY = "quantity"
    SUM = "sum"
    PRODUCT = "product"
    QUOTIENT = "quotient"
    POWER = "power"
    EXPONENTIAL = "exponential"
    LOGARITHM = "logarithm"
    LONGEST = "longest"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class Term:
    """A quantity of one kernel's prediction.

    Attributes:
        name: what it is; "" for a part of another term's formula that has no name.
        value: as the model computed it, in `unit`.
        unit: "ns", "bytes", ...; "" for a factor or an exponent.
        operation: how it follows from `operands`.
        operands: the terms of its formula; a quantity has none.
        note: source of a quantity, or the reason for a term.
    """

    name: str
    value: float
    unit: str = "ns"
    operation: Operation = Operation.QUANTITY
    operands: "tuple[Term, ...]" = ()
    note: str = ""

    def evaluate(self) -> float:
        """Return the value that follows from the quantities, by the operations only."""
        if self.operation is Operation.QUANTITY:
            return self.value
        return _EVALUATE[self.operation]([operand.evaluate() for operand in self.operands])

    def named(self) -> "Iterator[Term]":
        """Yield each named term once, after its operands."""
        # By identity: equal terms of different kernels are distinct, and one object may occur in
        # several formulas.
        seen: set[int] = set()
        yield from self._named(seen)

    def _named(self, seen: set[int]) -> "Iterator[Term]":
        if id(self) in seen:
            return
        seen.add(id(self))
        for operand in self.operands:
            yield from operand._named(seen)
        if self.name:
            yield self

    @property
    def formula(self) -> str:
        """The term as a formula of its operands' values: `924 x 1.0909 + 7,436 x 0.9021`."""
        if self.operation is Operation.QUANTITY:
            return self.figure
        texts = [operand._in_formula(self.operation) for operand in self.operands]
        return _FORMULA[self.operation](texts)

    @property
    def figure(self) -> str:
        """The value as text, without its unit."""
        return f"{self.value:.4f}" if self.unit == "" else f"{self.value:,.0f}"

    def _in_formula(self, outer: Operation) -> str:
        if self.name or self.operation is Operation.QUANTITY:
            return self.figure
        inner = self.operation
        weaker = _PRECEDENCE.get(inner, 9) < _PRECEDENCE.get(outer, 0)
        # a / (b / c) and (a^b)^c need parentheses; a / b x c reads from the left and needs none.
        nested = inner is outer and outer in (Operation.QUOTIENT, Operation.POWER)
        return f"({self.formula})" if weaker or nested else self.formula


def _norm(values: list[float]) -> float:
    exponent, *times = values
    # Relative to the longest, as in `gemm_tiles.p_norm`: powers of nanoseconds overflow.
    longest_ns = max(times)
    powers = ((time / longest_ns) ** exponent for time in times)
    return longest_ns * math.fsum(powers) ** (1 / exponent)


_EVALUATE: dict[Operation, Callable[[list[float]], float]] = {
    Operation.SUM: math.fsum,
    Operation.PRODUCT: math.prod,
    Operation.QUOTIENT: lambda values: values[0] / values[1],
    Operation.POWER: lambda values: values[0] ** values[1],
    Operation.EXPONENTIAL: lambda values: math.exp(values[0]),
    Operation.LOGARITHM: lambda values: math.log(values[0]),
    Operation.LONGEST: max,
    Operation.NORM: _norm,
}

_FORMULA: dict[Operation, Callable[[list[str]], str]] = {
    Operation.SUM: " + ".join,
    Operation.PRODUCT: " x ".join,
    Operation.QUOTIENT: " / ".join,
    Operation.POWER: "^".join,
    Operation.EXPONENTIAL: lambda texts: f"e^{texts[0]}",
    Operation.LOGARITHM: lambda texts: f"ln({texts[0]})",
    Operation.LONGEST: lambda texts: f"max({', '.join(texts)})",
    Operation.NORM: lambda texts: f"norm[{texts[0]}]({', '.join(texts[1:])})",
}

# Operations absent here are written as function calls, which never need parentheses.
_PRECEDENCE = {
    Operation.SUM: 1,
    Operation.PRODUCT: 2,
    Operation.QUOTIENT: 2,
    Operation.EXPONENTIAL: 3,
    Operation.POWER: 3,
}


def quantity(name: str, value: float, unit: str = "ns", note: str = "") -> Term:
    """Return a term without operands."""
    return Term(name, float(value), unit, note=note)


def _combine(  # noqa: PLR0917
    operation: Operation,
    name: str,
    operands: Sequence[Term],
    unit: str,
    value: float | None,
    note: str = "",
) -> Term:
    term = Term(name, math.nan, unit, operation, tuple(operands))
    # A term keeps the model's value where there is one, so that `evaluate` can be checked with it.
    known = term.evaluate() if value is None else float(value)
    return Term(name, known, unit, operation, tuple(operands), note)


def total(
    *operands: Term, name: str = "", value: float | None = None, unit: str = "ns", note: str = ""
) -> Term:
    """Return the sum of terms."""
    return _combine(Operation.SUM, name, operands, unit, value, note)


def product(
    *operands: Term, name: str = "", value: float | None = None, unit: str = "ns", note: str = ""
) -> Term:
    """Return the product of terms."""
    return _combine(Operation.PRODUCT, name, operands, unit, value, note)


def quotient(above: Term, below: Term, name: str = "", value: float | None = None) -> Term:
    """Return the ratio of two terms of one unit."""
    return _combine(Operation.QUOTIENT, name, (above, below), "", value)


def power(base: Term, exponent: Term) -> Term:
    """Return a term without unit to a power."""
    return _combine(Operation.POWER, "", (base, exponent), base.unit, None)


def exponential(exponent: Term) -> Term:
    """Return e to a power."""
    return _combine(Operation.EXPONENTIAL, "", (exponent,), "", None)


def logarithm(operand: Term, name: str = "", value: float | None = None) -> Term:
    """Return the natural logarithm of a term without unit."""
    return _combine(Operation.LOGARITHM, name, (operand,), "", value)


def longest(*operands: Term, name: str = "", value: float | None = None, note: str = "") -> Term:
    """Return the largest of times in ns."""
    return _combine(Operation.LONGEST, name, operands, "ns", value, note)


def norm(exponent: float, *operands: Term, name: str = "", value: float | None = None) -> Term:
    """Return the p-norm of times in ns: p = 1 means no overlap, infinity full overlap."""
    return _combine(Operation.NORM, name, (factor(exponent), *operands), "ns", value)


def factor(value: float, name: str = "", note: str = "") -> Term:
    """Return a quantity without unit."""
    return quantity(name, value, "", note)


class TermRecord:
    """Collects the terms of selected kernels while their durations are predicted.

    Attributes:
        rows: the kernels, as positions among all predicted ones, ascending, int64[k].
        roots: row -> the term of its duration so far.
        modelled: row -> the model's time, if a database row replaced it.
        rules: row -> the rule of its duration; set at the end.
        facts: row -> (name, text) of other inputs: database rows, its interval.
    """

    def __init__(self, rows: I64) -> None:
        self.rows = np.unique(rows)
        self.roots: dict[int, Term] = {}
        self.rules: dict[int, Rule] = {}
        self.modelled: dict[int, Term] = {}
        self.facts: dict[int, list[tuple[str, str]]] = {int(row): [] for row in self.rows}

    def update(self, rows: slice | I64, build: Callable[[int, Term | None], Term | None]) -> None:
        """Replace the roots of recorded kernels among `rows`.

        Args:
            rows: kernels of the columns that `build` reads: a slice, or ascending positions.
            build: (position in the columns, root so far) -> new root; None keeps the root.
        """
        for row, position in self.among(rows):
            root = build(position, self.roots.get(row))
            if root is not None:
                self.roots[row] = root

    def update_where(self, mask: Mask, build: Callable[[int, Term | None], Term | None]) -> None:
        """Replace the roots of recorded kernels in `mask`, bool[n]; see `update`."""
        self.update(slice(0, len(mask)), lambda i, root: build(i, root) if mask[i] else root)

    def within(self, rows: I64) -> "TermRecord":
        """Return an empty record of the recorded kernels in `rows`, as positions there.

        `rows` is ascending, int64.
        """
        return TermRecord(np.array([position for _, position in self.among(rows)], dtype=np.int64))

    def take(self, rows: I64, other: "TermRecord") -> None:
        """Copy roots and facts from `other`, a record that `within` returned for the same rows."""
        for row, position in self.among(rows):
            self.facts[row] += other.facts[position]
            if position in other.roots:
                self.roots[row] = other.roots[position]

    def among(self, rows: slice | I64) -> list[tuple[int, int]]:
        """Return (row, position in `rows`) of the recorded kernels in `rows`."""
        if isinstance(rows, slice):
            start, stop = rows.start, rows.stop
            inside = self.rows[(self.rows >= start) & (self.rows < stop)].tolist()
            return [(row, row - start) for row in inside]
        positions = np.searchsorted(rows, self.rows)
        inside = positions < len(rows)
        inside[inside] = rows[positions[inside]] == self.rows[inside]
        pairs = zip(self.rows[inside].tolist(), positions[inside].tolist(), strict=True)
        return list(pairs)
