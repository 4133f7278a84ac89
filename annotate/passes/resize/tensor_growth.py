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
from onerank.annotate.passes.resize.operand_growth import NEED_VALUES, flatten
from onerank.annotate.passes.resize.propagate import (
    CallInstance,
    CallSignature,
    Propagator,
    Sides,
    Storage,
    TensorRef,
)
from onerank.annotate.passes.resize.size_change import Sizing
from onerank.annotate.passes.resize.tensor_locations import (
    UNKNOWN_STORAGE,
    TensorAccesses,
    TensorLocation,
    ValueTexts,
    calls_of,
    execution_order,
    have_same_operands,
    launchers,
    parse_locations,
    tensor_accesses,
)
from onerank.annotate.unique_rows import combine
from onerank.ir import Graph, Kind, Phase

I64 = npt.NDArray[np.int64]

SEGMENT_LENGTH = 64

"""Average number of calls in a segment."""

_MAX_SEGMENT = 1024

_HASH_MULTIPLIERS = (
    0x9E3779B1,
    0x85EBCA77,
)  # multipliers of a hash that spreads form numbers over 32 bits

Values = tuple[Any, ...]

RelativeRef = tuple[int, bool, int]

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
    forms: Sequence[CallSignature | None]
    value: I64
    values: Sequence[Values]
    accesses: TensorAccesses


class PropagationResult(NamedTuple):
    """The growth of the calls' tensors.

    Attributes:
        of: index into `sides` of each call, -1 for one without tensors, int64[n].
        sides: distinct forms with powers of inputs and results.
    """

    of: I64
    sides: Sequence[tuple[CallSignature, tuple[Powers, ...], tuple[Powers, ...]]]


class _CreatedStorage(NamedTuple):
    """State of a storage after a segment; tensor and waiting calls are relative to the segment."""

    grows: Any
    elements: int
    tensor: int
    written: bool
    waiting: tuple[RelativeRef, ...]


class _SegmentResult(NamedTuple):
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
    waits: tuple[tuple[int, tuple[RelativeRef, ...]], ...]
    gone: tuple[int, ...]
    made: tuple[tuple[int, _CreatedStorage], ...]
    inferred_from_sizes: dict[str, int]


def propagate_calls(calls: Calls, walk: Propagator) -> PropagationResult:
    """Follow the storages through the calls."""
    return _SegmentMemo(calls, walk).result()


class _SegmentMemo:
    def __init__(self, calls: Calls, walk: Propagator) -> None:
        self._calls, self._walk = calls, walk
        self._known = dict[tuple[Any, ...], _SegmentResult]()
        self._sides = list[tuple[CallSignature, tuple[Powers, ...], tuple[Powers, ...]]]()
        self._place = dict[tuple[int, int, int], int]()
        self._of = np.full(len(calls.form), -1, dtype=np.int64)
        walk.earlier_powers = self._earlier_powers

    def result(self) -> PropagationResult:
        calls, accesses = self._calls, self._calls.accesses
        cuts = _cuts(calls.form)
        begin = accesses.first[cuts]
        back = [
            _distance_to_last_use(column, begin) for column in (accesses.storage, accesses.tensor)
        ]
        of_calls, codes = _row_codes(calls.form, calls.value), _row_codes(*back, accesses.offset)
        met = _first_uses(accesses.storage, back[0], begin)
        tensors = _first_uses(accesses.tensor, back[1], begin)
        as_results = _first_uses(accesses.result, back[0], begin)
        for number, (start, end) in enumerate(pairwise(cuts.tolist())):
            inside = slice(int(begin[number]), int(begin[number + 1]))
            same = of_calls[start:end].tobytes(), codes[inside].tobytes()
            local = {one: place for place, one in enumerate(tensors(number))}
            self._visit(slice(start, end), same, met(number), as_results(number), local)
        for node in {*self._walk.inputs, *self._walk.outputs}:
            form = calls.forms[int(calls.form[node])]
            assert form is not None, "a call that was walked has tensors"
            self._of[node] = self._number(form, node)
        return PropagationResult(self._of, self._sides)

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
            self._known[key] = self._propagate_segment(span, met, local)
        else:
            self._replay(known, span, met, list(local))

    def _propagate_segment(
        self, span: slice, met: list[int], local: dict[int, int]
    ) -> _SegmentResult:
        """Walk over the calls of a segment, and record the result."""
        walk, calls = self._walk, self._calls
        kept = {one: (found, found.grows, len(found.waiting))
                for one in met if (found := walk.storages.get(one)) is not None}  # fmt: skip
        inferred_from_sizes = dict(walk.inferred_from_sizes)
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
        made = list[tuple[int, _CreatedStorage]]()
        for place, one in enumerate(met):
            now, (old, grew, waited) = walk.storages.get(one), kept.get(one, (None, None, 0))
            if old is not None and grew is None and old.grows is not None:
                defined.append((place, old.grows))
            if now is None:
                gone += [place] * (old is not None)
            elif now is not old:
                waiting = _relative(now.waiting, span.start)
                number = local[now.tensor]
                made.append(
                    (place, _CreatedStorage(now.grows, now.elements, number, now.written, waiting))
                )
            elif now.grows is None and len(now.waiting) > waited:
                waits.append((place, _relative(now.waiting[waited:], span.start)))
        more = {
            op: n - inferred_from_sizes.get(op, 0) for op, n in walk.inferred_from_sizes.items()
        }
        return _SegmentResult(
            of, tuple(defined), tuple(waits), tuple(gone), tuple(made),
            {op: n for op, n in more.items() if n},
        )  # fmt: skip

    def _replay(
        self, known: _SegmentResult, span: slice, met: list[int], tensors: list[int]
    ) -> None:
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
        for op, count in known.inferred_from_sizes.items():
            walk.inferred_from_sizes[op] = walk.inferred_from_sizes.get(op, 0) + count

    def _absolute(self, waiting: Sequence[RelativeRef], start: int) -> tuple[TensorRef, ...]:
        found: list[TensorRef] = []
        for node, is_input, position in waiting:
            form = self._calls.forms[int(self._calls.form[start + node])]
            assert form is not None, "what waits is a tensor of a call"
            tensors = form.inputs if is_input else form.outputs
            found.append(TensorRef(start + node, is_input, position, tensors[position]))
        return tuple(found)

    def _number(self, form: CallSignature, node: int) -> int:
        """Return the index of an analysed call's result among the distinct results."""
        inputs, outputs = self._walk.inputs[node], self._walk.outputs[node]
        key = form.number, id(inputs), id(outputs)  # `_sides` keeps both, so that ids stay theirs
        if key not in self._place:
            self._place[key] = len(self._sides)
            self._sides.append((form, inputs, outputs))
        return self._place[key]

    def _earlier_powers(self, node: int) -> Sides:
        """Return the powers of inputs and results of a call of an earlier segment."""
        return self._sides[int(self._of[node])][1:]


