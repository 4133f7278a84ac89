"""Growth of every tensor of a step, from a memoised walk over its calls.

Layers and micro-batches repeat. The sequence of calls is split at certain pairs of call forms, so
repetitions are split equally. The result of a segment follows from its calls, from the identity of
their tensors, and from the state of the storages before it. Segments that agree in all of these are
walked once (see `propagate` for single calls).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.dimensions import Powers
from onerank.annotate.passes.resize.operand_growth import NEED_VALUES, flat
from onerank.annotate.passes.resize.propagate import (
    CallInstance,
    Form,
    Sides,
    Storage,
    StorageState,
    Walk,
)
from onerank.annotate.passes.resize.size_change import Sizing
from onerank.annotate.passes.resize.tensor_locations import (
    UNTOLD,
    Accesses,
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

LENGTH = 64

"""Average number of calls in a segment."""

_LONGEST = 1024

_MIX = 0x9E3779B1, 0x85EBCA77  # multipliers of a hash that spreads form numbers over 32 bits

Values = tuple[Any, ...]

Waiting = tuple[int, bool, int]

"""A tensor of a call: (index of the call in its segment, whether it is an input, index)."""


class Calls(NamedTuple):
    """Calls in the order in which they ran, n of them.

    Attributes:
        form: number of the form of each, int64[n].
        forms: the forms; None for one without tensors.
        value: number of the argument values of each, int64[n].
        values: the argument values.
        accesses: their tensors.
    """

    form: I64
    forms: Sequence[Form | None]
    value: I64
    values: Sequence[Values]
    accesses: Accesses


class Result(NamedTuple):
    """The growth of the calls' tensors.

    Attributes:
        of: index into `sides` of each call, -1 for one without tensors, int64[n].
        sides: distinct forms with powers of inputs and results.
    """

    of: I64
    sides: Sequence[tuple[Form, tuple[Powers, ...], tuple[Powers, ...]]]


class _Made(NamedTuple):
    """State of a storage after a segment; tensor and waiting calls are relative to the segment."""

    grows: Any
    elements: int
    tensor: int
    written: bool
    waiting: tuple[Waiting, ...]


class _Known(NamedTuple):
    """The result of a segment.

    Attributes:
        of: as in `Result`, of its calls.
        defined: earlier storages whose growth it determined first, with that growth.
        waits: earlier storages, and calls that wait for their growth.
        gone: earlier storages that it forgot.
        made: storages that it created.
        unruled: operator -> calls whose results only sizes determine.
    """

    of: I64
    defined: tuple[tuple[int, Any], ...]
    waits: tuple[tuple[int, tuple[Waiting, ...]], ...]
    gone: tuple[int, ...]
    made: tuple[tuple[int, _Made], ...]
    unruled: dict[str, int]


def walk_over(calls: Calls, walk: Walk) -> Result:
    """Follow the storages through the calls."""
    return _Stretches(calls, walk).result()


class _Stretches:
    def __init__(self, calls: Calls, walk: Walk) -> None:
        self._calls, self._walk = calls, walk
        self._known = dict[tuple[Any, ...], _Known]()
        self._sides = list[tuple[Form, tuple[Powers, ...], tuple[Powers, ...]]]()
        self._place = dict[tuple[int, int, int], int]()
        self._of = np.full(len(calls.form), -1, dtype=np.int64)
        walk.told_before = self._told_before

    def result(self) -> Result:
        calls, accesses = self._calls, self._calls.accesses
        cuts = _cuts(calls.form)
        begin = accesses.first[cuts]
        back = [_back(column, begin) for column in (accesses.storage, accesses.tensor)]
        of_calls, codes = _code(calls.form, calls.value), _code(*back, accesses.offset)
        met = _firsts(accesses.storage, back[0], begin)
        tensors = _firsts(accesses.tensor, back[1], begin)
        as_results = _firsts(accesses.result, back[0], begin)
        for number, (start, end) in enumerate(pairwise(cuts.tolist())):
            inside = slice(int(begin[number]), int(begin[number + 1]))
            same = of_calls[start:end].tobytes(), codes[inside].tobytes()
            local = {one: place for place, one in enumerate(tensors(number))}
            self._visit(slice(start, end), same, met(number), as_results(number), local)
        for node in {*self._walk.inputs, *self._walk.outputs}:
            form = calls.forms[int(calls.form[node])]
            assert form is not None, "a call that was walked has tensors"
            self._of[node] = self._number(form, node)
        return Result(self._of, self._sides)

    def _visit(
        self,
        span: slice,
        same: tuple[bytes, bytes],
        met: list[int],
        as_results: list[bool],
        local: dict[int, int],
    ) -> None:
        get = self._walk.storages.get
        before: list[Any] = []
        for one, as_result in zip(met, as_results, strict=True):
            storage = get(one)
            if storage is None:
                before.append(None)
                continue
            tensor = local.get(storage.tensor, -1)
            if as_result and tensor < 0:  # memory is reused for a new tensor
                before.append(None)
            else:
                before += storage.grows, storage.elements, tensor, storage.written
        key = (*same, *before)
        known = self._known.get(key)
        if known is None:
            self._known[key] = self._walked(span, met, local)
        else:
            self._again(known, span, met, list(local))

    def _walked(self, span: slice, met: list[int], local: dict[int, int]) -> _Known:
        """Walk over the calls of a segment, and record the result."""
        walk, calls = self._walk, self._calls
        kept = {one: (found, found.grows, len(found.waiting))
                for one in met if (found := walk.storages.get(one)) is not None}  # fmt: skip
        unruled = dict(walk.unruled)
        for node in range(span.start, span.stop):
            form = calls.forms[int(calls.form[node])]
            if form is not None:
                places = tuple(calls.accesses.places(node))
                inputs = len(form.inputs)
                values = calls.values[int(calls.value[node])]
                walk.visit(CallInstance(node, form, places[:inputs], places[inputs:], values))
        of = np.full(span.stop - span.start, -1, dtype=np.int64)
        for node in range(span.start, span.stop):
            form = calls.forms[int(calls.form[node])]
            if form is not None:
                of[node - span.start] = self._number(form, node)
        self._of[span] = of
        defined, waits, gone = list[Any](), list[Any](), list[int]()
        made = list[tuple[int, _Made]]()
        for place, one in enumerate(met):
            now, (old, grew, waited) = walk.storages.get(one), kept.get(one, (None, None, 0))
            if old is not None and grew is None and old.grows is not None:
                defined.append((place, old.grows))
            if now is None:
                gone += [place] * (old is not None)
            elif now is not old:
                waiting = _relative(now.waiting, span.start)
                number = local[now.tensor]
                made.append((place, _Made(now.grows, now.elements, number, now.written, waiting)))
            elif now.grows is None and len(now.waiting) > waited:
                waits.append((place, _relative(now.waiting[waited:], span.start)))
        more = {op: n - unruled.get(op, 0) for op, n in walk.unruled.items()}
        return _Known(
            of, tuple(defined), tuple(waits), tuple(gone), tuple(made),
            {op: n for op, n in more.items() if n},
        )  # fmt: skip

    def _again(self, known: _Known, span: slice, met: list[int], tensors: list[int]) -> None:
        """Apply the recorded result of an equal segment."""
        walk = self._walk
        self._of[span] = known.of
        for place, grows in known.defined:
            walk.define(walk.storages[met[place]], grows)
        for place, waiting in known.waits:
            walk.storages[met[place]].waiting += self._absolute(waiting, span.start)
        for place in known.gone:
            walk.storages.pop(met[place], None)
        for place, made in known.made:
            waiting = self._absolute(made.waiting, span.start) if made.waiting else ()
            walk.storages[met[place]] = Storage(
                made.grows, made.elements, tensors[made.tensor], made.written, waiting
            )
        for op, count in known.unruled.items():
            walk.unruled[op] = walk.unruled.get(op, 0) + count

    def _absolute(self, waiting: Sequence[Waiting], start: int) -> tuple[StorageState, ...]:
        found: list[StorageState] = []
        for node, is_input, position in waiting:
            form = self._calls.forms[int(self._calls.form[start + node])]
            assert form is not None, "what waits is a tensor of a call"
            tensors = form.inputs if is_input else form.outputs
            found.append(StorageState(start + node, is_input, position, tensors[position]))
        return tuple(found)

    def _number(self, form: Form, node: int) -> int:
        """Return the index of an analysed call's result among the distinct results."""
        inputs, outputs = self._walk.inputs[node], self._walk.outputs[node]
        key = form.number, id(inputs), id(outputs)  # `_sides` keeps both, so that ids stay theirs
        if key not in self._place:
            self._place[key] = len(self._sides)
            self._sides.append((form, inputs, outputs))
        return self._place[key]

    def _told_before(self, node: int) -> Sides:
        """Return the powers of inputs and results of a call of an earlier segment."""
        return self._sides[int(self._of[node])][1:]


