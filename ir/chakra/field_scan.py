"""Scan the protobuf wire format of many node messages at once.

The scan requires fields in ascending order, each once, as every protobuf library writes them;
`reader` parses other messages with protobuf. Attributes follow onerank's writing order: some that
hardly differ between nodes, then numbers that mostly differ, then others that hardly differ. The
scan reads the numbers. `decode_columns` parses each distinct run of attributes before and after
them, and each distinct run of operand shapes and types.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.ir.arrays import I64, U64, Mask
from onerank.ir.chakra.attributes import FRONT, NUMBERS, SPECS, Field
from onerank.ir.chakra.bytes_columns import ATTRIBUTE, inner_of
from onerank.ir.nodes import default_of, largest_of

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
        end_bit = end & (~end + _ONE)
        used_bits = end_bit ^ (end_bit - _ONE)
        digits = word & used_bits & _DIGITS
        length = ((used_bits & _BYTES) * _BYTES >> np.uint64(56)).astype(np.int64)
        minimal = digits >= used_bits >> np.uint64(8)  # else its last digit is a zero too many
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
"""Per step of a divide and conquer: digits left unchanged, mask kept, mask moved, shift."""


def find(buffer: Buffer, places: I64, pattern: bytes) -> Mask:
    """Return whether a byte string of up to `PADDING` bytes lies at each place."""
    matches = np.ones(len(places), dtype=bool)
    for begin in range(0, len(pattern), 8):
        chunk = pattern[begin : begin + 8]
        mask = np.uint64((1 << 8 * len(chunk)) - 1)
        matches &= (buffer.words(places + begin) & mask) == int.from_bytes(chunk, "little")
    return matches


_SKIPPED_NAMES = ("is_cpu_op", "gpu_op", *(field.attribute for field in FRONT))


class Spans(NamedTuple):
    """A part of each message: from the byte `first` up to `last`, int64[n]; equal where absent."""

    first: I64
    last: I64


class FoundFields(NamedTuple):
    """Numbers of an attribute: the messages that have it, int64[m], and their values, int64[m]."""

    row: I64
    value: I64


@dataclass(slots=True)
class Scan:
    """Fields of n node messages.

    Attributes:
        plain: which messages could be read so, bool[n]; of the others nothing else holds.
        exact: which hold no field that is empty, zero or longer than need be, bool[n].
        id: uint64[n].
        type: int64[n].
        start_micros: uint64[n].
        duration_micros: uint64[n].
        control: packed varints.
        data: packed varints.
        texts: by column, those of their own field: the name, and values of operands.
        inputs: what follows the values in the IOInfo of the inputs.
        front: likewise of the outputs, and behind it attributes before the numbers.
        output_bytes: how much of `front` is the outputs', int64[n].
        numbers: by column, those of `NUMBERS` that any message has, written as we do.
        back: everything behind the numbers.
    """

    plain: Mask
    exact: Mask
    id: U64
    type: I64
    control: Spans
    data: Spans
    start_micros: U64
    duration_micros: U64
    texts: dict[str, Spans]
    inputs: Spans
    front: Spans
    output_bytes: I64
    numbers: dict[str, FoundFields]
    back: Spans


class Cursor:
    """A place in each message, that moves over one field after another."""

    def __init__(self, buffer: Buffer, first: I64, last: I64) -> None:
        self.buffer, self.at, self.last = buffer, first.copy(), last
        self.plain = np.ones(len(first), dtype=bool)
        self.exact = np.ones(len(first), dtype=bool)

    def number(self, tag: int) -> U64:
        """Read a varint field, 0 where it is absent."""
        is_present = self._begins(tag)
        if not is_present.any():
            return np.zeros(len(is_present), dtype=np.uint64)
        read = self.buffer.varints(self.at + 1)
        self.plain &= ~is_present | read.short
        self.exact &= ~is_present | (read.minimal & (read.value > 0))
        self.at += np.where(is_present, 1 + read.length, 0)
        self._stop()
        return np.where(is_present, read.value, np.uint64(0))

    def span(self, tag: int) -> Spans:
        """Read a field behind its length."""
        is_present = self._begins(tag)
        if not is_present.any():
            return Spans(self.at.copy(), self.at.copy())
        read = self.buffer.varints(self.at + 1)
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        self.plain &= ~is_present | read.short
        self.exact &= ~is_present | (read.minimal & (size > 0))
        first = np.where(is_present, self.at + 1 + read.length, self.at)
        self.at = np.where(is_present, first + size, self.at)
        self._stop()
        return Spans(np.minimum(first, self.at), self.at.copy())

    def skip(self, beginning: "_Beginning") -> None:
        """Pass over an attribute whose first bytes look like a certain one's."""
        word = self.buffer.words(self.at)
        is_present = (word & beginning.mask) == beginning.word
        if not is_present.any():
            return
        size = (word >> np.uint64(8)) & np.uint64(0x7F)
        self.at += np.where(is_present, 2 + size.astype(np.int64), 0)
        self._stop()

    def attribute(self, field: Field) -> FoundFields:
        """Read a number's attribute where it is as we write it."""
        beginning, head = _BEGINNINGS[field.column], _HEADS[field.column]
        word = self.buffer.words(self.at)
        row = np.flatnonzero(((word & beginning.mask) == beginning.word) & (self.at < self.last))
        if not len(row):
            return FoundFields(row, row)
        at, size = self.at[row] + 2, (word[row] >> np.uint64(8)).astype(np.uint8)
        read = self.buffer.varints(at + len(head))
        spec = SPECS[field.column]
        is_valid = find(self.buffer, at, head)
        is_valid &= read.short & read.minimal & (len(head) + read.length == size)
        is_valid &= read.value <= np.uint64(largest_of(spec))
        if default_of(spec) >= 0:
            is_valid &= read.value != default_of(spec)
        ends = at + size
        is_valid &= ends <= self.last[row]
        row = row[is_valid]
        self.at[row] = ends[is_valid]
        return FoundFields(row, read.value[is_valid].astype(np.int64))

    def _stop(self) -> None:
        """Give up messages that end inside a field."""
        is_past_end = self.at > self.last
        if is_past_end.any():
            self.plain &= ~is_past_end
            self.at[is_past_end] = self.last[is_past_end]

    def _begins(self, tag: int) -> Mask:
        return (self.buffer.bytes[self.at] == tag) & (self.at < self.last)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """First 8 bytes of an attribute as a node holds it, of a size below 128, and which count."""

    word: np.uint64
    mask: np.uint64

    @classmethod
    def of(cls, head: bytes) -> "_Beginning":
        octets = (ATTRIBUTE + b"\0" + head)[:8]
        mask = (1 << 8 * len(octets)) - 1 & ~(0x7F << 8)
        return cls(np.uint64(int.from_bytes(octets, "little")), np.uint64(mask))


