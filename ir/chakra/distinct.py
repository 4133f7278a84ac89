"""Byte strings that occur many times, looked at once."""

import numpy as np

from onerank.ir.chakra.scan import Spans
from onerank.ir.chakra.words import Buffer
from onerank.ir.edges import I64
from onerank.ir.strings import Codes, StringTable


def cut(buffer: Buffer, spans: Spans) -> list[bytes]:
    """Return the bytes at each span."""
    octets = buffer.octets
    return [octets[a:b] for a, b in zip(spans.first.tolist(), spans.last.tolist(), strict=True)]


class Numbers:
    """Numbers of distinct byte strings, from 0 on in the order in which they are met.

    Attributes:
        count: how many were given.
    """

    def __init__(self, remembered: int) -> None:
        self.count = 0
        self._remembered = remembered
        self._known: dict[bytes, int] = {}

    def of(self, strings: list[bytes]) -> tuple[I64, list[bytes]]:
        """Return the number of each, and those that have it since now, in its order.

        Beyond what is remembered, a string may get a number anew.
        """
        known = self._known
        try:
            return np.fromiter(map(known.__getitem__, strings), np.int64, len(strings)), []
        except KeyError:
            pass
        if len(known) > self._remembered:
            known.clear()
        new = [octets for octets in dict.fromkeys(strings) if octets not in known]
        known.update(zip(new, range(self.count, self.count + len(new)), strict=True))
        self.count += len(new)
        return np.fromiter(map(known.__getitem__, strings), np.int64, len(strings)), new


class TextCodes:
    """Codes of texts in a table by their UTF-8; nobody else may add to the table meanwhile."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._known: dict[bytes, int] = {}
        for code, text in enumerate(strings.values):
            try:
                self._known[text.encode()] = code
            except UnicodeEncodeError:
                continue  # no file holds it

    def codes(self, texts: list[bytes]) -> Codes:
        """Return the code of each, -1 for one that is not UTF-8."""
        known = self._known
        try:
            return np.fromiter(map(known.__getitem__, texts), np.int32, len(texts))
        except KeyError:
            self._add([octets for octets in dict.fromkeys(texts) if octets not in known])
        return np.fromiter(map(known.__getitem__, texts), np.int32, len(texts))

    def _add(self, new: list[bytes]) -> None:
        begin = len(self._strings)
        try:
            self._strings.add_new([octets.decode() for octets in new])
        except UnicodeDecodeError:
            bad = [octets for octets in new if not _is_utf8(octets)]
            self._known.update(dict.fromkeys(bad, -1))
            new = [octets for octets in new if octets not in self._known]
            self._strings.add_new([octets.decode() for octets in new])
        self._known.update(zip(new, range(begin, begin + len(new)), strict=True))


def _is_utf8(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True
