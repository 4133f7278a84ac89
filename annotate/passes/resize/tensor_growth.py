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

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.dimensions import Powers
from onerank.annotate.passes.resize.memoized_walk import Calls, walk_over
from onerank.annotate.passes.resize.operand_growth import NEED_VALUES, flat
from onerank.annotate.passes.resize.propagate import Walk
from onerank.annotate.passes.resize.size_change import Sizing
from onerank.annotate.passes.resize.storage_state import Form
from onerank.annotate.passes.resize.tensor_locations import (
    Place,
    Texts,
    accesses,
    calls_of,
    in_order,
    launchers,
    places_of,
    same_call,
)
from onerank.annotate.unique_rows import combine
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
    result = walk_over(_calls(graph, calls, number, forms), walk)
    of = np.full(len(graph), -1, dtype=np.int64)
    of[calls] = result.of
    of[rows[launched]] = of[by[rows[launched]]]
    operands = [
        Operands(
            tuple(zip(form.inputs, inputs, strict=True)),
            tuple(zip(form.outputs, outputs, strict=True)),
        )
        for form, inputs, outputs in result.sides
    ]
    return Growths(of, tuple(operands), walk.unruled)


def _calls(graph: Graph, rows: I64, number: I64, forms: Sequence[Form | None]) -> Calls:
    """Return the calls with their tensors and, for `NEED_VALUES`, their argument values."""
    nodes = graph.nodes
    codes = [nodes.input_values[rows], nodes.output_values[rows]]
    first, which = combine([np.concatenate(codes)])
    texts = graph.strings.decode(np.concatenate(codes)[first])
    told = Texts(texts, which[: len(rows)], which[len(rows) :])

    def apart(call: int, result: bool, text: str) -> Sequence[Place | None]:
        form = forms[int(number[call])]
        return (
            ()
            if form is None
            else places_of(form.call.outputs if result else form.call.inputs, text)
        )

    inputs = np.array([len(form.inputs) if form else 0 for form in forms], dtype=np.int64)
    results = np.array([len(form.outputs) if form else 0 for form in forms], dtype=np.int64)
    found = accesses(told, (inputs[number], results[number]), apart)
    value, values = _values(forms, number, told)
    return Calls(number, forms, value, values, found)


def _values(
    forms: Sequence[Form | None], number: I64, texts: Texts
) -> tuple[I64, list[tuple[Any, ...]]]:
    """Return the number of each call's argument values, and the distinct ones; 0 is of none."""
    needs = np.array([form is not None and form.call.op in NEED_VALUES for form in forms])
    known = dict[tuple[Any, ...], int]({(): 0})
    made = np.zeros(len(number), dtype=np.int64)
    for call in np.flatnonzero(needs[number]).tolist():
        form, text = forms[int(number[call])], texts.distinct[int(texts.inputs[call])]
        if form is not None and text:
            made[call] = known.setdefault(_plain(form, text), len(known))
    return made, list(known)


def _plain(form: Form, text: str) -> tuple[Any, ...]:
    """Return the arguments of a call, None for its tensors."""
    tensors = form.call.inputs
    return tuple(
        None if place < len(tensors) and tensors[place] is not None else _as_key(value)
        for place, value in enumerate(_DECODE.decode(text))
    )


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


def _as_key(value: Any) -> Any:
    return tuple(map(_as_key, cast("list[Any]", value))) if isinstance(value, list) else value
