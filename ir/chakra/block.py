"""Columns filled from node messages block by block."""

from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import FIELDS, GPU_OPS, IO_COLUMNS, Field
from onerank.ir.chakra.dependencies import Collector
from onerank.ir.chakra.et_def_pb2 import AttributeProto, IOInfo
from onerank.ir.chakra.pieces import inner_of, varint
from onerank.ir.chakra.scan import Scan, Spans, operands, scan
from onerank.ir.chakra.wire import UNREADABLE
from onerank.ir.chakra.words import Buffer, Mask, find
from onerank.ir.edges import I64
from onerank.ir.kinds import Collective
from onerank.ir.nodes import Nodes, default_of, dtype_of, is_text
from onerank.ir.strings import Codes, StringTable

I8 = npt.NDArray[np.int8]

FLAG, OP, REASONS = "is_cpu_op", "gpu_op", "data_dep_reasons"
_CLASSES: list[Field] = [
    Field(FLAG, FLAG, "bool_val"),
    Field(OP, OP, "string_val"),
    *FIELDS,
    Field(REASONS, REASONS, "bytes_val"),
]
"""Attributes of ours, in the order they are written."""

_HEADS = [inner_of(field.attribute, field.variant) for field in _CLASSES]
_NAMES = frozenset(field.attribute for field in _CLASSES)


def _begin(attribute: bytes) -> int:
    """Return the first word of an attribute, its name cut off at the word's end."""
    return int.from_bytes(attribute[: min(8, 2 + attribute[1])], "little")


_BEGINNINGS = np.array([_begin(head) for head in _HEADS], dtype=np.uint64)
_SORTED = np.argsort(_BEGINNINGS)
_BY_LENGTH = np.array([(1 << 8 * min(8, 2 + length)) - 1 for length in range(256)], dtype=np.uint64)
_MOSTLY_DISTINCT = ("input_values", "output_values")
_SPECS = {spec.name: spec for spec in fields(Nodes)}
_NONE = np.int8(-1)


class _Codes(dict[bytes, int]):
    """Codes of texts by their UTF-8; -1 for bytes that are not UTF-8."""

    def __init__(self, strings: StringTable) -> None:
        super().__init__()
        self._strings = strings

    def __missing__(self, octets: bytes) -> int:
        try:
            code = self._strings.intern(octets.decode())
        except UnicodeDecodeError:
            return -1
        self[octets] = code
        return code


class _Rests(dict[bytes, int]):
    """Places in `codes` by what follows the values in an IOInfo; -1 for what is not plain."""

    def __init__(self, strings: StringTable) -> None:
        super().__init__()
        self._strings = strings
        self.codes: list[tuple[int, int]] = []
        """Codes of shapes and types."""

    def __missing__(self, octets: bytes) -> int:
        try:
            info = IOInfo.FromString(octets)
        except UNREADABLE:
            return -1
        if info.values or info.SerializeToString() != octets:
            return -1
        self[octets] = len(self.codes)
        self.codes.append((self._strings.intern(info.shapes), self._strings.intern(info.types)))
        return self[octets]


