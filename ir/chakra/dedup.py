"""Find repeated rows and byte strings, so that each distinct one is processed once."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64
from onerank.ir.chakra.field_scan import PADDING, Buffer, Spans
from onerank.ir.nodes import StringTable

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier of the hash: 2**64 / the golden ratio, as in Fibonacci hashing."""

_SHIFT = np.uint64(29)
"""Mixes high bits into low ones: the low bits of a product depend on low bits only."""


def group_equal_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return one row of each distinct combination of values, and the combination of each row.

    Args:
        columns: integers, each [n].

    Returns:
        Rows, int64[distinct]; and an index into them for each row, int64[n].
    """
    hashes = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        hashes *= _ODD
        hashes ^= hashes >> _SHIFT
        hashes ^= column.astype(np.int64).view(np.uint64)
    # A stable sort is faster here, because many hashes are equal.
    order = np.argsort(hashes, kind="stable")
    by_value = hashes[order]
    is_first = np.ones(len(hashes), dtype=bool)
    np.not_equal(by_value[1:], by_value[:-1], out=is_first[1:])
    first = order[is_first]
    combination = np.empty(len(hashes), dtype=np.int64)
    combination[order] = np.cumsum(is_first) - 1
    representative = first[combination]
    if all(np.array_equal(column, column[representative]) for column in columns):
        return first, combination
    # Two combinations have the same hash: treat every row as distinct, which is always correct.
    all_rows = np.arange(len(hashes))
    return all_rows, all_rows


def cut(buffer: Buffer, spans: Spans) -> list[bytes]:
    """Return the bytes at each span."""
    octets = buffer.octets
    return [octets[a:b] for a, b in zip(spans.first.tolist(), spans.last.tolist(), strict=True)]


def packed(strings: list[bytes]) -> tuple[Buffer, Spans]:
    """Return byte strings joined in one buffer, and the span of each; the inverse of `cut`."""
    sizes = np.fromiter(map(len, strings), np.int64, len(strings))
    last = np.cumsum(sizes)
    return Buffer(b"".join([*strings, bytes(PADDING)])), Spans(last - sizes, last)


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
        new_strings = list(islice(reversed(number_of), len(number_of) - known_count))
        return numbers, new_strings[::-1]

    def set(self, numbers: dict[bytes, int], following: int) -> None:
        """Set the numbers of some strings; new strings get numbers from `following` on."""
        self._known.update(numbers)
        self._known.default_factory = count(following).__next__

    def forget(self) -> None:
        """Forget all strings; one that occurs again gets a new, higher number."""
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
        """Return the code of the text at each span, -1 for one that is not UTF-8."""
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
        self._numbers.set(codes, len(self._strings))
