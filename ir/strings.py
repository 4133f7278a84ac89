"""Interned strings: a column of int32 codes into one table per graph."""

from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int32]


class StringTable:
    """Append-only table of distinct strings; code 0 is the empty string."""

    __slots__ = ("_codes", "_values")

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: list[str] = [""]
        self._codes: dict[str, int] = {"": 0}
        for value in values:
            self.intern(value)

    def intern(self, value: str) -> int:
        """Return the code of `value`, adding it when it is new."""
        code = self._codes.get(value)
        if code is None:
            code = len(self._values)
            self._values.append(value)
            self._codes[value] = code
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
        return type(self)(self._values)

    def encode(self, values: Iterable[str]) -> Codes:
        """Intern every value; return their codes, int32[n]."""
        codes, strings = self._codes, self._values
        found: list[int] = []
        for value in values:
            code = codes.get(value)
            if code is None:
                code = codes[value] = len(strings)
                strings.append(value)
            found.append(code)
        return np.array(found, dtype=np.int32)

    def decode(self, codes: Codes) -> list[str]:
        """Return the strings of `codes`, in order."""
        values = self._values
        return [values[code] for code in codes.tolist()]
