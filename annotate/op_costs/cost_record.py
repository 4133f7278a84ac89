"""The cost record of one operator call: FLOPs, bytes, class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir import UNKNOWN


class Part(NamedTuple):
    """A component GEMM [m, k] x [k, n] of a composite call.

    Attributes:
        batch: number of GEMMs in one launch.
        m: rows of the result.
        n: columns of the result.
        k: inner size.
        item_bytes: bytes of an element of operands and result.
        reuse: elements of [m, k] per element in memory, above 1 for a convolution's image.
        times: repetitions, or the time relative to a plain GEMM of these sizes.
        launches: additional launch floors per repetition.
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
        gemm: (batch, m, n, k, bytes of an operand's and a result's element) of a dense GEMM.
        parts: GEMMs that libraries turn a convolution or a recurrent layer into.
        attention: (batch, heads, key heads, query length, key length, head size of query and of
            value, causal, backward) of fused attention; causal 2: queries of the last keys.
        floor_share: shortest such call as a share of the description's launch floor.
        passes: number of times that its kernels stream the bytes.
        rereads: number of times that memory, not the cache, serves them.
        cycles: least SM cycles for its elements.
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


# Complex dtype -> dtype of its real and imaginary parts.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

Formula = Callable[[Call], Work | None]
"""Call -> its work; None if the formula does not cover its operands."""


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
    """Return the work of GEMMs in the dtype of `operand`, with every operand read once.

    A complex multiply-add counts as four real ones.

    Args:
        call: the call.
        operand: the operand whose dtype decides.
        flops: FLOPs, each multiply-add two.
        bytes_read: None: bytes of all operands.
        gemm: (batch, m, n, k) of a single dense GEMM.
        parts: component GEMMs of a composite call.
        attention: shape of fused attention, see `Work`.
    """
    read = call.input_bytes if bytes_read is None else bytes_read
    if real := _PARTS.get(operand.dtype):
        # No `gemm`: the tile model is fitted to real dtypes only.
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
