"""One call after another: what each tells of its tensors' growth, and what is known of storages.

What a call tells follows from its form, from which of its tensors are the same, and from what is
known of their storages. Calls that agree in all of this are read once and told again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor
from onerank.annotate.passes.resize.dimensions import Powers
from onerank.annotate.passes.resize.input_growth import OVERWRITES, input_growth
from onerank.annotate.passes.resize.operand_growth import (
    MASKS,
    NEED_VALUES,
    Growth,
    Read,
    likeliest,
    read,
)
from onerank.annotate.passes.resize.size_change import CONSTANT, Power, Sizing, numel, total
from onerank.annotate.passes.resize.storage_state import (
    CallInstance,
    Form,
    Storage,
    Storages,
    StorageState,
    is_as_made,
)
from onerank.annotate.passes.resize.tensor_locations import Place

_CREATES = frozenset(
    "empty empty_strided empty_permuted zeros ones full new_empty new_zeros new_ones new_full "
    "new_empty_strided resize_ randn rand randint arange range linspace".split()
)

Sides = tuple[tuple[Powers, ...], tuple[Powers, ...]]
"""Powers of a call's inputs and of its results."""


class Propagated(NamedTuple):
    """Powers of a call's inputs and results, and whether a rule told the results."""

    inputs: tuple[Powers, ...]
    outputs: tuple[Powers, ...]
    ruled: bool


class _Effect(NamedTuple):
    """What a call does to the storage of its tensor at `slot`, counted inputs before results."""

    does: Literal["forget", "make", "define", "wait"]
    slot: int
    grows: Growth = None
    elements: int = 0


class Walk:
    """Follows storages from call to call.

    Attributes:
        inputs: node -> powers of its inputs.
        outputs: node -> powers of its results.
        unruled: operator -> how many calls have results told by sizes alone.
        storages: what is known of each storage.
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
        """Take note of a call."""
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
        """Return all that what a call tells depends on."""
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
        """Do to a storage what a call does."""
        inputs = len(met.places)
        at = met.places[effect.slot] if effect.slot < inputs else met.results[effect.slot - inputs]
        assert at is not None, "only tensors that lie somewhere have a storage"
        if effect.does == "forget":
            del self.storages[at.storage]
        elif effect.does == "make":
            written = effect.slot >= inputs or met.form.communicates
            self.storages[at.storage] = Storage(effect.grows, effect.elements, at.tensor, written)
        elif effect.does == "define":
            assert effect.grows is not None, "what is defined grows somehow"
            self.define(self.storages[at.storage], effect.grows)
        else:
            self.storages[at.storage].waiting += (_seen(met, effect.slot),)

    def _did(self, met: CallInstance, effect: _Effect) -> None:
        """Do it, and keep it for calls alike."""
        self._effects.append(effect)
        self._do(met, effect)

    def _read_anew(self, met: CallInstance) -> bool:
        """Read a call; return whether its results are told by more than their sizes."""
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
        """Keep what the call wrote, and what it was first to tell of its inputs."""
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
        """Keep a result that nobody can tell yet: memory that is new, or filled with one value."""
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
        """Keep a result: new, a view, or an operand that was written to."""
        grown = total(self.outputs[met.node][slot - len(met.places)])
        storage = self.storages.get(at.storage)
        if at.storage not in among or storage is None:
            self._did(met, _Effect("make", slot, grown, numel(tensor.shape)))
        elif storage.grows is None:
            self._did(met, _Effect("define", slot, grown))
        elif met.form.call.op not in NEED_VALUES:
            self._tell(storage, _seen(met, slot))
        elif storage.grows != grown:  # what a reduction writes is told by its operand
            self._did(met, _Effect("make", slot, grown, numel(tensor.shape)))

    def _tell(self, storage: Storage, seen: StorageState) -> None:
        """Read a view anew by what its storage is known to be, if it is all of it."""
        assert storage.grows is not None, "told is what is known"
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
        """Say how a storage grows, to those as well who used it before anybody knew."""
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
    """Return whether the results are views, or what others will fill: those tell."""
    op = met.form.call.op
    taken = {at.storage for at in met.places if at is not None}
    views = all(at is not None and at.storage in taken for at in met.results)
    return views or op in _CREATES or op_class(f"aten::{op}") is OpClass.NOTHING


def _listed(value: Any) -> Any:
    """Return a value as JSON tells it: lists for the tuples that keys are made of."""
    return list(map(_listed, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value
