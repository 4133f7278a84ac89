"""The kernel database's keys of a graph's nodes, each distinct call worked out once."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.distinct import combine
from onerank.annotate.lookup.call_key import CallKey, call_key, keeps_values
from onerank.annotate.work.argument_values import without_tensors
from onerank.ir import Graph

I64 = npt.NDArray[np.int64]


class Keyed(NamedTuple):
    """Nodes by the call they are part of.

    Attributes:
        key: positions in `keys`, -1 for a node without one, int64[n].
        keys: of the distinct calls.
    """

    key: I64
    keys: tuple[CallKey, ...]


def keys_of(graph: Graph, index: I64, operators: Collection[str]) -> Keyed:
    """Return the keys of the nodes at `index` whose operator is one of `operators`.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    nodes, strings = graph.nodes, graph.strings
    first, form = combine([c[index] for c in (nodes.op, nodes.input_shapes, nodes.input_types)])
    rows = index[first]
    named = [strings[int(op)] for op in nodes.op[rows]]
    wanted = [op.split(".", 1)[0] in operators for op in named]
    by_value = np.array([w and keeps_values(op) for w, op in zip(wanted, named, strict=True)])
    values = np.zeros(len(index), dtype=np.int64)
    where = np.flatnonzero(by_value[form]) if len(rows) else first
    texts = [""]
    if len(where):
        values[where], texts = without_tensors(graph, nodes.input_values[index[where]])
    first, call = combine([form, values])
    found = dict[CallKey, int]()
    place = np.full(len(first), -1, dtype=np.int64)
    for position, row in enumerate(first.tolist()):
        if not wanted[form[row]]:
            continue
        node = index[row]
        op, shapes, types = (
            strings[int(c[node])] for c in (nodes.op, nodes.input_shapes, nodes.input_types)
        )
        if key := call_key(op, shapes, types, texts[values[row]]):
            place[position] = found.setdefault(key, len(found))
    return Keyed(place[call], tuple(found))
