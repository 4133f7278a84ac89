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
from onerank.ir.chakra.decode import Dependencies
from onerank.ir.chakra.et_def_pb2 import IOInfo
from onerank.ir.chakra.wire import make_raw_node
from onerank.ir.edges import I64, Edges
from onerank.ir.errors import ChakraError
from onerank.ir.kinds import COMMUNICATION, GPU_COMPUTE, Collective, Evidence, Kind, Phase, Reason
from onerank.ir.nodes import Nodes, default_of, is_text
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


def encode(
    nodes: Nodes, deps: Dependencies, strings: StringTable, rows: npt.NDArray[Any]
) -> list[bytes]:
    """Return the messages of the nodes at indices `rows`, from their columns alone.

    Negative times count as 0: only another tool's file may have them, and `amend` keeps them.

    Raises:
        ChakraError: a text has no UTF-8 form.
    """
    micros = whole_micros(nodes)[rows]
    chosen = nodes.take(rows)
    attributes = _attributes(chosen, micros, strings)
    names = _encoded(chosen.id, chosen.name, lambda code: strings[code].encode(), "name")
    types = [NODE_TYPES[kind] for kind in Kind]
    inputs = _io_infos(chosen, "inputs", strings)
    outputs = _io_infos(chosen, "outputs", strings)
    ids, reasons = deps.ids.tolist(), deps.reason.tobytes()
    controls = np.concatenate([[0], np.cumsum(deps.reason == Reason.CONTROL)])
    begin, end = deps.offsets[rows], deps.offsets[rows + 1]
    middle = begin + controls[end] - controls[begin]
    messages: list[bytes] = []
    for index, (number, kind, start, duration, low, mid, high) in enumerate(
        zip(
            chosen.id.tolist(),
            chosen.kind.tolist(),
            np.maximum(chosen.start_ns // 1000, 0).tolist(),
            np.maximum(micros, 0).tolist(),
            begin.tolist(),
            middle.tolist(),
            end.tolist(),
            strict=True,
        )
    ):
        why = reasons[mid:high]
        if any(why):
            attributes[index].append(encode_attribute("data_dep_reasons", "bytes_val", why))
        node = make_raw_node(
            id=number,
            name=names[index],
            type=types[kind],
            ctrl_deps=ids[low:mid],
            data_deps=ids[mid:high],
            start_time_micros=start,
            duration_micros=duration,
            inputs=inputs[index],
            outputs=outputs[index],
            attr=attributes[index],
        )
        messages.append(node.SerializeToString())
    return messages


def _attributes(nodes: Nodes, micros: I64, strings: StringTable) -> list[list[bytes]]:
    """Return each node's attributes in their order, without `data_dep_reasons`."""
    host = encode_attribute("is_cpu_op", "bool_val", True)
    device = encode_attribute("is_cpu_op", "bool_val", False)
    start: dict[int, list[bytes]] = {kind: [] for kind in Kind}
    start[Kind.HOST_OP] = [host]
    for kind in (*GPU_COMPUTE, *COMMUNICATION):
        start[kind] = [device]
    for name, kind in GPU_OPS.items():
        start[kind] = [device, encode_attribute("gpu_op", "string_val", name)]
    made = [start[kind].copy() for kind in nodes.kind.tolist()]
    for field in FIELDS:
        values = getattr(nodes, field.column)
        if field.column == "duration_ns":
            written = (values % 1000 != 0) | (values // 1000 != micros)
        elif field.column == "start_ns":
            written = values % 1000 != 0
        else:
            written = values != _DEFAULTS[field.column]
        rows = np.flatnonzero(written)
        encoded = _encoded(nodes.id[rows], values[rows], _encoder(field, strings), field.attribute)
        for row, attribute in zip(rows.tolist(), encoded, strict=True):
            made[row].append(attribute)
    return made


def _encoder(field: Field, strings: StringTable) -> Callable[[int], bytes]:
    name, variant, words = field.attribute, field.variant, field.words
    if words is not None:
        return lambda value: encode_attribute(name, variant, words(value).name.lower())
    if variant == "string_val":
        return lambda code: encode_attribute(name, variant, strings[code])
    return lambda value: encode_attribute(name, variant, value)


def _encoded(
    ids: npt.NDArray[Any],
    values: npt.NDArray[Any],
    encode_one: Callable[[int], bytes],
    attribute: str,
) -> list[bytes]:
    """Encode a column, each distinct value once."""
    distinct, places = np.unique(values, return_inverse=True)
    made: list[bytes] = []
    for value in distinct.tolist():
        try:
            made.append(encode_one(value))
        except ValueError as error:
            node = ids[int(np.argmax(values == value))]
            raise _not_unicode(node, attribute, error) from error
    return [made[place] for place in places.tolist()]


def _not_unicode(node: Any, attribute: str, error: ValueError) -> ChakraError:
    return ChakraError(
        f"node {node}: {attribute} has no UTF-8 form ({error}); replace that character"
    )


def _io_infos(nodes: Nodes, side: str, strings: StringTable) -> list[list[bytes]]:
    """Return each node's IOInfo message, in a list that is empty when there is none."""
    columns = [getattr(nodes, column) for column in IO_COLUMNS[side]]
    made: dict[tuple[int, int, int], list[bytes]] = {(0, 0, 0): []}
    infos: list[list[bytes]] = []
    for row, codes in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        info = made.get(codes)
        if info is None:
            values, shapes, types = (strings[code] for code in codes)
            try:
                message = IOInfo(values=values, shapes=shapes, types=types)
            except ValueError as error:
                raise _not_unicode(nodes.id[row], side, error) from error
            info = made[codes] = [message.SerializeToString()]
        infos.append(info)
    return infos
