"""Messages of many nodes at once: columns of byte strings, joined row by row in one go.

Joining byte strings that exist costs a copy of memory each, so a message is put together from
pieces: texts as they are, prefixes that depend on a length alone, numbers as rows of a matrix.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.et_def_pb2 import AttributeProto
from onerank.ir.edges import I64, U8
from onerank.ir.nodes import U64, Objects

ATTRIBUTE = b"\x52"
"""Tag of a node's attribute."""


def nested(attribute: bytes) -> bytes:
    """Return an attribute as a field of a node."""
    return ATTRIBUTE + varint(len(attribute)) + attribute


def varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 in base 128, lowest digits first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def inner_of(attribute: str, variant: str) -> bytes:
    """Return an attribute's bytes up to its value."""
    name = attribute.encode()
    number = AttributeProto.DESCRIPTOR.fields_by_name[variant].number
    wire_type = 2 if variant in ("string_val", "bytes_val") else 0
    return b"\x0a" + varint(len(name)) + name + varint(number << 3 | wire_type)


def varints(values: U64) -> tuple[U8, I64]:
    """Return varints as rows padded with zeros, uint8[n, width], and their lengths, int64[n]."""
    width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    digits = np.empty((len(values), width), dtype=np.uint8)
    lengths = np.ones(len(values), dtype=np.int64)
    rest = values
    for place in range(width):
        if place:
            rest = rest >> np.uint64(7)
            lengths += rest > 0
        digits[:, place] = (rest & np.uint64(0x7F)) | ((rest > 0x7F).astype(np.uint64) << 7)
    return digits, lengths


def varint_lengths(values: I64) -> I64:
    """Return how many bytes the varints of numbers from 0 on take, int64[n]."""
    lengths = np.ones(len(values), dtype=np.int64)
    rest = values >> 7
    while rest.any():
        lengths += rest > 0
        rest >>= 7
    return lengths


class Pieces:
    """Byte strings of `count` rows, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self._parts: list[tuple[I64, Objects]] = []
        self.lengths = np.zeros(count, dtype=np.int64)
        """Bytes of each row so far, int64[count]."""

    def add(self, rows: I64, pieces: Objects, lengths: I64) -> None:
        """Append a piece to each of `rows`, which are distinct."""
        if len(rows):
            self._parts.append((rows, pieces))
            self.lengths[rows] += lengths

    def add_one_of(self, rows: I64, table: list[bytes], numbers: npt.NDArray[np.integer]) -> None:
        """Append `table[number]` to each of `rows`."""
        pieces = np.empty(len(table), dtype=object)
        pieces[:] = table
        sizes = np.array([len(piece) for piece in table], dtype=np.int64)
        self.add(rows, pieces[numbers], sizes[numbers])

    def add_numbers(self, rows: I64, values: U64, head: bytes) -> None:
        """Append `head` and a varint to each of `rows`."""
        digits, lengths = varints(values)
        self._add_matrix(rows, digits, lengths, head, values == 0)

    def add_messages(self, rows: I64, values: U64, outer: bytes, inner: bytes) -> None:
        """Append a nested message of up to 127 bytes: `inner` and a varint."""
        digits, lengths = varints(values)
        head = outer + b"\0" + inner
        made = self._matrix(digits, head)
        made[:, len(outer)] = len(inner) + lengths
        pieces = _strings(made)
        pieces[values == 0] = outer + bytes((len(inner) + 1,)) + inner + b"\0"
        self.add(rows, pieces, len(head) + lengths)

    def add_lists(self, rows: I64, values: U64, counts: I64, head: bytes) -> None:
        """Append a packed list: `head`, its length, and the next `count` of `values` as varints."""
        digits, lengths = varints(values)
        packed = digits[np.arange(digits.shape[1]) < lengths[:, None]].tobytes()
        until = np.concatenate([[0], np.cumsum(lengths)])
        ends = np.cumsum(counts)
        first, last = until[ends - counts], until[ends]
        self.add_sized(rows, last - first, lambda size: head + varint(size))
        self.add_slices(rows, packed, first, last)

    def add_slices(self, rows: I64, octets: bytes, first: I64, last: I64) -> None:
        """Append `octets[first:last]` to each of `rows`."""
        made = np.empty(len(first), dtype=object)
        made[:] = [octets[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        self.add(rows, made, last - first)

    def add_sized(self, rows: I64, sizes: I64, prefix: Callable[[int], bytes]) -> None:
        """Append to each of `rows` what `prefix` makes of its size."""
        if not len(rows):
            return
        used = np.flatnonzero(np.bincount(sizes)).tolist()
        place = np.zeros(used[-1] + 1, dtype=np.int64)
        place[used] = np.arange(len(used))
        self.add_one_of(rows, [prefix(size) for size in used], place[sizes])

    def cut(self) -> list[bytes]:
        """Return each row."""
        octets, ends = self.join(framed=False), np.cumsum(self.lengths)
        starts = ends - self.lengths
        return [octets[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def join(self, *, framed: bool) -> bytes:
        """Return all rows one after another, each behind its length if `framed`."""
        count = len(self.lengths)
        parts = self._parts
        if framed:
            front = Pieces(count)
            front.add_numbers(np.arange(count), self.lengths.astype(np.uint64), b"")
            parts = [*front._parts, *parts]
        places = np.zeros(count + 1, dtype=np.int64)
        for rows, _ in parts:
            places[rows + 1] += 1
        np.cumsum(places, out=places)
        flat = np.empty(places[-1], dtype=object)
        for rows, pieces in parts:
            here = places[rows]
            flat[here] = pieces
            places[rows] = here + 1
        return b"".join(flat.tolist())

    def _add_matrix(
        self, rows: I64, digits: U8, lengths: I64, head: bytes, zero: npt.NDArray[np.bool_]
    ) -> None:
        pieces = _strings(self._matrix(digits, head))
        pieces[zero] = head + b"\0"
        self.add(rows, pieces, len(head) + lengths)

    @staticmethod
    def _matrix(digits: U8, head: bytes) -> U8:
        made = np.empty((len(digits), len(head) + digits.shape[1]), dtype=np.uint8)
        made[:, : len(head)] = np.frombuffer(head, dtype=np.uint8)
        made[:, len(head) :] = digits
        return made


def _strings(rows: U8) -> Objects:
    """Return each row as bytes, without the zeros at its end."""
    return rows.view(f"S{rows.shape[1]}").ravel().astype(object)
