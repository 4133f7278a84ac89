"""FLOPs and bytes of the operators of layers with a state per sequence (`capture serve`).

Operators are those of `capture/serving/state_operators.py`. Bytes are those of operands, states and
results, each moved once. The chunked scans are several kernels that pass buffers to each other, see
`chunk_kernels`. Of the delta rule, one of them computes the states chunk after chunk: its time is
that of the steps that wait for each other (`Work.chain`), or of its bytes.

Shapes: n sequences, t tokens of each, h heads, g groups or key heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import Formula, Work, matmul_work, vector_work
from onerank.annotate.op_costs.operands import Call, Tensor, allowing_tf32

DELTA_CHUNK = 64
"""Tokens of a chunk of fla's kernels of the delta rule."""

LIGHTNING_BLOCK, _LIGHTNING_PART = 256, 32
"""Tokens of a block of vLLM's lightning attention, and of its parts."""

_SILU = 3
_GATE = _SILU + 1


def _tensors(call: Call, *places: int) -> list[Tensor] | None:
    """Return operands; None if one is not recorded."""
    tensors = [tensor for place in places if (tensor := call.tensor(place)) is not None]
    return tensors if len(tensors) == len(places) else None


def _power_of_two_above(size: int) -> int:
    """Return the smallest power of two that is at least `size`: Triton's blocks."""
    return 1 << max(0, size - 1).bit_length()


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
    work = _with_state(vector_work(call, each * rows.numel), state)
    times, cycles = _CONVOLUTIONS[call.op]
    return replace(work, passes=times, cycles=cycles * rows.numel)


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
    (n, t, h, value), key = v.shape, q.shape[3]
    c, chunks = DELTA_CHUNK, ceil(t / DELTA_CHUNK)
    of_token = 6 * c * key + 4 * c * value + 6 * key * value + c * c // 3
    work = _with_state(matmul_work(call, v, n * h * chunks * c * of_token), state)
    steps = _KDA_STEPS if _is_kda(call) else _DELTA_STEPS
    return _streamed(work, _delta_kernels(call), steps * chunks)


def _recurrent_delta_rule(call: Call) -> Work | None:
    """Return the work of the delta rule for one token of each sequence.

    For each element of the state: decay, 1; product with the key, 2; update, 2; product with the
    query, 2. The kernel computes a power of two of elements of the key.
    """
    state = call.tensor(5)
    if state is None:
        return None
    n, h, key, value = state.shape
    work = _with_state(vector_work(call, 7 * state.numel), state)
    cycles = _DELTA_UPDATE_CYCLES * n * h * _power_of_two_above(key) * value
    return replace(work, passes=_UPDATE_TIMES, cycles=cycles)


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
    heads = n * t * h
    cycles = heads * (p * (2 * s + chunk) / _SCAN_FLOPS_PER_CYCLE + _SCORE_CYCLES * chunk / 2)
    loads = _SCAN_LOADS * (s + min(t, chunk))
    return replace(_streamed(work, _mamba_kernels(call), loads), cycles=cycles)


def _selective_state_update(call: Call) -> Work | None:
    """Return the work of Mamba's update for one token of each sequence.

    For each element of the state: decay, 1; dt B x, 2; sum, 1; product with C, 2. Mamba 1 has a
    decay for each, exp(dt A): 2 more. For each element of the input, D x, 2, and the gate, 4.
    """
    operands = _tensors(call, 0, 2, 7)
    if operands is None:
        return None
    x, a, state = operands
    of_state = 6 if len(a.shape) == 1 else 8
    of_input = 2 * (call.tensor(5) is not None) + _GATE * (call.tensor(8) is not None)
    work = _with_state(vector_work(call, of_state * state.numel + of_input * x.numel), state)
    each = _MAMBA_2_UPDATE_CYCLES if len(a.shape) == 1 else _UPDATE_CYCLES
    size = state.shape[-1]
    cycles = each * state.numel * _power_of_two_above(size) / max(1, size)
    return replace(work, passes=_MAMBA_UPDATE_TIMES, cycles=cycles)


