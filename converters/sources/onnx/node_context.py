"""Inputs and outputs of the lowering rules: an ONNX node with its operands, and PyTorch calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from onerank.converters.sources.onnx.model import DTYPES, Tensor

Argument = Tensor | tuple[Tensor, ...] | int | float | bool | list[Any] | None


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A call of a PyTorch operator.

    Attributes:
        op: operator with namespace: "aten::mm".
        inputs: arguments by position in the operator's schema.
        outputs: results, None for one that is not computed.
    """

    op: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Tensor | None, ...]

    def columns(self) -> dict[str, str]:
        """Return the operand columns of `Nodes`, as JSON text."""
        text = {
            "input_shapes": [_shape(argument) for argument in self.inputs],
            "input_types": [_type(argument) for argument in self.inputs],
            "input_values": [_value(argument) for argument in self.inputs],
            "output_shapes": [_shape(tensor) for tensor in self.outputs],
            "output_types": [_type(tensor) for tensor in self.outputs],
        }
        return {name: msgspec.json.encode(value).decode() for name, value in text.items()}


def call(op: str, inputs: list[Argument], *outputs: Tensor | None) -> AtenCall:
    """Return a call of an `aten` operator."""
    return AtenCall(f"aten::{op}", tuple(inputs), outputs)


def _shape(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return list(argument.shape)
    if isinstance(argument, tuple):
        return [list(tensor.shape) for tensor in argument]
    return []


def _type(argument: Argument) -> str:
    if isinstance(argument, Tensor):
        return f"Tensor({DTYPES.get(argument.dtype, (argument.dtype,))[0]})"
    if isinstance(argument, tuple):
        return f"GenericList[{','.join(_type(tensor) for tensor in argument)}]"
    if isinstance(argument, bool):
        return "Bool"
    if isinstance(argument, list):
        return "GenericList[]" if not argument else f"GenericList[{_type(argument[0])}]"
    if isinstance(argument, int):
        return "Int"
    return "Double" if isinstance(argument, float) else "None"


def _value(argument: Argument) -> Any:
    return argument if isinstance(argument, (bool, int, float, list)) else []


@dataclass(frozen=True, slots=True)
class NodeContext:
    """An ONNX node with the shapes, types and constant data of its operands.

    Attributes:
        op: ONNX operator.
        domain: its operator set; "" is ONNX's own.
        inputs: shape and type per operand, None for an omitted one.
        outputs: shape and type per result.
        attributes: name -> value.
        data: per operand, its data if it is a small constant, else None.
        weights: per operand, whether it is a weight.
    """

    op: str
    domain: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    data: tuple[Any, ...]
    weights: tuple[bool, ...]

    def tensor(self, position: int) -> Tensor:
        """Return a required operand."""
        operand = self.inputs[position]
        assert operand is not None, f"{self.op} lacks operand {position}"
        return operand

    def optional(self, position: int) -> Tensor | None:
        """Return an optional operand."""
        return self.inputs[position] if position < len(self.inputs) else None

    @property
    def present(self) -> list[Tensor]:
        """The operands that are not omitted."""
        return [tensor for tensor in self.inputs if tensor is not None]

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outputs[0]


Rule = Callable[[NodeContext], list[AtenCall] | None]
