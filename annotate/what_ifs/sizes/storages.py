"""What is known of blocks of memory, by what the calls so far did to them."""

from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.what_ifs.sizes.operands import Growth
from onerank.annotate.what_ifs.sizes.places import Place
from onerank.annotate.what_ifs.sizes.sizing import numel
from onerank.annotate.work.shapes import Tensor


class Seen(NamedTuple):
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
    waiting: tuple[Seen, ...] = ()


Storages = dict[int, Storage]
"""What is known of each storage, by its id."""


def is_as_made(storages: Storages, at: Place, tensor: Tensor) -> bool:
    """Return whether a tensor is the one that its storage was made as."""
    storage = storages.get(at.storage)
    if storage is None:
        return False
    return storage.elements == numel(tensor.shape) and storage.tensor == at.tensor
