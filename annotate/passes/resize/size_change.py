"""A change of sequence length and micro-batch, and whether operands still fit each other."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.unique_rows import combine
from onerank.ir import Graph, Job
from onerank.ir.errors import AnnotateError

Power = tuple[int, int]
"""Growth of a size: its powers of sequence length and of micro-batch."""

CONSTANT: Power = (0, 0)

SEQ: Power = (1, 0)

BATCH: Power = (0, 1)

TOKENS: Power = (1, 1)

_SHIFT_FRACTION = 8
"""A size within 1/8 of the sequence length is the sequence with a shift, such as of labels."""


@dataclass(frozen=True, slots=True)
class Change:
    """A captured size, 0 if it is to be inferred from the trace, and the new size."""

    before: int
    after: int


NO_SEQUENCE = Change(2**40, 2**40)
"""The change for a step without sequences; no size is as large, so none matches."""


def parse_change(option: str, text: str) -> Change:
    """Parse `8192`, or `4096=8192` with the captured size.

    Raises:
        AnnotateError: it is neither, or a size is below 1.
    """
    before, equals, after = text.partition("=")
    sizes = [before, after] if equals else [text]
    if not all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes):
        raise AnnotateError(
            f"{option} {text}: expected a size, {option} 8192, or the captured and the new one, "
            f"{option} 4096=8192; both 1 or more",
            code="resize-option-malformed",
        )
    return Change(*map(int, sizes)) if equals else Change(0, int(text))


@dataclass(frozen=True)
class Sizing:
    """Sequence length and micro-batch, captured and new.

    Attributes:
        seq: length of the sequences that the script passes to its model.
        batch: number of sequences in a micro-batch.
        parts: divisors of a sequence from the parallel axes, including 1.
        routes: experts per token, for each kind of routing layer; empty without routing.
    """

    seq: Change
    batch: Change
    parts: tuple[int, ...] = (1,)
    routes: tuple[int, ...] = ()

    @classmethod
    def of(cls, seq: Change, batch: Change, job: Job) -> "Sizing":
        """Return the sizing of a job, whose tp and cp axes may cut sequences."""
        tp, cp = (job.world.sizes.get(axis, 1) for axis in ("tp", "cp"))
        # Each cp rank has two chunks of the sequence, which balances a causal mask.
        chunks = {2 * cp} if cp > 1 else set[int]()
        cuts = sorted({1, tp, cp, tp * cp} | chunks)
        return cls(seq, batch, tuple(cut for cut in cuts if seq.before % cut == 0))

    @cached_property
    def lengths(self) -> frozenset[int]:
        """Sizes that a sequence dimension may have."""
        return frozenset(self.seq.before // part for part in self.parts)

    @cached_property
    def unit(self) -> int:
        """The smallest size of a sequence dimension."""
        return min(self.lengths)

    def is_shifted_sequence(self, size: int) -> bool:
        """Return whether a size is the sequence length with a shift, such as of labels."""
        return 0 < abs(size - self.seq.before) * _SHIFT_FRACTION < self.seq.before

    def _keeps_shift(self, size: int) -> bool:
        """Return whether a size that grows with the sequence keeps its distance from it.

        Labels padded by one token are 6 long for a sequence of 5. `is_shifted_sequence` guesses
        what a size is, so it does not accept that distance; here the growth is known.
        """
        by_one = abs(size - self.seq.before) == 1 and size % self.unit != 0
        return by_one or self.is_shifted_sequence(size)

    def is_token_count(self, size: int) -> bool:
        """Return whether a size counts the tokens of a micro-batch, of whole or split sequences.

        With routing, each token counts once per expert that receives it.
        """
        length, rest = divmod(size, self.batch.before)
        if not rest and (length in self.lengths or self.is_shifted_sequence(length)):
            return True
        routed = (divmod(size, self.batch.before * route) for route in self.routes)
        return any(not rest and length in self.lengths for length, rest in routed)

    def resized(self, size: int, power: Power) -> int:
        """Return the new size of a dimension.

        Raises:
            AnnotateError: the new size is not a whole number.
        """
        seq, batch = power
        if power == CONSTANT:
            return size
        per = self.batch.before**batch
        if seq == 1 and size % per == 0 and self._keeps_shift(size // per):
            return (size // per + self.seq.after - self.seq.before) * self.batch.after**batch
        product = size * self.seq.after**seq * self.batch.after**batch
        divisor = self.seq.before**seq * per
        if product % divisor:
            raise AnnotateError(
                f"a size of {size} cannot be resized: {size} x "
                f"{_terms(self.seq, self.batch, power)} = {product / divisor:.2f} is no whole "
                "number\n  choose a sequence length and a micro-batch that divide as the captured "
                "ones do",
                code="resize-not-whole",
            )
        return product // divisor

    def shape(self, shape: tuple[int, ...], powers: tuple[Power, ...]) -> tuple[int, ...]:
        """Return the new shape of a tensor."""
        return tuple(self.resized(*pair) for pair in zip(shape, powers, strict=True))


def total(powers: tuple[Power, ...]) -> Power:
    """Return how the number of elements grows."""
    return sum(seq for seq, _ in powers), sum(batch for _, batch in powers)


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements; 1 for a 0-d tensor."""
    return prod(shape)


