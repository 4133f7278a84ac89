"""Where the fields of many node messages lie, found field by field for all of them at once.

This reads messages whose fields come in the order of their numbers, each once, as every protobuf
library writes them. Others are left to `decode`, which asks protobuf itself.

Attributes come in the order in which we write them: a few that hardly differ from node to node,
then numbers that mostly do, then others that hardly differ. The numbers are read here; the runs of
attributes before and behind them, and shapes and types of operands, are for `runs`, which reads
each distinct one once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.ir.chakra.attributes import FRONT, NUMBERS, SPECS, Field
from onerank.ir.chakra.pieces import ATTRIBUTE, inner_of
from onerank.ir.chakra.words import Buffer, Mask, find
from onerank.ir.edges import I64
from onerank.ir.nodes import U64, default_of, largest_of

_SKIPPED_NAMES = ("is_cpu_op", "gpu_op", *(field.attribute for field in FRONT))


class Spans(NamedTuple):
    """A part of each message: from the byte `first` up to `last`, int64[n]; equal where absent."""

    first: I64
    last: I64


class Found(NamedTuple):
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
    numbers: dict[str, Found]
    back: Spans


class Cursor:
    """A place in each message, that moves over one field after another."""

    def __init__(self, buffer: Buffer, first: I64, last: I64) -> None:
        self.buffer, self.at, self.last = buffer, first.copy(), last
        self.plain = np.ones(len(first), dtype=bool)
        self.exact = np.ones(len(first), dtype=bool)

    def number(self, tag: int) -> U64:
        """Read a varint field, 0 where it is absent."""
        here = self._begins(tag)
        if not here.any():
            return np.zeros(len(here), dtype=np.uint64)
        read = self.buffer.varints(self.at + 1)
        self.plain &= ~here | read.short
        self.exact &= ~here | (read.minimal & (read.value > 0))
        self.at += np.where(here, 1 + read.length, 0)
        self._stop()
        return np.where(here, read.value, np.uint64(0))

    def span(self, tag: int) -> Spans:
        """Read a field behind its length."""
        here = self._begins(tag)
        if not here.any():
            return Spans(self.at.copy(), self.at.copy())
        read = self.buffer.varints(self.at + 1)
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        self.plain &= ~here | read.short
        self.exact &= ~here | (read.minimal & (size > 0))
        first = np.where(here, self.at + 1 + read.length, self.at)
        self.at = np.where(here, first + size, self.at)
        self._stop()
        return Spans(np.minimum(first, self.at), self.at.copy())

    def skip(self, beginning: "_Beginning") -> None:
        """Pass over an attribute whose first bytes look like a certain one's."""
        word = self.buffer.words(self.at)
        here = (word & beginning.mask) == beginning.word
        if not here.any():
            return
        size = (word >> np.uint64(8)) & np.uint64(0x7F)
        self.at += np.where(here, 2 + size.astype(np.int64), 0)
        self._stop()

    def attribute(self, field: Field) -> Found:
        """Read a number's attribute where it is as we write it."""
        beginning, head = _BEGINNINGS[field.column], _HEADS[field.column]
        word = self.buffer.words(self.at)
        row = np.flatnonzero(((word & beginning.mask) == beginning.word) & (self.at < self.last))
        if not len(row):
            return Found(row, row)
        at, size = self.at[row] + 2, (word[row] >> np.uint64(8)).astype(np.uint8)
        read = self.buffer.varints(at + len(head))
        spec = SPECS[field.column]
        good = find(self.buffer, at, head)
        good &= read.short & read.minimal & (len(head) + read.length == size)
        good &= read.value <= np.uint64(largest_of(spec))
        if default_of(spec) >= 0:
            good &= read.value != default_of(spec)
        ends = at + size
        good &= ends <= self.last[row]
        row = row[good]
        self.at[row] = ends[good]
        return Found(row, read.value[good].astype(np.int64))

    def _stop(self) -> None:
        """Give up messages that end inside a field."""
        over = self.at > self.last
        if over.any():
            self.plain &= ~over
            self.at[over] = self.last[over]

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
    given = cursor.span(tag)
    inner = Cursor(cursor.buffer, given.first, given.last)
    values = inner.span(0x0A)
    cursor.plain &= inner.plain
    cursor.exact &= inner.exact
    return values, Spans(values.last, given.last)
