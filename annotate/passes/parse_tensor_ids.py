"""Parse the tensor ids in the value texts of all nodes at once.

A text has `[id, storage, offset, elements, bytes, device]` for each tensor. A step has up to a
million of them, so all texts are joined, and numpy parses one number of every tensor at a time.
"""

from collections.abc import Sequence

import numpy as np

from onerank.ir.arrays import I64, U8, Mask

_OPEN, _COMMA, _QUOTE, _ZERO = b'[,"0'

# Numbers in `[id, storage, offset, elements, bytes, device]`.
_TUPLE_NUMBERS = 5

# Leading numbers that are the location.
_LOCATION_NUMBERS = 3

# Digits of one 64-bit word, and eight "0" characters, which XOR removes.
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


def parse_tensor_ids(texts: Sequence[str]) -> tuple[I64, I64, I64, I64]:
    """Return the number of tensors in each text, and ids, storages and offsets of all of them."""
    ends = np.cumsum(np.array(list(map(len, texts)), dtype=np.int64))
    joined = "".join(texts)
    # Positions below count bytes, so a device name that is not ASCII would shift them.
    if not joined.isascii():
        joined = joined.encode("ascii", "replace").decode()
    buffer = np.frombuffer(joined.encode() + bytes(2 * _WORD), dtype=np.uint8)
    opens = _candidate_openings(buffer)
    good, place, kept = np.ones(len(opens), dtype=bool), opens + 1, list[I64]()
    for number in range(_TUPLE_NUMBERS):
        value, place = _parse_numbers(buffer, place, good)
        good &= buffer[place] == _COMMA
        # Only valid positions advance, so none passes the end of the buffer.
        place += good
        if number < _LOCATION_NUMBERS:
            kept.append(value)
    good &= buffer[place] == _QUOTE
    of = np.searchsorted(ends, opens[good], side="right")
    tensor, storage, offset = (column[good] for column in kept)
    return np.bincount(of, minlength=len(texts)).astype(np.int64), tensor, storage, offset


def _candidate_openings(buffer: U8) -> I64:
    """Return the last opening bracket before each string that follows a number."""
    quotes = np.flatnonzero(buffer == _QUOTE)
    quotes = quotes[quotes > 1]
    quotes = quotes[(buffer[quotes - 1] == _COMMA) & (_digit_values(buffer, quotes - 2) < 10)]
    opens = np.flatnonzero(buffer == _OPEN)
    nearest = np.searchsorted(opens, quotes) - 1
    nearest = opens[nearest[nearest >= 0]]
    return nearest[np.append(True, nearest[1:] != nearest[:-1])[: len(nearest)]]


def _digit_values(buffer: U8, place: I64) -> U8:
    """Return the digit at each position; 10 or more for other characters."""
    return buffer[place] - np.uint8(_ZERO)


def _parse_numbers(buffer: U8, place: I64, good: Mask) -> tuple[I64, I64]:
    """Return the numbers of up to 15 digits at positions, and their ends, int64[p] each.

    Sets `good`, bool[p], to False where no number begins, or a longer one.
    """
    value, length = _parse_word(buffer, place)
    good &= length > 0
    longer = np.flatnonzero(length == _WORD)
    if len(longer):
        more, digits = _parse_word(buffer, place[longer] + _WORD)
        good[longer] &= digits < _WORD
        value[longer] = value[longer] * 10**digits + more
        length[longer] += digits
    return value, place + length


def _parse_word(buffer: U8, place: I64) -> tuple[I64, I64]:
    """Return the number at the start of the eight bytes at positions, and its count of digits.

    It parses all eight bytes at once in a little-endian word: pairs of digits become numbers below
    100, pairs of these numbers below 10,000, and these one number.
    """
    words = np.ndarray(len(buffer) - _WORD + 1, dtype="<u8", buffer=buffer, strides=(1,))
    digits = words[place] ^ _ZEROS
    others = (digits | digits + _SIX_MORE) & _HIGH_BITS
    first = others & (~others + np.uint64(1))
    _, power = np.frexp(first.astype(np.float64))  # 2^(8 k + 7) for the k-th byte, 0 for none
    length = np.where(first, power // _WORD - 1, _WORD).astype(np.int64)
    word = digits << ((_WORD - length) * 8).astype(np.uint64)
    word[length == 0] = 0  # a shift by 64 bits is undefined
    for mask, factor, bits in _PAIRS:
        word = ((word & mask) * factor) >> bits
    return word.astype(np.int64), length
