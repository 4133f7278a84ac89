"""FLOPs and bytes of operators that users register, such as custom and Triton operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.operands import Call, Operand
from onerank.ir.errors import AnnotateError

Shape = tuple[int, ...]
Shapes = Sequence[Shape | None]
"""The shape of each argument or result, in the schema's order. Arguments that are no tensor are
None; for a list of tensors, the shape of its first."""

Count = Callable[[Shapes, Shapes], object]
"""Returns FLOPs or bytes, an integer, given the shapes of the arguments and of the results."""


@dataclass(frozen=True)
class OperatorCost:
    """How much an operator computes and moves.

    Attributes:
        flops: its floating-point operations, a multiply-add counting two.
        bytes_read: bytes that it reads; None: all tensor arguments, each once.
        bytes_written: bytes that it writes; None: all results, each once.
    """

    flops: Count
    bytes_read: Count | None = None
    bytes_written: Count | None = None


_registered: dict[str, OperatorCost] = {}


def register_operator_cost(
    operator: str,
    flops: Count,
    *,
    bytes_read: Count | None = None,
    bytes_written: Count | None = None,
) -> None:
    """Register the cost of an operator, for this process; as `onerank.register_operator_cost`."""
    namespace, _, name = operator.partition("::")
    if not namespace or not name or "." in name:
        raise AnnotateError(
            f"{operator!r} is no operator's name; expected its namespace, two colons and its name\n"
            '  register it as "mylib::gemm"',
            code="operator-cost-name",
        )
    _registered[operator] = OperatorCost(flops, bytes_read, bytes_written)


def is_registered(op: str) -> bool:
    """Return whether a formula of an operator, with or without overload, is registered."""
    return bool(_registered) and op.split(".", 1)[0] in _registered


def registered_work(op: str, call: Call, otherwise: Work) -> Work:
    """Return the work of a call of a registered operator.

    Args:
        op: operator with namespace.
        call: its operands.
        otherwise: the work by its operands alone.

    Raises:
        AnnotateError: a formula raised, or returned no count.
    """
    cost = _registered[op.split(".", 1)[0]]
    inputs, outputs = _shapes(call.inputs), _shapes(call.outputs)
    counts: dict[str, Any] = {}
    for name in ("flops", "bytes_read", "bytes_written"):
        formula: Count | None = getattr(cost, name)
        if formula is not None:
            counts[name] = _count(op, name, formula, inputs, outputs)
    return replace(otherwise, **counts)


def _shapes(operands: tuple[Operand, ...]) -> list[Shape | None]:
    return [operand[0].shape if operand else None for operand in operands]


def _count(
    op: str, name: str, formula: Count, inputs: list[Shape | None], outputs: list[Shape | None]
) -> int:
    try:
        result = formula(inputs, outputs)
    except Exception as error:
        raise AnnotateError(
            f"the {name} registered for {op} raised {type(error).__name__}: {error}\n"
            f"  it has to take arguments of shapes {inputs} and results of shapes {outputs}",
            code="operator-cost-invalid",
        ) from error
    # `__index__` accepts NumPy's and torch's integers but no float, which would hide a rounded
    # count.
    count = result.__index__() if isinstance(result, SupportsIndex) else -1
    if count < 0:
        raise AnnotateError(
            f"the {name} registered for {op} returned {result!r} for arguments of shapes {inputs}\n"
            "  return a count, an integer of at least 0",
            code="operator-cost-invalid",
        )
    return count
