"""Follow tensors through a step: how each call's operands grow with sequence and micro-batch.

A tensor is known by its storage, in the order in which calls wrote to it. What no call wrote is a
parameter or a constant, unless it holds integers: those are tokens and positions. Views keep how
their storage grows, so that of two equal sizes the hidden one and the sequence are told apart by
what they are multiplied with.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from onerank.annotate.what_ifs.dimensions import Powers
from onerank.annotate.what_ifs.operands import (
    MASKS,
    NEED_VALUES,
    Growth,
    Read,
    flat,
    likeliest,
    part,
    read,
)
from onerank.annotate.what_ifs.places import (
    Place,
    calls_of,
    in_order,
    launchers,
    places_of,
    same_call,
)
from onerank.annotate.what_ifs.sizing import BATCH, CONSTANT, SEQ, Power, Sizing, numel, total
from onerank.annotate.work.classes import OpClass, op_class
from onerank.annotate.work.shapes import Call, Tensor
from onerank.ir import Graph, Kind, Phase

_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
_CREATES = frozenset(
    "empty empty_strided empty_permuted zeros ones full new_empty new_zeros new_ones new_full "
    "new_empty_strided resize_ randn rand randint arange range linspace".split()
)
_OVERWRITES = frozenset(
    "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ set_".split()
)
_FILLS = frozenset({"split_with_sizes_copy", "_chunk_cat"})  # operands after the first
_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_DECODE = msgspec.json.Decoder(list[Any])


class Operands(NamedTuple):
    """Shapes and powers of a node's inputs and outputs, lists laid out flat."""

    inputs: tuple[tuple[Tensor, Powers], ...]
    outputs: tuple[tuple[Tensor, Powers], ...]


@dataclass(slots=True)
class _Storage:
    """What is known of a block of memory: how it grows, its elements, the tensor that made it."""

    grows: Growth
    elements: int
    tensor: int
    waiting: "list[_Seen]" = field(default_factory=list[Any])


class _Seen(NamedTuple):
    """A tensor of a call: its place among the inputs or the results."""

    node: int
    is_input: bool
    position: int
    tensor: Tensor


@dataclass(slots=True)
class Growths:
    """How every node's operands grow.

    Attributes:
        operands: node index -> its operands.
        unruled: operator -> how many calls have results told by sizes alone.
    """

    operands: dict[int, Operands]
    unruled: dict[str, int]


