"""Formulas that operators of several libraries share."""

from collections.abc import Callable

from onerank.annotate.op_costs.cost_record import Formula, Work, matmul_work, vector_work
from onerank.annotate.op_costs.operands import Call, Tensor

SUM, QUANTIZE = 1, 2  # a scale and the largest number
# Two elements of a head become two sums of two products.
ROTARY = 3


def per_element(flops: int, written: tuple[int, ...] = (), *, returns: bool = True) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its largest operand.

    Args:
        flops: FLOPs per element of this operand.
        written: positions of arguments that the operator writes and does not read.
        returns: whether it returns tensors; if not, a capture without a device records as its
            results what it writes.
    """

    def formula(call: Call) -> Work | None:
        read = [at for at in range(len(call.inputs)) if at not in written]
        elements = max((call.numel(at) for at in read), default=0)
        results = call.list_bytes(*written) + (call.output_bytes if returns else 0)
        return vector_work(call, flops * elements, call.list_bytes(*read), results)

    return formula


# Sizes of an operand, by its position among the arguments; negative ones count from the results.
_Shapes = Callable[[int], tuple[int, ...]]


def matrix_products(flops: Callable[[_Shapes], int], operand: int = 0) -> Formula:
    """Return the formula of a kernel whose FLOPs are those of matrix products.

    Args:
        flops: computes FLOPs from a function that returns the shape at a position; -1 is the first
            result.
        operand: position of the operand whose dtype the products have.
    """

    def formula(call: Call) -> Work | None:
        def shape(at: int) -> tuple[int, ...]:
            tensor = call.tensor(at) if at >= 0 else call.output(-1 - at)
            if tensor is None:
                raise _AbsentError
            return tensor.shape

        given: Tensor | None = call.tensor(operand)
        try:
            count = flops(shape)
        except (_AbsentError, IndexError, ZeroDivisionError, ValueError):
            return None
        return matmul_work(call, given, count) if given else None

    return formula


class _AbsentError(Exception):
    """An operand that a formula needs is not recorded."""


def per_result(flops: int) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its first result."""

    def formula(call: Call) -> Work | None:
        result = call.output()
        return vector_work(call, flops * result.numel) if result else None

    return formula


def per_first_operand(flops: int) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its first operand.

    The operand may be a list of tensors.
    """

    def formula(call: Call) -> Work:
        return vector_work(call, flops * call.numel(0))

    return formula
