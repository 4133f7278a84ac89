"""Calls as a walk meets them: what calls alike share, and where the tensors of one lie."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from onerank.annotate.what_ifs.sizes.places import Place
from onerank.annotate.work.shapes import Call, Tensor

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


class Met(NamedTuple):
    """A call as it is met: where its tensors are, and argument values that are no tensors."""

    node: int
    form: Form
    places: tuple[Place | None, ...]
    results: tuple[Place | None, ...]
    values: tuple[Any, ...]
