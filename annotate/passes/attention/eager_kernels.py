"""The kernels of eager attention, as transformers runs it.

Forward: copy keys and values for each query head that shares them, scores = Q K^T, scale, add the
mask, softmax in float32, round to the operands' dtype, multiply by V. Backward: dP = dO V^T, dV =
P^T dO, dP to float32, softmax backward, scale, dQ = dS K, dK = dS^T Q, and the sums over heads that
share keys. A causal mask hides half of the scores and saves no work.

The float16 softmax reads float16 and its backward writes it; the bfloat16 one is float32 on both
sides, with a copy before and after. On a GPU its backward first multiplies dP by P in a separate
kernel (aten/src/ATen/native/SoftMax.cpp and cuda/SoftMax.cu of PyTorch).
"""

from typing import NamedTuple

from onerank.ir.dtypes import ITEM_BYTES, TENSOR_TYPES

_FLOAT, _BFLOAT = TENSOR_TYPES["float32"], TENSOR_TYPES["bfloat16"]
_FLOAT_BYTES = ITEM_BYTES["float32"]

Operand = tuple[tuple[int, ...], str]


class EagerKernel(NamedTuple):
    """One kernel: its operator, operands and results as (shape, type)."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


class Sizes(NamedTuple):
    """Sizes of an attention call, in the order of `Work.attention`.

    `rows` counts queries and `keys` counts keys, per sequence. `heads` counts heads of queries,
    `key_heads` heads of keys and values. `d` and `dv` are the widths of a head of queries and of
    values.
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


def forward(s: Sizes, dtype: str) -> list[EagerKernel]:
    """Return the kernels of the forward pass."""
    kind = TENSOR_TYPES[dtype]
    merged = s.batch * s.heads
    scores = (s.batch, s.heads, s.rows, s.keys)
    flat = (merged, s.rows, s.keys)
    query, out = (merged, s.rows, s.d), (merged, s.rows, s.dv)
    softmax_dtype = _softmax_dtype(kind)
    # transformers' `repeat_kv` copies shared keys and values before the products.
    kernels = [_repeat_heads(s, width, kind) for width in (s.d, s.dv) if s.heads != s.key_heads]
    return [
        *kernels,
        _kernel("bmm", [(query, kind), ((merged, s.d, s.keys), kind)], (flat, kind)),
        _kernel("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _kernel("add", [(scores, kind), ((s.batch, 1, s.rows, s.keys), kind)], (scores, kind)),
        *_cast(scores, kind, softmax_dtype),
        _kernel("_softmax", [(scores, softmax_dtype)], (scores, _FLOAT)),
        *_cast(scores, _FLOAT, kind),
        _kernel("bmm", [(flat, kind), ((merged, s.keys, s.dv), kind)], (out, kind)),
    ]


def backward(s: Sizes, dtype: str) -> list[EagerKernel]:
    """Return the kernels of the backward pass."""
    kind = TENSOR_TYPES[dtype]
    merged = s.batch * s.heads
    scores, flat = (s.batch, s.heads, s.rows, s.keys), (merged, s.rows, s.keys)
    out = (merged, s.rows, s.dv)
    transposed = (merged, s.keys, s.rows)
    softmax_dtype = _softmax_dtype(kind)
    kernels = [
        _kernel("bmm", [(transposed, kind), (out, kind)], ((merged, s.keys, s.dv), kind)),
        _kernel("bmm", [(out, kind), ((merged, s.dv, s.keys), kind)], (flat, kind)),
        *_cast(scores, kind, _FLOAT),
        _kernel("mul", [(scores, _FLOAT), (scores, _FLOAT)], (scores, _FLOAT)),
        _kernel(
            "_softmax_backward_data", [(scores, _FLOAT), (scores, _FLOAT)], (scores, softmax_dtype)
        ),
        *_cast(scores, softmax_dtype, kind),
        _kernel("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _kernel(
            "bmm", [(flat, kind), ((merged, s.keys, s.d), kind)], ((merged, s.rows, s.d), kind)
        ),
        _kernel(
            "bmm", [((merged, s.d, s.rows), kind), (flat, kind)], ((merged, s.d, s.keys), kind)
        ),
    ]
    if s.heads != s.key_heads:
        kernels += [_sum_heads(s, width, kind) for width in (s.dv, s.d)]
    return kernels


class Bytes(NamedTuple):
    """Memory of a call in addition to its operands and results.

    Attributes:
        kept: saved for backward: softmax in float32 and rounded, repeated keys and values.
        forward: additional peak in forward: the masked scores, and those in the softmax's input
            dtype.
        backward: additional peak in backward: dP in float32, its product with P, the result.
    """

    kept: int
    forward: int
    backward: int


def memory(s: Sizes, dtype: str, item: int) -> Bytes:
    """Return the memory of a call whose operands have `item` bytes per element."""
    repeated_heads = (
        s.batch * s.heads * s.keys * (s.d + s.dv) * item if s.heads != s.key_heads else 0
    )
    kind = TENSOR_TYPES[dtype]
    rounded_bytes = item if kind != _FLOAT else 0
    cast_bytes = _FLOAT_BYTES if kind == _BFLOAT else 0
    return Bytes(
        # The softmax saves its float32 result for its backward, and the product with V saves the
        # rounded one.
        kept=s.scores * (_FLOAT_BYTES + rounded_bytes) + repeated_heads,
        forward=s.scores * (item + cast_bytes),
        backward=s.scores * (2 * _FLOAT_BYTES + (cast_bytes or item)),
    )


def _softmax_dtype(kind: str) -> str:
    """Return the dtype that softmax reads and its backward writes, for operands of a dtype."""
    return _FLOAT if kind == _BFLOAT else kind


def _cast(shape: tuple[int, ...], before: str, after: str) -> list[EagerKernel]:
    """Return the copy from one dtype to another; empty if they are equal."""
    return [_kernel("copy_", [(shape, after), (shape, before)], (shape, after))] * (before != after)


def _kernel(op: str, inputs: list[Operand], output: Operand) -> EagerKernel:
    return EagerKernel(f"aten::{op}", tuple(inputs), (output,))


def _repeat_heads(s: Sizes, width: int, kind: str) -> EagerKernel:
    """Return the copy of keys or values for each query head that shares them."""
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    return _kernel("copy_", [(shape, kind), (shape, kind)], (shape, kind))


def _sum_heads(s: Sizes, width: int, kind: str) -> EagerKernel:
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    summed = (s.batch, s.key_heads, s.keys, width)
    return EagerKernel("aten::sum", ((shape, kind), ((), "None")), ((summed, kind),))
