"""Write a graph as a Chakra file.

Messages from another tool's file change only in the columns that changed since reading.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from onerank.ir.arrays import I64, U64, Mask
from onerank.ir.chakra.attributes import (
    ATTRIBUTES_OF,
    IO_COLUMNS,
    check_values,
    readers,
    variant_of,
)
from onerank.ir.chakra.decode_nodes import decode, not_a_node
from onerank.ir.chakra.dependencies import Dependencies, dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.et_def_pb2 import AttributeProto, Node
from onerank.ir.chakra.framing import UNREADABLE, Packed, frame
from onerank.ir.chakra.metadata import amend_job, decode_job, encode_job
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import Nodes
from onerank.ir.output_files import replacing

Changes = dict[str, Mask]
"""Column, or "dependencies" -> nodes whose value differs from the one in their message, bool[n]."""

_IO_FIELDS = {
    column: (side, name)
    for side, columns in IO_COLUMNS.items()
    for name, column in zip(("values", "shapes", "types"), columns, strict=True)
}

_FIELDS = {
    "id": ("id",),
    "name": ("name",),
    "kind": ("type",),
    "start_ns": ("start_time_micros",),
    "duration_ns": ("duration_micros",),
}

_READERS = readers(lambda text: 0)


def find_changes(nodes: Nodes, deps: Dependencies, read: Nodes, read_deps: Dependencies) -> Changes:
    """Return where columns and dependencies differ from those read from the messages (`read`)."""
    changes: Changes = {"dependencies": _differing_rows(deps, read_deps)}
    for spec in fields(Nodes):
        if spec.name != "foreign":
            changes[spec.name] = getattr(nodes, spec.name) != getattr(read, spec.name)
    return changes


def _differing_rows(left: Dependencies, right: Dependencies) -> Mask:
    counts = np.diff(left.offsets)
    is_different = counts != np.diff(right.offsets)
    # A row with another count shifts the ids of all later rows, so the arrays do not align.
    if is_different.any():
        for row in np.flatnonzero(~is_different).tolist():
            left_span = slice(left.offsets[row], left.offsets[row + 1])
            right_span = slice(right.offsets[row], right.offsets[row + 1])
            same = np.array_equal(left.ids[left_span], right.ids[right_span])
            is_different[row] = not (
                same and np.array_equal(left.reason[left_span], right.reason[right_span])
            )
        return is_different
    unequal = (left.ids != right.ids) | (left.reason != right.reason)
    return (
        np.bincount(np.repeat(np.arange(len(counts)), counts)[unequal], minlength=len(counts)) > 0
    )


def amend(message: bytes, fresh: bytes, changed: Iterable[str]) -> bytes:
    """Return `message` with the changed columns from `fresh` and everything else unchanged.

    Args:
        message: the node as another tool wrote it.
        fresh: the node encoded from its columns.
        changed: columns to replace, or "dependencies".
    """
    node, new = Node.FromString(message), Node.FromString(fresh)
    for column in changed:
        for name in _FIELDS.get(column, ()):
            setattr(node, name, getattr(new, name))
        if column in _IO_FIELDS:
            side, name = _IO_FIELDS[column]
            setattr(getattr(node, side), name, getattr(getattr(new, side), name))
        if column == "dependencies":
            node.ctrl_deps[:] = new.ctrl_deps
            node.data_deps[:] = new.data_deps
        for name in ATTRIBUTES_OF.get(column, ()):
            _take_over(node, new, name)
    return node.SerializeToString()


def _take_over(node: Node, new: Node, name: str) -> None:
    """Set attribute `name` of `node` to its value in `new`; delete it if `new` has none."""
    readable_places = [
        i for i, attribute in enumerate(node.attr) if attribute.name == name and _is_read(attribute)
    ]
    replacement = next((attribute for attribute in new.attr if attribute.name == name), None)
    if replacement is None:
        # From the end, so that the places still to be deleted stay valid.
        for index in reversed(readable_places):
            del node.attr[index]
    elif readable_places:
        # Readers take the last of several attributes with one name.
        _set_value(node.attr[readable_places[-1]], replacement)
    else:
        node.attr.append(replacement)


def _is_read(attribute: AttributeProto) -> bool:
    """Return whether the attribute's type and value fit its column, so that it is read."""
    variant = variant_of(attribute)
    if not variant:
        return False
    return _READERS[attribute.name][1](variant, getattr(attribute, variant)) is not None


def _set_value(attribute: AttributeProto, replacement: AttributeProto) -> None:
    """Set the value, in the attribute's present type if that type can hold it."""
    variant = variant_of(replacement)
    value: Any = getattr(replacement, variant)
    try:
        setattr(attribute, variant_of(attribute), value)
    except (TypeError, ValueError):
        setattr(attribute, variant, value)


