"""Interned strings: a column of int32 codes into one table per graph."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import count, islice
from typing import Self

import numpy as np

from onerank.ir.arrays import I32

Codes = I32


class StringTable:
    """Append-only table of distinct strings; code 0 is the empty string."""

    __slots__ = ("_codes", "_values")

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: list[str] = [""]
        self._codes = defaultdict[str, int]()
        """Codes of the strings indexed so far; `_index` adds the rest on first use."""
        for value in values:
            self.intern(value)

    def intern(self, value: str) -> int:
        """Return the code of `value`, adding it when it is new."""
        codes = self._index()
        code = codes.get(value)
        if code is None:
            code = len(self._values)
            self._values.append(value)
            codes[value] = code
        return code

    def __getitem__(self, code: int) -> str:
        return self._values[code]

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> tuple[str, ...]:
        """All strings, in the order of their codes."""
        return tuple(self._values)

    def copy(self) -> Self:
        """Return an independent table with the same codes."""
        table = type(self)()
        table._values = self._values.copy()
        return table

    def add_new(self, values: Iterable[str]) -> None:
        """Append strings that are known to be distinct and not in the table."""
        self._values.extend(values)

    def encode(self, values: Iterable[str]) -> Codes:
        """Intern every value; return their codes, int32[n]."""
        codes = self._index()
        known = len(codes)
        # A missing key then gets the next code in C, without a Python call per new string.
        codes.default_factory = count(known).__next__
        try:
            assigned = [codes[value] for value in values]
        finally:  # `values` may be an iterator that fails
            codes.default_factory = None
            newest_first = islice(reversed(codes), len(codes) - known)
            self._values.extend(reversed(list(newest_first)))
        return np.fromiter(assigned, np.int32, len(assigned))

    def decode(self, codes: Codes) -> list[str]:
        """Return the strings of `codes`, in order."""
        values = self._values
        return [values[code] for code in codes.tolist()]

    def _index(self) -> defaultdict[str, int]:
        """Return the codes of all strings; built on the first use."""
        codes = self._codes
        known = len(codes)
        if known < len(self._values):
            codes.update(zip(self._values[known:], range(known, len(self._values)), strict=True))
        return codes
