"""Columns of byte strings: UTF-8 text, and the messages of many nodes joined at once.

Appending to byte strings copies memory each time. So each row's pieces are collected first and
joined in one pass: texts, prefixes that depend only on a length, and numbers as rows of a matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, U8, U64, Mask
from onerank.ir.chakra.attributes import FIELDS, IO_COLUMNS
from onerank.ir.chakra.et_def_pb2 import AttributeProto
from onerank.ir.errors import ChakraError
from onerank.ir.nodes import TEXT_COLUMNS, Codes, Nodes, Objects, StringTable

ATTRIBUTE = b"\x52"
"""Tag of a node's attribute: field 10, wire type 2 (a length follows), so 10 << 3 | 2."""


def nested(attribute: bytes) -> bytes:
    """Return an attribute as a field of a node."""
    return ATTRIBUTE + varint(len(attribute)) + attribute


@lru_cache(maxsize=1 << 14)
def varint(value: int) -> bytes:
    """Return a number from 0 to 2**64 - 1 as a varint: base 128, lowest digits first.

    The top bit of every byte but the last is set (protobuf, "Encoding", "Base 128 Varints").
    """
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def inner_of(attribute: str, variant: str) -> bytes:
    """Return an attribute's bytes up to its value: the name (field 1), then the value's tag."""
    name = attribute.encode()
    number = AttributeProto.DESCRIPTOR.fields_by_name[variant].number
    # Texts and bytes are length-delimited (wire type 2); all other variants in use are varints (0).
    wire_type = 2 if variant in ("string_val", "bytes_val") else 0
    return b"\x0a" + varint(len(name)) + name + varint(number << 3 | wire_type)


def varints(values: U64) -> tuple[U8, I64]:
    """Return varints as rows padded with zeros, uint8[n, width], and their lengths, int64[n]."""
    width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    digits = np.empty((len(values), width), dtype=np.uint8)
    lengths = np.ones(len(values), dtype=np.int64)
    remaining = values
    for place in range(width):
        if place:
            remaining = remaining >> np.uint64(7)
            lengths += remaining > 0
        digits[:, place] = (remaining & np.uint64(0x7F)) | (
            (remaining > 0x7F).astype(np.uint64) << 7
        )
    return digits, lengths


def varint_lengths(values: I64) -> I64:
    """Return the number of bytes of each value's varint, int64[n]; the values are not negative."""
    lengths = np.ones(len(values), dtype=np.int64)
    remaining = values >> 7
    while remaining.any():
        lengths += remaining > 0
        remaining >>= 7
    return lengths


def sized(octets: list[bytes]) -> tuple[Objects, I64]:
    """Return byte strings as object[n], and their sizes, int64[n]."""
    pieces = np.empty(len(octets), dtype=object)
    pieces[:] = octets
    return pieces, np.fromiter(map(len, octets), np.int64, len(octets))


