"""FLOPs and bytes of the attention operators of vLLM and SGLang, by the sequences of their step.

Their operands are the packed tokens of all sequences and, of some operators, the whole paged KV
cache. So the operands do not show the work. The step of the engine does: `InferenceStep` has the
keys that attention reads and the pairs of a query and a key that it computes, if they are recorded.

FLOPs are 2 * pairs * h * (d + dv), as in `attention`, with causal pairs counted exactly. Bytes are
those of queries, results, and the keys and values of the step's sequences.
"""

from collections.abc import Mapping

from onerank.annotate.op_costs.cost_record import LOWER_RIGHT, AttentionShape, Work
from onerank.annotate.op_costs.operands import Call, UnknownDtypeError
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
        # As if each sequence had the mean number of keys.
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
