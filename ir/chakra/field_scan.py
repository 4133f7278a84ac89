"""Scan the protobuf wire format of many node messages at once.

The scan requires fields in ascending order, each once. Protobuf libraries write them so, but the
format allows any order (protobuf, "Encoding", "Field Order"); `decode_nodes` parses other messages
with protobuf. Attributes must follow onerank's writing order: some that hardly differ between
nodes, then numbers that mostly differ, then others that hardly differ. The scan reads the numbers.
`decode_runs` parses each distinct run of attributes before and after them, and each distinct run
of operand shapes and types.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.ir.arrays import I64, U64, Mask
from onerank.ir.chakra.attributes import FRONT, NUMBERS, SPECS, Field
from onerank.ir.chakra.bytes_columns import ATTRIBUTE, inner_of, slices
from onerank.ir.nodes import default_of, largest_of

PADDING = 24
"""Zero bytes after the last message of a buffer, so that reading words there stays inside it."""

# Masks for a word of 8 varint bytes: continuation bits, digits, and the lowest bit of each byte.
_ENDS = np.uint64(0x8080808080808080)

_DIGITS = ~_ENDS

_BYTES = np.uint64(0x0101010101010101)

_ONE = np.uint64(1)


class Varints(NamedTuple):
    """Varints of up to 8 bytes, of values below 2**56.

    Attributes:
        value: uint64[n].
        length: bytes of each, int64[n].
        short: whether it ends within 8 bytes; otherwise value and length are undefined.
        minimal: whether it has no superfluous digit, which would be a trailing zero.
    """

    value: U64
    length: I64
    short: Mask
    minimal: Mask


class Buffer:
    """Bytes of messages, followed by `PADDING` zeros."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        size = len(octets)
        self.bytes = np.frombuffer(octets, dtype=np.uint8)
        # Overlapping words: a stride of 1 byte gives the 8 bytes from any position on.
        self._words = np.ndarray((size - 7,), "<u8", octets, 0, (1,))

    def words(self, places: I64) -> U64:
        """Return the 8 bytes from each place on as little-endian words, uint64[n]."""
        return self._words[places]

    def varints(self, places: I64) -> Varints:
        """Return the varint at each place."""
        word = self._words[places]
        # A clear continuation bit marks the last byte of a varint. `end_bit` is the lowest such
        # bit, and `used_bits` all bits up to it. The product adds up one per used byte.
        end = ~word & _ENDS
        end_bit = end & (~end + _ONE)
        used_bits = end_bit ^ (end_bit - _ONE)
        digits = word & used_bits & _DIGITS
        length = ((used_bits & _BYTES) * _BYTES >> np.uint64(56)).astype(np.int64)
        # Else its last digit is a zero too many.
        minimal = digits >= used_bits >> np.uint64(8)
        return Varints(_packed(digits), length, end != 0, minimal)


def _packed(digits: U64) -> U64:
    """Return the number whose 7-bit digits lie one per byte: remove the gaps between them."""
    largest = int(digits.max(initial=0))
    for largest_done, low, high, shift in _FOLDS:
        if largest > largest_done:
            digits = (digits & low) | ((digits & high) >> shift)
    return digits


# Steps that merge pairs of digits, then fours, then eights. Each is (largest value without a gap to
# close, mask of the bits that stay, mask of the bits that move, their shift). A step is skipped if
# no value needs it.
_FOLDS = [
    (few, np.uint64(low), ~np.uint64(low), np.uint64(shift))
    for few, low, shift in (
        (0xFF, 0x007F007F007F007F, 1),
        (0xFFFF, 0x00003FFF00003FFF, 2),
        (0xFFFFFFFF, 0x000000000FFFFFFF, 4),
    )
]


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
    """A part of each message: bytes `first` to `last` - 1, int64[n]; equal if it is absent."""

    first: I64
    last: I64


def cut(buffer: Buffer, spans: Spans) -> list[bytes]:
    """Return the bytes at each span."""
    return slices(buffer.octets, spans.first, spans.last)


