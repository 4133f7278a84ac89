"""Propagate growth with sequence and batch from call to call through storages.

The growth of a call's tensors follows from its signature, from which of its tensors are the same,
and from the state of their storages. Calls that agree in all of these are analysed once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor
from onerank.annotate.passes.resize.input_growth import input_growth
from onerank.annotate.passes.resize.operand_growth import (
    DRAWN,
    MASKS,
    CallPowers,
    Growth,
    cheapest_reading,
    infer_powers,
)
from onerank.annotate.passes.resize.result_growth import NEED_VALUES
from onerank.annotate.passes.resize.size_change import CONSTANT, Power, Powers, Sizing, numel, total
from onerank.annotate.passes.resize.storage_growth import (
    CallInstance,
    CallSignature,
    StorageGrowth,
    Storages,
    TensorRef,
    covers_storage,
)
from onerank.annotate.passes.tensor_locations import OVERWRITES, TensorLocation

_UNINITIALIZED = frozenset(
    "empty empty_strided empty_permuted zeros ones full new_empty new_zeros new_ones new_full "
    "new_empty_strided resize_ randn rand arange range linspace".split()
)

Sides = tuple[tuple[Powers, ...], tuple[Powers, ...]]
"""Powers of a call's inputs and of its results."""


class Propagated(NamedTuple):
    """Powers of a call's inputs and results, and whether a rule determined the results."""

    inputs: tuple[Powers, ...]
    outputs: tuple[Powers, ...]
    ruled: bool


class _StorageEffect(NamedTuple):
    """An effect of a call on the storage of the tensor at `slot`; inputs precede results.

    Attributes:
        kind: "remove" the storage, "create" it, "define" its unknown growth, or let the tensor
            "wait" until a later call defines it.
        slot: index of the tensor among inputs and results.
        growth: growth to set, for "create" and "define".
        elements: elements of the tensor, for "create".
    """

    kind: Literal["remove", "create", "define", "wait"]
    slot: int
    growth: Growth = None
    elements: int = 0