# Nodes encoded at a time. Blocks bound the memory: each block reuses that of the one before.
_BLOCK = 16384


def write(graph: Graph, path: str | Path) -> None:
    """Write a Chakra `.et` file; it appears under its name only when complete.

    A node read from another tool's file keeps its message, except for columns that changed since.

    Raises:
        ChakraError: a value does not fit Chakra's schema.
        GraphError: two nodes share an id.
        OSError: the file cannot be written.
    """
    with replacing(Path(path)) as file:
        file.write(frame([_metadata(graph)]))
        file.writelines(_nodes(graph))


def _metadata(graph: Graph) -> bytes:
    if graph.foreign is None:
        return encode_job(graph.job)
    return amend_job(graph.foreign, decode_job(graph.foreign, "graph.foreign"), graph.job)


def _nodes(graph: Graph) -> Iterator[bytes]:
    """Yield the bytes of the node messages, each after its length, in chunks of whole nodes."""
    nodes = graph.nodes
    # Ascending ids, as onerank numbers nodes, are unique without a sort.
    if not (nodes.id[1:] > nodes.id[:-1]).all():
        _require_unique(nodes.id)
    deps = dependencies(nodes, graph.edges)
    messages = nodes.foreign.tolist()
    is_kept = np.zeros(len(nodes), dtype=bool)
    # `count` runs in C; only graphs with messages of another tool need the loop.
    if messages.count(None) < len(messages):
        is_kept[:] = [message is not None for message in messages]
    kept_rows = np.flatnonzero(is_kept)
    if not len(kept_rows):
        check_values(nodes, ~is_kept, ~is_kept)
        encoder = Encoder(nodes, deps, graph.strings)
        for begin in range(0, len(nodes), _BLOCK):
            rows = np.arange(begin, min(begin + _BLOCK, len(nodes)))
            yield from encoder.encode(rows).joined()
    else:
        yield frame(_amended(graph, deps, is_kept, kept_rows))


def _require_unique(ids: U64) -> None:
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise GraphError(
            f"{int(counts.max())} nodes have id {distinct[np.argmax(counts)]}; ids must be unique,"
            " renumber the nodes",
            code="graph-repeated-id",
        )


def _amended(graph: Graph, deps: Dependencies, is_kept: Mask, kept_rows: I64) -> list[bytes]:
    """Return the node messages of a graph that has messages of another tool.

    Raises:
        ChakraError: a message to change has a damaged field that no reader needs.
    """
    nodes = graph.nodes
    changes = _changes(graph, deps, kept_rows)
    # A time that is unchanged since reading stays as the other tool wrote it, even if negative.
    has_own_start, has_own_duration = ~is_kept, ~is_kept
    has_own_start[kept_rows] = changes["start_ns"]
    has_own_duration[kept_rows] = changes["duration_ns"]
    check_values(nodes, has_own_start, has_own_duration)
    any_change = np.any(list(changes.values()), axis=0)
    rows: I64 = np.sort(np.concatenate([np.flatnonzero(~is_kept), kept_rows[any_change]]))
    messages: list[bytes] = nodes.foreign.tolist()
    kept_messages: list[bytes] = [messages[row] for row in kept_rows.tolist()]
    encoded = Encoder(nodes, deps, graph.strings).encode(rows).cut()
    for row, message in zip(rows.tolist(), encoded, strict=True):
        messages[row] = message
    for place in np.flatnonzero(any_change).tolist():
        row = int(kept_rows[place])
        changed = [column for column, is_changed in changes.items() if is_changed[place]]
        try:
            messages[row] = amend(kept_messages[place], messages[row], changed)
        except UNREADABLE as error:
            # Reading skips a field that a later one of its kind overrides; protobuf does not.
            raise not_a_node(f"the read message of node {nodes.id[row]}", error) from error
    return messages


def _changes(graph: Graph, deps: Dependencies, kept_rows: I64) -> Changes:
    """Return what changed since reading in the nodes that have a message."""
    messages = graph.nodes.foreign[kept_rows].tolist()
    # A copy, because decoding adds texts and the graph's table is shared with other graphs.
    strings = graph.strings.copy()
    read = decode(Packed(messages, "graph.foreign"), strings)
    return find_changes(
        graph.nodes.take(kept_rows), _take(deps, kept_rows), read.nodes, read.dependencies
    )


def _take(deps: Dependencies, rows: I64) -> Dependencies:
    counts = np.diff(deps.offsets)[rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    shift: I64 = np.repeat(deps.offsets[rows] - offsets[:-1], counts)
    index = np.arange(len(shift)) + shift
    return Dependencies(offsets, deps.ids[index], deps.reason[index])
