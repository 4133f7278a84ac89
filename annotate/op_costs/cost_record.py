"""The cost record of one operator call: FLOPs, bytes, and the sizes of its GEMM or attention."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir import UNKNOWN
from onerank.ir.arrays import F64


class PartKernel(IntEnum):
    """The kernel of a component GEMM."""

    LIBRARY = 0
    """The kernel of a plain GEMM."""
    CUTLASS_EXPERTS = 1
    """TensorRT-LLM's grouped kernel."""
    VLLM_EXPERTS = 2
    """vLLM's grouped kernel in Triton, in tiles for more tokens than experts."""
    VLLM_FEW_TOKENS = 3
    """The same in tiles for up to as many tokens as experts."""
    SGLANG_EXPERTS = 4
    """SGLang's grouped kernel in Triton, in tiles for more tokens than experts."""
    SGLANG_FEW_TOKENS = 5
    """The same in tiles for up to as many tokens as experts."""
    GROUPED = 6
    """torch's grouped kernel."""
    CONVOLUTION = 7
    """A convolution from a larger image to a smaller one."""
    IMAGE_GRADIENT = 8
    """The gradient of its image, or a transposed convolution."""
    FILTER_GRADIENT = 9
    """The gradient of its filter."""
    NARROW_CONVOLUTION = 10
    """A convolution whose channels are no multiple of those that tensor cores load at once."""
    NARROW_IMAGE_GRADIENT = 11
    """The gradient of its image."""
    NARROW_FILTER_GRADIENT = 12
    """The gradient of its filter."""
    POINT_CONVOLUTION = 13
    """A convolution that multiplies each point by one matrix."""
    POINT_IMAGE_GRADIENT = 14
    """The gradient of its image."""
    POINT_FILTER_GRADIENT = 15
    """The gradient of its filter."""
    RECURRENT_STEP = 16
    """A time step of a recurrent layer."""
    RECURRENT_STEP_GRADIENT = 17
    """The gradient of a time step."""
    RECURRENT_WEIGHT_GRADIENT = 18
    """The gradient of a weight over all time steps."""

    @property
    def for_few_tokens(self) -> "PartKernel":
        """The kernel's tiles for up to as many tokens as experts."""
        return _FOR_FEW_TOKENS.get(self, self)


_FOR_FEW_TOKENS = {
    PartKernel.VLLM_EXPERTS: PartKernel.VLLM_FEW_TOKENS,
    PartKernel.SGLANG_EXPERTS: PartKernel.SGLANG_FEW_TOKENS,
}

EXPERT_KERNELS = (PartKernel.CUTLASS_EXPERTS, *_FOR_FEW_TOKENS, *_FOR_FEW_TOKENS.values())
"""Kernels of an inference engine for the experts of an MoE layer."""


class ComponentGemm(NamedTuple):
    """A component GEMM [m, k] x [k, n] of a composite call.

    Attributes:
        batch: number of GEMMs in one launch.
        m: rows of the result.
        n: columns of the result.
        k: inner size.
        item_bytes: bytes of an element of the operands.
        reuse: elements of [m, k] per element in memory, above 1 for a convolution's image.
        times: repetitions, or the time relative to a plain GEMM of these sizes.
        launches: additional launch floors per repetition.
        kernel: its kernel.
        also_moved: bytes that other kernels of the call move per repetition.
        result_bytes: bytes of an element of the result; 0: as of the operands.
    """

    batch: int
    m: int
    n: int
    k: int
    item_bytes: float
    reuse: float = 1.0
    times: float = 1.0
    launches: int = 0
    kernel: PartKernel = PartKernel.LIBRARY
    also_moved: int = 0
    result_bytes: int = 0


class Scales(IntEnum):
    """Granularity of the scales of 8-bit or 4-bit operands of a GEMM: one for each of these.

    ROW and BLOCK are of an inference engine's kernels, the others of torch's operators, which run
    cuBLASLt's kernels on Hopper.
    """

    TENSOR = 0
    ROW = 1
    BLOCK = 2
    TORCH_ROW = 3
    TORCH_BLOCK = 4


class GemmShape(NamedTuple):
    """A dense GEMM [m, k] x [k, n]. Its fields are the columns of arrays with a GEMM in each row.

    Attributes:
        batch: number of GEMMs in one launch.
        m: rows of the result.
        n: columns of the result.
        k: inner size.
        operand_bytes: bytes of an operand's element; in 4 bits, its share of the scale is included.
        result_bytes: bytes of a result's element.
    """

    batch: int
    m: int
    n: int
    k: int
    operand_bytes: float
    result_bytes: int


class AttentionSizes(NamedTuple):
    """Sizes of a call of attention.

    Attributes:
        batch: number of sequences.
        heads: heads of queries.
        key_heads: heads of keys and values.
        rows: queries of a sequence.
        keys: keys of a sequence.
        d: width of a head of queries and keys.
        dv: width of a head of values.
    """

    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    d: int
    dv: int

    @property
    def scores(self) -> int:
        """Elements of the scores."""
        return self.batch * self.heads * self.rows * self.keys


