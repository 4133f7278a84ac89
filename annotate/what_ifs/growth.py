"""Follow tensors through a step: how each call's operands grow with sequence and micro-batch.

A tensor is known by its storage, in the order in which calls wrote to it. What no call wrote is a
parameter or a constant, unless it holds integers: those are tokens and positions. Views keep how
their storage grows, so that of two equal sizes the hidden one and the sequence are told apart by
what they are multiplied with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.distinct import combine
from onerank.annotate.what_ifs.dimensions import Powers
from onerank.annotate.what_ifs.operands import NEED_VALUES, flat
from onerank.annotate.what_ifs.places import calls_of, in_order, launchers, places_of, same_call
from onerank.annotate.what_ifs.sizing import Sizing
from onerank.annotate.what_ifs.walk import Form, Met, Walk
from onerank.annotate.work.classes import OpClass, op_class
from onerank.annotate.work.shapes import Call, Tensor
from onerank.ir import Graph, Kind, Phase

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_DECODE = msgspec.json.Decoder(list[Any])
_FORM = ("op", "input_shapes", "input_types", "output_shapes", "output_types", "kind")


class Operands(NamedTuple):
    """Shapes and powers of a node's inputs and outputs, lists laid out flat."""

    inputs: tuple[tuple[Tensor, Powers], ...]
    outputs: tuple[tuple[Tensor, Powers], ...]


@dataclass(frozen=True, slots=True)
class Growths:
    """How every node's operands grow.

    Attributes:
        of: place in `operands` of each node, -1 for one without, int64[n].
        operands: the distinct ones.
        unruled: operator -> how many calls have results told by sizes alone.
    """

    of: I64
    operands: tuple[Operands, ...]
    unruled: dict[str, int]

    def at(self, node: int) -> Operands | None:
        """Return the operands of a node."""
        place = int(self.of[node])
        return self.operands[place] if place >= 0 else None

    def spread(self, values: Sequence[Any], otherwise: Any) -> npt.NDArray[Any]:
        """Return for each node what is told of its operands, `otherwise` for one without."""
        return np.array([*values, otherwise])[self.of]


def growths(graph: Graph, sizing: Sizing) -> Growths:
    """Return how the operands of every node with shapes grow.

    It follows the calls in the order in which they ran: what a storage holds depends on who wrote
    to it last. Each distinct call is read once, see `walk`; what an operator launched has its
    operands.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    nodes, rows, by = graph.nodes, in_order(graph), launchers(graph)
    told = np.zeros(len(graph), dtype=bool)
    told[rows] = True
    launched = (by[rows] >= 0) & told[by[rows]] & same_call(graph, rows, by[rows])
    calls = rows[~launched]
    columns = [getattr(nodes, name)[calls] for name in _FORM]
    first, number = combine([*columns, nodes.phase[calls] == Phase.OPTIMIZER])
    call_of = calls_of(graph)
    rows_of_forms = cast("list[int]", calls[first].tolist())
    forms = [_form(graph, row, call_of(row), at) for at, row in enumerate(rows_of_forms)]
    walk = Walk(sizing)
    inputs, outputs = (graph.strings.decode(getattr(nodes, f"{side}_values")[calls])
                       for side in ("input", "output"))  # fmt: skip
    ran = [forms[place] for place in cast("list[int]", number.tolist())]
    for node, form, ins, outs in zip(calls.tolist(), ran, inputs, outputs, strict=True):
        if form is not None:
            walk.visit(_met(node, form, ins, outs))
    made, operands = _distinct(walk, calls, ran)
    of = np.full(len(graph), -1, dtype=np.int64)
    of[calls] = made
    of[rows[launched]] = of[by[rows[launched]]]
    return Growths(of, operands, walk.unruled)


def _form(graph: Graph, node: int, call: Call | None, number: int) -> Form | None:
    if call is None:
        return None
    nodes = graph.nodes
    kind = Kind(int(nodes.kind[node]))
    sort = op_class(graph.strings[int(nodes.op[node])])
    return Form(
        number=number,
        call=call,
        inputs=tuple(flat(call.inputs)),
        outputs=tuple(flat(call.outputs)),
        communicates=kind.is_communication or sort is OpClass.COMMUNICATION,
        collective=kind == Kind.COLLECTIVE,
        optimizer=int(nodes.phase[node]) == Phase.OPTIMIZER,
    )


def _met(node: int, form: Form, inputs: str, outputs: str) -> Met:
    plain: tuple[Any, ...] = ()
    if form.call.op in NEED_VALUES and inputs:
        tensors = form.call.inputs
        plain = tuple(
            None if place < len(tensors) and tensors[place] is not None else _as_key(value)
            for place, value in enumerate(_DECODE.decode(inputs))
        )
    places, results = places_of(form.call.inputs, inputs), places_of(form.call.outputs, outputs)
    return Met(node, form, places, results, plain)


def _as_key(value: Any) -> Any:
    return tuple(map(_as_key, cast("list[Any]", value))) if isinstance(value, list) else value


def _distinct(
    walk: Walk, calls: I64, forms: Sequence[Form | None]
) -> tuple[I64, tuple[Operands, ...]]:
    """Return the place of each call's operands among the distinct ones, and these."""
    places, found = list[int](), list[Operands]()
    known = dict[tuple[int, int, int], int]()
    for node, form in zip(calls.tolist(), forms, strict=True):
        if form is None:
            places.append(-1)
            continue
        inputs, outputs = walk.inputs[node], walk.outputs[node]
        key = form.number, id(inputs), id(outputs)
        if key not in known:
            known[key] = len(found)
            sides = zip((form.inputs, form.outputs), (inputs, outputs), strict=True)
            found.append(Operands(*(tuple(zip(*side, strict=True)) for side in sides)))
        places.append(known[key])
    return np.array(places, dtype=np.int64), tuple(found)
