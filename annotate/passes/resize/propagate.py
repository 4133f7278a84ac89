"""Propagate growth with sequence and batch from call to call through storages.

The growth of a call's tensors follows from its form, from which of its tensors are the same, and
from what is known of their storages. Calls that agree in all of these are analysed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.dimensions import Powers, readings
from onerank.annotate.passes.resize.operand_growth import (
    BAGS,
    BROADCASTS,
    MASKS,
    NEED_VALUES,
    Growth,
    Read,
    likeliest,
    part,
    read,
)
from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    SEQ,
    Power,
    Sizing,
    numel,
    total,
)
from onerank.annotate.passes.resize.tensor_locations import OVERWRITES, Place

_FILLS = frozenset({"split_with_sizes_copy", "_chunk_cat"})  # operands after the first


@dataclass(frozen=True, slots=True)
class Form:
    """The form that many calls share.

    Attributes:
        number: identifies the form.
        call: operator, shapes and dtypes.
        inputs: its input tensors, lists flattened.
        outputs: its results likewise.
        communicates: whether it sends or receives.
        collective: whether it is a collective.
        optimizer: whether it is of the optimizer's phase.
    """

    number: int
    call: Call
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    communicates: bool
    collective: bool
    optimizer: bool

    @property
    def fills(self) -> bool:
        """Whether operands after the first are written to."""
        return self.collective or self.call.op in _FILLS

    @property
    def parts_of_one(self) -> bool:
        """Whether its tensors are parts of one, cut along a dimension."""
        return self.communicates or self.fills


class CallInstance(NamedTuple):
    """One call: its node and form, the locations of its tensors, and its other arguments."""

    node: int
    form: Form
    places: tuple[Place | None, ...]
    results: tuple[Place | None, ...]
    values: tuple[Any, ...]


class StorageState(NamedTuple):
    """A tensor of a call: its place among the inputs or the results."""

    node: int
    is_input: bool
    position: int
    tensor: Tensor


@dataclass(slots=True)
class Storage:
    """Growth and origin of a storage.

    Attributes:
        grows: its growth; None while unknown.
        elements: elements of the tensor that created it.
        tensor: id of that tensor.
        written: whether a call wrote it; a script's tokens and constants are not written.
        waiting: calls that need its growth.
    """

    grows: Growth
    elements: int
    tensor: int
    written: bool
    waiting: tuple[StorageState, ...] = ()


Storages = dict[int, Storage]

"""State of each storage by its id."""


def is_as_made(storages: Storages, at: Place, tensor: Tensor) -> bool:
    """Return whether a tensor is the one that created its storage."""
    storage = storages.get(at.storage)
    if storage is None:
        return False
    return storage.elements == numel(tensor.shape) and storage.tensor == at.tensor


_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})

_PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_"})

_INDEXES = _PUTS | {"index"}


class InputGrowth(NamedTuple):
    """How the inputs of a call grow when it begins.

    Attributes:
        grows: growth of each; None if not known.
        overwritten: indices of inputs whose storage the call overwrites.
    """

    grows: tuple[Growth, ...]
    overwritten: tuple[int, ...]


def input_growth(met: CallInstance, storages: Storages, sizing: Sizing) -> InputGrowth:
    """Return the growth of a call's inputs; unknown for inputs that it writes to."""
    form, call, places = met.form, met.form.call, met.places
    lie_in = {at.storage for at in places if at is not None}
    known = {one: storages[one] for one in lie_in if one in storages}
    grows: list[Growth] = []
    overwritten: list[int] = []
    for position, (tensor, at) in enumerate(zip(form.inputs, places, strict=True)):
        if not _is_written_to(met, position):
            grows.append(_grows(tensor, at, known, sizing, communicates=form.communicates))
            continue
        grows.append(None)
        if at is None or at.storage not in known:
            continue
        kept = is_as_made(known, at, tensor) and not _taken_for_a_parameter(known[at.storage])
        if not (kept or _writes_a_part(call, places, known)):
            del known[at.storage]
            overwritten.append(position)
    if form.parts_of_one:
        told = next((growth for growth in grows if growth is not None), None)
        grows = [told if growth is None else growth for growth in grows]
    unwritten = [at is not None and at.storage not in known for at in places]
    if call.op in _INDEXES:
        grows = _alike_indices(call, grows)
        if call.op in _PUTS and unwritten[0] and form.inputs[0].shape == form.inputs[-1].shape:
            grows[0] = grows[-1]  # the values replace the whole tensor
    elif op_class(f"aten::{call.op}") in BROADCASTS or call.op == "convolution_backward":
        grows = _beside(form.inputs, grows, unwritten)
        grows = _of_tables(met, grows, known, sizing)
    elif call.op in BAGS:
        grows = _of_bags(form.inputs, grows, sizing)
    if form.optimizer:
        grows = [CONSTANT] * len(grows)
    return InputGrowth(tuple(grows), tuple(overwritten))


