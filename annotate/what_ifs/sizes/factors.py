"""Whether the operands of calls still fit each other at another size."""

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
_PAIRS = frozenset(
    f"aten::{name}{place}" for name in ("add", "sub", "mul", "div") for place in ("", "_")
)
"""Operators of two operands that broadcast."""


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


def misfits(after: Graph, changed: Mask) -> tuple[str, ...]:
    """Return a sentence if sums and the like have operands that no longer broadcast.

    Args:
        after: the step at another size.
        changed: nodes whose operands have other shapes, bool[n].
    """
    nodes, strings = after.nodes, after.strings
    codes = [code for code in np.unique(nodes.op[changed]).tolist() if strings[code] in _PAIRS]
    rows = np.flatnonzero(changed & np.isin(nodes.op, codes))
    first, which = combine([nodes.op[rows], nodes.input_shapes[rows]])
    wrong = [not _broadcast(strings[int(nodes.input_shapes[row])]) for row in rows[first].tolist()]
    lost = np.array(wrong, dtype=bool)[which]
    if not lost.any():
        return ()
    names = sorted({strings[code] for code in nodes.op[rows[lost]].tolist()})
    return (
        f"{int(lost.sum())} calls of {', '.join(names)} have operands that do not fit each other: "
        "a size was lost on the way to them, and their shapes and bytes are not to be trusted.",
    )


def _broadcast(shapes: str) -> bool:
    pair = _LIST.decode(shapes)[:2]
    if not all(isinstance(size, int) for one in pair for size in one):
        return True  # a list of tensors
    ends = zip(*(reversed(one) for one in pair), strict=False)
    return all(a == b or 1 in (a, b) for a, b in ends)
