"""Parse each distinct run of fields of node messages once.

A run is the end of an IOInfo (shapes and types), the fields after it (attributes), or both. Many
nodes share equal runs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra.attributes import FIELDS, GPU_OPS, NUMBERS, SPECS, Field
from onerank.ir.chakra.bytes_columns import ATTRIBUTE, inner_of, varint
from onerank.ir.chakra.et_def_pb2 import AttributeProto
from onerank.ir.chakra.field_scan import Buffer, Cursor, Spans, cut, find, packed
from onerank.ir.chakra.framing import UNREADABLE
from onerank.ir.enums import Collective
from onerank.ir.nodes import StringTable, default_of, largest_of


class BytesInterner:
    """Numbers distinct byte strings, from `begin` on, in the order of their first occurrence."""

    def __init__(self, begin: int = 0) -> None:
        self._known = defaultdict[bytes, int](count(begin).__next__)

    def of(self, buffer: Buffer, spans: Spans) -> tuple[I64, list[bytes]]:
        """Return the number of the bytes at each span, and the newly numbered strings in order."""
        number_of, octets = self._known, buffer.octets
        known_count = len(number_of)
        places = zip(spans.first.tolist(), spans.last.tolist(), strict=True)
        assigned = [number_of[octets[a:b]] for a, b in places]
        numbers = np.fromiter(assigned, np.int64, len(assigned))
        # A dict keeps the order of insertion, so the new strings are its last entries.
        new_strings = list(islice(reversed(number_of), len(number_of) - known_count))
        return numbers, new_strings[::-1]

    def set(self, numbers: dict[bytes, int], following: int) -> None:
        """Set the numbers of some strings; new strings get numbers from `following` on."""
        self._known.update(numbers)
        self._known.default_factory = count(following).__next__

    def forget(self) -> None:
        """Forget all strings; a string that occurs again gets a new, higher number."""
        self._known.clear()


class TextCodes:
    """Maps UTF-8 texts to codes of a string table. Nothing else may add to the table meanwhile."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._numbers = BytesInterner()
        code_of: dict[bytes, int] = {}
        for code, text in enumerate(strings.values):
            try:
                code_of[text.encode()] = code
            except UnicodeEncodeError:
                continue  # not encodable, so no file can contain it
        self._numbers.set(code_of, len(strings))

    def codes(self, buffer: Buffer, spans: Spans) -> I64:
        """Return the code of the text at each span, -1 for a text that is not UTF-8."""
        codes, new_texts = self._numbers.of(buffer, spans)
        try:
            self._strings.add_new(list(map(bytes.decode, new_texts)))
        except UnicodeDecodeError:
            self._add_each(new_texts)
            return self._numbers.of(buffer, spans)[0]
        return codes

    def _add_each(self, texts: list[bytes]) -> None:
        """Add the texts that are UTF-8; the others get code -1."""
        codes: dict[bytes, int] = {}
        for octets in texts:
            try:
                self._strings.add_new([octets.decode()])
                codes[octets] = len(self._strings) - 1
            except UnicodeDecodeError:
                codes[octets] = -1
        # Code -1 marks such a text; protobuf then parses its node and reports the place.
        self._numbers.set(codes, len(self._strings))


# Runs and attributes beyond this number contain exact times or ids and hardly repeat. To remember
# them would cost memory and save no parsing.
_REMEMBERED = 1 << 16

SHAPES, TYPES = "shapes", "types"

FLAG, OP, REASONS = "is_cpu_op", "gpu_op", "data_dep_reasons"

# Attributes of ours, in the order they are written.
_CLASSES: list[Field] = [
    Field(FLAG, FLAG, "bool_val"),
    Field(OP, OP, "string_val"),
    *FIELDS,
    Field(REASONS, REASONS, "bytes_val"),
]

# An attribute's name is field 1 of AttributeProto, and libraries write fields in ascending order
# (protobuf, "Encoding"). So the encoded name and the tag of the value start the attribute.
_HEADS = [inner_of(field.attribute, field.variant) for field in _CLASSES]

_NAMES = frozenset(field.attribute for field in _CLASSES)

_COLUMNS = [field.column for field in _CLASSES]

FIRST_NUMBER, LAST_NUMBER = (_COLUMNS.index(NUMBERS[end].column) for end in (0, -1))
"""Positions in `_CLASSES` of the numbers that `scan` reads."""


def _begin(attribute: bytes) -> int:
    """Return the first 8 bytes of an attribute: tag, length of the name, start of the name.

    Bytes behind a shorter name are 0.
    """
    return int.from_bytes(attribute[: min(8, 2 + attribute[1])], "little")


_BEGINNINGS = np.array([_begin(head) for head in _HEADS], dtype=np.uint64)

