"""Whether the factors of products still fit at another size."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.distinct import combine
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError

Mask = npt.NDArray[np.bool_]

_LIST = msgspec.json.Decoder(list[Any])
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator of one product -> the place of its first factor; the second stands behind it."""


def check_products(before: Graph, after: Graph, changed: Mask) -> None:
    """Refuse products whose factors do not fit: a size was lost on the way.

    Args:
        before: the step as captured.
        after: the same at another size.
        changed: nodes whose operands have other shapes, bool[n].

    Raises:
        AnnotateError: there is one.
    """
    nodes, strings = after.nodes, after.strings
    places = {code: _FACTORS.get(strings[code]) for code in np.unique(nodes.op[changed]).tolist()}
    products = [code for code, place in places.items() if place is not None]
    rows = np.flatnonzero(changed & np.isin(nodes.op, products))
    first, _ = combine([nodes.op[rows], nodes.input_shapes[rows]])
    for row in rows[first].tolist():
        place = places[int(nodes.op[row])] or 0
        left, right = _LIST.decode(strings[int(nodes.input_shapes[row])])[place : place + 2]
        if min(len(left), len(right)) > 1 and left[-1] != right[-2]:
            was = _LIST.decode(before.strings[int(before.nodes.input_shapes[row])])
            raise AnnotateError(
                f"{strings[int(nodes.op[row])]} would multiply {left} x {right}, captured as "
                f"{was[place]} x {was[place + 1]}: a size was lost on the way, as of steps that "
                "pad their sequences, cut them into pieces of a fixed length or go through them "
                "one by one; capture the step at the size asked for"
            )
