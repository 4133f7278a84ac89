"""Calls of PyTorch's operators, which is what the cost models know."""

from dataclasses import dataclass
from typing import Any

import msgspec

from onerank.converters.onnx.model import DTYPES, Tensor

Argument = Tensor | tuple[Tensor, ...] | int | float | bool | list[Any] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        op: operator with namespace: "aten::mm".
        inputs: arguments by position in the operator's schema.
        outputs: results, None for one that is not asked for.
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
        return {name: msgspec.json.encode(given).decode() for name, given in text.items()}


def call(op: str, inputs: list[Argument], *outputs: Tensor | None) -> Call:
    """Return a call of one of PyTorch's own operators."""
    return Call(f"aten::{op}", tuple(inputs), outputs)


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