def _relative(waiting: Sequence[StorageState], start: int) -> tuple[Waiting, ...]:
    return tuple((one.node - start, one.is_input, one.position) for one in waiting)


def _cuts(form: I64) -> I64:
    """Return the starts of segments, at pairs of forms with a certain hash, and the end."""
    mixed = form * _MIX[0]
    mixed[1:] += form[:-1] * _MIX[1]
    begins = np.flatnonzero((mixed & 0xFFFFFFFF) * LENGTH >> 32 == 0)
    ends = np.unique(np.concatenate([[0], begins, [len(form)]]))
    lengths = np.diff(ends)
    pieces = np.maximum(1, -(-lengths // _LONGEST))
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(np.repeat(ends[:-1], pieces) + within * _LONGEST, len(form))


def _back(ids: I64, begin: I64) -> I64:
    """Return the distance to each id's last use in its segment; 0 for none, -1 for `UNTOLD`."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    before = np.full(len(ids), -1, dtype=np.int64)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    before[order[again + 1]] = order[again]
    start = np.repeat(begin[:-1], np.diff(begin))
    back = np.where(before >= start, np.arange(len(ids)) - before, 0)
    back[ids == UNTOLD] = -1
    return back


def _code(*columns: I64) -> npt.NDArray[np.int32]:
    return combine(columns)[1].astype(np.int32)


def _firsts(column: npt.NDArray[Any], back: I64, begin: I64) -> Callable[[int], list[Any]]:
    """Return a function from a segment to the values of a column at the first use of each id."""
    first = np.flatnonzero(back == 0)
    values = column[first]
    starts = np.searchsorted(first, begin).tolist()

    def of(stretch: int) -> list[Any]:
        return values[starts[stretch] : starts[stretch + 1]].tolist()

    return of


Mask = npt.NDArray[np.bool_]

_DECODE = msgspec.json.Decoder(list[Any])

_FORM = ("op", "input_shapes", "input_types", "output_shapes", "output_types", "kind")


class Operands(NamedTuple):
    """Shapes and powers of a node's inputs and outputs, with lists flattened."""

    inputs: tuple[tuple[Tensor, Powers], ...]
    outputs: tuple[tuple[Tensor, Powers], ...]


@dataclass(frozen=True, slots=True)
class Growths:
    """Growth of the operands of every node.

    Attributes:
        of: index into `operands` of each node, -1 for one without, int64[n].
        operands: distinct operands.
        unruled: operator -> number of calls whose results only sizes determine.
    """

    of: I64
    operands: tuple[Operands, ...]
    unruled: dict[str, int]

    def at(self, node: int) -> Operands | None:
        """Return the operands of a node."""
        place = int(self.of[node])
        return self.operands[place] if place >= 0 else None

    def spread(self, values: Sequence[Any], otherwise: Any) -> npt.NDArray[Any]:
        """Return the growth of each node's operands, `otherwise` for a node without."""
        return np.array([*values, otherwise])[self.of]


def growths(graph: Graph, sizing: Sizing) -> Growths:
    """Return the growth of the operands of every node with shapes.

    It follows the calls in execution order, because the content of a storage depends on its last
    writer. Each distinct call is analysed once (see `Walk`). Kernels share the operands of the
    operator that launched them.

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
    """Return the number of each call's argument values and the distinct values; 0 is no values."""
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
