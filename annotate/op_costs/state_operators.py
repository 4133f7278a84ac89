"""FLOPs and bytes of the operators of layers with a state per sequence (`capture serve`).

Operators are those of `capture/serving/state_operators.py`. Bytes are those of operands, states and
results, each moved once. The chunked scans are several kernels that pass buffers to each other:
`Work.passes` counts these buffers, as a multiple of the bytes. One of the kernels computes the
states chunk after chunk: `Work.chain` are its dependent steps.

Shapes: n sequences, t tokens of each, h heads, g groups or key heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from onerank.annotate.op_costs.cost_record import Formula, Work, matmul_work, vector_work
from onerank.annotate.op_costs.operands import Call, Tensor

DELTA_CHUNK = 64
"""Tokens of a chunk of fla's kernels of the delta rule."""

_SILU = 3


def _tensors(call: Call, *places: int) -> list[Tensor] | None:
    """Return operands; None if one is not recorded."""
    found = [call.tensor(place) for place in places]
    return None if None in found else [tensor for tensor in found if tensor is not None]


def _with_state(work: Work, state: Tensor) -> Work:
    """Return work that also writes a state, which it reads as an operand."""
    return replace(work, bytes_written=work.bytes_written + state.nbytes)


def _convolution(call: Call) -> Work | None:
    """Return the work of a depthwise convolution: rows [n, t, channels] or [n, channels]."""
    operands = _tensors(call, 0, 1, 3)
    if operands is None:
        return None
    rows, weight, state = operands
    each = 2 * weight.shape[-1] + _SILU * (call.value(4) is not False)
    return _with_state(vector_work(call, each * rows.numel), state)


def _chunked_delta_rule(call: Call) -> Work | None:
    """Return the work of the chunked delta rule (arXiv:2412.06464), by fla's kernels.

    For each head and token, with chunks of c tokens, keys of k and values of v elements:
    - scores of keys with keys, and of queries with keys: 2 c k each;
    - the inverse of a triangular matrix of a chunk, c^2 / 3;
    - the inverse times keys and times values: 2 c k and 2 c v;
    - the state times corrected keys, its update, and the state times queries: 2 k v each;
    - scores times values: 2 c v.
    Chunks are computed whole: their upper halves, and the rest of the last one, are masked.
    """
    operands = _tensors(call, 0, 2, 5)
    if operands is None:
        return None
    q, v, state = operands
    (n, t, h, value), (groups, key) = v.shape, q.shape[2:]
    c, chunks = DELTA_CHUNK, ceil(t / DELTA_CHUNK)
    of_token = 6 * c * key + 4 * c * value + 6 * key * value + c * c // 3
    work = _with_state(matmul_work(call, v, n * h * chunks * c * of_token), state)
    # Two vectors of each token that the inverse makes, and the corrected value, written and read;
    # normalised keys and queries; the inverse; a state for each chunk.
    buffers = n * h * (t * (key + 2 * value + c) + chunks * key * value) + 2 * n * t * groups * key
    return _streamed(work, 2 * buffers * v.item_bytes, _DELTA_STEPS * chunks)


def _recurrent_delta_rule(call: Call) -> Work | None:
    """Return the work of the delta rule for one token of each sequence.

    For each element of the state: decay, 1; product with the key, 2; update, 2; product with the
    query, 2.
    """
    state = call.tensor(5)
    return state and _with_state(vector_work(call, 7 * state.numel), state)


def _mamba_scan(call: Call) -> Work | None:
    """Return the work of Mamba 2's chunked scan (arXiv:2405.21060), by mamba_ssm's kernels.

    With chunks of c tokens, heads of p elements and states of p x s: scores of C with B, 2 c s for
    each group and token; and for each head and token the states of chunks and their products with
    C, 2 p s each, and scores times inputs, c p, of which the kernel computes the lower half. As
    `library_operators` counts these kernels.
    """
    operands = _tensors(call, 0, 3, 7)
    chunk = call.value(8)
    if operands is None or not isinstance(chunk, int):
        return None
    x, b, state = operands
    (n, t, h, p), (groups, s) = x.shape, b.shape[2:]
    chunks = ceil(t / chunk)
    of_token = 2 * chunk * s * groups + h * p * (4 * s + chunk)
    work = _with_state(matmul_work(call, x, n * chunks * chunk * of_token), state)
    # In float32: dt and sums of the decay, two states for each chunk, and the scores.
    buffers = n * (2 * h * t + 2 * chunks * h * p * s + chunks * groups * chunk * chunk)
    return _streamed(work, 2 * 4 * buffers, _MAMBA_STEPS * chunks)


def _selective_state_update(call: Call) -> Work | None:
    """Return the work of Mamba 2's update for one token of each sequence.

    For each element of the state: decay, 1; dt B x, 2; sum, 1; product with C, 2. For each element
    of the input, D x: 2.
    """
    operands = _tensors(call, 0, 7)
    if operands is None:
        return None
    x, state = operands
    skip = 2 * (call.tensor(5) is not None)
    return _with_state(vector_work(call, 6 * state.numel + skip * x.numel), state)


# Dependent steps of a chunk, in loads that wait for each other.
_DELTA_STEPS, _MAMBA_STEPS = 4.0, 1.0


def _streamed(work: Work, buffer_bytes: int, chain: float) -> Work:
    """Return work whose kernels also move buffers, and compute chunks one after another."""
    moved = work.bytes_read + work.bytes_written
    return replace(work, passes=1 + buffer_bytes / max(1, moved), chain=chain)


FORMULAS: Mapping[str, Formula] = {
    f"onerank_serving::{name}": formula
    for name, formula in {
        "causal_conv1d": _convolution,
        "causal_conv1d_update": _convolution,
        "chunk_gated_delta_rule": _chunked_delta_rule,
        "recurrent_gated_delta_rule": _recurrent_delta_rule,
        "mamba_chunk_scan": _mamba_scan,
        "selective_state_update": _selective_state_update,
    }.items()
}
"""Full name -> formula."""

NEED_VALUES = frozenset({"mamba_chunk_scan", "causal_conv1d", "causal_conv1d_update"})
"""Operators, by base name, whose formula reads argument values."""
