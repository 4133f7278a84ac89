"""Find repeated rows and byte strings, so that each distinct one is processed once."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64
from onerank.ir.chakra.field_scan import PADDING, Buffer, Spans
from onerank.ir.string_table import StringTable

_ODD = np.uint64(0x9E3779B97F4A7C15)

_SHIFT = np.uint64(29)


def group_equal_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return one row of each distinct combination of values, and the combination of each row.

    Args:
        columns: integers, each [n].

    Returns:
        Rows, int64[distinct]; and an index into them for each row, int64[n].
    """
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed *= _ODD
        mixed ^= mixed >> _SHIFT
        mixed ^= column.astype(np.int64).view(np.uint64)
    order = np.argsort(mixed, kind="stable")  # faster where many are equal
    by_value = mixed[order]
    begins = np.ones(len(mixed), dtype=bool)
    np.not_equal(by_value[1:], by_value[:-1], out=begins[1:])
    first = order[begins]
    number = np.empty(len(mixed), dtype=np.int64)
    number[order] = np.cumsum(begins) - 1
    same_as = first[number]
    if all(np.array_equal(column, column[same_as]) for column in columns):
        return first, number
    everyone = np.arange(len(mixed))  # two combinations were mixed into one number
    return everyone, everyone


def cut(buffer: Buffer, spans: Spans) -> list[bytes]:
    """Return the bytes at each span."""
    octets = buffer.octets
    return [octets[a:b] for a, b in zip(spans.first.tolist(), spans.last.tolist(), strict=True)]


def packed(strings: list[bytes]) -> tuple[Buffer, Spans]:
    """Return byte strings one behind another, and where each lies: what `cut` takes apart."""
    sizes = np.fromiter(map(len, strings), np.int64, len(strings))
    last = np.cumsum(sizes)
    return Buffer(b"".join([*strings, bytes(PADDING)])), Spans(last - sizes, last)


class BytesInterner:
    """Numbers of distinct byte strings, from `begin` on in the order in which they are met."""

    def __init__(self, begin: int = 0) -> None:
        self._known = defaultdict[bytes, int](count(begin).__next__)

    def of(self, buffer: Buffer, spans: Spans) -> tuple[I64, list[bytes]]:
        """Return the number of what lies at each span, and what has one since now, in its order."""
        known, octets = self._known, buffer.octets
        before = len(known)
        places = zip(spans.first.tolist(), spans.last.tolist(), strict=True)
        found = [known[octets[a:b]] for a, b in places]
        numbers = np.fromiter(found, np.int64, len(found))
        new = list(islice(reversed(known), len(known) - before))
        return numbers, new[::-1]

    def set(self, numbers: dict[bytes, int], following: int) -> None:
        """Give some strings certain numbers, and those met next numbers from `following` on."""
        self._known.update(numbers)
        self._known.default_factory = count(following).__next__

    def forget(self) -> None:
        """Let strings met again get a number anew, behind all numbers given so far."""
        self._known.clear()


class TextCodes:
    """Maps UTF-8 texts to codes of a string table. Nothing else may add to the table meanwhile."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._numbers = BytesInterner()
        known: dict[bytes, int] = {}
        for code, text in enumerate(strings.values):
            try:
                known[text.encode()] = code
            except UnicodeEncodeError:
                continue  # no file holds it
        self._numbers.set(known, len(strings))

    def codes(self, buffer: Buffer, spans: Spans) -> I64:
        """Return the code of the text at each span, -1 for one that is not UTF-8."""
        codes, new = self._numbers.of(buffer, spans)
        try:
            self._strings.add_new(list(map(bytes.decode, new)))
        except UnicodeDecodeError:
            self._add_each(new)
            return self._numbers.of(buffer, spans)[0]
        return codes

    def _add_each(self, new: list[bytes]) -> None:
        """Add those of some texts that are UTF-8."""
        codes: dict[bytes, int] = {}
        for octets in new:
            try:
                self._strings.add_new([octets.decode()])
                codes[octets] = len(self._strings) - 1
            except UnicodeDecodeError:
                codes[octets] = -1
        self._numbers.set(codes, len(self._strings))
