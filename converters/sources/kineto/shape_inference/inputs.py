"""Inputs of a call, and dtype promotion (torch.result_type)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

from onerank.ir.dtypes import DTYPES, TENSOR_TYPES, split_types

Shape = tuple[int, ...]

UNKNOWN_TYPE = "Tensor(not recorded)"
"""Type of a tensor in a list, as the profiler records it."""


class TensorShape(NamedTuple):
    """Shape of a tensor, and its type as PyTorch's C++ name."""

    shape: Shape
    type: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Result = TensorShape | None
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

    def tensor(self, position: int) -> TensorShape | None:
        """Return the tensor at `position`, or None."""
        # Optional operands are recorded with type None, so positions keep their meaning.
        if position >= len(self.types) or not self.types[position].startswith("Tensor("):
            return None
        return TensorShape(tuple(self.shapes[position]), self.types[position][len("Tensor(") : -1])

    def tensors(self, position: int) -> tuple[TensorShape, ...]:
        """Return the tensors of the list at `position`; () if it is no list of tensors."""
        if position >= len(self.types) or not self.types[position].startswith(
            "GenericList[Tensor("
        ):
            return ()
        kinds = split_types(self.types[position][len("GenericList[") : -1])
        pairs = zip(self.shapes[position], kinds, strict=True)
        return tuple(TensorShape(tuple(shape), kind[len("Tensor(") : -1]) for shape, kind in pairs)

    def value(self, position: int) -> Any:
        """Return the value at `position`, or None."""
        return self.values[position] if position < len(self.values) else None

    def list_of(self, position: int) -> list[Any] | None:
        """Return the list at `position`, or None."""
        value = self.value(position)
        return cast("list[Any]", value) if isinstance(value, list) else None

    def numbers(self, position: int) -> list[int] | None:
        """Return the list of integers at `position`, or None."""
        values = self.list_of(position)
        # A list of booleans is no list of sizes.
        if values is None or any(type(value) is not int for value in values):
            return None
        return values


Rule = Callable[[Inputs], tuple[Result, ...] | None]
"""Infers the results of a call; None if its inputs do not determine them."""


# The profiler records a dtype argument as its number.
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

_CATEGORIES = ("bool", "int", "float", "complex")


def cpp_name(dtype: str) -> str:
    """Return the C++ name of a dtype."""
    return TENSOR_TYPES[dtype][len("Tensor(") : -1]


def requested_type(inputs: Inputs, position: int, default: str) -> str:
    """Return the C++ type that the ScalarType number at `position` requests, else `default`."""
    # Not isinstance: a boolean would count as the number 0 or 1 of a type.
    code = inputs.value(position)
    return cpp_name(BY_CODE[code]) if type(code) is int and code in BY_CODE else default


def type_category(name: str) -> int:
    """Return the category of a type: 0 bool, 1 integer, 2 floating point, 3 complex."""
    dtype = DTYPES[name][0] if name in DTYPES else name
    category = "int" if dtype.startswith("uint") else dtype.rstrip("0123456789")
    return _CATEGORIES.index(category if category in _CATEGORIES else "float")


def promote_types(tensors: list[TensorShape], numbers: list[object] | None = None) -> str:
    """Return the type of an operation on tensors and Python numbers.

    Zero-dimensional tensors and numbers count only if their category is higher.
    """
    dimensioned = [tensor.type for tensor in tensors if tensor.shape]
    scalars = [tensor.type for tensor in tensors if not tensor.shape]
    # As in torch.result_type, tensors with dimensions decide before those without.
    result = _widest(dimensioned or scalars)
    category = type_category(result)
    if dimensioned and scalars and type_category(_widest(scalars)) > category:
        result = _widest(scalars)
        # A zero-dimensional double is mostly a Python number, which promotes to the default dtype.
        result = "float" if result == "double" else result
        category = type_category(result)
    for number in numbers or ():
        # A Python float with an integer tensor gives torch's default dtype, float32.
        if isinstance(number, float) and category < _CATEGORIES.index("float"):
            return "float"
        if type(number) is int and category < _CATEGORIES.index("int"):
            result, category = cpp_name("int64"), _CATEGORIES.index("int")
    return result


def _widest(names: list[str]) -> str:
    categories = [type_category(name) for name in names]
    top = max(categories)
    highest = [name for name, level in zip(names, categories, strict=True) if level == top]
    sizes = [DTYPES[name][1] if name in DTYPES else 0 for name in highest]
    widest = [name for name, size in zip(highest, sizes, strict=True) if size == max(sizes)]
    # float16 and bfloat16 have no common 16-bit type.
    halves = {"c10::Half", "c10::BFloat16"}
    return "float" if halves <= set(widest) else widest[0]


def broadcast(shapes: list[Shape]) -> Shape | None:
    """Return the shape that all shapes broadcast to; None if they do not broadcast."""
    reversed_shape: list[int] = []
    for place in range(max(map(len, shapes), default=0)):
        # Sizes of 1 broadcast to any other.
        sizes = {shape[-1 - place] for shape in shapes if place < len(shape)} - {1}
        if len(sizes) > 1:
            return None
        reversed_shape.append(sizes.pop() if sizes else 1)
    return tuple(reversed(reversed_shape))


def like(position: int, *, also: int = 0) -> Rule:
    """Return a rule: the first result has the shape and type of the input at `position`.

    Args:
        position: position of the input.
        also: number of following inputs that have a result of the same shape and type.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        results = [inputs.tensor(at) for at in range(position, position + also + 1)]
        return tuple(results) if results[0] is not None else None

    return rule