def _selective_scan(call: Call) -> Work | None:
    """Return the work of Mamba 1's scan (arXiv:2312.00752), as `_selective_state_update` counts it.

    For each element of the input also dt = softplus(dt + bias), 2. A block of threads scans all
    tokens of a channel, in chunks that it computes whole. If the tokens fill all chunks, it loads
    them without masks, which takes fewer cycles.
    """
    operands = _tensors(call, 0, 2, 7)
    if operands is None:
        return None
    x, a, state = operands
    skip, bias, gate = (call.tensor(place) is not None for place in (5, 6, 8))
    each = 8 * a.shape[1] + 2 * skip + 2 * bias + _GATE * gate
    work = _streamed(
        _with_state(vector_work(call, each * x.numel), state), _selective_kernels(call), 0.0
    )
    n, t, channels = x.shape
    chunk = next((size for size in _SCAN_CHUNKS if t <= size), _LONGEST_SCAN_CHUNK)
    tokens = ceil(t / chunk) * chunk
    cycles = _MASKED_SCAN_CYCLES if t % chunk else _UNMASKED_SCAN_CYCLES
    return replace(work, cycles=cycles * n * tokens * channels * a.shape[1])


def _lightning(call: Call) -> Work | None:
    """Return the work of lightning attention (arXiv:2401.04658), by vLLM's kernels.

    For each head and token, with keys of d and values of e elements: scores and their products with
    values, 2 (d + e) for each earlier token of a block of 256, computed in parts of 32 up to the
    token's; the state of a block and its product with queries, 2 d e each. Blocks are computed
    whole. Operands in float32 are multiplied as TF32, Triton's default.
    """
    operands = _tensors(call, 0, 2, 4)
    if operands is None:
        return None
    q, v, state = operands
    (n, t, h, value), key = v.shape, q.shape[3]
    tokens = ceil(t / LIGHTNING_BLOCK) * LIGHTNING_BLOCK
    seen = (LIGHTNING_BLOCK + _LIGHTNING_PART) // 2
    flops = n * h * tokens * (2 * seen * (key + value) + 4 * key * value)
    work = _with_state(matmul_work(call, allowing_tf32(q), flops), state)
    return _streamed(work, _lightning_kernels(call), 0.0)


def _lightning_update(call: Call) -> Work | None:
    """Return the work of lightning attention for one token of each sequence.

    For each element of the state: decay, 1; key times value, 1; sum, 1; product with the query, 2.
    """
    state = call.tensor(4)
    return None if state is None else _with_state(vector_work(call, 5 * state.numel), state)


def _linear_recurrence(call: Call) -> Work | None:
    """Return the work of Griffin's recurrence (arXiv:2402.19427).

    For each element of the input: decay times state, 1; sum, 1.
    """
    operands = _tensors(call, 0, 2)
    if operands is None:
        return None
    x, state = operands
    return _with_state(vector_work(call, 2 * x.numel), state)


# Time of fla's update over that of its bytes at the achievable bandwidth of an H100: 8 to 256
# sequences with 32 heads of 128 x 128 in float32, which it updates with 2.35 to 2.45 TB/s.
_UPDATE_TIMES = 1.18


# fla's convolutions: time over that of their bytes, with 8,192 channels on an H100, and SM cycles
# of an element. Cycles limit the convolution of prefills on an H200: 0.52 to 0.59 with Triton's
# choice among all configurations (8,192 channels, H100), 0.66 to 0.74 among three (3,584 to 12,288
# channels, three models on H100s and H200s). They limit that of decodes on both GPUs: 1.2 to 1.4 of
# 0.1 to 3.1 million elements beyond its shortest time, in the same models
# (2026-11-27-state-kernels-h100, 2026-11-28-serving-blind-5-h200).
_CONVOLUTIONS = {"causal_conv1d": (1.4, 0.6), "causal_conv1d_update": (1.0, 1.3)}

# The same as `_UPDATE_TIMES` of mamba_ssm's update, with 128 heads of 64 and 128 numbers of the
# state in float32 (2026-11-27-state-kernels-h100).
_MAMBA_UPDATE_TIMES = 1.07

# SM cycles of an element of the state in the updates of decodes. In 16 bits they limit the kernels
# and not the bytes: mamba_ssm's update of Falcon-H1 takes as long on an H200 as on an H100, 0.65
# cycles; with 128 heads of 64 it takes 0.59. fla's update takes 0.50 to 0.53 with heads of
# 96 x 192, which count as 128 x 192
# (2026-11-28-serving-blind-2-h200, 2026-11-27-state-kernels-h100).
_MAMBA_2_UPDATE_CYCLES, _DELTA_UPDATE_CYCLES = 0.62, 0.50