def _is_written_to(met: CallInstance, position: int) -> bool:
    """Return whether a call writes to an input: the first, later ones, or a final `out=`."""
    op, places = met.form.call.op, met.places
    if position == 0:
        return op in OVERWRITES
    if met.form.fills:
        return True
    at, last = places[position], position == len(places) - 1
    return last and not op.endswith("_") and at in met.results and at not in places[:-1]


def _writes_a_part(call: Call, places: Sequence[Place | None], storages: Storages) -> bool:
    """Return whether a copy writes only a part of existing memory."""
    at = places[0]
    if call.op != "copy_" or at is None:
        return False
    storage = storages.get(at.storage)
    unknown = storage is not None and storage.grows is None
    itself = any(one is not None and one.storage == at.storage for one in places[1:])
    return unknown or itself or at.offset > 0


def _taken_for_a_parameter(storage: Storage) -> bool:
    """Return whether it was never written, and therefore assumed not to grow."""
    return not storage.written and storage.grows == CONSTANT


def _grows(
    tensor: Tensor, at: Place | None, storages: Storages, sizing: Sizing, *, communicates: bool
) -> Growth:
    """Return the growth of an input; for an unwritten one, the growth that its shape implies."""
    storage = storages.get(at.storage) if at is not None else None
    if storage is not None:
        if storage.grows is None or numel(tensor.shape) == storage.elements:
            return storage.grows
        return _part(tensor, storage, storage.grows, sizing)
    if communicates and at is not None:
        return None
    powers = likeliest(tensor.shape, sizing, None)
    if tensor.dtype in _INTEGERS:
        return total(powers)
    return None if at is None else _as_activations(powers)


def _part(tensor: Tensor, storage: Storage, whole: Power, sizing: Sizing) -> Growth:
    """Return the growth of a view with more or fewer elements than its storage."""
    powers = part(tensor.shape, sizing, whole)
    grows = total(powers)
    if numel(tensor.shape) > storage.elements:  # an expanded constant grows like the other operands
        return _expanded(tensor, storage, whole, sizing) or grows if whole != CONSTANT else None
    if tensor.dtype in _INTEGERS and not (storage.written and whole == CONSTANT):
        return grows
    if whole == CONSTANT:
        return _as_activations(powers)
    return min(grows[0], whole[0]), min(grows[1], whole[1])


def _expanded(tensor: Tensor, storage: Storage, whole: Power, sizing: Sizing) -> Growth:
    """Return the growth of a storage that is repeated: at least that of the storage."""
    if numel(tensor.shape) % max(1, storage.elements):
        return None
    grown = (total(powers) for _, powers in readings(tensor.shape, sizing, None))
    return next((one for one in grown if one[0] >= whole[0] and one[1] >= whole[1]), None)


def _as_activations(powers: Powers) -> Power:
    """Return the growth of a tensor that no call wrote: none for a parameter.

    A tensor in the shape of activations, [batch, sequence, ...] or [sequence, batch, ...],
    represents the result of a collective that the capture did not run, so it grows.
    """
    return total(powers) if len(powers) > 2 and set(powers[:2]) == {SEQ, BATCH} else CONSTANT


