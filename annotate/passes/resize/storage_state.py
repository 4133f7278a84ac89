"""Calls by signature, and what is known of each storage after the calls so far."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.operand_growth import Growth
from onerank.annotate.passes.resize.size_change import numel
from onerank.annotate.passes.resize.tensor_locations import Place

_FILLS = frozenset({"split_with_sizes_copy", "_chunk_cat"})  # operands after the first


@dataclass(frozen=True, slots=True)
class Form:
    """What many calls share.

    Attributes:
        number: tells forms apart.
        call: operator, shapes and types.
        inputs: its input tensors, lists laid out flat.
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
    """A call as it is met: where its tensors are, and argument values that are no tensors."""

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
    """What is known of a block of memory.

    Attributes:
        grows: how, as far as anybody has told.
        elements: of the tensor that made it.
        tensor: that tensor.
        written: whether a call wrote it, not a script's tokens or constants.
        waiting: who is to be told how it grows.
    """

    grows: Growth
    elements: int
    tensor: int
    written: bool
    waiting: tuple[StorageState, ...] = ()


Storages = dict[int, Storage]
"""What is known of each storage, by its id."""


def is_as_made(storages: Storages, at: Place, tensor: Tensor) -> bool:
    """Return whether a tensor is the one that its storage was made as."""
    storage = storages.get(at.storage)
    if storage is None:
        return False
    return storage.elements == numel(tensor.shape) and storage.tensor == at.tensor