# SM cycles of an element of Mamba 1's state: for each token of mamba_ssm's scan, and for an update.
# On an H100, scans of Mamba 2.8B and Jamba take 0.46 to 0.48 cycles. If the tokens fill all chunks,
# which the kernel then loads without masks, they take 0.29 to 0.30. Updates of 16 to 200 sequences
# with 5,120 and 8,192 channels take 0.62 to 0.70
# (2026-11-27-serving-blind-2-h100, 2026-11-28-serving-blind-3-h100).
_MASKED_SCAN_CYCLES, _UNMASKED_SCAN_CYCLES, _UPDATE_CYCLES = 0.475, 0.295, 0.65

# Tokens of a chunk of the scan: the shortest that holds all tokens, else the longest
# (`selective_scan_fwd_cuda` of mamba_ssm).
_SCAN_CHUNKS, _LONGEST_SCAN_CHUNK = (128, 256, 512, 1024), 2048

# Time of a copy that transposes tokens and channels over that of its bytes, in the layers of both
# models.
_TRANSPOSED = 5.8

# Time of mamba_ssm's kernels over that of their bytes: states of chunks, their sum over the chunks
# before, of which the cache serves a part, and the output.
_STATES, _PASSING, _SCAN = 1.2, 0.8, 1.5

# The kernels that multiply: FLOPs of an SM in a cycle and cycles of each score of a head in the
# scan of the chunks, and FLOPs in that of their states. From the scan above (chunks of 128, heads
# of 64, states of 128), which its bytes limit as well, and from Falcon-H1's (chunks of 256, heads
# of 128, states of 256), which they do not: it takes as long on an H200 as on an H100
# (2026-11-28-serving-blind-4-h100, 2026-11-28-serving-blind-2-h200).
_SCAN_FLOPS_PER_CYCLE, _SCORE_CYCLES, _STATE_FLOPS_PER_CYCLE = 604.0, 0.48, 404.0

# Loads that wait for each other in a block of the scan, for each number of a state and each score.
# Falcon-H1's takes 16 us for one and for two chunks, whose blocks all run at once.
_SCAN_LOADS = 0.067

# Launch floors of mamba_ssm's sums and of its pass over the states, of Falcon-H1.
_MAMBA_CUMSUM, _MAMBA_PASSING = 0.9, 0.6


class ChunkKernel(NamedTuple):
    """A kernel of a chunked scan.

    Attributes:
        name: its name.
        moved: bytes that it streams, multiplied by its time over that of its bytes.
        floors: its shortest time in launch floors; 0 for the kernel that has the FLOPs.
        cycles: SM cycles that it takes at least.
    """

    name: str
    moved: int
    floors: float = 0.0
    cycles: float = 0.0


# A chunk of the scan over the states of the delta rule, in loads that wait for each other: an H100
# takes 1.25 us with 16 heads of 128, and 1.48 with 32 (2026-11-27-state-kernels-h100).
_DELTA_STEPS = 3.3

# Shortest times of fla's kernels in launch floors, from the same measurement. Kernels that are
# slower than their bytes: the same, and their time over that of their bytes. The kernel of the
# inverse takes 16 to 19 us up to 1,024 tokens.
_NORM, _CUMSUM = 1.08, 0.48
_INVERSE, _VECTORS, _OUTPUT = (6.2, 2.8), (1.45, 1.15), (1.5, 1.45)


