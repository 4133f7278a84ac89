"""Encode columns as node messages.

Fields are written in ascending order of their numbers, as every protobuf library writes them;
`field_scan` reads only messages in that order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra.attributes import (
    BACK,
    FRONT,
    GPU_OPS,
    IO_COLUMNS,
    NODE_TYPES,
    NUMBERS,
    Field,
    encode_attribute,
    whole_micros,
)
from onerank.ir.chakra.bytes_columns import (
    ATTRIBUTE,
    NumberField,
    Pieces,
    Texts,
    inner_of,
    nested,
    slices,
    varint,
    varint_lengths,
)
from onerank.ir.chakra.dependencies import Dependencies
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata
from onerank.ir.enums import COMMUNICATION, GPU_COMPUTE, Kind, Reason
from onerank.ir.nodes import Nodes, StringTable, default_of


def header(version: str) -> bytes:
    """Return a metadata message with only a version."""
    return GlobalMetadata(version=version).SerializeToString()


def attribute(name: str, variant: str, value: object) -> bytes:
    """Return an attribute as a field of a node."""
    return nested(encode_attribute(name, variant, value))


class NodeWriter:
    """Encodes `count` nodes with the ids 0 to count - 1, without a `Nodes` table."""

    def __init__(self, count: int) -> None:
        self._pieces = Pieces(count)
        self._all_rows = np.arange(count)

    def write_heads(
        self,
        names: Sequence[str],
        types: npt.NDArray[np.integer],
        data_deps: Sequence[Sequence[int]],
        duration_micros: I64,
    ) -> None:
        """Write the fields before the attributes.

        Raises:
            UnicodeEncodeError: a name has no UTF-8 form.
        """
        pieces = self._pieces
        # proto3 omits fields with their default value: the id of the first node is 0.
        rows = self._all_rows[1:]
        pieces.add_numbers(rows, rows.astype(np.uint64), b"\x08")
        distinct = {name: place for place, name in enumerate(dict.fromkeys(names))}
        encoded = (name.encode() for name in distinct)
        table = [b"\x12" + varint(len(text)) + text if text else b"" for text in encoded]
        pieces.add_one_of(self._all_rows, table, np.array([distinct[name] for name in names]))
        pieces.add_one_of(self._all_rows, [b"\x18" + bytes((n,)) for n in range(8)], types)
        counts = np.array([len(awaited) for awaited in data_deps], dtype=np.int64)
        waiting = np.flatnonzero(counts)
        ids = np.array([*chain.from_iterable(data_deps)], dtype=np.uint64)
        pieces.add_lists(waiting, ids, counts[waiting], b"\x2a")
        lasting = np.flatnonzero(duration_micros)
        pieces.add_numbers(lasting, duration_micros[lasting].astype(np.uint64), b"\x38")

    def write_flag(self, name: str, *, value: bool) -> None:
        """Write a flag that has the same value on all nodes."""
        table = [attribute(name, "bool_val", value)]
        self._pieces.add_one_of(self._all_rows, table, np.zeros_like(self._all_rows))

    def write_integers(
        self, name: str, variant: str, rows: I64, values: npt.NDArray[np.integer]
    ) -> None:
        """Write an integer attribute of the nodes at `rows`."""
        # int32 and int64 fields encode negative numbers as 64-bit two's complement.
        unsigned = values.astype(np.int64).view(np.uint64)
        self._pieces.add_messages(rows, unsigned, ATTRIBUTE, inner_of(name, variant))

    def messages(self) -> list[bytes]:
        """Return the messages."""
        return self._pieces.cut()


_DEFAULTS = {spec.name: default_of(spec) for spec in fields(Nodes) if spec.name != "foreign"}

_ALWAYS = frozenset(("id", "name", "kind", "start_ns", "duration_ns"))

_IO_HEADS = {
    column: head
    for columns in IO_COLUMNS.values()
    for column, head in zip(columns, (b"\x0a", b"\x12", b"\x1a"), strict=True)
}

_BACK = [field.column for field in BACK]

Columns = dict[str, npt.NDArray[Any]]
"""Columns of the nodes being encoded; an absent column has its default on all of them."""


class Encoder:
    """Encodes nodes from their columns.

    Args:
        nodes: columns of all nodes.
        deps: dependencies of each node.
        strings: table of the text columns.

    Raises:
        ChakraError: a text has no UTF-8 form.
    """

    def __init__(self, nodes: Nodes, deps: Dependencies, strings: StringTable) -> None:
        self._nodes = nodes
        self._micros = whole_micros(nodes)
        self._texts = Texts(nodes, strings)
        self._deps = deps
        self._reasons = deps.reason.tobytes()
        self._middle = deps.offsets[:-1] + _count(deps, deps.reason == Reason.CONTROL)
        self._has_reasons = _count(deps, (deps.reason > 0) & (deps.reason < Reason.CONTROL)) > 0
        # A single reason goes with the other repeated attributes, which are encoded once per
        # distinct combination; only longer lists are encoded per node.
        single = np.flatnonzero(self._has_reasons & (deps.offsets[1:] - self._middle == 1))
        self._single_reason = np.zeros(len(nodes), dtype=np.uint8)
        self._single_reason[single] = deps.reason[self._middle[single]]
        self._has_reasons[single] = False
        self._used = [
            column
            for column, default in _DEFAULTS.items()
            if column in _ALWAYS or (getattr(nodes, column) != default).any()
        ]

    def encode(self, rows: npt.NDArray[Any]) -> Pieces:
        """Return the messages of the nodes at indices `rows`.

        Negative times count as 0: only another tool's file can have them, and `amend` keeps them.
        """
        # The order of the calls below is that of the field numbers in et_def.proto, then that of
        # `attributes.FIELDS`.
        chosen_rows = rows
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
            chosen_rows = slice(int(rows[0]), int(rows[-1]) + 1)  # no copies
        micros = self._micros[chosen_rows]
        chosen = {column: getattr(self._nodes, column)[chosen_rows] for column in self._used}
        pieces = Pieces(len(rows))
        pieces.add_fields([NumberField(chosen["id"], chosen["id"] != 0, b"\x08")])
        self._add_repeated(pieces, chosen, ["name", "kind"], self._add_head)
        single_dependency = self._add_dependencies(pieces, rows)
        pieces.add_fields(
            [
                single_dependency,
                _where_set(np.maximum(chosen["start_ns"] // 1000, 0), b"\x30"),
                _where_set(np.maximum(micros, 0), b"\x38"),
            ]
        )
        self._add_values(pieces, chosen, "inputs", b"\x42")
        self._add_repeated(pieces, chosen, ["input_shapes", "input_types"], self._add_operands)
        self._add_values(pieces, chosen, "outputs", b"\x4a")
        front = ["output_shapes", "output_types", "kind", "op", "stream", "thread"]
        self._add_repeated(pieces, chosen, front, self._add_front)
        pieces.add_fields([*_numbers(chosen, micros)])
        chosen["reason"] = self._single_reason[chosen_rows]
        self._add_repeated(pieces, chosen, [*_BACK, "reason"], self._add_back)
        self._add_reasons(pieces, rows)
        return pieces

    def _add_repeated(
        self,
        pieces: Pieces,
        chosen: Columns,
        columns: list[str],
        add: Callable[[Pieces, Columns], None],
    ) -> None:
        """Append fields that depend on `columns` only, encoded once per distinct combination."""
        present = [column for column in columns if column in chosen]
        if present:
            first, combination = group_equal_rows([chosen[column] for column in present])
            distinct = Pieces(len(first))
            add(distinct, {column: chosen[column][first] for column in present})
            pieces.add_one_of(np.arange(len(combination)), distinct.cut(), combination)

    def _add_head(self, pieces: Pieces, chosen: Columns) -> None:
        self._add_text(pieces, chosen, "name", lambda size: b"\x12" + varint(size))
        pieces.add_one_of(np.arange(len(chosen["kind"])), _TYPES, chosen["kind"])

    def _add_operands(self, pieces: Pieces, chosen: Columns) -> None:
        for column in chosen:
            head = _IO_HEADS[column]
            self._add_text(pieces, chosen, column, lambda size, head=head: head + varint(size))

    def _add_front(self, pieces: Pieces, chosen: Columns) -> None:
        self._add_operands(pieces, {name: chosen[name] for name in chosen if name in _IO_HEADS})
        all_rows = np.arange(len(chosen["kind"]))
        pieces.add_one_of(all_rows, _KIND_ATTRIBUTES, chosen["kind"])
        for field in FRONT:
            self._add_attribute(pieces, chosen, field)

    def _add_back(self, pieces: Pieces, chosen: Columns) -> None:
        for field in BACK:
            self._add_attribute(pieces, chosen, field)
        reason = chosen["reason"]
        pieces.add_one_of(np.arange(len(reason)), _REASONS, reason)

    def _add_text(
        self, pieces: Pieces, chosen: Columns, column: str, prefix: Callable[[int], bytes]
    ) -> None:
        """Append the texts of a column, each after `prefix(size)`."""
        rows = np.flatnonzero(chosen[column])
        texts, sizes = self._texts.of(chosen[column][rows])
        pieces.add_sized(rows, sizes, prefix)
        pieces.add(rows, texts, sizes)

    def _add_dependencies(self, pieces: Pieces, rows: I64) -> NumberField:
        """Append `ctrl_deps` and `data_deps` as packed varints.

        Returns the `data_deps` of nodes that have exactly one, as a field for `add_fields`.
        """
        offsets, middle = self._deps.offsets, self._middle[rows]
        self._add_lists(pieces, offsets[rows], middle, b"\x22", 1)
        end = offsets[rows + 1]
        self._add_lists(pieces, middle, end, b"\x2a", 2)
        is_single = end - middle == 1
        values = np.zeros(len(rows), dtype=np.uint64)
        values[is_single] = self._deps.ids[middle[is_single]]
        return NumberField(values, is_single, b"\x2a", b"")

    def _add_lists(self, pieces: Pieces, low: I64, high: I64, head: bytes, least: int) -> None:
        """Append each row's dependencies from `low` to `high` if there are at least `least`."""
        chosen_rows = np.flatnonzero(high - low >= least)
        if len(chosen_rows):
            counts = high[chosen_rows] - low[chosen_rows]
            shift: I64 = np.repeat(low[chosen_rows] - np.cumsum(counts) + counts, counts)
            pieces.add_lists(
                chosen_rows, self._deps.ids[shift + np.arange(len(shift))], counts, head
            )

    def _add_reasons(self, pieces: Pieces, rows: I64) -> None:
        """Append `data_dep_reasons` to nodes with several `data_deps` that are not all DATA."""
        chosen_rows = np.flatnonzero(self._has_reasons[rows])
        first, last = self._middle[rows[chosen_rows]], self._deps.offsets[rows[chosen_rows] + 1]
        pieces.add_sized(chosen_rows, last - first, _REASONS_PREFIX)
        pieces.add_each(chosen_rows, slices(self._reasons, first, last))

    def _add_values(self, pieces: Pieces, chosen: Columns, side: str, outer: bytes) -> None:
        """Append the beginning of an IOInfo: its tag, its length and its values.

        Values hardly repeat; shapes and types do and are appended by `_add_repeated`.
        """
        columns = [column for column in IO_COLUMNS[side] if column in chosen]
        if not columns:
            return
        total = np.zeros(len(chosen["id"]), dtype=np.int64)
        for column in columns:
            size = self._texts.sizes(chosen[column])
            total += np.where(size > 0, 1 + varint_lengths(size) + size, 0)
        chosen_rows = np.flatnonzero(total)
        pieces.add_sized(chosen_rows, total[chosen_rows], lambda size: outer + varint(size))
        if columns[0] == IO_COLUMNS[side][0]:
            head = _IO_HEADS[columns[0]]
            self._add_text(pieces, chosen, columns[0], lambda size: head + varint(size))

    def _add_attribute(self, pieces: Pieces, chosen: Columns, field: Field) -> None:
        values = chosen.get(field.column)
        if values is None:
            return
        # A reader gives absent attributes the same default, so they need no bytes.
        rows = np.flatnonzero(values != _DEFAULTS[field.column])
        if field.words is not None:
            pieces.add_one_of(rows, _word_attributes(field), values[rows])
        elif field.variant == "string_val":
            self._add_text(pieces, chosen, field.column, _prefix(field.attribute, field.variant))
        else:
            unsigned = values[rows].astype(np.int64).view(np.uint64)
            inner = inner_of(field.attribute, field.variant)
            pieces.add_messages(rows, unsigned, ATTRIBUTE, inner)


