"""The cost record of one operator call."""

from collections.abc import Callable
from dataclasses import dataclass

from onerank.annotate.work.shapes import Call, Tensor
from onerank.ir import UNKNOWN


@dataclass(frozen=True, slots=True)
class Work:
    """What a call does, however fast it does it.

    Attributes:
        flops: floating-point operations, a multiply-add counting two; UNKNOWN without a formula.
        bytes_read: bytes of the operands, each read once; UNKNOWN without shapes.
        bytes_written: bytes of the results, each written once; UNKNOWN without shapes.
        matmul: whether the operations are matrix products, so run at `dtype`'s matmul rate.
        dtype: type of the products' operands; "" when `matmul` is false.
        gemm: of one dense product, (batch, m, n, k, bytes of an operand's and a result's element).
        attention: of fused attention, (batch, heads, key heads, query length, key length, head
            size of query and of value, causal, backward); causal 2: queries of the last keys.
        launches: part of a description's launch floor that the shortest such calls take.
    """

    flops: int = UNKNOWN
    bytes_read: int = UNKNOWN
    bytes_written: int = UNKNOWN
    matmul: bool = False
    dtype: str = ""
    gemm: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    launches: float = 1.0


Formula = Callable[[Call], Work | None]
"""The work of a call, or None when its operands are not those the formula is for."""


def product(
    call: Call,
    operand: Tensor,
    flops: int,
    bytes_read: int | None = None,
    *,
    gemm: tuple[int, ...] = (),
    attention: tuple[int, ...] = (),
) -> Work:
    """Return the work of matrix products of `operand`'s type: every operand read once.

    `gemm` is (batch, m, n, k) where they are one dense product.
    """
    read = call.input_bytes if bytes_read is None else bytes_read
    if gemm:
        result = call.output()
        gemm = (*gemm, operand.item_bytes, result.item_bytes if result else operand.item_bytes)
    return Work(
        flops,
        read,
        call.output_bytes,
        matmul=True,
        dtype=operand.dtype,
        gemm=gemm,
        attention=attention,
    )


def vector(call: Call, flops: int, read: int | None = None, written: int | None = None) -> Work:
    """Return work of the vector units; the bytes default to those of all operands."""
    return Work(
        flops,
        call.input_bytes if read is None else read,
        call.output_bytes if written is None else written,
    )
