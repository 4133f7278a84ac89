"""Where the tensors of many calls are, as columns read from the texts of their values at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.places import Place

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

UNTOLD = -1
"""Storage of a tensor of which nobody tells where it is."""

_OPEN, _COMMA, _QUOTE, _ZERO = b'[,"0'
_NUMBERS = 5  # of `[id, storage, offset, elements, bytes, device]`, of which three are kept
_KEPT = 3


class Accesses(NamedTuple):
    """Tensors of n calls, inputs before results, m of them.

    Attributes:
        first: where each call's begin, and the end, int64[n + 1].
        tensor: id of each, int64[m].
        storage: id of its storage, `UNTOLD` where nobody tells, int64[m].
        offset: of its first element there, int64[m].
        result: whether it is a result, bool[m].
    """

    first: I64
    tensor: I64
    storage: I64
    offset: I64
    result: npt.NDArray[np.bool_]

    def places(self, call: int) -> list[Place | None]:
        """Return where the tensors of a call are."""
        span = slice(int(self.first[call]), int(self.first[call + 1]))
        columns = (self.tensor[span], self.storage[span], self.offset[span])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [None if row[1] == UNTOLD else Place(*row) for row in rows]


class Texts(NamedTuple):
    """Distinct texts of values, and which of them each call has of inputs and of results."""

    distinct: Sequence[str]
    inputs: I64
    results: I64


def accesses(
    texts: Texts,
    expected: tuple[I64, I64],
    apart: Callable[[int, bool, str], Sequence[Place | None]],
) -> Accesses:
    """Return where the tensors of calls are.

    Args:
        texts: what they have of values.
        expected: how many tensors each has as inputs and as results.
        apart: reads the text of a call's inputs, or results, that does not tell of each tensor as
            nearly all do.
    """
    counts, tensor, storage, offset = tensors_in(texts.distinct)
    starts = np.cumsum(counts) - counts
    which = np.stack([texts.inputs, texts.results], axis=1).ravel()
    count = np.stack(expected, axis=1).ravel()
    start = starts[which]
    extra: list[Place | None] = []
    for row in np.flatnonzero(counts[which] != count).tolist():
        start[row] = len(tensor) + len(extra)
        extra += apart(row // 2, bool(row % 2), texts.distinct[int(which[row])])
    more = [place or Place(UNTOLD, UNTOLD, 0) for place in extra]
    ends = np.cumsum(count)
    places = np.repeat(start - (ends - count), count) + np.arange(int(count.sum()))
    columns = [
        np.concatenate([column, np.array(told, dtype=np.int64)])[places]
        for column, told in zip(
            (tensor, storage, offset), zip(*more, strict=True) if more else ((), (), ()),
            strict=True,
        )
    ]  # fmt: skip
    result = np.repeat(np.arange(len(count)) % 2 == 1, count)
    return Accesses(np.append(0, ends[1::2]), *columns, result)


def tensors_in(texts: Sequence[str]) -> tuple[I64, I64, I64, I64]:
    """Return the number of tensors in each text, and ids, storages and offsets of all of them."""
    ends = np.cumsum(np.fromiter((len(text) for text in texts), np.int64, len(texts)))
    joined = "".join(texts)
    if not joined.isascii():  # a device has a strange name: characters count as bytes below
        joined = joined.encode("ascii", "replace").decode()
    buffer = np.frombuffer(joined.encode() + b"\0", dtype=np.uint8)
    at = np.flatnonzero(buffer[:-1] == _OPEN)
    at = at[_digits(buffer, at + 1) < 10]
    place, kept = at + 1, list[I64]()
    for number in range(_NUMBERS):
        value, place = _number(buffer, place, keep=number < _KEPT)
        good = buffer[place] == _COMMA
        at, place = at[good], place[good] + 1
        kept = [column[good] for column in kept]
        if number < _KEPT:
            kept.append(value[good])
        if number < _NUMBERS - 1:
            good = _digits(buffer, place) < 10
            at, place, kept = at[good], place[good], [column[good] for column in kept]
    quoted = buffer[place] == _QUOTE
    of = np.searchsorted(ends, at[quoted], side="right")
    tensor, storage, offset = (column[quoted] for column in kept)
    return np.bincount(of, minlength=len(texts)).astype(np.int64), tensor, storage, offset


def _digits(buffer: U8, place: I64) -> U8:
    """Return the digit at each place; 10 and more for what is none."""
    return buffer[place] - np.uint8(_ZERO)


def _number(buffer: U8, place: I64, *, keep: bool) -> tuple[I64, I64]:
    """Return the numbers that begin at places, and where they end."""
    value, place = np.zeros(len(place), dtype=np.int64), place.copy()
    rows = np.arange(len(place))
    while len(rows):
        digit = _digits(buffer, place[rows])
        goes_on = digit < 10
        rows, digit = rows[goes_on], digit[goes_on]
        if keep:
            value[rows] = value[rows] * 10 + digit
        place[rows] += 1
    return value, place
