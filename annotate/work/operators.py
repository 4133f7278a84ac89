"""FLOPs and bytes of an operator call: which formula is whose."""

from dataclasses import replace

from onerank.annotate.work import attention, convolutions, gemm, pointwise, recurrent
from onerank.annotate.work.classes import base_name, op_class
from onerank.annotate.work.passes import cycles_of, passes_of, rereads_of
from onerank.annotate.work.record import Work
from onerank.annotate.work.shapes import Call, UnknownDtypeError
from onerank.ir.errors import AnnotateError

NEED_VALUES = convolutions.NEED_VALUES | attention.NEED_VALUES | pointwise.NEED_VALUES
"""Operators, by base name, whose cost depends on argument values, not on shapes alone."""

_MOST = 2**61
"""FLOPs or bytes of a call; sums of reads and writes have a place in 64 bits."""

_FORMULAS = {
    **gemm.FORMULAS,
    **convolutions.FORMULAS,
    **recurrent.FORMULAS,
    **attention.FORMULAS,
}


def needs_values(op: str) -> bool:
    """Return whether `work_of` must be given the operator's input values."""
    return base_name(op) in NEED_VALUES


def work_of(
    op: str,
    inputs: tuple[str, str],
    outputs: tuple[str, str] = ("", ""),
    values: str = "",
    *,
    fills: bool = False,
) -> Work:
    """Return FLOPs and bytes of a call.

    Args:
        op: operator, with or without namespace and overload.
        inputs: (shapes, types) of the arguments, JSON text as in the columns of `Nodes`.
        outputs: the same of the results.
        values: input values, for operators that `needs_values`.
        fills: whether the zeros that it writes a part of are written by it, and not by a kernel
            beside it: of a CPU capture, whose nodes are whole operators.

    Raises:
        AnnotateError: the text cannot be read, or tells of more work than 64 bits count.
    """
    try:
        call = Call.parse(base_name(op), inputs, outputs, values if needs_values(op) else "")
    except UnknownDtypeError:
        return Work()
    work = work_of_call(op, call)
    if max(work.flops, work.bytes_read, work.bytes_written, call.output_bytes) >= _MOST:
        raise AnnotateError(
            f"{op} of shapes {inputs[0]} would be {max(work.flops, work.bytes_read):.3g} FLOPs or "
            f"bytes: expected less than {_MOST:.3g}; are the sizes those of the step?"
        )
    if fills and call.op in pointwise.WRITES_INTO_ZEROS:
        return replace(work, bytes_written=work.bytes_written + call.output_bytes)
    return work


def work_of_call(op: str, call: Call) -> Work:
    """Return FLOPs and bytes of a call whose operands were read."""
    if not call.has_tensors:
        return Work()
    formula = _FORMULAS.get(call.op) or pointwise.BY_CLASS.get(op_class(op))
    work = (formula(call) if formula else None) or pointwise.bytes_only(call)
    passes, cycles = passes_of(call), cycles_of(call, op_class(op))
    if passes == 1 and not cycles:
        return work
    return replace(work, passes=passes, rereads=rereads_of(call), cycles=cycles)
