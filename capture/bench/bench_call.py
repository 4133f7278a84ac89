"""A call to measure, and the record of its measurement."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from onerank.ir.dtypes import DTYPES, ITEM_BYTES, TENSOR_TYPES, split_types
from onerank.ir.errors import CaptureError


@dataclass(frozen=True, slots=True)
class BenchOperand:
    """A tensor operand.

    Attributes:
        shape: its sizes.
        dtype: torch's name without `torch.`.
        strides: in elements; None for a contiguous tensor.
        host: whether it is in host memory, as the tensor of a Python number is.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    strides: tuple[int, ...] | None = None
    host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def swapped(self, first: int, second: int) -> Self:
        """Return this shape as a view of a contiguous tensor with two dimensions swapped."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        inside = contiguous(tuple(self.shape[dim] for dim in order))
        return replace(self, strides=tuple(inside[order.index(dim)] for dim in range(len(order))))


@dataclass(frozen=True, slots=True)
class BenchCall:
    """A call of an operator with operands by shape, dtype and layout.

    Attributes:
        op: `aten::mm`.
        arguments: by position in the schema: a `BenchOperand`, a tuple of them (with None for an
            absent tensor of a list), or a plain value.
        tf32: whether GEMMs of float32 may run in TF32.
        same: (position, earlier position) of arguments that are the same tensors.
    """

    # `same` is part of a call's identity: memory that is read once takes less time.

    op: str
    arguments: tuple[Any, ...]
    tf32: bool = False
    same: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, op: str, shapes: str, types: str, values: str) -> Self:
        """Read a call from the texts of a node's columns.

        Raises:
            CaptureError: an argument cannot be created again.
        """
        if not values:
            raise CaptureError(
                f"{op}: its argument values were not recorded", code="bench-no-arguments"
            )
        columns = [json.loads(text) for text in (shapes, types, values)]
        arguments = tuple(_argument(op, *column) for column in zip(*columns, strict=True))
        return cls(op, arguments, same=tuple(_same(arguments, columns[2])))

    def operands(self) -> Iterator[BenchOperand]:
        """Yield every tensor operand in the order of the arguments, those of a list one by one."""
        for argument in self.arguments:
            if isinstance(argument, BenchOperand):
                yield argument
            elif isinstance(argument, tuple):
                yield from (item for item in argument if isinstance(item, BenchOperand))

    def with_operands(self, operands: list[BenchOperand]) -> Self:
        """Return the call with other operands, in the order of `operands()`."""
        remaining = iter(operands)

        def put(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return tuple(put(item) for item in argument)
            return next(remaining) if isinstance(argument, BenchOperand) else argument

        return replace(self, arguments=tuple(put(argument) for argument in self.arguments))

    @property
    def nbytes(self) -> int:
        """Bytes of all operands on the device; a tensor that is passed twice counts once."""
        repeated = {position for position, _ in self.same}
        distinct_arguments = tuple(
            argument for position, argument in enumerate(self.arguments) if position not in repeated
        )
        return sum(
            operand.nbytes
            for operand in BenchCall(self.op, distinct_arguments).operands()
            if not operand.host
        )

    def texts(self) -> tuple[str, str, str]:
        """Return (shapes, types, values) as the columns of a node of this call contain them."""
        earlier, ids = dict(self.same), itertools.count(1)
        rows: list[tuple[Any, str, Any]] = []
        for position, argument in enumerate(self.arguments):
            again = position in earlier
            rows.append(rows[earlier[position]] if again else _texts(argument, ids))
        shapes, types, values = (
            json.dumps([row[column] for row in rows], separators=(",", ":")) for column in range(3)
        )
        return shapes, types, values

    def layout(self) -> dict[str, Any]:
        """Return the properties that a node does not record: strides, host operands, TF32."""
        layout: dict[str, Any] = {}
        for position, operand in enumerate(self.operands()):
            if operand.host:
                layout[str(position)] = "host"
            elif operand.strides not in (None, contiguous(operand.shape)):
                layout[str(position)] = list(operand.strides or ())
        return {**layout, "tf32": True} if self.tf32 else layout


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _argument(op: str, shape: Any, kind: str, value: Any) -> Any:
    if kind.startswith("GenericList[") and "Tensor(" in kind:
        kinds = split_types(kind[len("GenericList[") : -1])
        return tuple(_argument(op, *item) for item in zip(shape, kinds, value, strict=True))
    if kind.startswith("Tensor("):
        name = kind[len("Tensor(") : -1]
        if "nullptr" in name:  # torch's type name of an undefined tensor
            return None
        if name not in DTYPES:
            raise CaptureError(
                f"{op}: tensors of type {name} cannot be created", code="bench-unknown-dtype"
            )
        return BenchOperand(tuple(shape), DTYPES[name][0], host=value[-1] == "cpu")
    if value == "<None>":
        return None
    return tuple(value) if isinstance(value, list) else value


def _same(arguments: tuple[Any, ...], values: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield arguments that are the same tensors as an earlier one."""
    first_position: dict[str, int] = {}
    for position, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        if isinstance(argument, BenchOperand) or (
            isinstance(argument, tuple) and any(isinstance(item, BenchOperand) for item in argument)
        ):
            # The value of a tensor contains its id and storage, so equal texts are the same tensor.
            earlier = first_position.setdefault(json.dumps(value), position)
            if earlier < position:
                yield position, earlier


def _texts(argument: Any, ids: Iterator[int]) -> tuple[Any, str, Any]:
    """Return (shape, type, value) of an argument as an execution trace writes them."""
    if isinstance(argument, BenchOperand):
        place = "cpu" if argument.host else "cuda:0"
        size = ITEM_BYTES[argument.dtype]
        # Each operand has its own id: `_same` takes equal values for one tensor.
        value = [next(ids), 0, 0, prod(argument.shape), size, place]
        return list(argument.shape), TENSOR_TYPES[argument.dtype], value
    if isinstance(argument, tuple):
        parts = [_texts(item, ids) for item in argument]
        kinds = ",".join(kind for _, kind, _ in parts)
        return [part[0] for part in parts], f"GenericList[{kinds}]", [part[2] for part in parts]
    if argument is None:
        return [], "None", "<None>"
    names = {bool: "Bool", int: "Int", float: "Double", str: "String"}
    return [], names[type(argument)], argument
