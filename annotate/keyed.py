"""The kernel database's keys of a graph's nodes, each distinct call worked out once."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from onerank.annotate.call_key import CallKey, call_key, keeps_values
from onerank.annotate.distinct import combine
from onerank.ir import Graph

I64 = npt.NDArray[np.int64]

_TENSOR = r'\[\d+,\d+,\d+,\d+,\d+,"[^"]*"\]'
"""A tensor among an operator's values: its ids differ from call to call, and no key holds them."""


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
        values[where], texts = _without_tensors(graph, nodes.input_values[index[where]])
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


def _without_tensors(graph: Graph, codes: npt.NDArray[np.int32]) -> tuple[I64, list[str]]:
    """Return (positions in texts, texts) of values with null for every tensor; the first is ""."""
    distinct, place = np.unique(codes, return_inverse=True)
    told = pl.Series("text", graph.strings.decode(distinct), dtype=pl.String)
    told = told.str.replace_all(_TENSOR, "null")
    texts = told.unique(maintain_order=True).to_frame().with_row_index("code", offset=1)
    codes_of = told.to_frame().join(texts, on="text", how="left", maintain_order="left")["code"]
    return codes_of.to_numpy().astype(np.int64)[place], ["", *texts["text"].to_list()]
