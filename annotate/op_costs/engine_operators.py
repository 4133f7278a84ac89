"""FLOPs and bytes of operators of inference engines: vLLM, SGLang and TensorRT-LLM.

Attention: the operands are the packed tokens of all sequences and, in some operators, the whole
paged KV cache, so the work does not follow from them. It follows from the engine's step, if that is
recorded: `InferenceStep` has the number of keys that attention reads, and of query-key pairs that
it computes. FLOPs are 2 * pairs * h * (d + dv), as in `attention`, with exact causal pairs. Bytes
are those of queries, results, and the keys and values of the step's sequences.

Experts: one call runs both grouped GEMMs of an MoE layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import (
    LOWER_RIGHT,
    AttentionShape,
    ComponentGemm,
    Formula,
    PartKernel,
    Work,
    matmul_work,
    vector_work,
)
from onerank.annotate.op_costs.operands import Call, UnknownDtypeError, flatten
from onerank.ir import InferenceStep

# Operator -> axis of the heads in its second operand: the new keys [tokens, heads, d], vLLM's
# cache for a CPU [blocks, heads, page, d], or FlashAttention's [blocks, page, heads, d].
_KEY_HEADS: Mapping[str, int] = {
    "vllm::unified_attention": 1,
    "vllm::unified_attention_with_output": 1,
    "_C::cpu_attention_with_kv_cache": 1,
    "_vllm_fa2_C::varlen_fwd": 2,
    "_vllm_fa3_C::fwd": 2,
}

# Operators that write the new keys and values, their first operands, to the paged cache.
_CACHE_WRITES = (
    "_C_cache_ops::reshape_and_cache",
    "_C_cache_ops::reshape_and_cache_flash",
    "_C::cpu_attn_reshape_and_cache",
)


def reads_paged_cache(op: str) -> bool:
    """Return whether an operator attends to an engine's paged KV cache, or writes to it."""
    name = op.split(".", 1)[0]
    return name in _KEY_HEADS or name in _CACHE_WRITES


def computes_paged_attention(op: str) -> bool:
    """Return whether an operator attends to an engine's paged KV cache."""
    return op.split(".", 1)[0] in _KEY_HEADS


def paged_cache_work(op: str, inputs: tuple[str, str], step: InferenceStep | None) -> Work:
    """Return the work of an operator on a paged KV cache; unknown if the step lacks its counts.

    Args:
        op: an operator that `reads_paged_cache`.
        inputs: (shapes, types) of the arguments, as for `work_of`. The first are queries [tokens,
            heads, d] and keys.
        step: the step of the graph.
    """
    try:
        call = Call.parse(op, inputs, ("", ""), "", "")
    except UnknownDtypeError:
        return Work()
    name = op.split(".", 1)[0]
    if name in _CACHE_WRITES:
        new_bytes = call.list_bytes(0, 1)
        return Work(flops=0, bytes_read=new_bytes, bytes_written=new_bytes)
    query, key, axis = call.tensor(0), call.tensor(1), _KEY_HEADS[name]
    if step is None or query is None or key is None or len(query.shape) != 3:
        return Work()
    keys, pairs = step.attention_keys, step.attention_pairs
    if keys is None or pairs is None or len(key.shape) <= axis:
        return Work()
    _, heads, size = query.shape
    key_heads = key.shape[axis]
    cache_bytes = 2 * keys * key_heads * size * key.item_bytes
    shape = None
    tokens = step.new_tokens * step.batch
    if step.kind != "mixed" and step.batch and tokens:
        # The models of attention take one length, so each sequence gets the mean number of keys.
        masked = LOWER_RIGHT if step.new_tokens > 1 else 0
        mean = max(1, round(keys / step.batch))
        sizes = step.batch, heads, key_heads, step.new_tokens, mean, size, size
        shape = AttentionShape(*sizes, causal=masked, backward=0)
    return Work(
        flops=4 * pairs * heads * size,
        bytes_read=query.nbytes + cache_bytes,
        bytes_written=query.nbytes,
        matmul=True,
        dtype=query.dtype,
        attention=shape,
    )


class ExpertSizes(NamedTuple):
    """Sizes of the experts of an MoE layer on a rank.

    Attributes:
        tokens: rows of the input.
        chosen: experts of a token.
        experts: experts of the layer.
        hidden: width of a token.
        first: columns of the first GEMM, twice `inner` with a gated activation.
        inner: inner size of the second GEMM.
    """

    tokens: int
    chosen: int
    experts: int
    hidden: int
    first: int
    inner: int

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.tokens * self.chosen

    @property
    def active(self) -> int:
        """Experts that get rows; fewer rows than experts go to a different expert each."""
        return max(1, min(self.experts, self.rows))


