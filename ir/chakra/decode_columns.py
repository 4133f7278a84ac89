"""Fill columns from blocks of node messages.

Ids, times and names differ from node to node and are read of each. `decode_runs` reads the fields
that many nodes share, once for all of these nodes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I8, I64, U64, Mask
from onerank.ir.chakra.attributes import SPECS
from onerank.ir.chakra.decode_runs import (
    FLAG,
    OP,
    REASONS,
    SHAPES,
    TYPES,
    RunColumn,
    RunContents,
    Runs,
    TextCodes,
)
from onerank.ir.chakra.dependencies import Dependencies, DependencyCollector
from onerank.ir.chakra.field_scan import Buffer, Spans, scan
from onerank.ir.nodes import StringTable, default_of, dtype_of

# Values that every node has, before the runs' contents are spread over the nodes.
_DENSE: dict[str, type[np.generic]] = {
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


class ColumnDecoder:
    """Columns of nodes; complete after `finish`.

    Attributes:
        columns: columns that at least one node sets.
        plain: nodes that were parsed, bool[n]; the columns hold no values of the other nodes.
        exact: nodes whose messages hold exactly what their columns say, encoded as onerank writes
            them, bool[n]. Properties that depend on several columns are checked elsewhere.
        flag: `is_cpu_op`, int8[n]; -1 where absent.
        gpu_op: index into `GPU_OPS`, int8[n]; -1 where absent.
        type: node type, int64[n].
        start_micros: field of that name, uint64[n].
        duration_micros: field of that name, uint64[n].
        has_ns: nodes that have the attribute `start_ns`, and those that have `duration_ns`.
    """

    def __init__(self, strings: StringTable) -> None:
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self._count = 0
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _DENSE}
        self._reason_bytes: list[bytes] = []
        self._sparse: dict[str, list[tuple[I64, npt.NDArray[Any]]]] = {}
        self._texts = TextCodes(strings)
        self._runs = Runs(self._texts)
        self._dependencies = DependencyCollector()

    def add(self, buffer: Buffer, messages: Spans) -> None:
        """Scan a block of node messages."""
        fields = scan(buffer, messages)
        texts = {column: self._texts.codes(buffer, at) for column, at in fields.texts.items()}
        for codes in texts.values():
            fields.plain &= codes >= 0
        for column, (rows, values) in fields.numbers.items():
            if len(rows):
                self._sparse.setdefault(column, []).append((rows + self._count, values))
        self._dependencies.add(self._count, buffer, fields)
        for part, values in {
            "id": fields.id,
            "type": fields.type,
            "start_micros": fields.start_micros,
            "duration_micros": fields.duration_micros,
            **texts,
            "inputs": self._runs.numbers(buffer, fields.inputs),
            "front": self._runs.numbers(buffer, fields.front),
            "output_bytes": fields.output_bytes,
            "back": self._runs.numbers(buffer, fields.back),
            "plain": fields.plain,
            "exact": fields.exact & fields.plain,
        }.items():
            self._parts[part].append(values)
        self._count += len(fields.plain)

    def finish(self) -> None:
        """Join the blocks, and copy the contents of each run to the nodes that have it."""
        joined: dict[str, npt.NDArray[Any]] = {
            name: np.concatenate([np.empty(0, dtype=_DENSE[name]), *parts])
            for name, parts in self._parts.items()
        }
        for column in ("id", "name", "input_values", "output_values"):
            self.columns[column] = joined[column].astype(dtype_of(SPECS[column]))
        self.type: I64 = joined["type"]
        self.plain: Mask = joined["plain"]
        self.exact: Mask = joined["exact"]
        self.start_micros: U64 = joined["start_micros"]
        self.duration_micros: U64 = joined["duration_micros"]
        self.has_ns = {
            "start_ns": np.zeros(self._count, dtype=bool),
            "duration_ns": np.zeros(self._count, dtype=bool),
        }
        for column, parts in self._sparse.items():
            column_values, is_set = self.column(column), self.has_ns.get(column)
            for rows, values in parts:
                column_values[rows] = values
                if is_set is not None:
                    is_set[rows] = True
        self.flag: I8 = np.full(self._count, -1, dtype=np.int8)
        self.gpu_op: I8 = np.full(self._count, -1, dtype=np.int8)
        self._reasons = np.full(self._count, -1, dtype=np.int64)
        if self._count:
            self._spread(self._runs.read(), joined)

    def _spread(self, runs: RunContents, joined: dict[str, npt.NDArray[Any]]) -> None:
        """Fill columns from the contents of the nodes' runs."""
        inputs, front, back = joined["inputs"], joined["front"], joined["back"]
        for numbers in (inputs, front, back):
            self.plain &= runs.plain[numbers]
        # All three kinds of run go through one decoder, which accepts operands and attributes
        # anywhere: operands belong to `inputs` and `front`, attributes to `front` and `back`.
        self.plain &= ~runs.has_attributes[inputs] & (runs.operand_bytes[back] == 0)
        self.plain &= runs.operand_bytes[front] == joined["output_bytes"]
        self.exact &= self.plain
        self.exact &= (runs.exact & runs.is_front)[front] & (runs.exact & runs.is_back)[back]
        self._reason_bytes = runs.reasons
        separate_columns = {FLAG: self.flag, OP: self.gpu_op, REASONS: self._reasons}
        for column, contents in runs.columns.items():
            if column in (SHAPES, TYPES):
                _fill(self.column(f"input_{column}"), contents, inputs)
                _fill(self.column(f"output_{column}"), contents, front)
                continue
            target = separate_columns.get(column)
            if target is None:
                target = self.column(column)
            # `back` second: of two attributes with one name, the last one in the message counts.
            for numbers in (front, back):
                has = _fill(target, contents, numbers)
                if column in self.has_ns:
                    self.has_ns[column] |= has

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column, created with its default value on first use."""
        values = self.columns.get(name)
        if values is None:
            spec = SPECS[name]
            values = np.full(self._count, default_of(spec), dtype=dtype_of(spec))
            self.columns[name] = values
        return values

    def dependencies(self, unparsed: I64, unparsed_dependencies: Dependencies) -> Dependencies:
        """Return the dependencies of all nodes.

        Args:
            unparsed: indices of the nodes that protobuf parsed instead, int64[m].
            unparsed_dependencies: dependencies of these nodes.
        """
        self._reasons[unparsed] = -1
        joined, exact = self._dependencies.join(
            self.plain, self._reasons, self._reason_bytes, unparsed, unparsed_dependencies
        )
        self.exact &= exact
        return joined


def _fill(column: npt.NDArray[Any], contents: RunColumn, numbers: I64) -> Mask:
    """Copy the values of each node's run into a column; return which nodes got one, bool[n]."""
    has = contents.has[numbers]
    if has.any():
        np.copyto(column, contents.value[numbers], where=has, casting="unsafe")
    return has