_HEADS = {field.column: inner_of(field.attribute, field.variant) for field in NUMBERS}

_BEGINNINGS = {column: _Beginning.of(head) for column, head in _HEADS.items()}

_SKIPPED = [_Beginning.of(b"\x0a" + bytes((len(name),)) + name.encode()) for name in _SKIPPED_NAMES]


def scan(buffer: Buffer, messages: Spans) -> Scan:
    """Find the fields of the node messages that lie at `messages`."""
    cursor = Cursor(buffer, messages.first, messages.last)
    number, name = cursor.number(0x08), cursor.span(0x12)
    node_type = np.minimum(cursor.number(0x18), np.uint64(1 << 32)).astype(np.int64)
    control, data = cursor.span(0x22), cursor.span(0x2A)
    start_micros, duration_micros = cursor.number(0x30), cursor.number(0x38)
    input_values, inputs = _operands(cursor, 0x42)
    output_values, outputs = _operands(cursor, 0x4A)
    for beginning in _SKIPPED:
        cursor.skip(beginning)
    return Scan(
        plain=cursor.plain,
        exact=cursor.exact,
        id=number,
        type=node_type,
        control=control,
        data=data,
        start_micros=start_micros,
        duration_micros=duration_micros,
        texts={"name": name, "input_values": input_values, "output_values": output_values},
        inputs=inputs,
        front=Spans(outputs.first, cursor.at.copy()),
        output_bytes=outputs.last - outputs.first,
        numbers={field.column: cursor.attribute(field) for field in NUMBERS},
        back=Spans(cursor.at.copy(), messages.last),
    )


def _operands(cursor: Cursor, tag: int) -> tuple[Spans, Spans]:
    """Find the values of an IOInfo, and what follows them in it."""
    message = cursor.span(tag)
    cursor_inside = Cursor(cursor.buffer, message.first, message.last)
    values = cursor_inside.span(0x0A)
    cursor.plain &= cursor_inside.plain
    cursor.exact &= cursor_inside.exact
    return values, Spans(values.last, message.last)
