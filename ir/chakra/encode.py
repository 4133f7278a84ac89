"""Columns into node messages."""

from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import (
    FIELDS,
    GPU_OPS,
    IO_COLUMNS,
    NODE_TYPES,
    Field,
    encode_attribute,
)
from onerank.ir.chakra.dependencies import Dependencies
from onerank.ir.chakra.pieces import ATTRIBUTE, Pieces, inner_of, nested, varint, varint_lengths
from onerank.ir.chakra.texts import Texts
from onerank.ir.edges import I64, Edges
from onerank.ir.errors import ChakraError
from onerank.ir.kinds import COMMUNICATION, GPU_COMPUTE, Collective, Evidence, Kind, Phase, Reason
from onerank.ir.nodes import U64, Nodes, default_of, is_text
from onerank.ir.strings import StringTable

_DEFAULTS = {spec.name: 0 if is_text(spec) else default_of(spec) for spec in fields(Nodes)}
_ENUMS: dict[str, type[IntEnum]] = {
    "kind": Kind,
    "collective": Collective,
    "evidence": Evidence,
    "phase": Phase,
}


def dependencies(nodes: Nodes, edges: Edges) -> Dependencies:
    """Return the ids each node waits for, control dependencies first, else in their order.

    Raises:
        ChakraError: a reason is not one of `Reason`.
    """
    bad = (edges.reason < min(Reason)) | (edges.reason > max(Reason))
    if bad.any():
        edge = int(np.argmax(bad))
        raise ChakraError(
            f"node {nodes.id[edges.target[edge]]}: edge from node {nodes.id[edges.source[edge]]}"
            f" has reason {edges.reason[edge]}; expected one of {_members(Reason)}"
        )
    ids, reason = nodes.id[edges.source], edges.reason.astype(np.uint8, copy=False)
    if (reason == Reason.CONTROL).any():
        order = np.lexsort((reason != Reason.CONTROL, edges.target))
        ids, reason = ids[order], reason[order]
    return Dependencies(edges.offsets, ids, reason)


def check_values(nodes: Nodes, own_start: npt.NDArray[Any], own_duration: npt.NDArray[Any]) -> None:
    """Refuse values that Chakra cannot hold.

    Args:
        nodes: columns to be written.
        own_start: which nodes' start is written (not kept from another tool's file), bool[n].
        own_duration: likewise for durations.

    Raises:
        ChakraError: a time is negative, or an enum column holds no member's number.
    """
    for column, written in (("start_ns", own_start), ("duration_ns", own_duration)):
        values = getattr(nodes, column)
        bad = (values < 0) & written
        if bad.any():
            index = int(np.argmax(bad))
            raise ChakraError(
                f"node {nodes.id[index]}: {column} is {values[index]}; Chakra's times are"
                " unsigned: shift the times so that none is negative"
            )
    for column, words in _ENUMS.items():
        values = getattr(nodes, column)
        bad = ~np.isin(values, np.array(list(words), dtype=values.dtype))
        if bad.any():
            index = int(np.argmax(bad))
            raise ChakraError(
                f"node {nodes.id[index]}: {column} is {values[index]};"
                f" expected one of {_members(words)}"
            )


def _members(words: type[IntEnum]) -> str:
    return ", ".join(f"{int(member)} ({member.name})" for member in words)