# `CausalVariant.LOWER_RIGHT` of torch.nn.attention.bias: the mask is aligned with the last key.
LOWER_RIGHT = 2


class AttentionShape(NamedTuple):
    """A call of fused attention. Its fields are the columns of arrays with a call in each row.

    Attributes:
        batch: as in `AttentionSizes`, like all fields up to `dv`.
        keys: with a window, keys that a tile of queries sees in the mean.
        causal: 0 without a causal mask and with a window, 1 if the mask is aligned with the first
            key, or `LOWER_RIGHT`.
        backward: 1 for the backward pass, 0 for the forward.
        window: keys that the last tile of queries sees, if a window hides keys; 0 without one.
        mask: 1 if a tensor masks the scores or adds to them, else 0.
        dropout: 1 if the call drops scores at random, else 0.

    Arrays of calls without a window, a mask or dropout may lack the last columns.
    """

    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    d: int
    dv: int
    causal: int
    backward: int
    window: int = 0
    mask: int = 0
    dropout: int = 0

    @staticmethod
    def columns(shapes: F64) -> dict[str, F64]:
        """Return the columns of an array of calls by field; those that it lacks are 0."""
        lacking = len(AttentionShape._fields) - shapes.shape[1]
        whole = np.pad(shapes, ((0, 0), (0, lacking)))
        return dict(zip(AttentionShape._fields, whole.T, strict=True))

    @property
    def sizes(self) -> AttentionSizes:
        """The sizes, without the flags."""
        return AttentionSizes(*self[: len(AttentionSizes._fields)])


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a call, independent of its speed.

    Attributes:
        flops: floating-point operations, a multiply-add counting two; UNKNOWN without a formula.
        bytes_read: bytes of the operands, each read once; UNKNOWN without shapes.
        bytes_written: bytes of the results, each written once; UNKNOWN without shapes.
        matmul: whether the operations are GEMMs, which run at `dtype`'s GEMM rate.
        dtype: dtype of the operands; "" if `matmul` is false.
        gemm: shape of a single dense GEMM.
        parts: GEMMs that libraries turn a convolution or a recurrent layer into.
        attention: shape of fused attention.
        scales: granularity of the scales of 8-bit or 4-bit operands.
        floor_share: shortest such call as a share of the description's launch floor.
        passes: number of times that its kernels stream the bytes.
        cached_passes: the same where an SM's cache keeps the rows of its blocks; 0: as `passes`.
        rereads: number of times that memory, not the cache, serves them.
        cycles: least SM cycles for its elements.
        arithmetic: whether these are of arithmetic, not of loads that a cache shortens.
        chain: loads that wait for each other, see `load_chains`.
        far_load: time of such a load from memory over one from the cache.
        tail: loads from the cache that follow all other work, one after another.
        floor_factor: time of the shortest such call over that of the shortest of its class.
        unknown_layout: whether its time depends on strides that the graph does not have.
    """

    flops: int = UNKNOWN
    bytes_read: int = UNKNOWN
    bytes_written: int = UNKNOWN
    matmul: bool = False
    dtype: str = ""
    gemm: GemmShape | None = None
    parts: tuple[ComponentGemm, ...] = ()
    attention: AttentionShape | None = None
    scales: Scales = Scales.TENSOR
    floor_share: float = 1.0
    passes: float = 1.0
    cached_passes: float = 0.0
    rereads: float = 1.0
    cycles: float = 0.0
    arithmetic: bool = False
    chain: float = 0.0
    far_load: float = 1.0
    tail: float = 0.0
    floor_factor: float = 1.0
    unknown_layout: bool = False


# Complex dtype -> dtype of its real and imaginary parts.
_REAL_DTYPES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

Formula = Callable[[Call], Work | None]
"""Call -> its work; None if the formula does not cover its operands."""


def matmul_work(
    call: Call,
    operand: Tensor,
    flops: int,
    bytes_read: int | None = None,
    *,
    gemm: tuple[int, int, int, int] | None = None,
    parts: tuple[ComponentGemm, ...] = (),
    attention: AttentionShape | None = None,
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
        attention: shape of fused attention.
    """
    read = call.input_bytes if bytes_read is None else bytes_read
    if real := _REAL_DTYPES.get(operand.dtype):
        # No `gemm`: the tile model is fitted to real dtypes only.
        return Work(4 * flops, read, call.output_bytes, matmul=True, dtype=real)
    result = call.output()
    result_bytes = result.item_bytes if result else operand.item_bytes
    return Work(
        flops,
        read,
        call.output_bytes,
        matmul=True,
        dtype=operand.dtype,
        gemm=GemmShape(*gemm, operand.item_bytes, result_bytes) if gemm else None,
        parts=parts,
        attention=attention,
    )


def vector_work(
    call: Call, flops: int, read: int | None = None, written: int | None = None
) -> Work:
    """Return work of the vector units; the bytes default to those of all operands."""
    return Work(
        flops,
        call.input_bytes if read is None else read,
        call.output_bytes if written is None else written,
    )