class Columns:
    """Columns of `count` nodes.

    Attributes:
        plain: which nodes were read, bool[count]; of the others no column holds.
        exact: which hold nothing but what their columns say, in the way that we write it, but for
            what depends on several columns, bool[count].
        flag: `is_cpu_op`, int8[count]; -1 where absent.
        gpu_op: place in `GPU_OPS`, int8[count]; -1 where absent.
        type: node type, int64[count].
        start_micros: field of that name, uint64[count].
        duration_micros: field of that name, uint64[count].
        told: which nodes have the attributes `start_ns` and `duration_ns`.
        dependencies: what each node waits for.
    """

    def __init__(self, count: int, strings: StringTable) -> None:
        self.made: dict[str, npt.NDArray[Any]] = {}
        self.plain = np.zeros(count, dtype=bool)
        self.exact = np.zeros(count, dtype=bool)
        self.flag: I8 = np.full(count, -1, dtype=np.int8)
        self.gpu_op: I8 = np.full(count, -1, dtype=np.int8)
        self.type = np.zeros(count, dtype=np.int64)
        self.start_micros = np.zeros(count, dtype=np.uint64)
        self.duration_micros = np.zeros(count, dtype=np.uint64)
        self.told = {
            "start_ns": np.zeros(count, dtype=bool),
            "duration_ns": np.zeros(count, dtype=bool),
        }
        self.dependencies = Collector(count)
        self._count = count
        self._strings = strings
        self._codes = _Codes(strings)
        self._rests = _Rests(strings)
        self._foreign: dict[bytes, bool] = {}

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column, at its default where nothing was read."""
        made = self.made.get(name)
        if made is None:
            spec = _SPECS[name]
            default = 0 if is_text(spec) else default_of(spec)
            made = self.made[name] = np.full(self._count, default, dtype=dtype_of(spec))
        return made

    def add(self, begin: int, buffer: Buffer, messages: Spans) -> None:
        """Read the messages of the nodes from `begin` on."""
        found = scan(buffer, messages)
        rows = slice(begin, begin + len(messages.first))
        self.column("id")[rows] = found.id
        self.type[rows] = found.type
        self.start_micros[rows] = found.start_micros
        self.duration_micros[rows] = found.duration_micros
        block = _Block(self, begin, buffer, found)
        block.texts("name", np.arange(len(found.plain)), found.name)
        for side, spans in zip(("inputs", "outputs"), found.operands, strict=True):
            block.operands(side, spans)
        reasons = block.attributes()
        self.dependencies.add(begin, buffer, found, reasons)
        self.plain[rows] = found.plain
        self.exact[rows] = found.exact & found.plain

    def codes(self, buffer: Buffer, spans: Spans, *, repeat: bool) -> Codes:
        """Intern texts, most of which `repeat` or do not; -1 for one that is not UTF-8."""
        if not repeat:
            try:
                return self._strings.encode([octets.decode() for octets in _cut(buffer, spans)])
            except UnicodeDecodeError:
                pass  # one by one, to tell which
        return np.fromiter(map(self._codes.__getitem__, _cut(buffer, spans)), dtype=np.int32)

    def rests(self, buffer: Buffer, spans: Spans) -> tuple[Codes, Codes]:
        """Intern shapes and types of IOInfo messages; -1 for what protobuf is to read."""
        places = np.fromiter(map(self._rests.__getitem__, _cut(buffer, spans)), dtype=np.int64)
        both = np.array([*self._rests.codes, (-1, -1)], dtype=np.int32)
        return both[places, 0], both[places, 1]

    def is_foreign(self, octets: bytes) -> bool:
        """Whether an attribute is another tool's, and readable."""
        known = self._foreign.get(octets)
        if known is None:
            try:
                known = AttributeProto.FromString(octets).name not in _NAMES
            except UNREADABLE:
                known = False
            if len(self._foreign) < _REMEMBERED:
                self._foreign[octets] = known
        return known


_REMEMBERED = 1 << 16
"""Distinct attributes of other tools kept; those beyond (ids, times) hardly repeat."""


def _cut(buffer: Buffer, spans: Spans) -> list[bytes]:
    octets = buffer.octets
    pairs = zip(spans.first.tolist(), spans.last.tolist(), strict=True)
    return [octets[a:b] for a, b in pairs]


