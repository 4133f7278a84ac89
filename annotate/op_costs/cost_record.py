"""The cost record of one operator call: FLOPs, bytes, class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir import UNKNOWN


class Part(NamedTuple):
    """A dense product [m, k] x [k, n], one of those that a call is made of.

    Attributes:
        batch: how many there are at once.
        m: rows of the result.
        n: columns of the result.
        k: inner size.
        item_bytes: of an element of operands and result.
        reuse: elements of [m, k] that share one element in memory, as in a convolution's image.
        times: repetitions, or how many times as long as a GEMM it takes.
        launches: additional launch floors, each time.
    """

    batch: int
    m: int
    n: int
    k: int
    item_bytes: int
    reuse: float = 1.0
    times: float = 1.0
    launches: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a call, independent of its speed.

    Attributes:
        flops: floating-point operations, a multiply-add counting two; UNKNOWN without a formula.
        bytes_read: bytes of the operands, each read once; UNKNOWN without shapes.
        bytes_written: bytes of the results, each written once; UNKNOWN without shapes.
        matmul: whether the operations are matrix products, which run at `dtype`'s GEMM rate.
        dtype: dtype of the operands; "" if `matmul` is false.
        gemm: of one dense GEMM, (batch, m, n, k, bytes of an operand's and a result's element).
        parts: of a convolution or a recurrent layer, the GEMMs that libraries turn it into.
        attention: of fused attention, (batch, heads, key heads, query length, key length, head size
            of query and of value, causal, backward); causal 2: queries of the last keys.
        floor_share: shortest such call as a share of the description's launch floor.
        passes: how often its kernels stream the bytes.
        rereads: how often memory, not the cache, serves them.
        cycles: SM cycles that its elements take at least.
    """

    flops: int = UNKNOWN
    bytes_read: int = UNKNOWN
    bytes_written: int = UNKNOWN
    matmul: bool = False
    dtype: str = ""
    gemm: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    attention: tuple[int, ...] = ()
    floor_share: float = 1.0
    passes: float = 1.0
    rereads: float = 1.0
    cycles: float = 0.0


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""Complex type -> type of its real and imaginary parts."""

Formula = Callable[[Call], Work | None]
"""The work of a call, or None when its operands are not those the formula is for."""


def product(
    call: Call,
    operand: Tensor,
    flops: int,
    bytes_read: int | None = None,
    *,
    gemm: tuple[int, ...] = (),
    parts: tuple[Part, ...] = (),
    attention: tuple[int, ...] = (),
) -> Work:
    """Return the work of matrix products of `operand`'s type: every operand read once.

    `gemm` is (batch, m, n, k) where they are one dense product, `parts` are several. Of complex
    numbers each multiply-add is four of real ones.
    """
    read = call.input_bytes if bytes_read is None else bytes_read
    if real := _PARTS.get(operand.dtype):
        return Work(4 * flops, read, call.output_bytes, matmul=True, dtype=real)
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
        parts=parts,
        attention=attention,
    )


def vector(call: Call, flops: int, read: int | None = None, written: int | None = None) -> Work:
    """Return work of the vector units; the bytes default to those of all operands."""
    return Work(
        flops,
        call.input_bytes if read is None else read,
        call.output_bytes if written is None else written,
    )
