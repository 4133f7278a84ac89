"""Where the fields of many node messages lie, found field by field for all of them at once.

This reads messages whose fields come in the order of their numbers, each once, as every protobuf
library writes them. Others are left to `decode`, which asks protobuf itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.ir.chakra.words import Buffer, Mask
from onerank.ir.edges import I64
from onerank.ir.nodes import U64

_MOST_ATTRIBUTES = 64
"""A node with more is left to protobuf."""


class Spans(NamedTuple):
    """A part of each message: from the byte `first` up to `last`, int64[n]; equal where absent."""

    first: I64
    last: I64


class Found(NamedTuple):
    """Attributes: the message each belongs to, and its span, in the messages' order by `turn`.

    Attributes:
        row: index of the message, int64[m].
        first: first byte, int64[m].
        last: byte behind the last one, int64[m].
        turns: where the first, second ... attribute of all messages begins, and the end.
    """

    row: I64
    first: I64
    last: I64
    turns: list[int]


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
        name: text.
        control: packed varints.
        data: packed varints.
        operands: IOInfo of the inputs, and of the outputs.
        attributes: every AttributeProto.
    """

    plain: Mask
    exact: Mask
    id: U64
    name: Spans
    type: I64
    control: Spans
    data: Spans
    start_micros: U64
    duration_micros: U64
    operands: tuple[Spans, Spans]
    attributes: Found


class _Cursor:
    """A place in each message, that moves over one field after another."""

    def __init__(self, buffer: Buffer, first: I64, last: I64) -> None:
        self.buffer, self.at, self.last = buffer, first.copy(), last
        self.plain = np.ones(len(first), dtype=bool)
        self.exact = np.ones(len(first), dtype=bool)

    def number(self, tag: int) -> U64:
        """Read a varint field, 0 where it is absent."""
        here = self._begins(tag)
        read = self.buffer.varints(self.at + 1)
        self.plain &= ~here | read.short
        self.exact &= ~here | (read.minimal & (read.value > 0))
        self.at += np.where(here, 1 + read.length, 0)
        self._stop()
        return np.where(here, read.value, np.uint64(0))

    def span(self, tag: int) -> Spans:
        """Read a field behind its length."""
        here = self._begins(tag)
        read = self.buffer.varints(self.at + 1)
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        self.plain &= ~here | read.short
        self.exact &= ~here | (read.minimal & (size > 0))
        first = np.where(here, self.at + 1 + read.length, self.at)
        self.at = np.where(here, first + size, self.at)
        self._stop()
        return Spans(np.minimum(first, self.at), self.at.copy())

    def _stop(self) -> None:
        """Give up messages that end inside a field."""
        over = self.at > self.last
        self.plain &= ~over
        self.at[over] = self.last[over]

    def _begins(self, tag: int) -> Mask:
        return (self.buffer.bytes[self.at] == tag) & (self.at < self.last)


def scan(buffer: Buffer, messages: Spans) -> Scan:
    """Find the fields of the node messages that lie at `messages`."""
    cursor = _Cursor(buffer, messages.first, messages.last)
    made = Scan(
        plain=cursor.plain,
        exact=cursor.exact,
        id=cursor.number(0x08),
        name=cursor.span(0x12),
        type=np.minimum(cursor.number(0x18), np.uint64(1 << 32)).astype(np.int64),
        control=cursor.span(0x22),
        data=cursor.span(0x2A),
        start_micros=cursor.number(0x30),
        duration_micros=cursor.number(0x38),
        operands=(cursor.span(0x42), cursor.span(0x4A)),
        attributes=Found(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), [0]),
    )
    made.attributes = _attributes(cursor)
    return made


def operands(buffer: Buffer, messages: Spans) -> tuple[Spans, Spans, Mask, Mask]:
    """Find the values of IOInfo messages, what follows them, and which are plain and exact."""
    cursor = _Cursor(buffer, messages.first, messages.last)
    values = cursor.span(0x0A)
    return values, Spans(values.last, messages.last), cursor.plain, cursor.exact


def _attributes(cursor: _Cursor) -> Found:
    """Read the rest of each message, which must be attributes."""
    rows: list[I64] = []
    spans: list[Spans] = []
    row = np.flatnonzero(cursor.plain & (cursor.at < cursor.last))
    at, last = cursor.at[row], cursor.last[row]
    while len(row):
        inner = _Cursor(cursor.buffer, at, last)
        given = inner.buffer.bytes[at] == 0x52
        span = inner.span(0x52)
        good = inner.plain & given & (len(rows) < _MOST_ATTRIBUTES)
        cursor.plain[row[~good]] = False
        cursor.exact[row[~inner.exact]] = False
        rows.append(row)
        spans.append(span)
        more = good & (inner.at < last)
        row, at, last = row[more], inner.at[more], last[more]
    turns = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(int).tolist()
    none = [np.empty(0, dtype=np.int64)]
    return Found(
        np.concatenate([*none, *rows]),
        np.concatenate([*none, *(span.first for span in spans)]),
        np.concatenate([*none, *(span.last for span in spans)]),
        turns,
    )
