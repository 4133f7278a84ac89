"""Columns filled from node messages block by block."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import SPECS
from onerank.ir.chakra.batch import FLAG, OP, REASONS, SHAPES, TYPES
from onerank.ir.chakra.dependencies import Collector, Dependencies
from onerank.ir.chakra.distinct import TextCodes
from onerank.ir.chakra.runs import Held, Read, Runs
from onerank.ir.chakra.scan import Spans, scan
from onerank.ir.chakra.words import Buffer, Mask
from onerank.ir.edges import I64
from onerank.ir.nodes import U64, default_of, dtype_of, is_text
from onerank.ir.strings import StringTable

I8 = npt.NDArray[np.int8]

_OF_ALL: dict[str, type[np.generic]] = {
    "id": np.uint64,
    "type": np.int64,
    "start_micros": np.uint64,
    "duration_micros": np.uint64,
    "name": np.int32,
    "input_values": np.int32,
    "output_values": np.int32,
    "inputs": np.int64,
    "front": np.int64,
    "back": np.int64,
    "output_bytes": np.int64,
    "plain": np.bool_,
    "exact": np.bool_,
}
"""What is read of every node."""


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
        self._octets: list[bytes] = []
        self._some: dict[str, list[tuple[I64, npt.NDArray[Any]]]] = {}
        self._texts = TextCodes(strings)
        self._runs = Runs(self._texts)
        self._dependencies = Collector()

    def add(self, buffer: Buffer, messages: Spans) -> None:
        """Read the messages of some more nodes."""
        found = scan(buffer, messages)
        texts = {column: self._texts.codes(buffer, at) for column, at in found.texts.items()}
        for codes in texts.values():
            found.plain &= codes >= 0
        for column, (rows, values) in found.numbers.items():
            if len(rows):
                self._some.setdefault(column, []).append((rows + self._count, values))
        self._dependencies.add(self._count, buffer, found)
        for part, values in {
            "id": found.id,
            "type": found.type,
            "start_micros": found.start_micros,
            "duration_micros": found.duration_micros,
            **texts,
            "inputs": self._runs.numbers(buffer, found.inputs),
            "front": self._runs.numbers(buffer, found.front),
            "output_bytes": found.output_bytes,
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
        for column in ("id", "name", "input_values", "output_values"):
            self.made[column] = joined[column].astype(dtype_of(SPECS[column]))
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
            self._spread(self._runs.read(), joined)

    def _spread(self, runs: Read, joined: dict[str, npt.NDArray[Any]]) -> None:
        """Fill columns with what the nodes' runs hold."""
        inputs, front, back = joined["inputs"], joined["front"], joined["back"]
        for numbers in (inputs, front, back):
            self.plain &= runs.plain[numbers]
        self.plain &= ~runs.has_attributes[inputs] & (runs.operand_bytes[back] == 0)
        self.plain &= runs.operand_bytes[front] == joined["output_bytes"]
        self.exact &= self.plain
        self.exact &= (runs.exact & runs.is_front)[front] & (runs.exact & runs.is_back)[back]
        self._octets = runs.reasons
        of_their_own = {FLAG: self.flag, OP: self.gpu_op, REASONS: self._reasons}
        for column, held in runs.held.items():
            if column in (SHAPES, TYPES):
                _fill(self.column(f"input_{column}"), held, inputs)
                _fill(self.column(f"output_{column}"), held, front)
                continue
            made = of_their_own.get(column)
            if made is None:
                made = self.column(column)
            for numbers in (front, back):
                has = _fill(made, held, numbers)
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
        made, exact = self._dependencies.join(self.plain, self._reasons, self._octets, rest, given)
        self.exact &= exact
        return made


def _fill(column: npt.NDArray[Any], held: Held, numbers: I64) -> Mask:
    """Fill in what runs of some numbers hold; return where, bool[n]."""
    has = held.has[numbers]
    if has.any():
        np.copyto(column, held.value[numbers], where=has, casting="unsafe")
    return has
