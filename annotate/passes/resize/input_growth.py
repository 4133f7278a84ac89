"""How the inputs of a call grow when it begins, by their storages and by the call's rules."""

from collections.abc import Sequence
from typing import NamedTuple

from onerank.annotate.op_costs.op_classes import op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.operand_growth import (
    BROADCASTS,
    Growth,
    cheapest_reading,
    view_reading,
)
from onerank.annotate.passes.resize.result_growth import BAGS
from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    SEQ,
    Power,
    Powers,
    Sizing,
    numel,
    readings,
    total,
)
from onerank.annotate.passes.resize.storage_growth import (
    CallInstance,
    StorageGrowth,
    Storages,
    covers_storage,
)
from onerank.annotate.passes.tensor_locations import OVERWRITES, TensorLocation

# Ids, positions and masks: without a known writer they grow as their shape reads, while a float may
# then be a parameter.
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})

_INDEXED_WRITES = frozenset({"index_put", "index_put_", "_index_put_impl_"})

_INDEXED_OPS = _INDEXED_WRITES | {"index"}


class InputGrowth(NamedTuple):
    """Growth of the inputs of a call when it begins.

    Attributes:
        growths: growth of each; None if unknown.
        overwritten: indices of inputs whose storage the call overwrites.
    """

    growths: tuple[Growth, ...]
    overwritten: tuple[int, ...]


def input_growth(instance: CallInstance, storages: Storages, sizing: Sizing) -> InputGrowth:
    """Return the growth of a call's inputs; unknown for inputs that it writes to."""
    signature, call, locations = (
        instance.signature,
        instance.signature.call,
        instance.input_locations,
    )
    storage_ids = {location.storage for location in locations if location is not None}
    known = {
        storage_id: storages[storage_id] for storage_id in storage_ids if storage_id in storages
    }
    growths: list[Growth] = []
    overwritten: list[int] = []
    for position, (tensor, location) in enumerate(zip(signature.inputs, locations, strict=True)):
        if not _is_written_to(instance, position):
            growths.append(
                _input_growth_of(
                    tensor, location, known, sizing, communicates=signature.communicates
                )
            )
            continue
        growths.append(None)
        if location is None or location.storage not in known:
            continue
        is_kept = covers_storage(known, location, tensor) and not _is_assumed_parameter(
            known[location.storage]
        )
        if not (is_kept or _writes_part(call, locations, known)):
            # Only from this copy. `_analyse` records the removal, which then also applies to equal
            # calls.
            del known[location.storage]
            overwritten.append(position)
    # Parts grow like the whole, so an unknown part takes the growth of a known one.
    if signature.splits_one_tensor:
        known_growth = next((growth for growth in growths if growth is not None), None)
        growths = [known_growth if growth is None else growth for growth in growths]
    unwritten = [location is not None and location.storage not in known for location in locations]
    if call.op in _INDEXED_OPS:
        growths = _growth_of_indices(call, growths)
        if (
            call.op in _INDEXED_WRITES
            and unwritten[0]
            and signature.inputs[0].shape == signature.inputs[-1].shape
        ):
            growths[0] = growths[-1]  # the values replace the whole tensor
    elif op_class(f"aten::{call.op}") in BROADCASTS or call.op == "convolution_backward":
        growths = _growth_of_unrecorded_copies(signature.inputs, growths, unwritten)
        growths = _growth_of_table_slices(instance, growths, known, sizing)
    elif call.op in BAGS:
        growths = _growth_of_bags(signature.inputs, growths, sizing)
    # Parameters, gradients and states do not grow, even if a size equals the sequence length.
    if signature.constant:
        growths = [CONSTANT] * len(growths)
    return InputGrowth(tuple(growths), tuple(overwritten))


def _is_written_to(instance: CallInstance, position: int) -> bool:
    """Return whether a call writes to an input: the first, later ones, or a final `out=`."""
    op, locations = instance.signature.call.op, instance.input_locations
    if position == 0:
        return op in OVERWRITES
    if instance.signature.writes_operands:
        return True
    location, is_last = locations[position], position == len(locations) - 1
    return (
        is_last
        and not op.endswith("_")
        and location in instance.result_locations
        and location not in locations[:-1]
    )


def _writes_part(
    call: Call, locations: Sequence[TensorLocation | None], storages: Storages
) -> bool:
    """Return whether a copy writes only a part of existing memory."""
    location = locations[0]
    if call.op != "copy_" or location is None:
        return False
    storage = storages.get(location.storage)
    is_unknown = storage is not None and storage.growth is None
    copies_itself = any(
        source is not None and source.storage == location.storage for source in locations[1:]
    )
    return is_unknown or copies_itself or location.offset > 0


def _is_assumed_parameter(storage: StorageGrowth) -> bool:
    """Return whether a storage was never written, and is therefore assumed not to grow."""
    return not storage.written and storage.growth == CONSTANT