_SORTED = np.argsort(_BEGINNINGS)

_BY_LENGTH = np.array([(1 << 8 * min(8, 2 + length)) - 1 for length in range(256)], dtype=np.uint64)

# Most attributes of a run that is parsed here; protobuf parses a run with more.
# `_split` takes one pass per attribute, so one odd run must not cause thousands of passes.
_MOST_ATTRIBUTES = 64


class _Attributes(NamedTuple):
    """The attributes of all runs: the first of each run, then the second of each, and so on.

    Attributes:
        row: index of the run, int64[m].
        first: index of the first byte, int64[m].
        last: index after the last byte, int64[m].
        turns: where the runs' first, second, ... attributes begin; ends with m.
    """

    row: I64
    first: I64
    last: I64
    turns: list[int]


class RunContext:
    """State that all batches of runs share.

    Attributes:
        reasons: distinct values of `data_dep_reasons`.
    """

    def __init__(self, texts: TextCodes) -> None:
        self.reasons: list[bytes] = []
        self._texts = texts
        self._numbers = BytesInterner()
        self._is_foreign: dict[bytes, bool] = {}

    def codes(self, buffer: Buffer, spans: Spans) -> I64:
        """Intern the texts at some spans; the code of a text that is not UTF-8 is -1."""
        return self._texts.codes(buffer, spans)

    def number_reasons(self, buffer: Buffer, spans: Spans) -> I64:
        """Return the index in `reasons` of the bytes at each span; new bytes are added."""
        numbers, new_values = self._numbers.of(buffer, spans)
        self.reasons += new_values
        return numbers

    def is_foreign(self, octets: bytes) -> bool:
        """Return whether an attribute parses and has a name that onerank does not read."""
        verdict = self._is_foreign.get(octets)
        if verdict is None:
            try:
                verdict = AttributeProto.FromString(octets).name not in _NAMES
            except UNREADABLE:
                verdict = False
            if len(self._is_foreign) < _REMEMBERED:
                self._is_foreign[octets] = verdict
        return verdict


