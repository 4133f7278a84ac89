"""The kernels of attention without a fused kernel, as transformers' eager attention runs it.

Forward: keys and values copied for each head that shares them, scores = Q K^T, scaled, the mask
added, softmax in float32, rounded to the operands' type, times V. Backward: dP = dO V^T,
dV = P^T dO, dP to float32, softmax's backward, scaled, dQ = dS K, dK = dS^T Q, and the sums over
heads that share keys. A causal mask hides half of the scores, and none of their work.
"""

from typing import NamedTuple

from onerank.annotate.work.shapes import DTYPES

_TYPES = {dtype: f"Tensor({name})" for name, (dtype, _) in reversed(DTYPES.items())}
_FLOAT = _TYPES["float32"]
_FLOAT_BYTES = 4

Operand = tuple[tuple[int, ...], str]


class Step(NamedTuple):
    """A kernel: its operator, operands and results as (shape, type), and input values."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    values: tuple[object, ...] = ()


class Sizes(NamedTuple):
    """Of an attention call, as `Work.attention` has them: heads, rows, keys, widths."""

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


def forward(s: Sizes, dtype: str) -> list[Step]:
    """Return the kernels of the forward pass."""
    kind = _TYPES[dtype]
    merged = s.batch * s.heads
    scores = (s.batch, s.heads, s.rows, s.keys)
    flat = (merged, s.rows, s.keys)
    query, out = (merged, s.rows, s.d), (merged, s.rows, s.dv)
    steps = [_repeated(s, width, kind) for width in (s.d, s.dv) if s.heads != s.key_heads]
    return [
        *steps,
        _step("bmm", [(query, kind), ((merged, s.d, s.keys), kind)], (flat, kind)),
        _step("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _step("add", [(scores, kind), ((s.batch, 1, s.rows, s.keys), kind)], (scores, kind)),
        _step("_softmax", [(scores, kind)], (scores, _FLOAT)),
        *([_step("copy_", [(scores, kind), (scores, _FLOAT)], (scores, kind))] * _casts(kind)),
        _step("bmm", [(flat, kind), ((merged, s.keys, s.dv), kind)], (out, kind)),
    ]


def backward(s: Sizes, dtype: str) -> list[Step]:
    """Return the kernels of the backward pass."""
    kind = _TYPES[dtype]
    merged = s.batch * s.heads
    scores, flat = (s.batch, s.heads, s.rows, s.keys), (merged, s.rows, s.keys)
    out = (merged, s.rows, s.dv)
    across = (merged, s.keys, s.rows)
    steps = [
        _step("bmm", [(across, kind), (out, kind)], ((merged, s.keys, s.dv), kind)),
        _step("bmm", [(out, kind), ((merged, s.dv, s.keys), kind)], (flat, kind)),
        *([_step("copy_", [(scores, _FLOAT), (scores, kind)], (scores, _FLOAT))] * _casts(kind)),
        _step("_softmax_backward_data", [(scores, _FLOAT), (scores, _FLOAT)], (scores, kind)),
        _step("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _step("bmm", [(flat, kind), ((merged, s.keys, s.d), kind)], ((merged, s.rows, s.d), kind)),
        _step("bmm", [((merged, s.d, s.rows), kind), (flat, kind)], ((merged, s.d, s.keys), kind)),
    ]
    if s.heads != s.key_heads:
        steps += [_summed(s, width, kind) for width in (s.dv, s.d)]
    return steps


class Bytes(NamedTuple):
    """Memory of a call beside its operands and results.

    Attributes:
        kept: held from forward to backward: softmax in float32 and rounded, repeated keys and
            values.
        forward: most in use beside in forward: what is scaled or masked, and its result.
        backward: most in use beside in backward: dP rounded and in float32, and what it becomes.
    """

    kept: int
    forward: int
    backward: int


def memory(s: Sizes, item: int) -> Bytes:
    """Return the memory of a call whose operands have elements of `item` bytes."""
    shared = s.batch * s.heads * s.keys * (s.d + s.dv) * item if s.heads != s.key_heads else 0
    rounded = item if item < _FLOAT_BYTES else 0
    return Bytes(
        kept=s.scores * (_FLOAT_BYTES + rounded) + shared,
        forward=s.scores * item,
        backward=s.scores * (_FLOAT_BYTES + item + rounded),
    )


def _casts(kind: str) -> int:
    """Return how often scores change type around the softmax: never if they are float32."""
    return int(kind != _FLOAT)


def _step(op: str, inputs: list[Operand], output: Operand) -> Step:
    return Step(f"aten::{op}", tuple(inputs), (output,))


def _repeated(s: Sizes, width: int, kind: str) -> Step:
    """Keys or values copied for each head that shares them; what is read is read once a copy."""
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    return _step("copy_", [(shape, kind), (shape, kind)], (shape, kind))


def _summed(s: Sizes, width: int, kind: str) -> Step:
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    less = (s.batch, s.key_heads, s.keys, width)
    return Step("aten::sum", ((shape, kind), ((), "None")), ((less, kind),))
