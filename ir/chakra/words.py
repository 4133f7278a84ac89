"""Protobuf's wire format read at many places of a buffer at once, eight bytes at a time."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.ir.edges import I64
from onerank.ir.nodes import U64

Mask = npt.NDArray[np.bool_]

PADDING = 24
"""Bytes that must follow the last one of a buffer, so that words can be read there."""

_ENDS = np.uint64(0x8080808080808080)
_DIGITS = ~_ENDS
_BYTES = np.uint64(0x0101010101010101)
_ONE = np.uint64(1)


class Varints(NamedTuple):
    """Varints of up to 8 bytes, of values below 2**56.

    Attributes:
        value: uint64[n].
        length: bytes of each, int64[n].
        short: whether it ends within 8 bytes; where not, value and length mean nothing.
        minimal: whether it has no digit too many.
    """

    value: U64
    length: I64
    short: Mask
    minimal: Mask


class Buffer:
    """Bytes to read, followed by `PADDING` zeros."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        size = len(octets)
        self.bytes = np.frombuffer(octets, dtype=np.uint8)
        self._words = np.ndarray((size - 7,), "<u8", octets, 0, (1,))

    def words(self, places: I64) -> U64:
        """Return the 8 bytes from each place on, the first lowest, uint64[n]."""
        return self._words[places]

    def varints(self, places: I64) -> Varints:
        """Return the varint at each place."""
        word = self._words[places]
        end = ~word & _ENDS
        low = end & (~end + _ONE)
        covered = low ^ (low - _ONE)
        digits = word & covered & _DIGITS
        length = ((covered & _BYTES) * _BYTES >> np.uint64(56)).astype(np.int64)
        minimal = digits >= covered >> np.uint64(8)  # else its last digit is a zero too many
        return Varints(_packed(digits), length, end != 0, minimal)


def _packed(digits: U64) -> U64:
    """Close up the digits of 7 bits, one per byte."""
    most = int(digits.max(initial=0))
    for few, low, high, shift in _FOLDS:
        if most > few:
            digits = (digits & low) | ((digits & high) >> shift)
    return digits


_FOLDS = [
    (few, np.uint64(low), ~np.uint64(low), np.uint64(shift))
    for few, low, shift in (
        (0xFF, 0x007F007F007F007F, 1),
        (0xFFFF, 0x00003FFF00003FFF, 2),
        (0xFFFFFFFF, 0x000000000FFFFFFF, 4),
    )
]
"""Largest digits that a step leaves alone, what it keeps, what it moves, and how far."""


def find(buffer: Buffer, places: I64, pattern: bytes) -> Mask:
    """Return whether a byte string of up to `PADDING` bytes lies at each place."""
    found = np.ones(len(places), dtype=bool)
    for begin in range(0, len(pattern), 8):
        part = pattern[begin : begin + 8]
        mask = np.uint64((1 << 8 * len(part)) - 1)
        found &= (buffer.words(places + begin) & mask) == int.from_bytes(part, "little")
    return found