def slices(octets: bytes, first: I64, last: I64) -> list[bytes]:
    """Return the bytes from each `first` up to `last`."""
    return [octets[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


# Bytes joined at a time. A row has no bound: each launch of an optimizer that updates thousands of
# tensors has the shapes of all of them, 0.1 MB.
_CHUNK_BYTES = 1 << 22


class Pieces:
    """Builds `count` byte strings (rows) from pieces, in the order in which pieces are added."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._parts: list[tuple[I64 | slice, Objects]] = []
        self.lengths = np.zeros(count, dtype=np.int64)
        """Bytes of each row so far, int64[count]."""

    def add(self, rows: I64, pieces: Objects, lengths: I64) -> None:
        """Append a piece to each of `rows`, which are distinct and ascending."""
        # A slice spares numpy an indexed copy: most fields are set on every row.
        if len(rows) == self._count:
            self._parts.append((slice(None), pieces))
            self.lengths += lengths
        elif len(rows):
            self._parts.append((rows, pieces))
            self.lengths[rows] += lengths

    def add_each(self, rows: I64, octets: list[bytes]) -> None:
        """Append a piece to each of `rows`."""
        self.add(rows, *sized(octets))

    def add_one_of(self, rows: I64, table: list[bytes], numbers: npt.NDArray[np.integer]) -> None:
        """Append `table[number]` to each of `rows`."""
        pieces, sizes = sized(table)
        self.add(rows, pieces[numbers], sizes[numbers])

    def add_numbers(self, rows: I64, values: U64, head: bytes) -> None:
        """Append `head` and a varint to each of `rows`."""
        self._add_fields(rows, [NumberField(values, np.ones(len(rows), dtype=bool), head)])

    def add_messages(self, rows: I64, values: U64, outer: bytes, inner: bytes) -> None:
        """Append a nested message of up to 127 bytes: `inner` and a varint."""
        self._add_fields(rows, [NumberField(values, np.ones(len(rows), dtype=bool), outer, inner)])

    def add_fields(self, numbers: "Sequence[NumberField]") -> None:
        """Append numbers one after another, each to the rows that have it."""
        present = [number for number in numbers if number.has.any()]
        for begin in range(0, len(present), _TOGETHER):
            self._add_fields(np.arange(self._count), present[begin : begin + _TOGETHER])

    def add_lists(self, rows: I64, values: U64, counts: I64, head: bytes) -> None:
        """Append a packed list: `head`, its length, and the next `count` of `values` as varints."""
        digits, lengths = varints(values)
        packed = digits[np.arange(digits.shape[1]) < lengths[:, None]].tobytes()
        until = np.concatenate([[0], np.cumsum(lengths)])
        ends = np.cumsum(counts)
        first, last = until[ends - counts], until[ends]
        self.add_sized(rows, last - first, lambda size: head + varint(size))
        self.add_each(rows, slices(packed, first, last))

    def add_sized(self, rows: I64, sizes: I64, prefix: Callable[[int], bytes]) -> None:
        """Append `prefix(size)` to each of `rows`."""
        if not len(rows):
            return
        used = np.flatnonzero(np.bincount(sizes)).tolist()
        place = np.zeros(used[-1] + 1, dtype=np.int64)
        place[used] = np.arange(len(used))
        self.add_one_of(rows, [prefix(size) for size in used], place[sizes])

    def cut(self) -> list[bytes]:
        """Return each row."""
        return list(map(b"".join, self._table(self._parts).tolist()))

    def joined(self) -> Iterator[bytes]:
        """Yield all rows one after another, each after its length, a few megabytes at a time."""
        front = Pieces(self._count)
        front.add_sized(np.arange(self._count), self.lengths, varint)
        table = self._table([*front._parts, *self._parts])
        chunk = np.cumsum(front.lengths + self.lengths) // _CHUNK_BYTES
        for rows in np.split(table, np.flatnonzero(np.diff(chunk)) + 1):
            yield b"".join(rows.ravel().tolist())

    def _table(self, parts: list[tuple[I64 | slice, Objects]]) -> Objects:
        """Return the pieces of each row, object[count, parts]."""
        table = np.empty((self._count, len(parts)), dtype=object)
        for place, (rows, pieces) in enumerate(parts):
            # `np.empty` of objects holds None, which cannot be joined.
            if len(pieces) < self._count:
                table[:, place] = b""
            table[rows, place] = pieces
        return table

    def _add_fields(self, rows: I64, numbers: "Sequence[NumberField]") -> None:
        """Append numbers; rows whose numbers have equal lengths are encoded together."""
        digits = [varints(number.values) for number in numbers]
        shape_key = np.zeros(len(rows), dtype=np.int64)
        for field, (_, lengths) in zip(numbers[:-1], digits, strict=False):
            shape_key = shape_key * _LENGTHS + lengths * field.has
        shape_key = shape_key * 2 + numbers[-1].has
        joined, total = np.full(len(rows), b"", dtype=object), np.zeros(len(rows), dtype=np.int64)
        # Rows whose numbers take the same number of bytes form a rectangular matrix, which numpy
        # turns into byte strings in one go.
        for value in np.flatnonzero(np.bincount(shape_key)).tolist():
            group = np.flatnonzero(shape_key == value)
            parts: list[U8] = []
            ends_in_zero = np.zeros(len(group), dtype=bool)
            for field, (field_digits, lengths) in zip(numbers, digits, strict=True):
                if field.has[group[0]]:
                    size, is_last = lengths[group], field is numbers[-1]
                    width = field_digits.shape[1] if is_last else int(size[0])
                    parts += [field.heads(size), field_digits[group, :width]]
                    total[group] += field.head_size + size
                    ends_in_zero = field.values[group] == 0
            if parts:
                pieces = _strings(np.concatenate(parts, axis=1))
                # numpy's type S drops trailing zero bytes. Only the number 0 ends in one.
                for row in np.flatnonzero(ends_in_zero).tolist():
                    pieces[row] += b"\0"
                joined[group] = pieces
        self.add(rows, joined, total)


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number field, or a nested message that ends in a number, on some of n rows.

    Attributes:
        values: uint64[n].
        has: the rows that have the field, bool[n].
        head: bytes before the number, or before the size of the nested message.
        inner: bytes of the nested message before its number; None for a plain number field. The
            message has at most 127 bytes, so its size is one byte.
    """

    values: U64
    has: Mask
    head: bytes
    inner: bytes | None = None

    @property
    def head_size(self) -> int:
        """Number of bytes before the number."""
        return len(self.head) if self.inner is None else len(self.head) + 1 + len(self.inner)

    def heads(self, lengths: I64) -> U8:
        """Return the bytes before numbers of the given lengths, uint8[n, head_size]."""
        head = self.head if self.inner is None else self.head + b"\0" + self.inner
        heads = np.empty((len(lengths), len(head)), dtype=np.uint8)
        heads[:] = np.frombuffer(head, dtype=np.uint8)
        if self.inner is not None:
            heads[:, len(self.head)] = len(self.inner) + lengths
        return heads


# Most numbers encoded as one piece. With more numbers, fewer rows agree in all their lengths.
_TOGETHER = 3

# Number of possible varint lengths: 1 to 10 bytes for 64 bits, and 0 for an absent number.
_LENGTHS = 11


def _strings(rows: U8) -> Objects:
    """Return each row as bytes, without its trailing zeros."""
    return rows.view(f"S{rows.shape[1]}").ravel().astype(object)


class Texts:
    """Text columns in UTF-8, each distinct text encoded once."""

    def __init__(self, nodes: Nodes, strings: StringTable) -> None:
        used = np.zeros(len(strings), dtype=bool)
        for column in TEXT_COLUMNS:
            used[getattr(nodes, column)] = True
        self._octets = np.full(len(strings), b"", dtype=object)
        self._sizes = np.zeros(len(strings), dtype=np.int64)
        codes: Codes = np.flatnonzero(used).astype(np.int32)
        try:
            octets = list(map(str.encode, strings.decode(codes)))
        except UnicodeEncodeError:
            raise _not_unicode(nodes, strings) from None
        self._octets[codes], self._sizes[codes] = sized(octets)

    def of(self, codes: Codes) -> tuple[Objects, I64]:
        """Return the encoded texts, object[n] of bytes, and their sizes, int64[n]."""
        return self._octets[codes], self._sizes[codes]

    def sizes(self, codes: Codes) -> I64:
        """Return the size of each encoded text in bytes, int64[n]."""
        return self._sizes[codes]


def _not_unicode(nodes: Nodes, strings: StringTable) -> ChakraError:
    """Return the error for the first text without a UTF-8 form."""
    attribute_of = {field.column: field.attribute for field in FIELDS}
    attribute_of |= {column: side for side, columns in IO_COLUMNS.items() for column in columns}
    for column in TEXT_COLUMNS:
        codes, first = np.unique(getattr(nodes, column), return_index=True)
        for code, row in zip(codes.tolist(), first.tolist(), strict=True):
            try:
                strings[code].encode()
            except UnicodeEncodeError as error:
                return ChakraError(
                    f"node {nodes.id[row]}: {attribute_of.get(column, column)} has no UTF-8 form"
                    f" ({error}); replace that character",
                    code="chakra-not-utf8",
                )
    raise AssertionError("every text has a UTF-8 form")
