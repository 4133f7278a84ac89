"""Where the tensors of many calls are, as columns read from the texts of their values at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.sizes.places import Place

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
    more = np.array([place or (UNTOLD, UNTOLD, 0) for place in extra], dtype=np.int64)
    ends = np.cumsum(count)
    places = np.repeat(start - (ends - count), count) + np.arange(int(count.sum()))
    tensor, storage, offset = (
        np.concatenate([column, told])[places]
        for column, told in zip((tensor, storage, offset), more.reshape(-1, 3).T, strict=True)
    )
    result = np.repeat(np.arange(len(count)) % 2 == 1, count)
    return Accesses(np.append(0, ends[1::2]), tensor, storage, offset, result)


def tensors_in(texts: Sequence[str]) -> tuple[I64, I64, I64, I64]:
    """Return the number of tensors in each text, and ids, storages and offsets of all of them."""
    ends = np.cumsum(np.array(list(map(len, texts)), dtype=np.int64))
    joined = "".join(texts)
    if not joined.isascii():  # a device has a strange name: characters count as bytes below
        joined = joined.encode("ascii", "replace").decode()
    buffer = np.frombuffer(joined.encode() + bytes(2 * _WORD), dtype=np.uint8)
    opens = _before_quotes(buffer)
    good, place, kept = np.ones(len(opens), dtype=bool), opens + 1, list[I64]()
    for number in range(_NUMBERS):
        value, place = _numbers(buffer, place, good)
        good &= buffer[place] == _COMMA
        place += good  # none runs on beyond the end
        if number < _KEPT:
            kept.append(value)
    good &= buffer[place] == _QUOTE
    of = np.searchsorted(ends, opens[good], side="right")
    tensor, storage, offset = (column[good] for column in kept)
    return np.bincount(of, minlength=len(texts)).astype(np.int64), tensor, storage, offset


def _before_quotes(buffer: U8) -> I64:
    """Return the last bracket that opens before each text that follows a number."""
    quotes = np.flatnonzero(buffer == _QUOTE)
    quotes = quotes[quotes > 1]
    quotes = quotes[(buffer[quotes - 1] == _COMMA) & (_digits(buffer, quotes - 2) < 10)]
    opens = np.flatnonzero(buffer == _OPEN)
    found = np.searchsorted(opens, quotes) - 1
    found = opens[found[found >= 0]]
    return found[np.append(True, found[1:] != found[:-1])[: len(found)]]


def _digits(buffer: U8, place: I64) -> U8:
    """Return the digit at each place; 10 and more for what is none."""
    return buffer[place] - np.uint8(_ZERO)


def _numbers(buffer: U8, place: I64, good: npt.NDArray[np.bool_]) -> tuple[I64, I64]:
    """Return the numbers that begin at places, of up to 15 digits, and where they end.

    Where none begins, or a longer one, it is no longer good.
    """
    value, length = _eight(buffer, place)
    good &= length > 0
    longer = np.flatnonzero(length == _WORD)
    if len(longer):
        more, digits = _eight(buffer, place[longer] + _WORD)
        good[longer] &= digits < _WORD
        value[longer] = value[longer] * 10**digits + more
        length[longer] += digits
    return value, place + length


def _eight(buffer: U8, place: I64) -> tuple[I64, I64]:
    """Return the number of the digits among the eight bytes at places, and how many they are.

    All eight at once, in a word whose lowest byte is the first: pairs of digits become numbers
    below 100, these below 10,000, and these one.
    """
    words = np.ndarray(len(buffer) - _WORD + 1, dtype="<u8", buffer=buffer, strides=(1,))
    digits = words[place] ^ _ZEROS
    others = (digits | digits + _SIX_MORE) & _HIGH_BITS
    first = others & (~others + np.uint64(1))
    _, power = np.frexp(first.astype(np.float64))  # 2^(8 k + 7) for the k-th byte, 0 for none
    length = np.where(first, power // _WORD - 1, _WORD).astype(np.int64)
    word = digits << ((_WORD - length) * 8).astype(np.uint64)
    word[length == 0] = 0  # a shift by all 64 bits is none
    for mask, factor, bits in _PAIRS:
        word = ((word & mask) * factor) >> bits
    return word.astype(np.int64), length


_WORD = 8
_ZEROS = np.uint64(0x3030303030303030)
_SIX_MORE = np.uint64(0x7676767676767676)  # sets the highest bit of a byte above 9
_HIGH_BITS = np.uint64(0x8080808080808080)
_PAIRS = tuple(
    (np.uint64(mask), np.uint64(factor), np.uint64(bits))
    for mask, factor, bits in (
        (0x0F0F0F0F0F0F0F0F, 2561, 8),
        (0x00FF00FF00FF00FF, 6553601, 16),
        (0x0000FFFF0000FFFF, 42949672960001, 32),
    )
)
