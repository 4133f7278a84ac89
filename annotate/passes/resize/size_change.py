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
"""How a size grows: with which powers of sequence length and of micro-batch."""

CONSTANT: Power = (0, 0)

SEQ: Power = (1, 0)

BATCH: Power = (0, 1)

TOKENS: Power = (1, 1)

_NEAR = 8  # a size this many times nearer to the sequence length than it is long is one shifted


@dataclass(frozen=True, slots=True)
class Change:
    """A captured size, 0 if it is to be inferred from the trace, and the new size."""

    before: int
    after: int


NO_SEQUENCE = Change(2**40, 2**40)
"""Of a step without sequences: longer than any size, so that none is of it."""


def parse_change(option: str, text: str) -> Change:
    """Read `8192`, or `4096=8192` where the captured size is named.

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
        seq: of the sequences that the script passes to its model.
        batch: sequences in a micro-batch.
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
        chunks = {2 * cp} if cp > 1 else set[int]()  # cp's ranks have two chunks each
        cuts = sorted({1, tp, cp, tp * cp} | chunks)
        return cls(seq, batch, tuple(cut for cut in cuts if seq.before % cut == 0))

    @cached_property
    def lengths(self) -> frozenset[int]:
        """What a dimension of the sequence is as long as."""
        return frozenset(self.seq.before // part for part in self.parts)

    @cached_property
    def unit(self) -> int:
        """The least of them."""
        return min(self.lengths)

    def near(self, size: int) -> bool:
        """Return whether a size is the sequence length but for a shift, of labels for one."""
        return 0 < abs(size - self.seq.before) * _NEAR < self.seq.before

    def of_tokens(self, size: int) -> bool:
        """Return whether a size is that of all tokens of a micro-batch, or of a part of each.

        Of experts' tokens it is once for each expert that a token goes to.
        """
        length, left = divmod(size, self.batch.before)
        if not left and (length in self.lengths or self.near(length)):
            return True
        routed = (divmod(size, self.batch.before * times) for times in self.routes)
        return any(not left and length in self.lengths for length, left in routed)

    def resized(self, size: int, power: Power) -> int:
        """Return the new size of a dimension.

        Raises:
            AnnotateError: it is no whole number.
        """
        seq, batch = power
        if power == CONSTANT:
            return size
        per = self.batch.before**batch
        if seq == 1 and size % per == 0 and self.near(size // per):
            return (size // per + self.seq.after - self.seq.before) * self.batch.after**batch
        made = size * self.seq.after**seq * self.batch.after**batch
        parts = self.seq.before**seq * per
        if made % parts:
            raise AnnotateError(
                f"a size of {size} cannot follow: {size} x {_terms(self.seq, self.batch, power)} "
                f"= {made / parts:.2f} is no whole number; choose a sequence length and a "
                "micro-batch that divide as the captured ones do",
                code="resize-not-whole",
            )
        return made // parts

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

_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator of one product -> the place of its first factor; the second stands behind it."""

_PAIRS = frozenset(
    f"aten::{name}{place}" for name in ("add", "sub", "mul", "div") for place in ("", "_")
)
"""Operators of two operands that broadcast."""


def check_products(before: Graph, after: Graph, changed: Mask) -> None:
    """Refuse products whose factors do not fit: a size was lost on the way.

    Args:
        before: the step as captured.
        after: the same at another size.
        changed: nodes whose operands have other shapes, bool[n].

    Raises:
        AnnotateError: there is one.
    """
    nodes, strings = after.nodes, after.strings
    places = {code: _FACTORS.get(strings[code]) for code in np.unique(nodes.op[changed]).tolist()}
    products = [code for code, place in places.items() if place is not None]
    rows = np.flatnonzero(changed & np.isin(nodes.op, products))
    first, _ = combine([nodes.op[rows], nodes.input_shapes[rows]])
    for row in rows[first].tolist():
        place = places[int(nodes.op[row])] or 0
        left, right = _LIST.decode(strings[int(nodes.input_shapes[row])])[place : place + 2]
        if min(len(left), len(right)) > 1 and left[-1] != right[-2]:
            was = _LIST.decode(before.strings[int(before.nodes.input_shapes[row])])
            raise AnnotateError(
                f"{strings[int(nodes.op[row])]} would multiply {left} x {right}, captured as "
                f"{was[place]} x {was[place + 1]}: a size was lost on the way, as of steps that "
                "pad their sequences, cut them into pieces of a fixed length or go through them "
                "one by one; capture the step at the size asked for",
                code="resize-operands-disagree",
            )


def misfits(after: Graph, changed: Mask) -> tuple[str, ...]:
    """Return a sentence if sums and the like have operands that no longer broadcast.

    Args:
        after: the step at another size.
        changed: nodes whose operands have other shapes, bool[n].
    """
    nodes, strings = after.nodes, after.strings
    codes = [code for code in np.unique(nodes.op[changed]).tolist() if strings[code] in _PAIRS]
    rows = np.flatnonzero(changed & np.isin(nodes.op, codes))
    first, which = combine([nodes.op[rows], nodes.input_shapes[rows]])
    wrong = [not _broadcast(strings[int(nodes.input_shapes[row])]) for row in rows[first].tolist()]
    lost = np.array(wrong, dtype=bool)[which]
    if not lost.any():
        return ()
    names = sorted({strings[code] for code in nodes.op[rows[lost]].tolist()})
    return (
        f"{int(lost.sum())} calls of {', '.join(names)} have operands that do not fit each other: "
        "a size was lost on the way to them, and their shapes and bytes are not to be trusted.",
    )


def _broadcast(shapes: str) -> bool:
    pair = _LIST.decode(shapes)[:2]
    if not all(isinstance(size, int) for one in pair for size in one):
        return True  # a list of tensors
    ends = zip(*(reversed(one) for one in pair), strict=False)
    return all(a == b or 1 in (a, b) for a, b in ends)
