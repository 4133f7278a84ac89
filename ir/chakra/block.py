"""Columns filled from node messages block by block."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import IO_COLUMNS, SPECS
from onerank.ir.chakra.dependencies import Collector, Dependencies
from onerank.ir.chakra.distinct import Numbers, TextCodes, cut
from onerank.ir.chakra.et_def_pb2 import IOInfo
from onerank.ir.chakra.runs import FLAG, OP, REASONS, Runs
from onerank.ir.chakra.scan import Scan, Spans, operands, scan
from onerank.ir.chakra.wire import UNREADABLE
from onerank.ir.chakra.words import Buffer, Mask
from onerank.ir.edges import I64
from onerank.ir.nodes import U64, default_of, dtype_of, is_text
from onerank.ir.strings import StringTable

I8 = npt.NDArray[np.int8]

_REMEMBERED = 1 << 16
"""Distinct shapes and types kept by their bytes."""

_OF_ALL: dict[str, type[np.generic]] = {
    "id": np.uint64,
    "type": np.int64,
    "start_micros": np.uint64,
    "duration_micros": np.uint64,
    "front": np.int64,
    "back": np.int64,
    "plain": np.bool_,
    "exact": np.bool_,
}
"""What is read of every node."""


class _Rests:
    """What follows the values in IOInfo messages: codes of shapes and types."""

    def __init__(self, texts: TextCodes) -> None:
        self._texts = texts
        self._known = Numbers(_REMEMBERED)
        self._codes = np.empty((0, 2), dtype=np.int32)

    def codes(self, octets: list[bytes]) -> npt.NDArray[np.int32]:
        """Return the codes of each, int32[n, 2]; -1 for what protobuf is to read."""
        places, new = self._known.of(octets)
        if new:
            given = [_shapes_and_types(one) for one in new]
            texts = [text for pair in given for text in pair or (b"", b"")]
            read = self._texts.codes(texts).reshape(-1, 2)
            read[[pair is None for pair in given]] = -1
            self._codes = np.concatenate([self._codes, read])
        return self._codes[places]


def _shapes_and_types(octets: bytes) -> tuple[bytes, bytes] | None:
    """Return what an IOInfo holds; None where it is not written as we do, or holds more."""
    try:
        info = IOInfo.FromString(octets)
    except UNREADABLE:
        return None
    if info.values or info.SerializeToString() != octets:
        return None
    return info.shapes.encode(), info.types.encode()


class Columns:
    """Columns of nodes; complete after `finish`.

    Attributes:
        made: columns that some node does not leave at its default.
        plain: which nodes were read, bool[n]; of the others no column holds.
        exact: which hold nothing but what their columns say, in the way that we write it, but for
            what depends on several columns, bool[n].
        flag: `is_cpu_op`, int8[n]; -1 where absent.
        gpu_op: place in `GPU_OPS`, int8[n]; -1 where absent.
        type: node type, int64[n].
        start_micros: field of that name, uint64[n].
        duration_micros: field of that name, uint64[n].
        told: which nodes have the attributes `start_ns` and `duration_ns`.
    """

    def __init__(self, strings: StringTable) -> None:
        self.made: dict[str, npt.NDArray[Any]] = {}
        self._count = 0
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _OF_ALL}
        self._some: dict[str, list[tuple[I64, npt.NDArray[Any]]]] = {}
        self._texts = TextCodes(strings)
        self._rests = _Rests(self._texts)
        self._runs = Runs(self._texts)
        self._dependencies = Collector()

    def add(self, buffer: Buffer, messages: Spans) -> None:
        """Read the messages of some more nodes."""
        found = scan(buffer, messages)
        self._add_texts("name", np.arange(len(found.plain)), buffer, found.name, found)
        for side, spans in zip(IO_COLUMNS, found.operands, strict=True):
            self._add_operands(side, buffer, spans, found)
        for column, (rows, values) in found.numbers.items():
            self._add_some(column, rows, values)
        self._dependencies.add(self._count, buffer, found)
        for part, values in {
            "id": found.id,
            "type": found.type,
            "start_micros": found.start_micros,
            "duration_micros": found.duration_micros,
            "front": self._runs.numbers(buffer, found.front),
            "back": self._runs.numbers(buffer, found.back),
            "plain": found.plain,
            "exact": found.exact & found.plain,
        }.items():
            self._parts[part].append(values)
        self._count += len(found.plain)

    def finish(self) -> None:
        """Join what was read, and spread over the nodes what their runs of attributes hold."""
        joined: dict[str, npt.NDArray[Any]] = {
            name: np.concatenate([np.empty(0, dtype=_OF_ALL[name]), *parts])
            for name, parts in self._parts.items()
        }
        self.made["id"] = joined["id"]
        self.type: I64 = joined["type"]
        self.plain: Mask = joined["plain"]
        self.exact: Mask = joined["exact"]
        self.start_micros: U64 = joined["start_micros"]
        self.duration_micros: U64 = joined["duration_micros"]
        self.told = {
            "start_ns": np.zeros(self._count, dtype=bool),
            "duration_ns": np.zeros(self._count, dtype=bool),
        }
        for column, parts in self._some.items():
            made, told = self.column(column), self.told.get(column)
            for rows, values in parts:
                made[rows] = values
                if told is not None:
                    told[rows] = True
        self.flag: I8 = np.full(self._count, -1, dtype=np.int8)
        self.gpu_op: I8 = np.full(self._count, -1, dtype=np.int8)
        self._reasons = np.full(self._count, -1, dtype=np.int64)
        if self._count:
            self._spread(joined["front"], joined["back"])

    def _spread(self, front: I64, back: I64) -> None:
        runs = self._runs
        plain, exact = runs.plain, runs.exact
        self.plain &= plain[front] & plain[back]
        self.exact &= self.plain
        self.exact &= (exact & runs.is_front)[front] & (exact & runs.is_back)[back]
        of_their_own = {FLAG: self.flag, OP: self.gpu_op, REASONS: self._reasons}
        for column, held in runs.held().items():
            made = of_their_own.get(column)
            if made is None:
                made = self.column(column)
            for number in (front, back):
                has = held.has[number]
                if has.any():
                    made[has] = held.value[number[has]]
                    if column in self.told:
                        self.told[column] |= has

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column, at its default where nothing was read."""
        made = self.made.get(name)
        if made is None:
            spec = SPECS[name]
            default = 0 if is_text(spec) else default_of(spec)
            made = self.made[name] = np.full(self._count, default, dtype=dtype_of(spec))
        return made

    def dependencies(self, rest: I64, given: Dependencies) -> Dependencies:
        """Return what each node waits for; of the nodes `rest` it is given."""
        self._reasons[rest] = -1
        made, exact = self._dependencies.join(
            self.plain, self._reasons, self._runs.reasons, rest, given
        )
        self.exact &= exact
        return made

    def _add_some(self, column: str, rows: I64, values: npt.NDArray[Any]) -> None:
        """Keep the values of some rows of the block."""
        if len(rows):
            self._some.setdefault(column, []).append((rows + self._count, values))

    def _add_texts(self, column: str, rows: I64, buffer: Buffer, spans: Spans, found: Scan) -> None:
        """Intern the texts at `spans` of the block's `rows`."""
        codes = self._texts.codes(cut(buffer, spans))
        found.plain[rows[codes < 0]] = False
        self._add_some(column, rows, codes)

    def _add_operands(self, side: str, buffer: Buffer, messages: Spans, found: Scan) -> None:
        """Read the IOInfo messages at `messages`, one per row or empty."""
        rows = np.flatnonzero(messages.last > messages.first)
        if not len(rows):
            return
        given = Spans(messages.first[rows], messages.last[rows])
        values, rest, plain, exact = operands(buffer, given)
        found.plain[rows[~plain]] = False
        found.exact[rows[~exact]] = False
        columns = IO_COLUMNS[side]
        self._add_texts(columns[0], rows, buffer, values, found)
        codes = self._rests.codes(cut(buffer, rest))
        found.plain[rows[codes[:, 0] < 0]] = False
        for column, some in zip(columns[1:], codes.T, strict=True):
            self._add_some(column, rows, some)