def _delta_kernels(call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of fla's chunked delta rule, in order.

    The inverse of each chunk is [c, c]; w and u are its products with keys and with values, which
    the scan over the states corrects; it also writes the state before each chunk.
    """
    operands = _tensors(call, 0, 2, 3)
    if operands is None:
        return ()
    q, v, decay = operands
    (n, t, h, value), key, item = v.shape, q.shape[3], v.item_bytes
    chunks = ceil(t / DELTA_CHUNK)
    keys, values = item * n * t * h * key, item * n * t * h * value
    inverse, states = item * n * t * h * DELTA_CHUNK, item * n * chunks * h * key * value

    def slower(kernel: tuple[float, float], moved: int) -> tuple[int, float]:
        floors, times = kernel
        return round(times * moved), floors

    return (
        ChunkKernel("l2norm_fwd_kernel", 2 * q.nbytes, _NORM),
        ChunkKernel("l2norm_fwd_kernel", 2 * q.nbytes, _NORM),
        ChunkKernel("chunk_local_cumsum_scalar_kernel", 2 * decay.nbytes, _CUMSUM),
        ChunkKernel("vectorized_elementwise_kernel", inverse, _CUMSUM),
        ChunkKernel(
            "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
            *slower(_INVERSE, q.nbytes + inverse),
        ),
        ChunkKernel(
            "recompute_w_u_fwd_kernel",
            *slower(_VECTORS, q.nbytes + inverse + keys + 2 * values),
        ),
        ChunkKernel(
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            q.nbytes + keys + 2 * values + states,
        ),
        ChunkKernel("chunk_fwd_kernel_o", *slower(_OUTPUT, 2 * (q.nbytes + values) + states)),
    )


# The same of Kimi's delta attention, whose decays differ by element of a key: loads of a chunk of
# the scan; launch floors of two kernels; and the least SM cycles of an element of the keys in the
# four others, which multiply. Chosen on 300, 512 and 2,048 tokens of 32 heads of 128 on an H200
# (2026-11-28-serving-blind-5-h200).
_KDA_STEPS, _KDA_INVERSE, _KDA_OUTPUT = 6.5, 11.8, 0.6
_KDA_CYCLES = {"intra": 2.6, "inter": 4.8, "vectors": 1.2, "output": 1.6}


def _is_kda(call: Call) -> bool:
    """Return whether the decays of a delta rule differ by element of a key, as Kimi's do."""
    keys, decay = call.tensor(1), call.tensor(3)
    return keys is not None and decay is not None and len(decay.shape) == len(keys.shape)


def _kda_kernels(call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of fla's Kimi delta attention, in order.

    They are those of the delta rule but for the inverse of a chunk, which two kernels compute: of
    parts of 16 tokens, and of the whole chunk.
    """
    operands, kernels = _tensors(call, 0, 2), _delta_kernels(call)
    if operands is None or not kernels:
        return ()
    queries, keys, sums, fill, _, vectors, scan, output = kernels
    q, v = operands
    n, t, h, _ = v.shape
    elements = n * ceil(t / DELTA_CHUNK) * DELTA_CHUNK * h * q.shape[3]
    cycles = {part: each * elements for part, each in _KDA_CYCLES.items()}
    return (
        queries,
        keys,
        sums._replace(name="chunk_local_cumsum_vector_kernel"),
        fill,
        fill._replace(moved=q.nbytes),
        ChunkKernel("chunk_kda_fwd_kernel_intra_token_parallel", 0, _CUMSUM, cycles["intra"]),
        ChunkKernel("chunk_kda_fwd_kernel_inter_solve_fused", 0, _KDA_INVERSE, cycles["inter"]),
        vectors._replace(name="recompute_w_u_fwd_kda_kernel", cycles=cycles["vectors"]),
        scan,
        output._replace(name="chunk_gla_fwd_kernel_o", floors=_KDA_OUTPUT, cycles=cycles["output"]),
    )


def _mamba_kernels(call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of mamba_ssm's chunked scan, in order.

    In float32: dt and the sums of the decay, the states of all chunks, and scores [c, c].
    """
    operands = _tensors(call, 0, 1, 3)
    chunk = call.value(8)
    if operands is None or not isinstance(chunk, int):
        return ()
    x, dt, b = operands
    (n, t, h, p), (groups, s) = x.shape, b.shape[2:]
    chunks = ceil(t / chunk)
    steps, states = 4 * n * t * h, 4 * n * chunks * h * p * s
    scores = 4 * n * chunks * groups * chunk * chunk
    return (
        ChunkKernel("_chunk_cumsum_fwd_kernel", dt.nbytes + 2 * steps, _MAMBA_CUMSUM),
        ChunkKernel(
            "_chunk_state_fwd_kernel",
            round(_STATES * (x.nbytes + b.nbytes + 2 * steps + states)),
            1.0,
            2 * n * t * h * p * s / _STATE_FLOPS_PER_CYCLE,
        ),
        ChunkKernel("_state_passing_fwd_kernel", round(_PASSING * 2 * states), _MAMBA_PASSING),
        ChunkKernel("_bmm_chunk_fwd_kernel", 2 * b.nbytes + scores, 1.0),
        ChunkKernel(
            "_chunk_scan_fwd_kernel",
            round(_SCAN * (2 * x.nbytes + b.nbytes + 2 * steps + states + scores)),
        ),
    )


def _selective_kernels(call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of mamba_ssm's scan of Mamba 1, in order.

    The scan reads contiguous tokens. Inputs, gate, B and C have contiguous channels, so they are
    copied first; vLLM's copy of the package does the same. A copy stores the last state.
    """
    operands = _tensors(call, 0, 1, 3, 4, 7)
    if operands is None:
        return ()
    x, dt, b, c, state = operands
    gate = call.tensor(8)
    rows = (x, b, c, *(() if gate is None else (gate,)))
    copies = (
        ChunkKernel("elementwise_kernel", round(_TRANSPOSED * 2 * row.nbytes), 1.0) for row in rows
    )
    moved = x.nbytes + dt.nbytes + sum(row.nbytes for row in rows) + state.nbytes
    return (
        *copies,
        ChunkKernel("selective_scan_fwd_kernel", moved),
        ChunkKernel("elementwise_kernel", 2 * state.nbytes, 1.0),
    )


def _lightning_kernels(call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of vLLM's lightning attention, in order; their times were not measured.

    The states of all blocks are float32. A copy joins them with the last one.
    """
    operands = _tensors(call, 0, 2, 4)
    if operands is None:
        return ()
    q, v, state = operands
    blocks = ceil(v.shape[1] / LIGHTNING_BLOCK)
    states = 4 * blocks * state.numel
    return (
        ChunkKernel("_fwd_diag_kernel", 2 * q.nbytes + 2 * v.nbytes),
        ChunkKernel("_fwd_kv_parallel", q.nbytes + v.nbytes + states, 1.0),
        ChunkKernel("_fwd_kv_reduce", 2 * states + 2 * state.nbytes, 1.0),
        ChunkKernel("_fwd_none_diag_kernel", q.nbytes + 2 * v.nbytes + states, 1.0),
        ChunkKernel("CatArrayBatchedCopy", 2 * states, 1.0),
    )


def chunk_kernels(op: str, call: Call) -> Sequence[ChunkKernel]:
    """Return the kernels of a chunked scan, by base name; () for another operator."""
    kernels = {
        "chunk_gated_delta_rule": _kda_kernels if _is_kda(call) else _delta_kernels,
        "mamba_chunk_scan": _mamba_kernels,
        "lightning_attention": _lightning_kernels,
        "selective_scan": _selective_kernels,
    }
    return kernels[op](call) if op in kernels else ()


def _streamed(work: Work, kernels: Sequence[ChunkKernel], chain: float) -> Work:
    """Return work with the streamed bytes and the steps of the kernel that has the FLOPs."""
    moved = sum(kernel.moved for kernel in kernels if not kernel.floors)
    of_operands = max(1, work.bytes_read + work.bytes_written)
    return replace(work, passes=moved / of_operands, chain=chain)


FORMULAS: Mapping[str, Formula] = {
    f"onerank_serving::{name}": formula
    for name, formula in {
        "causal_conv1d": _convolution,
        "causal_conv1d_update": _convolution,
        "chunk_gated_delta_rule": _chunked_delta_rule,
        "recurrent_gated_delta_rule": _recurrent_delta_rule,
        "lightning_attention": _lightning,
        "lightning_attention_update": _lightning_update,
        "linear_recurrence": _linear_recurrence,
        "mamba_chunk_scan": _mamba_scan,
        "selective_scan": _selective_scan,
        "selective_state_update": _selective_state_update,
    }.items()
}
"""Full name -> formula."""

MEASURED = frozenset(FORMULAS) - {
    f"onerank_serving::{name}"
    for name in ("lightning_attention", "lightning_attention_update", "linear_recurrence")
}
"""Operators, by full name, whose kernels were measured on Hopper GPUs."""

NEED_VALUES = frozenset({"mamba_chunk_scan", "causal_conv1d", "causal_conv1d_update"})
"""Operators, by base name, whose formula reads argument values."""