def _beside(tensors: Sequence[Tensor], grows: list[Growth], unwritten: list[bool]) -> list[Growth]:
    """Return the growth of operands; unknown for an unwritten matrix that may be an activation.

    Such a matrix is no parameter, but a copy that the capture did not record, so the other operands
    determine its growth.
    """
    rows = {
        (len(tensor.shape), tensor.shape[0])
        for tensor, growth, unknown in zip(tensors, grows, unwritten, strict=True)
        if not unknown and growth not in (None, CONSTANT) and len(tensor.shape) > 1
    }
    return [
        None if unknown and (len(tensor.shape), *tensor.shape[:1]) in rows else growth
        for tensor, growth, unknown in zip(tensors, grows, unwritten, strict=True)
    ]


def _of_tables(
    met: CallInstance, grows: list[Growth], storages: Storages, sizing: Sizing
) -> list[Growth]:
    """Return the growth of operands; unknown for a slice of a table with the sequence length.

    Slopes or angles of positions are in a buffer for the longest sequence. The buffer is constant,
    but its slice grows.
    """
    if all(growth in (None, CONSTANT) for growth in grows):
        return grows
    made = list(grows)
    for place, (tensor, at) in enumerate(zip(met.form.inputs, met.places, strict=True)):
        storage = storages.get(at.storage) if at is not None else None
        if storage is None or grows[place] != CONSTANT or storage.grows != CONSTANT:
            continue
        part_of_it = 1 < numel(tensor.shape) < storage.elements
        if part_of_it and any(size in sizing.lengths for size in tensor.shape):
            made[place] = None
    return made


def _of_bags(tensors: Sequence[Tensor], grows: list[Growth], sizing: Sizing) -> list[Growth]:
    """Return the growth of table, indices and bag offsets; all bags have equally many indices."""
    if len(tensors) < 3 or numel(tensors[1].shape) % max(1, numel(tensors[2].shape)):
        return grows
    bags = grows[2]
    if bags is None:
        bags = total(likeliest(tensors[2].shape, sizing, None))
    return [grows[0], *(bags for _ in grows[1:])]


def _alike_indices(call: Call, grows: list[Growth]) -> list[Growth]:
    """Return the growth of the inputs of an indexing; indices of one shape grow equally."""
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


_CREATES = frozenset(
    "empty empty_strided empty_permuted zeros ones full new_empty new_zeros new_ones new_full "
    "new_empty_strided resize_ randn rand randint arange range linspace".split()
)

Sides = tuple[tuple[Powers, ...], tuple[Powers, ...]]

"""Powers of a call's inputs and of its results."""


class Propagated(NamedTuple):
    """Powers of a call's inputs and results, and whether a rule determined the results."""

    inputs: tuple[Powers, ...]
    outputs: tuple[Powers, ...]
    ruled: bool


class _Effect(NamedTuple):
    """An effect of a call on the storage of the tensor at `slot`; inputs precede results."""

    does: Literal["forget", "make", "define", "wait"]
    slot: int
    grows: Growth = None
    elements: int = 0