class Propagator:
    """Follows storages from call to call.

    Attributes:
        inputs: node -> powers of its inputs.
        outputs: node -> powers of its results.
        inferred_from_sizes: operator -> number of calls whose results only sizes determine.
        storages: state of each storage.
        earlier_powers: returns the powers of a call that is in neither `inputs` nor `outputs`,
            because an equal call was analysed instead.
    """

    def __init__(self, sizing: Sizing) -> None:
        self.inputs = dict[int, tuple[Powers, ...]]()
        self.outputs = dict[int, tuple[Powers, ...]]()
        self.inferred_from_sizes = dict[str, int]()
        self.earlier_powers: Callable[[int], Sides] | None = None
        self._sizing = sizing
        self.storages = Storages()
        self._powers_by_key = dict[tuple[Any, ...], CallPowers]()
        self._known = dict[tuple[Any, ...], tuple[Propagated, tuple[_StorageEffect, ...]]]()
        self._updated_powers = dict[
            tuple[int, int, Power], tuple[tuple[Powers, ...], tuple[Powers, ...]]
        ]()
        self._effects = list[_StorageEffect]()

    def visit(self, instance: CallInstance) -> None:
        """Propagate growth through a call."""
        key = self._key(instance)
        known = self._known.get(key)
        if known is None:
            self._effects = list[_StorageEffect]()
            ruled = self._analyse(instance)
            powers = Propagated(self.inputs[instance.node], self.outputs[instance.node], ruled)
            self._known[key] = powers, tuple(self._effects)
        else:
            powers, effects = known
            self.inputs[instance.node], self.outputs[instance.node] = powers.inputs, powers.outputs
            for effect in effects:
                self._apply(instance, effect)
        if not powers.ruled:
            op = instance.signature.call.op
            self.inferred_from_sizes[op] = self.inferred_from_sizes.get(op, 0) + 1

    def _key(self, instance: CallInstance) -> tuple[Any, ...]:
        """Return a key of everything that determines the growth of a call's tensors."""
        # Numbers in the order of first use in place of ids, so that calls on other tensors are
        # equal.
        parts: list[Any] = [instance.signature.number, instance.values]
        location_numbers, storage_numbers = dict[TensorLocation, int](), dict[int, int]()
        storage_of = self.storages.get
        for location in (*instance.input_locations, *instance.result_locations):
            if location is None:
                parts.append(None)
                continue
            tensor_id, storage_id, offset = location
            parts += (
                location_numbers.setdefault(location, len(location_numbers)),
                storage_numbers.setdefault(storage_id, len(storage_numbers)),
                # Of an offset only its presence matters (`_writes_part`).
                offset > 0,
            )
            if (storage := storage_of(storage_id)) is not None:
                parts += (
                    storage.growth,
                    storage.elements,
                    storage.tensor == tensor_id,
                    storage.written,
                )
        return tuple(parts)

    def _apply(self, instance: CallInstance, effect: _StorageEffect) -> None:
        """Apply an effect of a call to a storage."""
        input_count = len(instance.input_locations)
        location = (
            instance.input_locations[effect.slot]
            if effect.slot < input_count
            else instance.result_locations[effect.slot - input_count]
        )
        assert location is not None, "only located tensors have a storage"
        if effect.kind == "remove":
            del self.storages[location.storage]
        elif effect.kind == "create":
            written = effect.slot >= input_count or instance.signature.communicates
            self.storages[location.storage] = StorageGrowth(
                effect.growth, effect.elements, location.tensor, written
            )
        elif effect.kind == "define":
            assert effect.growth is not None, "a definition has a growth"
            self.define(self.storages[location.storage], effect.growth)
        else:
            self.storages[location.storage].waiting += (_tensor_ref(instance, effect.slot),)

    def _record_effect(self, instance: CallInstance, effect: _StorageEffect) -> None:
        """Record an effect for equal calls, and apply it."""
        self._effects.append(effect)
        self._apply(instance, effect)

    def _analyse(self, instance: CallInstance) -> bool:
        """Analyse a call; return whether more than sizes determines its results."""
        signature = instance.signature
        growths, overwritten = input_growth(instance, self.storages, self._sizing)
        for position in overwritten:
            self._record_effect(instance, _StorageEffect("remove", position))
        powers = self._powers(signature, instance.values, growths)
        inputs, outputs = powers.inputs, powers.outputs
        if signature.splits_one_tensor and inputs:
            tensors = zip(signature.inputs, inputs, strict=True)
            # The shard has plain sizes, while the whole tensor has them times the number of ranks.
            shard_powers = min(tensors, key=lambda pair: pair[0].numel)[1]
            inputs = tuple(
                shard_powers if len(shard_powers) == len(dimension_powers) else dimension_powers
                for dimension_powers in inputs
            )
        if signature.constant:
            outputs = tuple((CONSTANT,) * len(t.shape) for t in signature.outputs)
        self.inputs[instance.node], self.outputs[instance.node] = inputs, outputs
        self._write(instance, growths)
        return signature.constant or powers.ruled or _is_determined_elsewhere(instance)

    def _powers(
        self, signature: CallSignature, values: tuple[Any, ...], growths: tuple[Growth, ...]
    ) -> CallPowers:
        key = signature.number, values, growths
        if key not in self._powers_by_key:
            call = (
                replace(signature.call, values=tuple(map(_tuples_as_lists, values)))
                if values
                else signature.call
            )
            self._powers_by_key[key] = infer_powers(call, growths, self._sizing)
        return self._powers_by_key[key]

    def _write(self, instance: CallInstance, growths: Sequence[Growth]) -> None:
        """Record the call's results, and the growth of inputs that it is the first to determine."""
        signature, op = instance.signature, instance.signature.call.op
        known_or_none = [
            growth for tensor, growth in zip(signature.inputs, growths, strict=True) if tensor.shape
        ]
        in_place = op.endswith("_") and op not in MASKS and bool(known_or_none)
        is_unknown = op in _UNINITIALIZED or (op in OVERWRITES and op != "copy_")
        is_unknown |= in_place and all(growth is None for growth in known_or_none)
        is_unknown &= op not in DRAWN
        input_storages = {
            location.storage for location in instance.input_locations if location is not None
        }
        input_count = len(instance.input_locations)
        for position, (tensor, location) in enumerate(
            zip(signature.outputs, instance.result_locations, strict=True)
        ):
            if location is None:
                continue
            if is_unknown:
                self._record_unknown_result(
                    instance,
                    input_count + position,
                    tensor,
                    location,
                    input_storages=input_storages,
                )
            else:
                self._record_result(
                    instance,
                    input_count + position,
                    tensor,
                    location,
                    input_storages=input_storages,
                )
        for position, location in enumerate(instance.input_locations):
            if location is None:
                continue
            storage = self.storages.get(location.storage)
            tensor_growth = total(self.inputs[instance.node][position])
            if storage is None:
                elements = _elements_seen(instance, position)
                self._record_effect(
                    instance, _StorageEffect("create", position, tensor_growth, elements)
                )
            elif storage.growth is None and not is_unknown:
                self._record_effect(instance, _StorageEffect("define", position, tensor_growth))
            elif storage.growth is None:
                self._record_effect(instance, _StorageEffect("wait", position))
            elif growths[position] is None:
                self._update_powers(storage, _tensor_ref(instance, position))

    def _record_unknown_result(
        self,
        instance: CallInstance,
        slot: int,
        tensor: Tensor,
        location: TensorLocation,
        *,
        input_storages: set[int],
    ) -> None:
        """Record a result of unknown growth: new memory, or memory filled with one value."""
        storage = self.storages.get(location.storage)
        if storage is None or not covers_storage(self.storages, location, tensor):
            outputs, position = self.outputs[instance.node], slot - len(instance.input_locations)
            powers = cheapest_reading(tensor.shape, self._sizing, None)
            self.outputs[instance.node] = (*outputs[:position], powers, *outputs[position + 1 :])
            if (
                storage is None
                or storage.growth is not None
                or location.storage not in input_storages
            ):
                self._record_effect(
                    instance, _StorageEffect("create", slot, None, numel(tensor.shape))
                )
                storage = self.storages[location.storage]
        if storage.growth is None:
            self._record_effect(instance, _StorageEffect("wait", slot))
        else:
            self._update_powers(storage, _tensor_ref(instance, slot))

    def _record_result(
        self,
        instance: CallInstance,
        slot: int,
        tensor: Tensor,
        location: TensorLocation,
        *,
        input_storages: set[int],
    ) -> None:
        """Record a result: new memory, a view, or an operand that was written to."""
        growth = total(self.outputs[instance.node][slot - len(instance.input_locations)])
        storage = self.storages.get(location.storage)
        if location.storage not in input_storages or storage is None:
            self._record_effect(
                instance, _StorageEffect("create", slot, growth, numel(tensor.shape))
            )
        elif storage.growth is None:
            self._record_effect(instance, _StorageEffect("define", slot, growth))
        elif instance.signature.call.op not in NEED_VALUES:
            self._update_powers(storage, _tensor_ref(instance, slot))
        elif storage.growth != growth:  # the operand of a reduction determines its result
            self._record_effect(
                instance, _StorageEffect("create", slot, growth, numel(tensor.shape))
            )

    def _update_powers(self, storage: StorageGrowth, ref: TensorRef) -> None:
        """Update the powers of a tensor from its storage, if it covers the whole storage."""
        assert storage.growth is not None, "the growth of the storage is known"
        if ref.node not in self.inputs and self.earlier_powers is not None:
            self.inputs[ref.node], self.outputs[ref.node] = self.earlier_powers(ref.node)
        side = self.inputs if ref.is_input else self.outputs
        powers = side[ref.node]
        covers_all = numel(ref.tensor.shape) == storage.elements
        if covers_all and total(powers[ref.position]) != storage.growth:
            key = id(powers), ref.position, storage.growth
            # The value keeps the old powers alive, so that no other object gets their id.
            if key not in self._updated_powers:
                tensor_powers = cheapest_reading(ref.tensor.shape, self._sizing, storage.growth)
                updated = (*powers[: ref.position], tensor_powers, *powers[ref.position + 1 :])
                self._updated_powers[key] = powers, updated
            side[ref.node] = self._updated_powers[key][1]

    def define(self, storage: StorageGrowth, growth: Power) -> None:
        """Set the growth of a storage, and update the calls that used it before."""
        storage.growth = growth
        for ref in storage.waiting:
            self._update_powers(storage, ref)
        storage.waiting = ()


