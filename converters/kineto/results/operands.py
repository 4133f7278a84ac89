"""Inputs of a call, and what it makes of them."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

from onerank.ir.dtypes import split_types

Shape = tuple[int, ...]

UNTOLD = "Tensor(not recorded)"
"""Type of a tensor in a list, as the profiler tells it."""


class Tensor(NamedTuple):
    """Shape of a tensor, and its type as PyTorch's C++ name."""

    shape: Shape
    type: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Result = Tensor | None
"""A result; None for one that was not asked for."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a call by position, as an execution trace has them.

    Attributes:
        values: numbers, truth values and lists of them; None for what is none of these.
        shapes: of tensors and lists of tensors; [] for others.
        types: `Tensor(float)`, `GenericList[...]`, `Int` and so on.
    """

    values: tuple[Any, ...] = ()
    shapes: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.types)

    def tensor(self, position: int) -> Tensor | None:
        """Return the tensor at `position`, or None."""
        if position >= len(self.types) or not self.types[position].startswith("Tensor("):
            return None
        return Tensor(tuple(self.shapes[position]), self.types[position][len("Tensor(") : -1])

    def tensors(self, position: int) -> tuple[Tensor, ...]:
        """Return the tensors of the list at `position`; none where it is no such list."""
        if position >= len(self.types) or not self.types[position].startswith(
            "GenericList[Tensor("
        ):
            return ()
        kinds = split_types(self.types[position][len("GenericList[") : -1])
        pairs = zip(self.shapes[position], kinds, strict=True)
        return tuple(Tensor(tuple(shape), kind[len("Tensor(") : -1]) for shape, kind in pairs)

    def value(self, position: int) -> Any:
        """Return the value at `position`, or None."""
        return self.values[position] if position < len(self.values) else None

    def list_of(self, position: int) -> list[Any] | None:
        """Return the list at `position`, or None."""
        found = self.value(position)
        return cast("list[Any]", found) if isinstance(found, list) else None

    def numbers(self, position: int) -> list[int] | None:
        """Return the list of integers at `position`, or None."""
        found = self.list_of(position)
        return found if found is not None and all(type(one) is int for one in found) else None
