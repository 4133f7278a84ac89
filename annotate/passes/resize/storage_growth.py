"""Calls of a step, and what is known of how the storages of their tensors grow."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.operand_growth import Growth
from onerank.annotate.passes.resize.size_change import numel
from onerank.annotate.passes.tensor_locations import TensorLocation

# Operators that write operands after the first; FSDP2 fills and empties its buffers with them.
_WRITES_OPERANDS = frozenset({"split_with_sizes_copy", "_chunk_cat"})


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Operator, shapes and dtypes that many calls share.

    Attributes:
        number: identifies the signature.
        call: operator, shapes and dtypes.
        inputs: its input tensors, lists flattened.
        outputs: its results, lists flattened.
        communicates: whether it is communication.
        collective: whether it is a collective.
        constant: whether none of its tensors grows: of the optimizer, or metadata of a kernel.
    """

    number: int
    call: Call
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    communicates: bool
    collective: bool
    constant: bool = False

    @property
    def writes_operands(self) -> bool:
        """Whether operands after the first are written to."""
        return self.collective or self.call.op in _WRITES_OPERANDS

    @property
    def splits_one_tensor(self) -> bool:
        """Whether its tensors are parts of one tensor, cut along a dimension."""
        return self.communicates or self.writes_operands


class CallInstance(NamedTuple):
    """One call: its node and signature, the locations of its tensors, and its other arguments."""

    node: int
    signature: CallSignature
    input_locations: tuple[TensorLocation | None, ...]
    result_locations: tuple[TensorLocation | None, ...]
    values: tuple[Any, ...]


class TensorRef(NamedTuple):
    """A tensor of a call, by its position among the inputs or the results."""

    node: int
    is_input: bool
    position: int
    tensor: Tensor


@dataclass(slots=True)
class StorageGrowth:
    """Growth and origin of a storage.

    Attributes:
        growth: its growth; None while unknown.
        elements: elements of the tensor that created it.
        tensor: id of that tensor.
        written: whether a call wrote it; none writes a script's tokens and constants.
        waiting: calls that need its growth.
    """

    growth: Growth
    elements: int
    tensor: int
    written: bool
    waiting: tuple[TensorRef, ...] = ()


Storages = dict[int, StorageGrowth]
"""State of each storage by its id."""


def covers_storage(storages: Storages, location: TensorLocation, tensor: Tensor) -> bool:
    """Return whether a tensor is the one that created its storage."""
    storage = storages.get(location.storage)
    if storage is None:
        return False
    return storage.elements == numel(tensor.shape) and storage.tensor == location.tensor