class RunDecoder:
    """Parses the distinct runs of fields at some spans.

    Attributes:
        plain: runs that were parsed, bool[runs]; values exist for these only.
        exact: runs encoded exactly as onerank writes them, bool[runs].
        operand_bytes: size of the encoded shapes and types, int64[runs].
        has_attributes: runs with any attribute, bool[runs].
        lowest: position of a run's first onerank attribute in writing order, `len(_HEADS)` if it
            has none, int64[runs].
        highest: position of its last onerank attribute, -1 if it has none, int64[runs].
        values: column -> (runs that have it, int64[m]; their values, int64[m]). A value is a
            number, a text code, an index into `GPU_OPS`, or for `data_dep_reasons` an index into
            `reasons`.
    """

    def __init__(self, context: RunContext, buffer: Buffer, spans: Spans) -> None:
        count = len(spans.first)
        self._context, self._buffer = context, buffer
        self.values: dict[str, tuple[I64, I64]] = {}
        self.plain, self.exact = np.ones(count, dtype=bool), np.ones(count, dtype=bool)
        self.lowest, self.highest = np.full(count, len(_HEADS)), np.full(count, -1)
        attributes = self._read_operands(spans)
        self.operand_bytes = attributes.first - spans.first
        self.has_attributes = attributes.last > attributes.first
        self._attributes = self._split(attributes)
        self._read_all()

    def _read_operands(self, spans: Spans) -> Spans:
        """Read shapes (field 2 of IOInfo) and types (field 3); return the bytes after them."""
        cursor = Cursor(self._buffer, spans.first, spans.last)
        for column, tag in ((SHAPES, 0x12), (TYPES, 0x1A)):
            text = cursor.span(tag)
            rows = np.flatnonzero(text.last > text.first)
            codes = self._context.codes(self._buffer, Spans(text.first[rows], text.last[rows]))
            self.values[column] = rows, codes
            self.plain[rows[codes < 0]] = False
        self.plain &= cursor.plain & cursor.exact
        return Spans(cursor.at, spans.last)

    def _split(self, spans: Spans) -> _Attributes:
        """Find the attributes; a run that contains any other field is not plain."""
        rows: list[I64] = []
        parts: list[Spans] = []
        run = np.flatnonzero(spans.first < spans.last)
        first, last = spans.first[run], spans.last[run]
        while len(run):
            cursor = Cursor(self._buffer, first, last)
            is_attribute = cursor.buffer.bytes[first] == ord(ATTRIBUTE)
            attribute = cursor.span(ord(ATTRIBUTE))
            is_valid = cursor.plain & is_attribute & (len(rows) < _MOST_ATTRIBUTES)
            self.plain[run[~is_valid]] = False
            self.exact[run[~cursor.exact]] = False
            rows.append(run)
            parts.append(attribute)
            continues = is_valid & (cursor.at < last)
            run, first, last = run[continues], cursor.at[continues], last[continues]
        turns = (
            np.concatenate([[0], np.cumsum([len(attribute) for attribute in rows])])
            .astype(int)
            .tolist()
        )
        empty = [np.empty(0, dtype=np.int64)]
        return _Attributes(
            np.concatenate([*empty, *rows]),
            np.concatenate([*empty, *(attribute.first for attribute in parts)]),
            np.concatenate([*empty, *(attribute.last for attribute in parts)]),
            turns,
        )

    def _read_all(self) -> None:
        attributes, buffer = self._attributes, self._buffer
        words = buffer.words(attributes.first)
        # The second byte is the name's length; bytes behind a shorter name are cleared, as in
        # `_begin`.
        words &= _BY_LENGTH[(words >> np.uint64(8)) & np.uint64(0xFF)]
        place = np.minimum(np.searchsorted(_BEGINNINGS[_SORTED], words), len(_SORTED) - 1)
        field_index = np.where(_BEGINNINGS[_SORTED][place] == words, _SORTED[place], len(_HEADS))
        self._check_order(field_index)
        # numpy sorts 8-bit numbers by radix, in linear time; int64 would take a merge sort.
        order = np.argsort(field_index.astype(np.uint8), kind="stable")
        ends = np.cumsum(np.bincount(field_index, minlength=len(_HEADS) + 1)).tolist()
        start = 0
        for field, head, end in zip(_CLASSES, _HEADS, ends, strict=False):
            members = order[start:end]
            start = end
            if not len(members):
                continue
            is_ours = find(buffer, attributes.first[members], head)
            # The first 8 bytes match, but the rest of the name or the type of the value differs.
            if not is_ours.all():
                self._check_foreign(members[~is_ours])
                members = members[is_ours]
            rows, at = attributes.row[members], attributes.first[members] + len(head)
            self._read(field, rows, Spans(at, attributes.last[members]))
        self._check_foreign(order[start:])

    def _check_order(self, field_index: I64) -> None:
        """Clear `exact` for runs whose attributes are not in onerank's writing order."""
        for begin, end in pairwise(self._attributes.turns):
            rows, position = self._attributes.row[begin:end], field_index[begin:end]
            self.exact[rows] &= position > self.highest[rows]
            self.highest[rows] = np.maximum(self.highest[rows], position)
            self.lowest[rows] = np.minimum(self.lowest[rows], position)

    def _check_foreign(self, rows_to_check: I64) -> None:
        """Classify attributes that onerank does not write in this form.

        A run with another tool's attribute is not exact. A run with one of onerank's names and
        another type of value is not plain either: protobuf parses its node.
        """
        attributes = self._attributes
        spans = Spans(attributes.first[rows_to_check], attributes.last[rows_to_check])
        is_foreign = [self._context.is_foreign(octets) for octets in cut(self._buffer, spans)]
        rows = attributes.row[rows_to_check]
        self.exact[rows] = False
        self.plain[rows[~np.array(is_foreign, dtype=bool)]] = False

    def _read(self, field: Field, rows: I64, spans: Spans) -> None:
        """Read the values of one of onerank's attributes."""
        if field.column == FLAG:
            values = self._buffer.bytes[spans.first]
            self._keep(field, rows, values, spans.last == spans.first + 1, values < 2)
        elif field.column == OP:
            values = self._words(spans, [*GPU_OPS])
            self._keep(field, rows, values, values >= 0)
        elif field.column == REASONS:
            numbers = self._context.number_reasons(self._buffer, self._sized(rows, spans))
            self._keep(field, rows, numbers)
        elif field.words is not None:
            words = {int(member): member.name.lower() for member in field.words}
            values = self._words(spans, [words.get(n, "") for n in range(max(words) + 1)])
            self._keep(field, rows, values, values >= 0)
            # onerank leaves out a value that equals the default, so it did not write this one.
            self.exact[rows[values == default_of(SPECS[field.column])]] = False
        elif field.variant == "string_val":
            codes = self._context.codes(self._buffer, self._sized(rows, spans))
            self._keep(field, rows, codes, codes >= 0)
        else:
            self._read_numbers(field, rows, spans)

    def _keep(self, field: Field, rows: I64, values: npt.NDArray[Any], *valid_masks: Mask) -> None:
        self.values[field.column] = rows, values.astype(np.int64)
        for is_valid in valid_masks:
            self.plain[rows[~is_valid]] = False

    def _read_numbers(self, field: Field, rows: I64, spans: Spans) -> None:
        spec = SPECS[field.column]
        varints = self._buffer.varints(spans.first)
        is_collective = field.column == "collective"
        highest = max(Collective) if is_collective else largest_of(spec)
        fits = varints.value <= np.uint64(highest)
        ends = varints.short & (spans.first + varints.length == spans.last)
        values = np.where(fits, varints.value, np.uint64(0)).astype(np.int64)
        self._keep(field, rows, values, fits, ends)
        # As for words, onerank writes no defaults.
        self.exact[rows[~varints.minimal | (values == default_of(spec))]] = False

    def _words(self, spans: Spans, words: Sequence[str]) -> I64:
        """Return the index of the word at each span (after its length); -1 for none of them."""
        word_index = np.full(len(spans.first), -1, dtype=np.int64)
        for number, word in enumerate(words):
            octets = varint(len(word)) + word.encode()
            if word:
                same = find(self._buffer, spans.first, octets)
                word_index[same & (spans.last - spans.first == len(octets))] = number
        return word_index

    def _sized(self, rows: I64, spans: Spans) -> Spans:
        """Return the spans without their length prefix; a wrong length makes a run not plain."""
        read = self._buffer.varints(spans.first)
        first = spans.first + read.length
        # A damaged length may be near 2**64. Clipping keeps the sum within int64; 2**40 is still
        # beyond the end of every buffer.
        size = np.minimum(read.value, np.uint64(1 << 40)).astype(np.int64)
        is_valid = read.short & (first + size == spans.last)
        self.plain[rows[~is_valid]] = False
        self.exact[rows[~read.minimal | (size == 0)]] = False
        return Spans(np.minimum(first, spans.last), spans.last)


