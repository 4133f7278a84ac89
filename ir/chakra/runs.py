"""Runs of fields that many nodes have the same of: each distinct run is read once.

A run holds shapes and types of operands, or attributes, or both: what ends an IOInfo, and what
follows it in a node.
"""

from dataclasses import dataclass

import numpy as np

from onerank.ir.chakra.batch import FIRST_NUMBER, LAST_NUMBER, Batch, Known
from onerank.ir.chakra.distinct import Numbers, TextCodes, packed
from onerank.ir.chakra.scan import Spans
from onerank.ir.chakra.words import Buffer, Mask
from onerank.ir.edges import I64

_REMEMBERED = 1 << 16
"""Distinct runs kept; those beyond (ids, times) hardly repeat."""


@dataclass(frozen=True, slots=True)
class Held:
    """What runs hold of one attribute.

    Attributes:
        has: which runs have it, bool[runs].
        value: its value in each of these, int64[runs]: a number, a code of a text, a place in
            `GPU_OPS`, of `data_dep_reasons` the number of their bytes.
    """

    has: Mask
    value: I64


@dataclass(frozen=True, slots=True)
class Read:
    """What the distinct runs hold, by their numbers.

    Attributes:
        plain: which were read, bool[runs]; of the others no value holds.
        exact: which are as we write them, bool[runs].
        operand_bytes: how many bytes the shapes and types take, int64[runs].
        has_attributes: which have any attribute, bool[runs].
        is_front: which hold no attribute that we write behind or among the numbers, bool[runs].
        is_back: which hold no attribute that we write before or among the numbers, bool[runs].
        reasons: distinct values of `data_dep_reasons`.
        held: by column what the runs hold; a column that none has is left out.
    """

    plain: Mask
    exact: Mask
    operand_bytes: I64
    has_attributes: Mask
    is_front: Mask
    is_back: Mask
    reasons: list[bytes]
    held: dict[str, Held]


class Runs:
    """The distinct runs met so far."""

    def __init__(self, texts: TextCodes) -> None:
        self._known = Known(texts)
        self._numbers = Numbers()
        self._unread: list[bytes] = []
        self._batches: list[Batch] = []

    def numbers(self, buffer: Buffer, spans: Spans) -> I64:
        """Return the number of the run at each span."""
        found, new = self._numbers.of(buffer, spans)
        self._unread += new
        if len(self._unread) > _REMEMBERED:
            self._read_new()
            self._numbers.forget()
        return found

    def read(self) -> Read:
        """Return what the runs hold that have a number."""
        self._read_new()
        batches = self._batches
        plain = np.concatenate([batch.plain for batch in batches])
        held: dict[str, Held] = {}
        begin = 0
        for batch in batches:
            for column, (runs, values) in batch.values.items():
                if column not in held:
                    none = np.zeros(len(plain), dtype=bool), np.zeros(len(plain), dtype=np.int64)
                    held[column] = Held(*none)
                held[column].has[runs + begin] = True
                held[column].value[runs + begin] = values
            begin += len(batch.plain)
        return Read(
            plain,
            np.concatenate([batch.exact for batch in batches]),
            np.concatenate([batch.operand_bytes for batch in batches]),
            np.concatenate([batch.has_attributes for batch in batches]),
            np.concatenate([batch.highest for batch in batches]) < FIRST_NUMBER,
            np.concatenate([batch.lowest for batch in batches]) > LAST_NUMBER,
            self._known.reasons,
            held,
        )

    def _read_new(self) -> None:
        if self._unread:
            self._batches.append(Batch(self._known, *packed(self._unread)))
            self._unread = []