class _Block:
    """Reads one block into the columns."""

    def __init__(self, columns: Columns, begin: int, buffer: Buffer, found: Scan) -> None:
        self._columns, self._begin, self._buffer, self._found = columns, begin, buffer, found

    def texts(self, column: str, rows: I64, spans: Spans) -> None:
        """Intern the texts at `spans` of the block's `rows`."""
        repeat = column not in _MOSTLY_DISTINCT
        codes = self._columns.codes(self._buffer, spans, repeat=repeat)
        self._found.plain[rows[codes < 0]] = False
        self._columns.column(column)[rows + self._begin] = codes

    def operands(self, side: str, messages: Spans) -> None:
        """Read the IOInfo messages at `messages`, one per row or empty."""
        rows = np.flatnonzero(messages.last > messages.first)
        if not len(rows):
            return
        given = Spans(messages.first[rows], messages.last[rows])
        values, rest, plain, exact = operands(self._buffer, given)
        self._found.plain[rows[~plain]] = False
        self._found.exact[rows[~exact]] = False
        columns = IO_COLUMNS[side]
        self.texts(columns[0], rows, values)
        shapes, types = self._columns.rests(self._buffer, rest)
        self._found.plain[rows[shapes < 0]] = False
        for column, codes in zip(columns[1:], (shapes, types), strict=True):
            self._columns.column(column)[rows + self._begin] = codes

    def attributes(self) -> tuple[I64, Spans]:
        """Read the attributes; return rows and bytes of those that are `data_dep_reasons`."""
        found, buffer = self._found.attributes, self._buffer
        reasons = np.empty(0, np.int64), Spans(np.empty(0, np.int64), np.empty(0, np.int64))
        word = buffer.words(found.first)
        word &= _BY_LENGTH[(word >> np.uint64(8)) & np.uint64(0xFF)]
        place = np.minimum(np.searchsorted(_BEGINNINGS[_SORTED], word), len(_SORTED) - 1)
        which = np.where(_BEGINNINGS[_SORTED][place] == word, _SORTED[place], len(_HEADS))
        self._check_order(which)
        order = np.argsort(which.astype(np.uint8), kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(_HEADS) + 1)).tolist()
        begin = 0
        for field, head, end in zip(_CLASSES, _HEADS, ends, strict=False):
            some = order[begin:end]
            begin = end
            if not len(some):
                continue
            sure = find(buffer, found.first[some], head)
            if not sure.all():
                self._foreign(some[~sure])
                some = some[sure]
            rows, at = found.row[some], found.first[some] + len(head)
            spans = Spans(at, found.last[some])
            if field.column == REASONS:
                reasons = rows, self._sized(rows, spans)
            else:
                self._read(field, rows, spans)
        self._foreign(order[begin:])
        return reasons

    def _check_order(self, which: I64) -> None:
        """Note the nodes whose attributes are in another order than we write."""
        found = self._found
        newest = np.full(len(found.plain), -1, dtype=np.int64)
        turns = found.attributes.turns
        for begin, end in pairwise(turns):
            rows, here = found.attributes.row[begin:end], which[begin:end]
            found.exact[rows] &= here > newest[rows]
            newest[rows] = here

    def _foreign(self, which: I64) -> None:
        """Look at attributes that are not what we write: other tools', or ours in other types."""
        found = self._found.attributes
        spans = Spans(found.first[which], found.last[which])
        is_foreign = [self._columns.is_foreign(octets) for octets in _cut(self._buffer, spans)]
        rows = found.row[which]
        self._found.exact[rows] = False
        self._found.plain[rows[~np.array(is_foreign, dtype=bool)]] = False

    def _read(self, field: Field, rows: I64, spans: Spans) -> None:
        """Read the values of an attribute of ours."""
        if field.column == FLAG:
            values = self._buffer.bytes[spans.first]
            self._keep(self._columns.flag, rows, values, spans.last == spans.first + 1, values < 2)
        elif field.column == OP:
            values = self._words(spans, [*GPU_OPS])
            self._keep(self._columns.gpu_op, rows, values, values >= 0)
        elif field.words is not None:
            words = {int(member): member.name.lower() for member in field.words}
            values = self._words(spans, [words.get(n, "") for n in range(max(words) + 1)])
            self._keep(self._columns.column(field.column), rows, values, values >= 0)
            self._found.exact[rows[values == default_of(_SPECS[field.column])]] = False
        elif field.variant == "string_val":
            self.texts(field.column, rows, self._sized(rows, spans))
        else:
            self._read_numbers(field.column, rows, spans)

    def _keep(
        self, column: npt.NDArray[Any], rows: I64, values: npt.NDArray[Any], *good: Mask
    ) -> None:
        column[rows + self._begin] = values
        for which in good:
            self._found.plain[rows[~which]] = False

    def _read_numbers(self, column: str, rows: I64, spans: Spans) -> None:
        read = self._buffer.varints(spans.first)
        made = self._columns.column(column)
        highest = max(Collective) if column == "collective" else np.iinfo(made.dtype).max
        fits = read.value <= np.uint64(highest)
        ends = read.short & (spans.first + read.length == spans.last)
        values = np.where(fits, read.value, np.uint64(0)).astype(np.int64)
        self._keep(made, rows, values, fits, ends)
        self._found.exact[rows[~read.minimal | (values == default_of(_SPECS[column]))]] = False
        if column in self._columns.told:
            self._columns.told[column][rows + self._begin] = True

    def _words(self, spans: Spans, words: list[str]) -> I64:
        """Return which word lies at each span behind its length, -1 for none."""
        found = np.full(len(spans.first), -1, dtype=np.int64)
        for number, word in enumerate(words):
            octets = varint(len(word)) + word.encode()
            if word:
                same = find(self._buffer, spans.first, octets)
                found[same & (spans.last - spans.first == len(octets))] = number
        return found

    def _sized(self, rows: I64, spans: Spans) -> Spans:
        """Return the bytes behind a length, to the end of each span."""
        read = self._buffer.varints(spans.first)
        first = spans.first + read.length
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        good = read.short & (first + size == spans.last)
        self._found.plain[rows[~good]] = False
        self._found.exact[rows[~read.minimal | (size == 0)]] = False
        return Spans(np.minimum(first, spans.last), spans.last)
