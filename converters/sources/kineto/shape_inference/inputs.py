"""Inputs of a call, and dtype promotion (torch.result_type)."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

from onerank.ir.dtypes import DTYPES, TENSOR_TYPES, split_types

Shape = tuple[int, ...]

UNKNOWN_TYPE = "Tensor(not recorded)"
"""Type of a tensor in a list, as the profiler records it."""


class Tensor(NamedTuple):
    """Shape of a tensor, and its type as PyTorch's C++ name."""

    shape: Shape
    type: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Result = Tensor | None
"""A result; None for one that was not requested."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a call by position, as in an execution trace.

    Attributes:
        values: numbers, booleans and lists of them; None for anything else.
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


BY_CODE = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    15: "bfloat16",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
}
"""Number of a ScalarType, as c10/core/ScalarType.h counts them -> dtype."""

_RANKS = ("bool", "int", "float", "complex")


def named(dtype: str) -> str:
    """Return the C++ name of a dtype."""
    return TENSOR_TYPES[dtype][len("Tensor(") : -1]


def asked(given: Inputs, position: int, otherwise: str) -> str:
    """Return the dtype that the number at `position` requests."""
    code = given.value(position)
    return named(BY_CODE[code]) if type(code) is int and code in BY_CODE else otherwise


def kind(name: str) -> int:
    """Return the place of a type among bool, integers, floating point and complex."""
    dtype = DTYPES[name][0] if name in DTYPES else name
    sort = "int" if dtype.startswith("uint") else dtype.rstrip("0123456789")
    return _RANKS.index(sort) if sort in _RANKS else _RANKS.index("float")


def promoted(tensors: list[Tensor], numbers: list[object] | None = None) -> str:
    """Return the type of an operation on tensors and Python numbers.

    Tensors without dimensions and numbers count only where they are of a higher kind.
    """
    whole = [one.type for one in tensors if one.shape]
    single = [one.type for one in tensors if not one.shape]
    best = _widest(whole or single)
    least = kind(best)
    if whole and single and kind(_widest(single)) > least:
        best = _widest(single)
        best = "float" if best == "double" else best  # a Python number's, most often
        least = kind(best)
    for number in numbers or ():
        if isinstance(number, float) and least < _RANKS.index("float"):
            return "float"
        if type(number) is int and least < _RANKS.index("int"):
            best, least = named("int64"), _RANKS.index("int")
    return best


def _widest(names: list[str]) -> str:
    kinds = [kind(name) for name in names]
    highest = [name for name, one in zip(names, kinds, strict=True) if one == max(kinds)]
    sizes = [DTYPES[name][1] if name in DTYPES else 0 for name in highest]
    widest = [name for name, size in zip(highest, sizes, strict=True) if size == max(sizes)]
    halves = {"c10::Half", "c10::BFloat16"}
    return "float" if halves <= set(widest) else widest[0]