def growths(graph: Graph, sizing: Sizing) -> Growths:
    """Return how the operands of every node with shapes grow.

    It is a loop over the calls, in the order in which they ran: what a storage holds depends on
    who wrote to it last. Each distinct call is read once.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    return _Walk(graph, sizing).run()


class _Walk:
    def __init__(self, graph: Graph, sizing: Sizing) -> None:
        self.graph, self.sizing = graph, sizing
        self.storages = dict[int, _Storage]()
        self.reads = dict[tuple[Any, ...], Read]()
        self.calls = calls_of(graph)
        self.inputs = dict[int, list[Powers]]()
        self.outputs = dict[int, list[Powers]]()
        self.found = dict[int, Call]()
        self.unruled = dict[str, int]()

    def run(self) -> Growths:
        launched = launchers(self.graph)
        for node in in_order(self.graph):
            by = launched[node]
            if by >= 0 and by in self.found and same_call(self.graph, node, by):
                self.found[node] = self.found[by]
                self.inputs[node], self.outputs[node] = self.inputs[by], self.outputs[by]
                continue
            self._visit(node)
        operands = {
            node: Operands(
                tuple(zip(flat(call.inputs), self.inputs[node], strict=True)),
                tuple(zip(flat(call.outputs), self.outputs[node], strict=True)),
            )
            for node, call in self.found.items()
        }
        return Growths(operands, self.unruled)

    def _visit(self, node: int) -> None:
        call = self.calls(node)
        if call is None:
            return
        self.found[node] = call
        nodes, strings = self.graph.nodes, self.graph.strings
        places = places_of(call.inputs, strings[int(nodes.input_values[node])])
        results = places_of(call.outputs, strings[int(nodes.output_values[node])])
        communicates = self._communicates(node)
        overwrites = call.op in _OVERWRITES
        fills = int(nodes.kind[node]) == Kind.COLLECTIVE or call.op in _FILLS
        made_here = set[Place | None](results)
        grows: list[Growth] = []
        for position, (tensor, at) in enumerate(zip(flat(call.inputs), places, strict=True)):
            last = 0 < position == len(places) - 1 and not call.op.endswith("_")
            out = position > 0 and fills
            out |= last and at in made_here and at not in places[:-1]
            if out or (overwrites and position == 0):
                grows.append(None)
                if at is not None and not self._fills(call, places) and not self._is(at, tensor):
                    self.storages.pop(at.storage, None)
                continue
            grows.append(self._grows(tensor, at, communicates))
        if communicates or fills:
            known = next((g for g in grows if g is not None), None)
            grows = [known if g is None else g for g in grows]
        if call.op in _INDEXES:
            grows = _alike_indices(call, grows)
        optimizer = int(nodes.phase[node]) == Phase.OPTIMIZER
        if optimizer:
            grows = [CONSTANT] * len(grows)
        made = self._read(node, call, tuple(grows))
        inputs, outputs = list(made.inputs), list(made.outputs)
        if (communicates or fills) and inputs:  # parts of one tensor, cut along a dimension
            tensors = zip(flat(call.inputs), inputs, strict=True)
            alike = min(tensors, key=lambda one: one[0].numel)[1]  # the shard has plain sizes
            inputs = [alike if len(alike) == len(powers) else powers for powers in inputs]
        self.inputs[node], self.outputs[node] = inputs, outputs
        if optimizer:
            outputs[:] = [(CONSTANT,) * len(t.shape) for t in flat(call.outputs)]
        elif not made.ruled and not self._is_told(call, places, results):
            self.unruled[call.op] = self.unruled.get(call.op, 0) + 1
        self._write(_Visit(node, call, places, results, grows))

    def _is_told(self, call: Call, places: list[Place | None], results: list[Place | None]) -> bool:
        """Return whether the results are views, or what others will fill: those tell."""
        taken = {at.storage for at in places if at is not None}
        views = all(at is not None and at.storage in taken for at in results)
        return views or call.op in _CREATES or op_class(f"aten::{call.op}") is OpClass.NOTHING

    def _fills(self, call: Call, places: list[Place | None]) -> bool:
        """Return whether a copy writes a part of what was made before, of zeros or of others."""
        at = places[0]
        if call.op != "copy_" or at is None:
            return False
        storage = self.storages.get(at.storage)
        unknown = storage is not None and storage.grows is None
        itself = any(one is not None and one.storage == at.storage for one in places[1:])
        return unknown or itself or at.offset > 0

    def _is(self, at: Place, tensor: Tensor) -> bool:
        """Return whether a tensor is the one that its storage was made as."""
        storage = self.storages.get(at.storage)
        whole = storage is not None and storage.elements == numel(tensor.shape)
        return whole and storage is not None and storage.tensor == at.tensor

    def _communicates(self, node: int) -> bool:
        if Kind(int(self.graph.nodes.kind[node])).is_communication:
            return True
        name = self.graph.strings[int(self.graph.nodes.op[node])]
        return op_class(name) is OpClass.COMMUNICATION

    def _grows(self, tensor: Tensor, at: Place | None, communicates: bool) -> Growth:
        """Return how an input grows; of one that nobody wrote, what it must be."""
        storage = self.storages.get(at.storage) if at is not None else None
        if storage is not None:
            if storage.grows is None or numel(tensor.shape) == storage.elements:
                return storage.grows
            return self._part(tensor, storage)
        if communicates and at is not None:
            return None
        powers = likeliest(tensor.shape, self.sizing, None)
        if tensor.dtype in _INTEGERS:
            return total(powers)
        return None if at is None else _as_activations(powers)

    def _part(self, tensor: Tensor, storage: _Storage) -> Growth:
        """Return how a view of more or fewer elements than its storage grows."""
        assert storage.grows is not None, "asked of a storage that is known"
        powers = part(tensor.shape, self.sizing, storage.grows)
        grows = total(powers)
        if numel(tensor.shape) > storage.elements:  # of a constant, what it meets tells
            return grows if storage.grows != CONSTANT else None
        if tensor.dtype in _INTEGERS:
            return grows
        if storage.grows == CONSTANT:
            return _as_activations(powers)
        return min(grows[0], storage.grows[0]), min(grows[1], storage.grows[1])

    def _read(self, node: int, call: Call, grows: tuple[Growth, ...]) -> Read:
        key = (id(call), grows)
        if call.op in NEED_VALUES:
            text = self.graph.strings[int(self.graph.nodes.input_values[node])]
            values = tuple(_DECODE.decode(text)) if text else ()
            call = replace(call, values=values)
            key = (*key, repr(values[1:]))
        if key not in self.reads:
            self.reads[key] = read(call, grows, self.sizing)
        return self.reads[key]

    def _write(self, visit: "_Visit") -> None:
        """Keep what the call wrote, and what it was first to tell of its inputs."""
        op = visit.call.op
        others = [g for t, g in zip(flat(visit.call.inputs), visit.grows, strict=True) if t.shape]
        in_place = op.endswith("_") and op not in MASKS and bool(others)
        untold = op in _CREATES or (op in _OVERWRITES and op != "copy_")
        untold |= in_place and all(one is None for one in others)
        taken = {at.storage for at in visit.places if at is not None}
        results = zip(flat(visit.call.outputs), visit.results, strict=True)
        for position, (tensor, at) in enumerate(results):
            if at is None:
                continue
            if untold:
                self._leave_untold(visit.node, position, tensor, at, among=taken)
            else:
                self._result(visit, position, tensor, at, among=taken)
        for position, (tensor, at) in enumerate(
            zip(flat(visit.call.inputs), visit.places, strict=True)
        ):
            if at is None:
                continue
            storage = self.storages.get(at.storage)
            grown = total(self.inputs[visit.node][position])
            if storage is None:
                self.storages[at.storage] = _Storage(grown, numel(tensor.shape), at.tensor)
            elif storage.grows is None and not untold:
                self._define(storage, grown)
            elif storage.grows is None or visit.grows[position] is None:
                self._tell(storage, _Seen(visit.node, True, position, tensor))

    def _leave_untold(
        self, node: int, position: int, tensor: Tensor, at: Place, *, among: set[int]
    ) -> None:
        """Keep a result that nobody can tell yet: memory that is new, or filled with one value."""
        storage = self.storages.get(at.storage)
        if storage is None or not self._is(at, tensor):
            self.outputs[node][position] = likeliest(tensor.shape, self.sizing, None)
            if storage is None or storage.grows is not None or at.storage not in among:
                storage = _Storage(None, numel(tensor.shape), at.tensor)
                self.storages[at.storage] = storage
        self._tell(storage, _Seen(node, False, position, tensor))

    def _result(
        self, visit: "_Visit", position: int, tensor: Tensor, at: Place, *, among: set[int]
    ) -> None:
        """Keep a result: new, a view, or an operand that was written to."""
        grown = total(self.outputs[visit.node][position])
        storage = self.storages.get(at.storage)
        if at.storage not in among or storage is None:
            self.storages[at.storage] = _Storage(grown, numel(tensor.shape), at.tensor)
        elif storage.grows is None:
            self._define(storage, grown)
        elif visit.call.op not in NEED_VALUES:
            self._tell(storage, _Seen(visit.node, False, position, tensor))

    def _tell(self, storage: _Storage, seen: _Seen) -> None:
        """Read a view anew by what its storage is known to be, if it is all of it."""
        if storage.grows is None:
            storage.waiting.append(seen)
            return
        side = self.inputs if seen.is_input else self.outputs
        whole = numel(seen.tensor.shape) == storage.elements
        if whole and total(side[seen.node][seen.position]) != storage.grows:
            known = likeliest(seen.tensor.shape, self.sizing, storage.grows)
            side[seen.node][seen.position] = known

    def _define(self, storage: _Storage, grows: Power) -> None:
        """Say how a storage grows, to those as well who used it before anybody knew."""
        storage.grows = grows
        for seen in storage.waiting:
            self._tell(storage, seen)
        storage.waiting.clear()


class _Visit(NamedTuple):
    """A call as it is met: where its operands and results are, how its operands grow."""

    node: int
    call: Call
    places: list[Place | None]
    results: list[Place | None]
    grows: list[Growth]


def _as_activations(powers: Powers) -> Power:
    """Return how a tensor that no call wrote grows: not at all, if it is a parameter.

    In the shape of activations, [batch, sequence, ...] or [sequence, batch, ...], it, or the part
    of a parameter that it is, stands for the result of a collective that the capture did not run.
    """
    return total(powers) if len(powers) > 2 and set(powers[:2]) == {SEQ, BATCH} else CONSTANT


def _alike_indices(call: Call, grows: list[Growth]) -> list[Growth]:
    """Return how the inputs of an indexing grow: indices of one shape, which go together, alike."""
    indices = (call.inputs[1] if len(call.inputs) > 1 else None) or ()
    first = len(call.inputs[0] or ()) if call.inputs else 0
    made = list(grows)
    for place, one in enumerate(indices, first):
        if made[place] is None:
            others = zip(indices, grows[first:], strict=False)
            made[place] = next(
                (g for t, g in others if g is not None and t.shape == one.shape), None
            )
    return made