def _relative(waiting: Sequence[TensorRef], start: int) -> tuple[RelativeRef, ...]:
    return tuple((one.node - start, one.is_input, one.position) for one in waiting)


def _cuts(form: I64) -> I64:
    """Return the starts of segments, at pairs of forms with a certain hash, and the end."""
    mixed = form * _HASH_MULTIPLIERS[0]
    mixed[1:] += form[:-1] * _HASH_MULTIPLIERS[1]
    begins = np.flatnonzero((mixed & 0xFFFFFFFF) * SEGMENT_LENGTH >> 32 == 0)
    ends = np.unique(np.concatenate([[0], begins, [len(form)]]))
    lengths = np.diff(ends)
    pieces = np.maximum(1, -(-lengths // _MAX_SEGMENT))
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(np.repeat(ends[:-1], pieces) + within * _MAX_SEGMENT, len(form))


def _distance_to_last_use(ids: I64, begin: I64) -> I64:
    """Return the distance to each id's last use in its segment; 0 for none, -1 for `UNTOLD`."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    before = np.full(len(ids), -1, dtype=np.int64)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    before[order[again + 1]] = order[again]
    start = np.repeat(begin[:-1], np.diff(begin))
    back = np.where(before >= start, np.arange(len(ids)) - before, 0)
    back[ids == UNKNOWN_STORAGE] = -1
    return back


def _row_codes(*columns: I64) -> npt.NDArray[np.int32]:
    return combine(columns)[1].astype(np.int32)


def _first_uses(column: npt.NDArray[Any], back: I64, begin: I64) -> Callable[[int], list[Any]]:
    """Return a function from a segment to the values of a column at the first use of each id."""
    first = np.flatnonzero(back == 0)
    values = column[first]
    starts = np.searchsorted(first, begin).tolist()

    def of(stretch: int) -> list[Any]:
        return values[starts[stretch] : starts[stretch + 1]].tolist()

    return of


Mask = npt.NDArray[np.bool_]

_DECODE = msgspec.json.Decoder(list[Any])

_SIGNATURE_COLUMNS = ("op", "input_shapes", "input_types", "output_shapes", "output_types", "kind")


class Operands(NamedTuple):
    """Shapes and powers of a node's inputs and outputs, with lists flattened."""

    inputs: tuple[tuple[Tensor, Powers], ...]
    outputs: tuple[tuple[Tensor, Powers], ...]


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """Growth of the operands of every node.

    Attributes:
        of: index into `operands` of each node, -1 for one without, int64[n].
        operands: distinct operands.
        unruled: operator -> number of calls whose results only sizes determine.
    """

    of: I64
    operands: tuple[Operands, ...]
    inferred_from_sizes: dict[str, int]

    def at(self, node: int) -> Operands | None:
        """Return the operands of a node."""
        place = int(self.of[node])
        return self.operands[place] if place >= 0 else None

    def spread(self, values: Sequence[Any], otherwise: Any) -> npt.NDArray[Any]:
        """Return the growth of each node's operands, `otherwise` for a node without."""
        return np.array([*values, otherwise])[self.of]


def step_growth(graph: Graph, sizing: Sizing) -> StepGrowth:
    """Return the growth of the operands of every node with shapes.

    It follows the calls in execution order, because the content of a storage depends on its last
    writer. Each distinct call is analysed once (see `Walk`). Kernels share the operands of the
    operator that launched them.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    nodes, rows, by = graph.nodes, execution_order(graph), launchers(graph)
    told = np.zeros(len(graph), dtype=bool)
    told[rows] = True
    launched = (by[rows] >= 0) & told[by[rows]] & have_same_operands(graph, rows, by[rows])
    calls = rows[~launched]
    columns = [getattr(nodes, name)[calls] for name in _SIGNATURE_COLUMNS]
    first, number = combine([*columns, nodes.phase[calls] == Phase.OPTIMIZER])
    call_of = calls_of(graph)
    rows_of_forms = cast("list[int]", calls[first].tolist())
    forms = [_call_signature(graph, row, call_of(row), at) for at, row in enumerate(rows_of_forms)]
    walk = Propagator(sizing)
    result = propagate_calls(_calls(graph, calls, number, forms), walk)
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
    return StepGrowth(of, tuple(operands), walk.inferred_from_sizes)


def _calls(graph: Graph, rows: I64, number: I64, forms: Sequence[CallSignature | None]) -> Calls:
    """Return the calls with their tensors and, for `NEED_VALUES`, their argument values."""
    nodes = graph.nodes
    codes = [nodes.input_values[rows], nodes.output_values[rows]]
    first, which = combine([np.concatenate(codes)])
    texts = graph.strings.decode(np.concatenate(codes)[first])
    told = ValueTexts(texts, which[: len(rows)], which[len(rows) :])

    def apart(call: int, result: bool, text: str) -> Sequence[TensorLocation | None]:
        form = forms[int(number[call])]
        return (
            ()
            if form is None
            else parse_locations(form.call.outputs if result else form.call.inputs, text)
        )

    inputs = np.array([len(form.inputs) if form else 0 for form in forms], dtype=np.int64)
    results = np.array([len(form.outputs) if form else 0 for form in forms], dtype=np.int64)
    found = tensor_accesses(told, (inputs[number], results[number]), apart)
    value, values = _values(forms, number, told)
    return Calls(number, forms, value, values, found)


def _values(
    forms: Sequence[CallSignature | None], number: I64, texts: ValueTexts
) -> tuple[I64, list[tuple[Any, ...]]]:
    """Return the number of each call's argument values and the distinct values; 0 is no values."""
    needs = np.array([form is not None and form.call.op in NEED_VALUES for form in forms])
    known = dict[tuple[Any, ...], int]({(): 0})
    made = np.zeros(len(number), dtype=np.int64)
    for call in np.flatnonzero(needs[number]).tolist():
        form, text = forms[int(number[call])], texts.distinct[int(texts.inputs[call])]
        if form is not None and text:
            made[call] = known.setdefault(_argument_key(form, text), len(known))
    return made, list(known)


def _argument_key(form: CallSignature, text: str) -> tuple[Any, ...]:
    """Return the arguments of a call, None for its tensors."""
    tensors = form.call.inputs
    return tuple(
        None if place < len(tensors) and tensors[place] is not None else _as_key(value)
        for place, value in enumerate(_DECODE.decode(text))
    )


def _call_signature(
    graph: Graph, node: int, call: Call | None, number: int
) -> CallSignature | None:
    if call is None:
        return None
    nodes = graph.nodes
    kind = Kind(int(nodes.kind[node]))
    sort = op_class(graph.strings[int(nodes.op[node])])
    return CallSignature(
        number=number,
        call=call,
        inputs=tuple(flatten(call.inputs)),
        outputs=tuple(flatten(call.outputs)),
        communicates=kind.is_communication or sort is OpClass.COMMUNICATION,
        collective=kind == Kind.COLLECTIVE,
        optimizer=int(nodes.phase[node]) == Phase.OPTIMIZER,
    )


def _as_key(value: Any) -> Any:
    return tuple(map(_as_key, cast("list[Any]", value))) if isinstance(value, list) else value
