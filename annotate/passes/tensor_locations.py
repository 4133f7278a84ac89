"""The call, launch and storage location of the tensors of each node."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from onerank.annotate.op_costs.op_classes import base_name
from onerank.annotate.op_costs.operands import Call, Operand, UnknownDtypeError
from onerank.annotate.passes.parse_tensor_ids import parse_tensor_ids
from onerank.ir import Graph
from onerank.ir.arrays import I64, Mask

_DECODE = msgspec.json.Decoder(list[Any])

# The start of a recorded tensor, `[id, storage, offset, elements, bytes, device]`.
_TENSOR = re.compile(r'\[(\d+),(\d+),(\d+),\d+,\d+,"')

OVERWRITES = frozenset(
    "fill_ zero_ copy_ bernoulli_ uniform_ normal_ random_ exponential_ log_normal_ set_".split()
)
"""Operators that overwrite their first operand without reading it.

Fusion, data dependencies and the growth of a resize all use this list.
"""

_OPERANDS = ("input_shapes", "input_types", "output_shapes")


class TensorLocation(NamedTuple):
    """Location of a tensor: its id, its storage's id, and the offset of its first element."""

    tensor: int
    storage: int
    offset: int


def call_of_node(graph: Graph) -> Callable[[int], Call | None]:
    """Return a function from a node to its call; None without tensors or with unknown dtypes.

    Each distinct text is parsed once.
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


def has_tensor_ids(text: str) -> bool:
    """Return whether the text of a node's values contains a tensor id."""
    return _TENSOR.search(text) is not None


def parse_locations(operands: tuple[Operand, ...], text: str) -> tuple[TensorLocation | None, ...]:
    """Return the location of each tensor, flattened; None if not recorded."""
    matches = _TENSOR.findall(text)
    # The common case, without JSON: the text locates every tensor.
    if len(matches) == sum(map(len, filter(None, operands))):
        return tuple(
            [TensorLocation(int(id_), int(storage), int(at)) for id_, storage, at in matches]
        )
    values = _DECODE.decode(text) if text else []
    if len(values) != len(operands):
        return (None,) * sum(len(operand or ()) for operand in operands)
    locations: list[TensorLocation | None] = []
    for operand, value in zip(operands, values, strict=True):
        if operand is not None:
            locations += _list_locations(value, len(operand))
    return tuple(locations)


def _list_locations(value: Any, count: int) -> list[TensorLocation | None]:
    """Return the locations in `[id, storage, offset, elements, bytes, device]`, or a list of them.

    All are None if the value has not `count` tensors.
    """
    if not isinstance(value, list) or not value:
        return [None] * count
    if isinstance(value[0], list):
        rows = cast("list[Any]", value)
        return [_location(row) for row in rows] if len(rows) == count else [None] * count
    return [_location(value)] if count == 1 else [None] * count


def _location(value: Any) -> TensorLocation | None:
    parts = cast("list[Any]", value) if isinstance(value, list) else []
    if len(parts) != 6 or not isinstance(parts[1], int):
        return None
    return TensorLocation(*map(int, parts[:3]))


def have_same_operands(graph: Graph, rows: I64, others: I64) -> Mask:
    """Return whether nodes have the same operand shapes and types as others, bool[n]."""
    columns = [getattr(graph.nodes, name) for name in _OPERANDS]
    return np.logical_and.reduce([column[rows] == column[others] for column in columns])


def execution_order(graph: Graph) -> I64:
    """Return the nodes with operands by start time, each launched node right after its launcher."""
    nodes = graph.nodes
    has = np.flatnonzero((nodes.input_shapes > 0) | (nodes.output_shapes > 0))
    by = graph.launchers()[has]
    start = nodes.start_ns[np.where(by >= 0, by, has)]
    return has[np.lexsort((by >= 0, np.where(by >= 0, by, has), start))]


UNKNOWN_STORAGE = -1
"""Storage of a tensor of unknown location."""


class TensorAccesses(NamedTuple):
    """Tensors of n calls, inputs before results, m of them.

    Attributes:
        first: start of each call's tensors, and the end, int64[n + 1].
        tensor: id of each, int64[m].
        storage: id of its storage, `UNKNOWN_STORAGE` if not recorded, int64[m].
        offset: of its first element there, int64[m].
        result: whether it is a result, bool[m].
    """

    first: I64
    tensor: I64
    storage: I64
    offset: I64
    result: Mask

    def places(self, call: int) -> list[TensorLocation | None]:
        """Return the locations of the tensors of a call."""
        span = slice(int(self.first[call]), int(self.first[call + 1]))
        columns = (self.tensor[span], self.storage[span], self.offset[span])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [None if row[1] == UNKNOWN_STORAGE else TensorLocation(*row) for row in rows]


class ValueTexts(NamedTuple):
    """Distinct value texts, and the index of each call's text for inputs and for results."""

    distinct: Sequence[str]
    inputs: I64
    results: I64


def tensor_accesses(
    texts: ValueTexts,
    expected: tuple[I64, I64],
    parse_unusual: Callable[[int, bool, str], Sequence[TensorLocation | None]],
) -> TensorAccesses:
    """Return the locations of the tensors of calls.

    Args:
        texts: their value columns.
        expected: number of tensors of each as inputs and as results.
        parse_unusual: parser of (call, whether it has the results, text) for other forms of text.
    """
    counts, tensor, storage, offset = parse_tensor_ids(texts.distinct)
    starts = np.cumsum(counts) - counts
    which = np.stack([texts.inputs, texts.results], axis=1).ravel()
    count = np.stack(expected, axis=1).ravel()
    start = starts[which]
    extra: list[TensorLocation | None] = []
    for row in np.flatnonzero(counts[which] != count).tolist():
        # Tensors of such texts are appended to the columns of the others.
        start[row] = len(tensor) + len(extra)
        extra += parse_unusual(row // 2, bool(row % 2), texts.distinct[int(which[row])])
    more = np.array(
        [place or (UNKNOWN_STORAGE, UNKNOWN_STORAGE, 0) for place in extra], dtype=np.int64
    )
    ends = np.cumsum(count)
    places = np.repeat(start - (ends - count), count) + np.arange(int(count.sum()))
    tensor, storage, offset = (
        np.concatenate([column, parsed])[places]
        for column, parsed in zip((tensor, storage, offset), more.reshape(-1, 3).T, strict=True)
    )
    result = np.repeat(np.arange(len(count)) % 2 == 1, count)
    return TensorAccesses(np.append(0, ends[1::2]), tensor, storage, offset, result)
