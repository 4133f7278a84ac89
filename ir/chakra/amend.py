"""Nodes of another tool's file: keep each message, change in it what a column changed."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import ATTRIBUTES_OF, IO_COLUMNS, readers, variant_of
from onerank.ir.chakra.dependencies import Dependencies
from onerank.ir.chakra.et_def_pb2 import AttributeProto, Node
from onerank.ir.nodes import Nodes

Changes = dict[str, npt.NDArray[np.bool_]]
"""Column, or "dependencies" -> which nodes' value is not the one their message holds, bool[n]."""

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
    """Compare columns, rows `nodes` with what their messages hold (`read`)."""
    changes: Changes = {"dependencies": _differing_rows(deps, read_deps)}
    for spec in fields(Nodes):
        if spec.name != "foreign":
            changes[spec.name] = getattr(nodes, spec.name) != getattr(read, spec.name)
    return changes


def _differing_rows(one: Dependencies, two: Dependencies) -> npt.NDArray[np.bool_]:
    counts = np.diff(one.offsets)
    differ = counts != np.diff(two.offsets)
    if differ.any():
        for row in np.flatnonzero(~differ).tolist():
            a = slice(one.offsets[row], one.offsets[row + 1])
            b = slice(two.offsets[row], two.offsets[row + 1])
            same = np.array_equal(one.ids[a], two.ids[b])
            differ[row] = not (same and np.array_equal(one.reason[a], two.reason[b]))
        return differ
    unequal = (one.ids != two.ids) | (one.reason != two.reason)
    return (
        np.bincount(np.repeat(np.arange(len(counts)), counts)[unequal], minlength=len(counts)) > 0
    )


def amend(message: bytes, fresh: bytes, changed: Iterable[str]) -> bytes:
    """Return `message` with the changed columns taken from `fresh`, all else as it was.

    Args:
        message: the node as another tool wrote it.
        fresh: the node as its columns alone are written.
        changed: columns to take over, or "dependencies".
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
    """Let the attribute read as `name` hold the value it has in `new`, or none as there."""
    readable = [i for i, given in enumerate(node.attr) if given.name == name and _is_read(given)]
    wanted = next((given for given in new.attr if given.name == name), None)
    if wanted is None:
        for index in reversed(readable):
            del node.attr[index]
    elif readable:
        _set_value(node.attr[readable[-1]], wanted)
    else:
        node.attr.append(wanted)


def _is_read(attribute: AttributeProto) -> bool:
    """Whether reading takes a column's value from the attribute."""
    variant = variant_of(attribute)
    if not variant:
        return False
    return _READERS[attribute.name][1](variant, getattr(attribute, variant)) is not None


def _set_value(attribute: AttributeProto, wanted: AttributeProto) -> None:
    """Set the value, in the type the attribute has already when that can hold it."""
    variant = variant_of(wanted)
    value: Any = getattr(wanted, variant)
    try:
        setattr(attribute, variant_of(attribute), value)
    except (TypeError, ValueError):
        setattr(attribute, variant, value)