def packed(strings: list[bytes]) -> tuple[Buffer, Spans]:
    """Return byte strings joined in one buffer, and the span of each; the inverse of `cut`."""
    sizes = np.fromiter(map(len, strings), np.int64, len(strings))
    last = np.cumsum(sizes)
    return Buffer(b"".join([*strings, bytes(PADDING)])), Spans(last - sizes, last)


class NumberValues(NamedTuple):
    """Values of a number attribute: the messages that have it and their values, both int64[m]."""

    row: I64
    value: I64


@dataclass(slots=True)
class Scan:
    """Fields of n node messages.

    Attributes:
        plain: messages that could be scanned, bool[n]; other fields are undefined for the rest.
        exact: messages without an empty, zero or overlong field, bool[n].
        id: uint64[n].
        type: int64[n].
        start_micros: uint64[n].
        duration_micros: uint64[n].
        control: packed varints.
        data: packed varints.
        texts: column -> the name, or the values of an IOInfo.
        inputs: bytes after the values in the IOInfo of the inputs.
        front: likewise of the outputs, then the attributes before the numbers.
        output_bytes: bytes of `front` that belong to the outputs, int64[n].
        numbers: column of `NUMBERS` -> values encoded exactly as onerank writes them.
        back: all bytes after the numbers.
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
    numbers: dict[str, NumberValues]
    back: Spans


class Cursor:
    """A position in each message; each read moves it past one field."""

    def __init__(self, buffer: Buffer, first: I64, last: I64) -> None:
        self.buffer, self.at, self.last = buffer, first.copy(), last
        self.plain = np.ones(len(first), dtype=bool)
        self.exact = np.ones(len(first), dtype=bool)

    def number(self, tag: int) -> U64:
        """Read a varint field; 0 if it is absent."""
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
        """Read a length-delimited field; return the span of its content."""
        is_present = self._begins(tag)
        if not is_present.any():
            return Spans(self.at.copy(), self.at.copy())
        read = self.buffer.varints(self.at + 1)
        # Clipped, so that a damaged length cannot overflow int64; `_stop` rejects it.
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        self.plain &= ~is_present | read.short
        self.exact &= ~is_present | (read.minimal & (size > 0))
        first = np.where(is_present, self.at + 1 + read.length, self.at)
        self.at = np.where(is_present, first + size, self.at)
        self._stop()
        return Spans(np.minimum(first, self.at), self.at.copy())

    def skip(self, beginning: "_Beginning") -> None:
        """Skip an attribute with this beginning.

        Only the first 8 bytes are compared; `decode_runs` checks the whole attribute.
        """
        word = self.buffer.words(self.at)
        is_present = (word & beginning.mask) == beginning.word
        if not is_present.any():
            return
        size = (word >> np.uint64(8)) & np.uint64(0x7F)
        self.at += np.where(is_present, 2 + size.astype(np.int64), 0)
        self._stop()

    def attribute(self, field: Field) -> NumberValues:
        """Read a number attribute in the messages that have it exactly as onerank writes it."""
        beginning, head = _BEGINNINGS[field.column], _HEADS[field.column]
        word = self.buffer.words(self.at)
        row = np.flatnonzero(((word & beginning.mask) == beginning.word) & (self.at < self.last))
        if not len(row):
            return NumberValues(row, row)
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
        return NumberValues(row, read.value[is_valid].astype(np.int64))

    def _stop(self) -> None:
        """Mark messages that end inside a field as not plain."""
        is_past_end = self.at > self.last
        if is_past_end.any():
            self.plain &= ~is_past_end
            self.at[is_past_end] = self.last[is_past_end]

    def _begins(self, tag: int) -> Mask:
        return (self.buffer.bytes[self.at] == tag) & (self.at < self.last)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """First 8 bytes of an attribute field below 128 bytes, and a mask without its size byte."""

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
    """Find the fields of the node messages at the spans `messages`."""
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
    """Return the values of an IOInfo (field 1), and the bytes after them."""
    message = cursor.span(tag)
    cursor_inside = Cursor(cursor.buffer, message.first, message.last)
    values = cursor_inside.span(0x0A)
    cursor.plain &= cursor_inside.plain
    cursor.exact &= cursor_inside.exact
    return values, Spans(values.last, message.last)
