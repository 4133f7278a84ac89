"""Decode the node messages of a Chakra file into columns and dependencies.

`decode` reads all messages at once (`decode_columns`). The messages that this does not understand,
as other tools may write them, are parsed by protobuf, one at a time (`decode_each`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, U8, U64, Mask
from onerank.ir.chakra.attributes import (
    GPU_OPS,
    IO_COLUMNS,
    NODE_TYPES,
    readers,
    variant_of,
)
from onerank.ir.chakra.decode_columns import ColumnDecoder
from onerank.ir.chakra.dependencies import NONE, Dependencies
from onerank.ir.chakra.et_def_pb2 import COMP_NODE, AttributeProto, IOInfo
from onerank.ir.chakra.framing import UNREADABLE, MessageSource, parse_raw_node
from onerank.ir.enums import COMMUNICATION, GPU_COMPUTE, Kind, Reason
from onerank.ir.errors import ChakraError
from onerank.ir.nodes import Nodes, StringTable, default_of, dtype_of

# Most distinct attributes that stay decoded; further ones (exact times, counts) hardly repeat.
_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class Decoded:
    """Contents of node messages.

    Attributes:
        nodes: columns, `foreign` not set.
        dependencies: ids that each node waits for.
        duration_micros: the field of that name, uint64[n].
        exact: messages that equal the encoded columns provided that `duration_micros` does,
            bool[n]. The other messages may or may not be equal.
    """

    nodes: Nodes
    dependencies: Dependencies
    duration_micros: U64
    exact: Mask


def decode(messages: MessageSource, strings: StringTable) -> Decoded:
    """Return the columns of node messages; protobuf parses only what `field_scan` cannot.

    An attribute whose type or value its column cannot hold leaves the column at its default.
    A time in microseconds over the range of int64 nanoseconds becomes the largest of these.

    Raises:
        ChakraError: a message is not a Node; begins with its place.
    """
    decoder = ColumnDecoder(strings)
    for buffer, spans in messages.blocks():
        decoder.add(buffer, spans)
    decoder.finish()
    unparsed = np.flatnonzero(~decoder.plain)
    _read_times(decoder)
    decoder.column("kind")[:] = _kinds(decoder)
    parsed_dependencies = NONE
    if len(unparsed):
        unparsed_messages = messages.take(unparsed)
        parsed, parsed_dependencies = decode_each(
            unparsed_messages, strings, lambda at: messages.place(int(unparsed[at]))
        )
        for spec in fields(Nodes):
            decoder.column(spec.name)[unparsed] = getattr(parsed, spec.name)
    nodes = Nodes.of(len(decoder.plain), **decoder.columns)
    dependencies = decoder.dependencies(unparsed, parsed_dependencies)
    exact = decoder.exact & _is_consistent(decoder, nodes)
    return Decoded(nodes, dependencies, decoder.duration_micros, exact)


def _read_times(decoder: ColumnDecoder) -> None:
    """Fill in times that are given only in microseconds."""
    for name, micros in (
        ("start_ns", decoder.start_micros),
        ("duration_ns", decoder.duration_micros),
    ):
        values, is_set = decoder.column(name), decoder.has_ns[name]
        values[~is_set] = nanoseconds(micros[~is_set])


def _kinds(decoder: ColumnDecoder) -> U8:
    # One more than the known types, for all others.
    by_type = np.full(max(NODE_TYPES.values()) + 2, Kind.INVALID, dtype=np.uint8)
    for kind, node_type in NODE_TYPES.items():
        by_type[node_type] = kind
    by_type[COMP_NODE] = Kind.KERNEL
    kinds = by_type[np.minimum(decoder.type, len(by_type) - 1)]
    computes = decoder.type == COMP_NODE
    for place, kind in enumerate(GPU_OPS.values()):
        kinds[computes & (decoder.gpu_op == place)] = kind
    # Last, as in `_Collected._kinds`: a host flag counts more than `gpu_op`.
    kinds[computes & (decoder.flag == 1)] = Kind.HOST_OP
    return kinds


def _is_consistent(decoder: ColumnDecoder, nodes: Nodes) -> Mask:
    """Return which nodes have the fields that onerank derives from several columns, bool[n]."""
    types = np.array([NODE_TYPES[kind] for kind in Kind])
    flags = np.full(len(Kind), -1)
    flags[[*GPU_COMPUTE, *COMMUNICATION]] = 0
    flags[Kind.HOST_OP] = 1
    gpu_ops = np.full(len(Kind), -1)
    for place, kind in enumerate(GPU_OPS.values()):
        gpu_ops[kind] = place
    start, duration = nodes.start_ns, nodes.duration_ns
    start_micros = decoder.start_micros.astype(np.int64)
    duration_micros = decoder.duration_micros.astype(np.int64)
    needs_attribute = (duration % 1000 != 0) | (duration // 1000 != duration_micros)
    return (
        (types[nodes.kind] == decoder.type)
        & (flags[nodes.kind] == decoder.flag)
        & (gpu_ops[nodes.kind] == decoder.gpu_op)
        & (start // 1000 == start_micros)
        & (decoder.has_ns["start_ns"] == (start % 1000 != 0))
        & (decoder.has_ns["duration_ns"] == needs_attribute)
    )


def decode_each(
    messages: Iterable[bytes], strings: StringTable, place: Callable[[int], str]
) -> tuple[Nodes, Dependencies]:
    """Parse node messages with protobuf; return their columns (`foreign` not set).

    An attribute whose type or value its column cannot hold leaves the column at its default.
    A time in microseconds over the range of int64 nanoseconds becomes the largest of these.

    Raises:
        ChakraError: a message is not a Node; begins with `place(its index)`.
    """
    collected = _Collected(strings)
    for index, message in enumerate(messages):
        try:
            collected.add(index, message)
        except UNREADABLE as error:
            raise not_a_node(place(index), error) from error
    return collected.nodes(), collected.dependencies()


def not_a_node(place: str, error: Exception) -> ChakraError:
    """Return the error for bytes that protobuf cannot parse as a Node."""
    reason = str(error)
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in reason:
        reason = f"a text in it is not UTF-8 ({reason})"
    return ChakraError(
        f"{place} is not a Chakra Node: {reason}; the file is damaged, or not a Chakra 1.0 trace",
        code="chakra-bad-node",
    )


class _Collected:
    """Column values of the messages parsed so far.

    `_rows` maps column -> (node index -> value), because most nodes set few columns.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._readers = readers(strings.intern)
        self._rows: dict[str, dict[int, Any]] = {}
        for column, _ in self._readers.values():
            self._rows[column] = {}
        for columns in IO_COLUMNS.values():
            self._rows.update({column: {} for column in columns})
        self._attributes: dict[bytes, tuple[dict[int, Any], Any] | None] = {}
        self._names: dict[bytes, int] = {}
        self._ids: list[int] = []
        self._name: list[int] = []
        self._type: list[int] = []
        self._start: list[int] = []
        self._duration: list[int] = []
        self._deps: list[int] = []
        self._ctrl: list[int] = []
        self._data: list[int] = []

    def add(self, index: int, message: bytes) -> None:
        node = parse_raw_node(message)
        self._ids.append(node.id)
        name = node.name
        code = self._names.get(name)
        if code is None:
            code = self._names[name] = self._strings.intern(name.decode())
        self._name.append(code)
        self._type.append(node.type)
        self._start.append(node.start_time_micros)
        self._duration.append(node.duration_micros)
        deps = self._deps
        before = len(deps)
        deps.extend(node.ctrl_deps)
        between = len(deps)
        deps.extend(node.data_deps)
        self._ctrl.append(between - before)
        self._data.append(len(deps) - between)
        if node.inputs:
            self._add_io(index, "inputs", node.inputs)
        if node.outputs:
            self._add_io(index, "outputs", node.outputs)
        attributes = self._attributes
        for attribute in node.attr:
            try:
                entry = attributes[attribute]
            except KeyError:
                entry = self._read(attribute)
            if entry is not None:
                entry[0][index] = entry[1]

    def _add_io(self, index: int, side: str, parts: list[bytes]) -> None:
        info = IOInfo()
        # A message field that occurs several times is merged (protobuf, "Encoding", "Last One
        # Wins"), so each part may hold some of the fields.
        for part in parts:
            info.MergeFromString(part)
        texts = (info.values, info.shapes, info.types)
        for column, text in zip(IO_COLUMNS[side], texts, strict=True):
            if text:
                self._rows[column][index] = self._strings.intern(text)

    def _read(self, message: bytes) -> tuple[dict[int, Any], Any] | None:
        """Return (rows of the column it fills, value), or None when it fills none."""
        attribute = AttributeProto.FromString(message)
        entry = None
        column_reader = self._readers.get(attribute.name)
        if column_reader is not None:
            variant = variant_of(attribute)
            value = column_reader[1](variant, getattr(attribute, variant)) if variant else None
            if value is not None:
                entry = (self._rows[column_reader[0]], value)
        if len(self._attributes) < _REMEMBERED:
            self._attributes[message] = entry
        return entry

    def nodes(self) -> Nodes:
        count = len(self._ids)
        columns: dict[str, npt.NDArray[Any]] = {
            "id": np.array(self._ids, dtype=np.uint64),
            "name": np.array(self._name, dtype=np.int32),
            "kind": self._kinds(),
            "start_ns": nanoseconds(self._start),
            "duration_ns": nanoseconds(self._duration),
        }
        for spec in fields(Nodes):
            rows = self._rows.get(spec.name)
            if rows:
                column = columns.get(spec.name)
                if column is None:
                    column = np.full(count, default_of(spec), dtype=dtype_of(spec))
                column[list(rows)] = np.array(list(rows.values()), dtype=column.dtype)
                columns[spec.name] = column
        return Nodes.of(count, **columns)

    def _kinds(self) -> U8:
        by_type = {node_type: kind for kind, node_type in NODE_TYPES.items()}
        by_type[COMP_NODE] = Kind.KERNEL
        kinds = [by_type.get(node_type, Kind.INVALID) for node_type in self._type]
        for index, text in self._rows["gpu_op"].items():
            if self._type[index] == COMP_NODE:
                kinds[index] = GPU_OPS.get(text, Kind.KERNEL)
        for index, flag in self._rows["is_cpu_op"].items():
            if flag and self._type[index] == COMP_NODE:
                # After `gpu_op`, which a host flag overrides.
                kinds[index] = Kind.HOST_OP
        return np.array(kinds, dtype=np.uint8)

    def dependencies(self) -> Dependencies:
        ctrl = np.array(self._ctrl, dtype=np.int64)
        data = np.array(self._data, dtype=np.int64)
        offsets = np.zeros(len(ctrl) + 1, dtype=np.int64)
        np.cumsum(ctrl + data, out=offsets[1:])
        kinds = np.tile(np.array([Reason.CONTROL, Reason.DATA], dtype=np.uint8), len(ctrl))
        reason = np.repeat(kinds, np.stack([ctrl, data], axis=1).ravel())
        for index, octets in self._rows["data_dep_reasons"].items():
            # Another tool may add or remove dependencies without updating onerank's attribute.
            if len(octets) == data[index] and all(octet < Reason.CONTROL for octet in octets):
                start = offsets[index] + ctrl[index]
                reason[start : offsets[index + 1]] = list(octets)
        return Dependencies(offsets, np.array(self._deps, dtype=np.uint64), reason)


def nanoseconds(micros: list[int] | U64) -> I64:
    """Return microseconds as nanoseconds, clipped to the largest int64."""
    largest = np.uint64(np.iinfo(np.int64).max)
    counts = np.array(micros, dtype=np.uint64)
    # Chakra's times are uint64 microseconds; above 2**63 / 1000 the product would wrap around.
    exact = np.minimum(counts, largest // np.uint64(1000)) * np.uint64(1000)
    return np.where(counts > largest // np.uint64(1000), largest, exact).astype(np.int64)