def whole_micros(nodes: Nodes) -> I64:
    """Return `duration_micros`, int64[n]: rounded so that no lane's sum drifts.

    Within a (stream, thread) lane, in node order, the durations up to and with each node add up
    to the exact sum rounded to the nearest microsecond (halves up). Whole ones stay as they are.
    """
    whole, rest = np.divmod(nodes.duration_ns, 1000)
    if not rest.any():
        return whole
    order = np.lexsort((nodes.thread, nodes.stream))  # stable: node order within a lane
    stream, thread = nodes.stream[order], nodes.thread[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
    until = np.cumsum(rest[order])
    before = until - rest[order]
    base = before[first][np.cumsum(first) - 1]
    whole[order] += (until - base + 500) // 1000 - (before - base + 500) // 1000
    return whole


class Encoder:
    """Encodes nodes from their columns alone.

    Args:
        nodes: columns of all nodes.
        deps: what each waits for.
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
        told = _count(deps, (deps.reason > 0) & (deps.reason < Reason.CONTROL))
        self._tells = told > 0

    def encode(self, rows: npt.NDArray[Any]) -> Pieces:
        """Return the messages of the nodes at indices `rows`.

        Negative times count as 0: only another tool's file may have them, and `amend` keeps them.
        """
        chosen, micros = self._nodes.take(rows), self._micros[rows]
        pieces, everyone = Pieces(len(rows)), np.arange(len(rows))
        _add_number(pieces, chosen.id, b"\x08")
        self._add_text(pieces, chosen, "name", lambda size: b"\x12" + varint(size))
        pieces.add_one_of(everyone, _TYPES, chosen.kind)
        self._add_dependencies(pieces, rows)
        _add_number(pieces, np.maximum(chosen.start_ns // 1000, 0).astype(np.uint64), b"\x30")
        _add_number(pieces, np.maximum(micros, 0).astype(np.uint64), b"\x38")
        for side, outer in (("inputs", b"\x42"), ("outputs", b"\x4a")):
            self._add_operands(pieces, chosen, side, outer)
        pieces.add_one_of(everyone, _KIND_ATTRIBUTES, chosen.kind)
        for field in FIELDS:
            values = getattr(chosen, field.column)
            if field.column == "duration_ns":
                written = (values % 1000 != 0) | (values // 1000 != micros)
            elif field.column == "start_ns":
                written = values % 1000 != 0
            else:
                written = values != _DEFAULTS[field.column]
            self._add_attribute(pieces, chosen, field, np.flatnonzero(written))
        self._add_reasons(pieces, rows)
        return pieces

    def _add_text(
        self, pieces: Pieces, chosen: Nodes, column: str, prefix: Callable[[int], bytes]
    ) -> None:
        codes = getattr(chosen, column)
        rows = np.flatnonzero(codes)
        pieces.add(rows, *self._texts.behind(codes[rows], prefix))

    def _add_dependencies(self, pieces: Pieces, rows: I64) -> None:
        """Append `ctrl_deps` and `data_deps`, packed varints behind their length."""
        offsets, middle = self._deps.offsets, self._middle[rows]
        for head, low, high in (
            (b"\x22", offsets[rows], middle),
            (b"\x2a", middle, offsets[rows + 1]),
        ):
            some = np.flatnonzero(high > low)
            counts = high[some] - low[some]
            shift: I64 = np.repeat(low[some] - np.cumsum(counts) + counts, counts)
            ids = self._deps.ids[shift + np.arange(len(shift))]
            pieces.add_lists(some, ids, counts, head)

    def _add_reasons(self, pieces: Pieces, rows: I64) -> None:
        """Append `data_dep_reasons` to the nodes with a reason other than DATA."""
        some = np.flatnonzero(self._tells[rows])
        first, last = self._middle[rows[some]], self._deps.offsets[rows[some] + 1]
        pieces.add_sized(some, last - first, _prefix("data_dep_reasons", "bytes_val"))
        pieces.add_slices(some, self._reasons, first, last)

    def _add_operands(self, pieces: Pieces, chosen: Nodes, side: str, outer: bytes) -> None:
        """Append an IOInfo to the nodes that have one of its texts."""
        sizes = np.zeros(len(chosen), dtype=np.int64)
        for column in IO_COLUMNS[side]:
            rows = np.flatnonzero(getattr(chosen, column))
            length = self._texts.sizes(getattr(chosen, column)[rows])
            sizes[rows] += 1 + varint_lengths(length) + length
        some = np.flatnonzero(sizes)
        pieces.add_sized(some, sizes[some], lambda size: outer + varint(size))
        for column, head in zip(IO_COLUMNS[side], (b"\x0a", b"\x12", b"\x1a"), strict=True):
            self._add_text(pieces, chosen, column, lambda size, head=head: head + varint(size))

    def _add_attribute(self, pieces: Pieces, chosen: Nodes, field: Field, rows: I64) -> None:
        values = getattr(chosen, field.column)
        if field.words is not None:
            words = [member.name.lower() for member in field.words]
            encoded = (encode_attribute(field.attribute, field.variant, word) for word in words)
            pieces.add_one_of(rows, [nested(message) for message in encoded], values[rows])
        elif field.variant == "string_val":
            self._add_text(pieces, chosen, field.column, _prefix(field.attribute, field.variant))
        else:
            unsigned = values[rows].astype(np.int64).view(np.uint64)
            pieces.add_messages(rows, unsigned, ATTRIBUTE, inner_of(field.attribute, field.variant))


def _count(deps: Dependencies, which: npt.NDArray[np.bool_]) -> I64:
    """Return how many of each node's dependencies are `which`, int64[n]."""
    until = np.concatenate([[0], np.cumsum(which)])
    return until[deps.offsets[1:]] - until[deps.offsets[:-1]]


def _add_number(pieces: Pieces, values: U64, head: bytes) -> None:
    """Append a field that is left out where it is 0."""
    rows = np.flatnonzero(values)
    pieces.add_numbers(rows, values[rows], head)


def _prefix(attribute: str, variant: str) -> Callable[[int], bytes]:
    """Return what makes the bytes before the text of an attribute, of the text's size."""
    inner = inner_of(attribute, variant)

    def prefix(size: int) -> bytes:
        before = inner + varint(size)
        return ATTRIBUTE + varint(len(before) + size) + before

    return prefix


_TYPES = [b"\x18" + varint(NODE_TYPES[kind]) if NODE_TYPES[kind] else b"" for kind in Kind]


def _kind_attributes(kind: Kind) -> bytes:
    """Return the attributes that tell kinds of one node type apart."""
    given: list[bytes] = []
    if kind is Kind.HOST_OP:
        given.append(encode_attribute("is_cpu_op", "bool_val", True))
    elif kind in (*GPU_COMPUTE, *COMMUNICATION):
        given.append(encode_attribute("is_cpu_op", "bool_val", False))
    given += [
        encode_attribute("gpu_op", "string_val", name)
        for name, of_kind in GPU_OPS.items()
        if of_kind is kind
    ]
    return b"".join(map(nested, given))


_KIND_ATTRIBUTES = [_kind_attributes(kind) for kind in Kind]