# Only 16-bit experts were measured, so only they are divided into GEMMs for the tile model. Experts
# with 8-bit weights get FLOPs and bytes.
_EXPERT_BYTES = 2
_WIDE = ("bfloat16", "float16")
_NARROW = ("float8_e4m3fn", "float8_e4m3fnuz", "int8")


def expert_parts(sizes: ExpertSizes, kernel: PartKernel) -> tuple[ComponentGemm, ComponentGemm]:
    """Return the two GEMMs of the experts of an MoE layer, which have equal shares of the rows.

    The activation reads the first GEMM's result and writes half as much. The sum over a token's
    experts reads the second GEMM's result. CUTLASS's kernels first copy the tokens into the order
    of the experts.
    """
    active, rows = sizes.active, sizes.rows
    rows_per_expert = -(-rows // active)
    activation = _EXPERT_BYTES * rows * (sizes.first + sizes.inner)
    tokens = _EXPERT_BYTES * (rows + sizes.tokens) * sizes.hidden
    before = tokens if kernel is PartKernel.CUTLASS_EXPERTS else 0

    def part(n: int, k: int, moved: int) -> ComponentGemm:
        sizes_of_gemm = active, rows_per_expert, n, k
        return ComponentGemm(*sizes_of_gemm, _EXPERT_BYTES, kernel=kernel, also_moved=moved)

    return (
        part(sizes.first, sizes.hidden, before + activation),
        part(sizes.hidden, sizes.inner, tokens),
    )


def _fused_experts(choices: int, kernel: PartKernel) -> Formula:
    """Return the formula of a call that runs the experts of an MoE layer on tokens [t, h].

    The other operands are the weights [e, n, h] and [e, h, i] and the experts chosen for each
    token, [t, c]. The number of tokens of each expert is a value on the device, which no trace
    records, as for `_grouped_mm`.

    Args:
        choices: position of the chosen experts.
        kernel: of the grouped GEMMs.
    """

    def formula(call: Call) -> Work | None:
        x, chosen = call.tensor(0), call.tensor(choices)
        operands = flatten(call.inputs)
        weights = [operand for operand in operands if len(operand.shape) == 3][:2]
        if x is None or chosen is None or len(weights) != 2:
            return None
        first, second = weights
        hidden = x.shape[-1]
        if (first.shape[2], second.shape[:2]) != (hidden, (first.shape[0], hidden)):
            return None
        if x.dtype not in _WIDE or first.dtype != second.dtype:
            return None
        if first.dtype not in (*_WIDE, *_NARROW):
            return None
        tokens = prod(x.shape[:-1])
        sizes = ExpertSizes(
            tokens, chosen.shape[-1], first.shape[0], hidden, first.shape[1], second.shape[2]
        )
        in_tiles = kernel.for_few_tokens if tokens <= sizes.experts else kernel
        weights_of_expert = (first.numel + second.numel) // max(1, sizes.experts)
        # Only weights: the block scales of idle experts with 8-bit weights still count as read.
        idle_bytes = (sizes.experts - sizes.active) * weights_of_expert * first.item_bytes
        parts = expert_parts(sizes, in_tiles) if first.dtype in _WIDE else ()
        flops = 2 * sizes.rows * weights_of_expert
        # The kernels quantise the tokens, so the products run at the rate of the weights' dtype.
        return matmul_work(call, first, flops, call.input_bytes - idle_bytes, parts=parts)

    return formula


OPAQUE_EXPERTS = (
    "vllm::moe_forward",
    "vllm::moe_forward_shared",
    "sglang::moe_forward_piecewise_cuda_graph_impl",
)
"""Operators that run the experts of a layer given by its name: its weights are no operands."""


def _without_weights(_: Call) -> Work:
    # FLOPs and bytes stay unknown: without the weights they would miss most of the work.
    return Work()


def _packed_linear(call: Call) -> Work | None:
    """Return the work of vLLM's linear layer on a CPU: d [t, n], tokens [t, k], weight [n, k]."""
    tokens, weight = call.tensor(1), call.tensor(2)
    if tokens is None or weight is None or len(tokens.shape) != 2 or len(weight.shape) != 2:
        return None
    (rows, k), n = tokens.shape, weight.shape[0]
    return matmul_work(call, tokens, 2 * rows * n * k, call.list_bytes(1, 2), gemm=(1, rows, n, k))


def _latent_attention(call: Call) -> Work | None:
    """Return the work of latent attention with one query per sequence.

    Its operands are queries [b, h, d], cached vectors [b, keys, d], and their leading part as
    values [b, keys, dv], which are read once with the vectors.
    """
    query, keys, values = (call.tensor(place) for place in range(3))
    if query is None or keys is None or values is None:
        return None
    (batch, heads, d), length, dv = query.shape, keys.shape[1], values.shape[2]
    shape = AttentionShape(batch, heads, 1, 1, length, d, dv, causal=0, backward=0)
    flops = 2 * batch * heads * length * (d + dv)
    return matmul_work(call, query, flops, query.nbytes + keys.nbytes, attention=shape)


# Operators of sparse latent attention (DSA) of `capture serve`, for n sequences of t new tokens and
# `keys` cached ones, the new ones last. A query reads no key after its own.


def _pairs(t: int, keys: int, count: int) -> int:
    """Return the query-key pairs of a sequence: each query reads at most `count` keys."""
    before = keys - t
    # The first new tokens have fewer than `count` keys, one more each; the others read `count`.
    growing = min(t, max(0, count - before))
    return growing * before + growing * (growing + 1) // 2 + (t - growing) * count


def _stored_keys(call: Call) -> Work | None:
    """Return the work of quantising new keys [n, t, d]; the second operand is their place."""
    keys = call.tensor(0)
    if keys is None:
        return None
    return vector_work(call, 2 * keys.numel, keys.nbytes, call.list_bytes(1))


def _scaled_queries(call: Call) -> Work:
    """Return the work of quantising queries [n, t, h, d] and scaling the heads' weights."""
    return vector_work(call, 2 * (call.numel(0) + call.numel(1)))


def _index_scores(call: Call) -> Work | None:
    """Return the work of an indexer's scores [n, t, keys] in float32.

    Queries [n, t, h, d] in 8 bits meet cached keys with their scales, [n, keys, d + 4].
    """
    q, weights, cached = (call.tensor(place) for place in range(3))
    if q is None or weights is None or cached is None:
        return None
    (n, t, h, d), keys = q.shape, cached.shape[1]
    pairs = n * _pairs(t, keys, keys)
    work = matmul_work(call, q, 2 * pairs * h * d, q.nbytes + weights.nbytes + cached.nbytes)
    return replace(work, bytes_written=4 * pairs)


def _largest_scores(call: Call) -> Work | None:
    """Return the work of selecting each query's largest scores; every score is read once."""
    scores = call.tensor(0)
    if scores is None:
        return None
    n, t, keys = scores.shape
    pairs = n * _pairs(t, keys, keys)
    return vector_work(call, pairs, 4 * pairs)


def _sparse_attention(call: Call) -> Work | None:
    """Return the work of attention of queries [n, t, h, d] to chosen vectors of [n, keys, d].

    Each chosen vector is read once for its query, up to the bytes of the whole cache.
    """
    query, cached, indices, result = *(call.tensor(place) for place in range(3)), call.output()
    if query is None or cached is None or indices is None or result is None:
        return None
    (n, t, h, d), keys, dv, count = query.shape, cached.shape[1], result.shape[3], indices.shape[2]
    pairs = n * _pairs(t, keys, count)
    read = min(cached.nbytes, pairs * d * cached.item_bytes)
    shape = AttentionShape(n, h, 1, 1, min(keys, count), d, dv, causal=0, backward=0)
    return matmul_work(
        call,
        query,
        2 * pairs * h * (d + dv),
        query.nbytes + read + indices.nbytes,
        # Each query of a prefill attends to other keys: no measured attention kernel does so.
        attention=shape if t == 1 else None,
    )


FORMULAS: Mapping[str, Formula] = {
    **{
        f"{library}::{name}_fused_experts": _fused_experts(4, kernel)
        for library, kernel in (
            ("vllm", PartKernel.VLLM_EXPERTS),
            ("sglang", PartKernel.SGLANG_EXPERTS),
        )
        for name in ("inplace", "outplace")
    },
    "trtllm::fused_moe": _fused_experts(1, PartKernel.CUTLASS_EXPERTS),
    "_C::weight_packed_linear": _packed_linear,
    "onerank_serving::latent_attention": _latent_attention,
    "onerank_serving::store_index_keys": _stored_keys,
    "onerank_serving::scale_index_queries": _scaled_queries,
    "onerank_serving::index_scores": _index_scores,
    "onerank_serving::largest_scores": _largest_scores,
    "onerank_serving::sparse_latent_attention": _sparse_attention,
    **dict.fromkeys(OPAQUE_EXPERTS, _without_weights),
}
"""Formulas of the operators whose operands show their work, by full name."""