def _input_growth_of(
    tensor: Tensor,
    location: TensorLocation | None,
    storages: Storages,
    sizing: Sizing,
    *,
    communicates: bool,
) -> Growth:
    """Return the growth of an input; for an unwritten one, the growth that its shape implies."""
    storage = storages.get(location.storage) if location is not None else None
    if storage is not None:
        if storage.growth is None:
            return None
        if numel(tensor.shape) == storage.elements:
            is_another = location is not None and storage.tensor != location.tensor
            if not (is_another and _is_assumed_parameter(storage)):
                return storage.growth
        return _view_growth(tensor, storage, storage.growth, sizing)
    # The buffer of a collective is filled by other ranks; its other tensors show how it grows.
    if communicates and location is not None:
        return None
    powers = cheapest_reading(tensor.shape, sizing, None)
    if tensor.dtype in INTEGERS:
        return total(powers)
    return None if location is None else _growth_of_unwritten(powers)


def _view_growth(tensor: Tensor, storage: StorageGrowth, whole: Power, sizing: Sizing) -> Growth:
    """Return the growth of a view with more or fewer elements than its storage."""
    powers = view_reading(tensor.shape, sizing, whole)
    growth = total(powers)
    if numel(tensor.shape) > storage.elements:
        # An expanded constant grows like the other operands of its reader.
        if whole == CONSTANT:
            return None
        return _growth_of_expanded(tensor, storage, whole, sizing) or growth
    if tensor.dtype in INTEGERS and not (storage.written and whole == CONSTANT):
        return growth
    if whole == CONSTANT:
        return _growth_of_unwritten(powers)
    # A part never grows faster than the whole.
    return min(growth[0], whole[0]), min(growth[1], whole[1])


def _growth_of_expanded(
    tensor: Tensor, storage: StorageGrowth, whole: Power, sizing: Sizing
) -> Growth:
    """Return the growth of a storage that is repeated: at least that of the storage."""
    if numel(tensor.shape) % max(1, storage.elements):
        return None
    growths = (total(powers) for _, powers in readings(tensor.shape, sizing, None))
    return next(
        (growth for growth in growths if growth[0] >= whole[0] and growth[1] >= whole[1]), None
    )


def _growth_of_unwritten(powers: Powers) -> Power:
    """Return the growth of a tensor that no call wrote: none for a parameter.

    A tensor in the shape of activations, [batch, sequence, ...] or [sequence, batch, ...],
    represents the result of a collective that the capture did not run, so it grows.
    """
    return total(powers) if len(powers) > 2 and set(powers[:2]) == {SEQ, BATCH} else CONSTANT


def _growth_of_unrecorded_copies(
    tensors: Sequence[Tensor], growths: list[Growth], unwritten: list[bool]
) -> list[Growth]:
    """Return the growth of operands; unknown for an unwritten matrix that may be an activation.

    Such a matrix is not a parameter but a copy that the capture did not record, so the other
    operands determine its growth.
    """
    rows = {
        (len(tensor.shape), tensor.shape[0])
        for tensor, growth, is_unwritten in zip(tensors, growths, unwritten, strict=True)
        if not is_unwritten and growth not in (None, CONSTANT) and len(tensor.shape) > 1
    }
    return [
        None if is_unwritten and (len(tensor.shape), *tensor.shape[:1]) in rows else growth
        for tensor, growth, is_unwritten in zip(tensors, growths, unwritten, strict=True)
    ]


def _growth_of_table_slices(
    instance: CallInstance, growths: list[Growth], storages: Storages, sizing: Sizing
) -> list[Growth]:
    """Return the growth of operands; unknown for a slice of a table with the sequence length.

    A buffer for the longest sequence holds slopes or angles of positions. The buffer is constant,
    but its slice grows.
    """
    if all(growth in (None, CONSTANT) for growth in growths):
        return growths
    slice_growths = list(growths)
    for index, (tensor, location) in enumerate(
        zip(instance.signature.inputs, instance.input_locations, strict=True)
    ):
        storage = storages.get(location.storage) if location is not None else None
        if storage is None or growths[index] != CONSTANT or storage.growth != CONSTANT:
            continue
        is_slice = 1 < numel(tensor.shape) < storage.elements
        if is_slice and any(size in sizing.lengths for size in tensor.shape):
            slice_growths[index] = None
    return slice_growths


def _growth_of_bags(
    tensors: Sequence[Tensor], growths: list[Growth], sizing: Sizing
) -> list[Growth]:
    """Return the growth of table, indices and bag offsets; all bags have equally many indices."""
    if len(tensors) < 3 or numel(tensors[1].shape) % max(1, numel(tensors[2].shape)):
        return growths
    # Without this rule the rows that a DLRM looks up did not grow with its micro-batch.
    bag_growth = growths[2]
    if bag_growth is None:
        bag_growth = total(cheapest_reading(tensors[2].shape, sizing, None))
    return [growths[0], *(bag_growth for _ in growths[1:])]


def _growth_of_indices(call: Call, growths: list[Growth]) -> list[Growth]:
    """Return the growth of the inputs of an indexing; indices of one shape grow equally."""
    indices = (call.inputs[1] if len(call.inputs) > 1 else None) or ()
    first = len(call.inputs[0] or ()) if call.inputs else 0
    input_growths = list(growths)
    for position, index in enumerate(indices, first):
        if input_growths[position] is None:
            index_growths = zip(indices, growths[first:], strict=False)
            input_growths[position] = next(
                (
                    growth
                    for other, growth in index_growths
                    if growth is not None and other.shape == index.shape
                ),
                None,
            )
    return input_growths