# Multiplier of the hash: 2**64 / the golden ratio, as in Fibonacci hashing.
_ODD = np.uint64(0x9E3779B97F4A7C15)

# Mixes high bits into low ones: the low bits of a product depend on low bits only.
_SHIFT = np.uint64(29)


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
    # The hash is not collision-free: compare the values themselves.
    representative = first[combination]
    if all(np.array_equal(column, column[representative]) for column in columns):
        return first, combination
    # Two combinations have the same hash: treat every row as distinct, which is always correct.
    all_rows = np.arange(len(hashes))
    return all_rows, all_rows


def _count(deps: Dependencies, is_counted: Mask) -> I64:
    """Return how many of each node's dependencies are in the mask `is_counted`, int64[n]."""
    counted_before = np.concatenate([[0], np.cumsum(is_counted)])
    return counted_before[deps.offsets[1:]] - counted_before[deps.offsets[:-1]]


def _where_set(values: I64, head: bytes) -> NumberField:
    """Return a number field that is absent for 0, as proto3 omits default values."""
    return NumberField(values.astype(np.uint64), values != 0, head)


def _numbers(chosen: Columns, micros: I64) -> Iterator[NumberField]:
    """Yield the number attributes, whose values mostly differ from node to node."""
    for field in NUMBERS:
        values = chosen.get(field.column)
        if values is None:
            continue
        # Chakra's times are whole microseconds. The attribute in ns is written only if they lose
        # something: a remainder, or a duration that `whole_micros` rounded up to keep lane sums.
        if field.column == "duration_ns":
            written = (values % 1000 != 0) | (values // 1000 != micros)
        elif field.column == "start_ns":
            written = values % 1000 != 0
        else:
            written = values != _DEFAULTS[field.column]
        unsigned = values.astype(np.int64).view(np.uint64)
        yield NumberField(unsigned, written, ATTRIBUTE, inner_of(field.attribute, field.variant))


@cache
def _word_attributes(field: Field) -> list[bytes]:
    """Return the attribute of each member of an enum."""
    words = [] if field.words is None else [member.name.lower() for member in field.words]
    return [nested(encode_attribute(field.attribute, field.variant, word)) for word in words]


@cache
def _prefix(attribute: str, variant: str) -> Callable[[int], bytes]:
    """Return a function from the size of an attribute's text to the bytes before that text."""
    inner = inner_of(attribute, variant)

    def prefix(size: int) -> bytes:
        before = inner + varint(size)
        return ATTRIBUTE + varint(len(before) + size) + before

    return prefix


_REASONS_PREFIX = _prefix("data_dep_reasons", "bytes_val")

# `data_dep_reasons` of a node with one dependency, by its reason; absent for DATA.
_REASONS = [_REASONS_PREFIX(1) + bytes((reason,)) if reason else b"" for reason in Reason]

_TYPES = [b"\x18" + varint(NODE_TYPES[kind]) if NODE_TYPES[kind] else b"" for kind in Kind]


def _kind_attributes(kind: Kind) -> bytes:
    """Return the attributes that distinguish kinds with the same node type."""
    encoded: list[bytes] = []
    if kind is Kind.HOST_OP:
        encoded.append(encode_attribute("is_cpu_op", "bool_val", True))
    elif kind in (*GPU_COMPUTE, *COMMUNICATION):
        encoded.append(encode_attribute("is_cpu_op", "bool_val", False))
    encoded += [
        encode_attribute("gpu_op", "string_val", name)
        for name, of_kind in GPU_OPS.items()
        if of_kind is kind
    ]
    return b"".join(map(nested, encoded))


_KIND_ATTRIBUTES = [_kind_attributes(kind) for kind in Kind]