def _tensor_ref(instance: CallInstance, slot: int) -> TensorRef:
    input_count = len(instance.input_locations)
    if slot < input_count:
        return TensorRef(instance.node, True, slot, instance.signature.inputs[slot])
    return TensorRef(
        instance.node, False, slot - input_count, instance.signature.outputs[slot - input_count]
    )


def _elements_seen(instance: CallInstance, position: int) -> int:
    """Return the elements of a new storage, of which an input may be a part."""
    signature, locations = instance.signature, instance.input_locations
    elements = [
        numel(tensor.shape)
        for tensor, location in zip(signature.inputs, locations, strict=True)
        if location is not None and location.storage == cast(Any, locations[position]).storage
    ]
    # FSDP copies the shards of a layer side by side into one buffer, which the all-gather sends.
    return sum(elements) if signature.call.op == "_foreach_copy_" else max(elements)


def _is_determined_elsewhere(instance: CallInstance) -> bool:
    """Return whether results are views or uninitialized, so that other calls determine them."""
    op = instance.signature.call.op
    input_storages = {
        location.storage for location in instance.input_locations if location is not None
    }
    are_views = all(
        location is not None and location.storage in input_storages
        for location in instance.result_locations
    )
    return are_views or op in _UNINITIALIZED or op_class(f"aten::{op}") is OpClass.NOTHING


def _tuples_as_lists(value: Any) -> Any:
    """Return a value as JSON represents it: lists for tuples in keys."""
    return (
        list(map(_tuples_as_lists, cast("tuple[Any, ...]", value)))
        if isinstance(value, tuple)
        else value
    )
