"""Which call a node is of, what launched it, and where its tensors are."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.work.classes import base_name
from onerank.annotate.work.shapes import Call, Operand, UnknownDtypeError
from onerank.ir import Graph, Reason

I64 = npt.NDArray[np.int64]

_DECODE = msgspec.json.Decoder(list[Any])
_TENSOR = re.compile(r'\[(\d+),(\d+),(\d+),\d+,\d+,"')
"""`[id, storage, offset, elements, bytes, device]`."""
_OPERANDS = ("input_shapes", "input_types", "output_shapes")


class Place(NamedTuple):
    """Where a tensor is: its id, that of its storage, and the first element's place there."""

    tensor: int
    storage: int
    offset: int


def calls_of(graph: Graph) -> Callable[[int], Call | None]:
    """Return the function from a node to its call, None where it has no tensors or unknown types.

    Each distinct text is read once.
    """
    nodes, strings = graph.nodes, graph.strings
    known = dict[tuple[int, ...], Call | None]()
    names = ("op", "input_shapes", "input_types", "output_shapes", "output_types")

    def call_of(node: int) -> Call | None:
        texts = tuple(int(getattr(nodes, name)[node]) for name in names)
        if texts not in known:
            op, shapes, types, out_shapes, out_types = (strings[code] for code in texts)
            try:
                call = Call.parse(base_name(op), (shapes, types), (out_shapes, out_types))
            except UnknownDtypeError:
                call = None
            known[texts] = call if call is not None and call.has_tensors else None
        return known[texts]

    return call_of


def launchers(graph: Graph) -> I64:
    """Return the node that launched each, -1 for none."""
    edges = graph.edges
    made = np.full(len(graph), -1, dtype=np.int64)
    launches = edges.reason == Reason.LAUNCH
    made[edges.target[launches]] = edges.source[launches]
    return made


def tells_tensors(text: str) -> bool:
    """Return whether the text of a node's values has the ids of a tensor."""
    return _TENSOR.search(text) is not None


def places_of(operands: tuple[Operand, ...], text: str) -> tuple[Place | None, ...]:
    """Return where each tensor is, laid out flat; None where it is not told."""
    told = _TENSOR.findall(text)
    if len(told) == sum(map(len, filter(None, operands))):  # each tells, as nearly always
        return tuple([Place(int(id_), int(storage), int(at)) for id_, storage, at in told])
    values = _DECODE.decode(text) if text else []
    if len(values) != len(operands):
        return (None,) * sum(len(operand or ()) for operand in operands)
    found: list[Place | None] = []
    for operand, value in zip(operands, values, strict=True):
        if operand is not None:
            found += _ids(value, len(operand))
    return tuple(found)


def _ids(value: Any, count: int) -> list[Place | None]:
    """Read `[id, storage, offset, elements, bytes, device]`, or a list of them."""
    if not isinstance(value, list) or not value:
        return [None] * count
    if isinstance(value[0], list):
        rows = cast("list[Any]", value)
        return [_id(one) for one in rows] if len(rows) == count else [None] * count
    return [_id(value)] if count == 1 else [None] * count


def _id(value: Any) -> Place | None:
    parts = cast("list[Any]", value) if isinstance(value, list) else []
    if len(parts) != 6 or not isinstance(parts[1], int):
        return None
    return Place(*map(int, parts[:3]))


def same_call(graph: Graph, rows: I64, others: I64) -> npt.NDArray[np.bool_]:
    """Return whether nodes have the same operands as others, bool[n]."""
    columns = [getattr(graph.nodes, name) for name in _OPERANDS]
    return np.logical_and.reduce([column[rows] == column[others] for column in columns])


def in_order(graph: Graph) -> I64:
    """Return the nodes with operands by start, what an operator launched right after it."""
    nodes = graph.nodes
    has = np.flatnonzero((nodes.input_shapes > 0) | (nodes.output_shapes > 0))
    by = launchers(graph)[has]
    start = nodes.start_ns[np.where(by >= 0, by, has)]
    return has[np.lexsort((by >= 0, np.where(by >= 0, by, has), start))]