@dataclass(frozen=True, slots=True)
class RunColumn:
    """One column of the distinct runs.

    Attributes:
        has: which runs set the column, bool[runs].
        value: value in each of these, int64[runs]: a number, a text code, an index into
            `GPU_OPS`, or for `data_dep_reasons` an index into `RunContents.reasons`.
    """

    has: Mask
    value: I64


@dataclass(frozen=True, slots=True)
class RunContents:
    """Contents of the distinct runs, by run number.

    Attributes:
        plain: runs that were parsed, bool[runs]; values exist for these only.
        exact: runs encoded exactly as onerank writes them, bool[runs].
        operand_bytes: size of the encoded shapes and types, int64[runs].
        has_attributes: runs with any attribute, bool[runs].
        is_front: runs without an attribute that onerank writes after or among the numbers,
            bool[runs].
        is_back: runs without an attribute that onerank writes before or among the numbers,
            bool[runs].
        reasons: distinct values of `data_dep_reasons`.
        columns: column -> its values in the runs; columns that no run sets are absent.
    """

    plain: Mask
    exact: Mask
    operand_bytes: I64
    has_attributes: Mask
    is_front: Mask
    is_back: Mask
    reasons: list[bytes]
    columns: dict[str, RunColumn]


class Runs:
    """The distinct runs met so far."""

    def __init__(self, texts: TextCodes) -> None:
        self._context = RunContext(texts)
        self._numbers = BytesInterner()
        self._unread: list[bytes] = []
        self._batches: list[RunDecoder] = []

    def numbers(self, buffer: Buffer, spans: Spans) -> I64:
        """Return the number of the run at each span."""
        numbers, new_runs = self._numbers.of(buffer, spans)
        self._unread += new_runs
        if len(self._unread) > _REMEMBERED:
            # A run that recurs later gets a second number; that costs memory, but stays correct.
            self._read_new()
            self._numbers.forget()
        return numbers

    def read(self) -> RunContents:
        """Return the contents of all numbered runs."""
        self._read_new()
        batches = self._batches
        plain = np.concatenate([batch.plain for batch in batches])
        contents: dict[str, RunColumn] = {}
        begin = 0
        for batch in batches:
            for column, (runs, values) in batch.values.items():
                if column not in contents:
                    empty = np.zeros(len(plain), dtype=bool), np.zeros(len(plain), dtype=np.int64)
                    contents[column] = RunColumn(*empty)
                contents[column].has[runs + begin] = True
                contents[column].value[runs + begin] = values
            begin += len(batch.plain)
        return RunContents(
            plain,
            np.concatenate([batch.exact for batch in batches]),
            np.concatenate([batch.operand_bytes for batch in batches]),
            np.concatenate([batch.has_attributes for batch in batches]),
            np.concatenate([batch.highest for batch in batches]) < FIRST_NUMBER,
            np.concatenate([batch.lowest for batch in batches]) > LAST_NUMBER,
            self._context.reasons,
            contents,
        )

    def _read_new(self) -> None:
        if self._unread:
            self._batches.append(RunDecoder(self._context, *packed(self._unread)))
            self._unread = []
