"""How a call's inputs grow, inferred from the storage they lie in."""

from collections.abc import Sequence
from typing import NamedTuple

from onerank.annotate.op_costs.op_classes import op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.dimensions import Powers, readings
from onerank.annotate.passes.resize.operand_growth import BAGS, BROADCASTS, Growth, likeliest, part
from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    SEQ,
    Power,
    Sizing,
    numel,
    total,
)
from onerank.annotate.passes.resize.storage_state import CallInstance, Storage, Storages, is_as_made
from onerank.annotate.passes.resize.tensor_locations import Place

OVERWRITES = frozenset(
    "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ set_".split()
)
"""Operators that write all of their first input, whatever it held."""

_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})

_PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_"})

_INDEXES = _PUTS | {"index"}


class InputGrowth(NamedTuple):
    """How the inputs of a call grow as it begins.

    Attributes:
        grows: of each; None where nobody has told.
        overwritten: places among the inputs of those whose memory will hold something else.
    """

    grows: tuple[Growth, ...]
    overwritten: tuple[int, ...]


def input_growth(met: CallInstance, storages: Storages, sizing: Sizing) -> InputGrowth:
    """Return how a call's inputs grow; of those that it writes to, nothing is known."""
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
            grows[0] = grows[-1]  # all of it is put there
    elif op_class(f"aten::{call.op}") in BROADCASTS or call.op == "convolution_backward":
        grows = _beside(form.inputs, grows, unwritten)
        grows = _of_tables(met, grows, known, sizing)
    elif call.op in BAGS:
        grows = _of_bags(form.inputs, grows, sizing)
    if form.optimizer:
        grows = [CONSTANT] * len(grows)
    return InputGrowth(tuple(grows), tuple(overwritten))


def _is_written_to(met: CallInstance, position: int) -> bool:
    """Return whether a call writes to an input: its first, those after it, or `out=` at the end."""
    op, places = met.form.call.op, met.places
    if position == 0:
        return op in OVERWRITES
    if met.form.fills:
        return True
    at, last = places[position], position == len(places) - 1
    return last and not op.endswith("_") and at in met.results and at not in places[:-1]


def _writes_a_part(call: Call, places: Sequence[Place | None], storages: Storages) -> bool:
    """Return whether a copy writes a part of what was made before, of zeros or of others."""
    at = places[0]
    if call.op != "copy_" or at is None:
        return False
    storage = storages.get(at.storage)
    unknown = storage is not None and storage.grows is None
    itself = any(one is not None and one.storage == at.storage for one in places[1:])
    return unknown or itself or at.offset > 0


def _taken_for_a_parameter(storage: Storage) -> bool:
    """Return whether nobody wrote it, so that it was taken to be what does not grow."""
    return not storage.written and storage.grows == CONSTANT


def _grows(
    tensor: Tensor, at: Place | None, storages: Storages, sizing: Sizing, *, communicates: bool
) -> Growth:
    """Return how an input grows; of one that nobody wrote, what it must be."""
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
    """Return how a view of more or fewer elements than its storage grows."""
    powers = part(tensor.shape, sizing, whole)
    grows = total(powers)
    if numel(tensor.shape) > storage.elements:  # of a constant, what it meets tells
        return _expanded(tensor, storage, whole, sizing) or grows if whole != CONSTANT else None
    if tensor.dtype in _INTEGERS and not (storage.written and whole == CONSTANT):
        return grows
    if whole == CONSTANT:
        return _as_activations(powers)
    return min(grows[0], whole[0]), min(grows[1], whole[1])


def _expanded(tensor: Tensor, storage: Storage, whole: Power, sizing: Sizing) -> Growth:
    """Return how all of a storage grows, several times over: as it does, at least."""
    if numel(tensor.shape) % max(1, storage.elements):
        return None
    grown = (total(powers) for _, powers in readings(tensor.shape, sizing, None))
    return next((one for one in grown if one[0] >= whole[0] and one[1] >= whole[1]), None)


def _as_activations(powers: Powers) -> Power:
    """Return how a tensor that no call wrote grows: not at all, if it is a parameter.

    In the shape of activations, [batch, sequence, ...] or [sequence, batch, ...], it, or the part
    of a parameter that it is, stands for the result of a collective that the capture did not run.
    """
    return total(powers) if len(powers) > 2 and set(powers[:2]) == {SEQ, BATCH} else CONSTANT


def _beside(tensors: Sequence[Tensor], grows: list[Growth], unwritten: list[bool]) -> list[Growth]:
    """Return how operands grow; of a matrix that nobody wrote, what the others tell.

    It is no parameter beside one with as many rows that grows, but a copy that the capture did not
    see made.
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
    """Return how operands grow; of as many rows of a table as the sequence has, what others tell.

    Slopes or angles of positions lie in a buffer for the longest sequence, which does not grow.
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
    """Return how a table, indices and where each bag's begin grow: bags of as many indices each."""
    if len(tensors) < 3 or numel(tensors[1].shape) % max(1, numel(tensors[2].shape)):
        return grows
    bags = grows[2]
    if bags is None:
        bags = total(likeliest(tensors[2].shape, sizing, None))
    return [grows[0], *(bags for _ in grows[1:])]


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
