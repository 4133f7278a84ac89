"""A node of an ONNX model with what is known of its operands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onerank.converters.onnx.calls import Call
from onerank.converters.onnx.model import Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """A node with what is known of its operands.

    Attributes:
        op: ONNX operator.
        domain: its operator set; "" is ONNX's own.
        inputs: shapes and types, None for an operand left out.
        outputs: the same of its results.
        attributes: name -> value.
        data: data of the operands that are small constants.
        weights: which operands are weights.
    """

    op: str
    domain: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    data: tuple[Any, ...]
    weights: tuple[bool, ...]

    def tensor(self, position: int) -> Tensor:
        """Return an operand that the operator cannot do without."""
        found = self.inputs[position]
        assert found is not None, f"{self.op} lacks operand {position}"
        return found

    def optional(self, position: int) -> Tensor | None:
        """Return an operand that may be left out."""
        return self.inputs[position] if position < len(self.inputs) else None

    @property
    def given(self) -> list[Tensor]:
        """The operands that are there."""
        return [tensor for tensor in self.inputs if tensor is not None]

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outputs[0]


Rule = Callable[[Site], list[Call] | None]