class Walk:
    """Follows storages from call to call.

    Attributes:
        inputs: node -> powers of its inputs.
        outputs: node -> powers of its results.
        unruled: operator -> number of calls whose results only sizes determine.
        storages: state of each storage.
        told_before: gives the powers of a call that is in neither of the first two, since one like
            it was walked instead.
    """

    def __init__(self, sizing: Sizing) -> None:
        self.inputs = dict[int, tuple[Powers, ...]]()
        self.outputs = dict[int, tuple[Powers, ...]]()
        self.unruled = dict[str, int]()
        self.told_before: Callable[[int], Sides] | None = None
        self._sizing = sizing
        self.storages = Storages()
        self._reads = dict[tuple[Any, ...], Read]()
        self._known = dict[tuple[Any, ...], tuple[Propagated, tuple[_Effect, ...]]]()
        self._anew = dict[tuple[int, int, Power], tuple[tuple[Powers, ...], tuple[Powers, ...]]]()
        self._effects = list[_Effect]()

    def visit(self, met: CallInstance) -> None:
        """Propagate growth through a call."""
        key = self._key(met)
        known = self._known.get(key)
        if known is None:
            self._effects = list[_Effect]()
            ruled = self._read_anew(met)
            told = Propagated(self.inputs[met.node], self.outputs[met.node], ruled)
            self._known[key] = told, tuple(self._effects)
        else:
            told, effects = known
            self.inputs[met.node], self.outputs[met.node] = told.inputs, told.outputs
            for effect in effects:
                self._do(met, effect)
        if not told.ruled:
            op = met.form.call.op
            self.unruled[op] = self.unruled.get(op, 0) + 1

    def _key(self, met: CallInstance) -> tuple[Any, ...]:
        """Return a key of everything that determines the growth of a call's tensors."""
        parts: list[Any] = [met.form.number, met.values]
        same, held = dict[Place, int](), dict[int, int]()
        known = self.storages.get
        for at in (*met.places, *met.results):
            if at is None:
                parts.append(None)
                continue
            tensor, block, offset = at
            parts += (
                same.setdefault(at, len(same)),
                held.setdefault(block, len(held)),
                offset > 0,
            )
            if (storage := known(block)) is not None:
                parts += storage.grows, storage.elements, storage.tensor == tensor, storage.written
        return tuple(parts)

    def _do(self, met: CallInstance, effect: _Effect) -> None:
        """Apply an effect of a call to a storage."""
        inputs = len(met.places)
        at = met.places[effect.slot] if effect.slot < inputs else met.results[effect.slot - inputs]
        assert at is not None, "only located tensors have a storage"
        if effect.does == "forget":
            del self.storages[at.storage]
        elif effect.does == "make":
            written = effect.slot >= inputs or met.form.communicates
            self.storages[at.storage] = Storage(effect.grows, effect.elements, at.tensor, written)
        elif effect.does == "define":
            assert effect.grows is not None, "a definition has a growth"
            self.define(self.storages[at.storage], effect.grows)
        else:
            self.storages[at.storage].waiting += (_seen(met, effect.slot),)

    def _did(self, met: CallInstance, effect: _Effect) -> None:
        """Record an effect for equal calls, and apply it."""
        self._effects.append(effect)
        self._do(met, effect)

    def _read_anew(self, met: CallInstance) -> bool:
        """Analyse a call; return whether more than sizes determines its results."""
        form = met.form
        grows, overwritten = input_growth(met, self.storages, self._sizing)
        for position in overwritten:
            self._did(met, _Effect("forget", position))
        made = self._read(form, met.values, grows)
        inputs, outputs = made.inputs, made.outputs
        if form.parts_of_one and inputs:
            tensors = zip(form.inputs, inputs, strict=True)
            alike = min(tensors, key=lambda one: one[0].numel)[1]  # the shard has plain sizes
            inputs = tuple(alike if len(alike) == len(powers) else powers for powers in inputs)
        if form.optimizer:
            outputs = tuple((CONSTANT,) * len(t.shape) for t in form.outputs)
        self.inputs[met.node], self.outputs[met.node] = inputs, outputs
        self._write(met, grows)
        return form.optimizer or made.ruled or _is_told(met)

    def _read(self, form: Form, values: tuple[Any, ...], grows: tuple[Growth, ...]) -> Read:
        key = form.number, values, grows
        if key not in self._reads:
            call = replace(form.call, values=tuple(map(_listed, values))) if values else form.call
            self._reads[key] = read(call, grows, self._sizing)
        return self._reads[key]

    def _write(self, met: CallInstance, grows: Sequence[Growth]) -> None:
        """Record the call's results, and the growth of inputs that it is the first to determine."""
        form, op = met.form, met.form.call.op
        others = [g for t, g in zip(form.inputs, grows, strict=True) if t.shape]
        in_place = op.endswith("_") and op not in MASKS and bool(others)
        untold = op in _CREATES or (op in OVERWRITES and op != "copy_")
        untold |= in_place and all(one is None for one in others)
        taken = {at.storage for at in met.places if at is not None}
        first = len(met.places)
        for position, (tensor, at) in enumerate(zip(form.outputs, met.results, strict=True)):
            if at is None:
                continue
            if untold:
                self._leave_untold(met, first + position, tensor, at, among=taken)
            else:
                self._result(met, first + position, tensor, at, among=taken)
        for position, (tensor, at) in enumerate(zip(form.inputs, met.places, strict=True)):
            if at is None:
                continue
            storage = self.storages.get(at.storage)
            grown = total(self.inputs[met.node][position])
            if storage is None:
                self._did(met, _Effect("make", position, grown, numel(tensor.shape)))
            elif storage.grows is None and not untold:
                self._did(met, _Effect("define", position, grown))
            elif storage.grows is None:
                self._did(met, _Effect("wait", position))
            elif grows[position] is None:
                self._tell(storage, _seen(met, position))

    def _leave_untold(
        self, met: CallInstance, slot: int, tensor: Tensor, at: Place, *, among: set[int]
    ) -> None:
        """Record a result of unknown growth: new memory, or memory filled with one value."""
        storage = self.storages.get(at.storage)
        if storage is None or not is_as_made(self.storages, at, tensor):
            outputs, position = self.outputs[met.node], slot - len(met.places)
            powers = likeliest(tensor.shape, self._sizing, None)
            self.outputs[met.node] = (*outputs[:position], powers, *outputs[position + 1 :])
            if storage is None or storage.grows is not None or at.storage not in among:
                self._did(met, _Effect("make", slot, None, numel(tensor.shape)))
                storage = self.storages[at.storage]
        if storage.grows is None:
            self._did(met, _Effect("wait", slot))
        else:
            self._tell(storage, _seen(met, slot))

    def _result(
        self, met: CallInstance, slot: int, tensor: Tensor, at: Place, *, among: set[int]
    ) -> None:
        """Record a result: new memory, a view, or an operand that was written to."""
        grown = total(self.outputs[met.node][slot - len(met.places)])
        storage = self.storages.get(at.storage)
        if at.storage not in among or storage is None:
            self._did(met, _Effect("make", slot, grown, numel(tensor.shape)))
        elif storage.grows is None:
            self._did(met, _Effect("define", slot, grown))
        elif met.form.call.op not in NEED_VALUES:
            self._tell(storage, _seen(met, slot))
        elif storage.grows != grown:  # the operand of a reduction determines its result
            self._did(met, _Effect("make", slot, grown, numel(tensor.shape)))

    def _tell(self, storage: Storage, seen: StorageState) -> None:
        """Update the powers of a tensor from its storage, if it covers the whole storage."""
        assert storage.grows is not None, "the growth of the storage is known"
        if seen.node not in self.inputs and self.told_before is not None:
            self.inputs[seen.node], self.outputs[seen.node] = self.told_before(seen.node)
        side = self.inputs if seen.is_input else self.outputs
        powers = side[seen.node]
        whole = numel(seen.tensor.shape) == storage.elements
        if whole and total(powers[seen.position]) != storage.grows:
            key = id(powers), seen.position, storage.grows
            if key not in self._anew:  # kept beside what it replaces, whose id stays its own
                known = likeliest(seen.tensor.shape, self._sizing, storage.grows)
                made = (*powers[: seen.position], known, *powers[seen.position + 1 :])
                self._anew[key] = powers, made
            side[seen.node] = self._anew[key][1]

    def define(self, storage: Storage, grows: Power) -> None:
        """Set the growth of a storage, and update the calls that used it before."""
        storage.grows = grows
        for seen in storage.waiting:
            self._tell(storage, seen)
        storage.waiting = ()


def _seen(met: CallInstance, slot: int) -> StorageState:
    inputs = len(met.places)
    if slot < inputs:
        return StorageState(met.node, True, slot, met.form.inputs[slot])
    return StorageState(met.node, False, slot - inputs, met.form.outputs[slot - inputs])


def _is_told(met: CallInstance) -> bool:
    """Return whether results are views or uninitialised, so that other calls determine them."""
    op = met.form.call.op
    taken = {at.storage for at in met.places if at is not None}
    views = all(at is not None and at.storage in taken for at in met.results)
    return views or op in _CREATES or op_class(f"aten::{op}") is OpClass.NOTHING


def _listed(value: Any) -> Any:
    """Return a value as JSON represents it: lists for tuples in keys."""
    return list(map(_listed, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value