def _terms(seq: Change, batch: Change, power: Power) -> str:
    terms = [f"{seq.after} / {seq.before}"] * power[0] + [
        f"{batch.after} / {batch.before}"
    ] * power[1]
    return " x ".join(terms)


Mask = npt.NDArray[np.bool_]

_LIST = msgspec.json.Decoder(list[Any])

_FACTOR_INDEX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator of one product -> index of its first factor; the second factor follows it."""

_BINARY = frozenset(
    f"aten::{name}{place}" for name in ("add", "sub", "mul", "div") for place in ("", "_")
)
"""Binary operators that broadcast their operands."""


def check_products(before: Graph, after: Graph, changed: Mask) -> None:
    """Raise for products whose factors do not match, because a size was not followed.

    Mamba-2, for example, pads its sequences to whole chunks. Its resized products would have no
    FLOPs and be faster than at the captured size.

    Args:
        before: the step as captured.
        after: the same at another size.
        changed: nodes whose operands have other shapes, bool[n].

    Raises:
        AnnotateError: the inner sizes of a product differ.
    """
    nodes, strings = after.nodes, after.strings
    factor_indices = {
        code: _FACTOR_INDEX.get(strings[code]) for code in np.unique(nodes.op[changed]).tolist()
    }
    products = [code for code, factor_index in factor_indices.items() if factor_index is not None]
    rows = np.flatnonzero(changed & np.isin(nodes.op, products))
    first, _ = combine([nodes.op[rows], nodes.input_shapes[rows]])
    for row in rows[first].tolist():
        factor_index = factor_indices[int(nodes.op[row])] or 0
        left, right = _LIST.decode(strings[int(nodes.input_shapes[row])])[
            factor_index : factor_index + 2
        ]
        if min(len(left), len(right)) > 1 and left[-1] != right[-2]:
            captured = _LIST.decode(before.strings[int(before.nodes.input_shapes[row])])
            raise AnnotateError(
                f"{strings[int(nodes.op[row])]} would multiply {left} x {right}, captured as "
                f"{captured[factor_index]} x {captured[factor_index + 1]}: a size was not "
                "followed, as in steps that pad, chunk or loop over their sequences\n"
                "  capture the step at the requested size",
                code="resize-operands-disagree",
            )


def mismatch_notes(after: Graph, changed: Mask) -> tuple[str, ...]:
    """Return a note if binary operators have operands that no longer broadcast.

    Args:
        after: the step at another size.
        changed: nodes whose operands have other shapes, bool[n].
    """
    nodes, strings = after.nodes, after.strings
    codes = [code for code in np.unique(nodes.op[changed]).tolist() if strings[code] in _BINARY]
    rows = np.flatnonzero(changed & np.isin(nodes.op, codes))
    first, which = combine([nodes.op[rows], nodes.input_shapes[rows]])
    mismatched = [
        not _can_broadcast(strings[int(nodes.input_shapes[row])]) for row in rows[first].tolist()
    ]
    is_mismatched = np.array(mismatched, dtype=bool)[which]
    if not is_mismatched.any():
        return ()
    names = sorted({strings[code] for code in nodes.op[rows[is_mismatched]].tolist()})
    return (
        f"{int(is_mismatched.sum())} calls of {', '.join(names)} have operands that no longer "
        "broadcast: a size was not followed, and their shapes and bytes are unreliable.",
    )


def _can_broadcast(shapes: str) -> bool:
    pair = _LIST.decode(shapes)[:2]
    if not all(isinstance(size, int) for shape in pair for size in shape):
        return True  # a list of tensors
    ends = zip(*(reversed(shape) for shape in pair), strict=False)
    return all(a == b or 1 in (a, b) for a, b in ends)
