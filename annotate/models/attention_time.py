"""The time of fused attention from its shape, by the kernel written for the GPU's architecture.

An SM processes 128 queries of one head against all their keys. With grouped-query attention (GQA)
it processes 128 queries of all heads of a group if that makes fewer tiles. The time is the longer
of two: the work of all tiles spread over the SMs, and the longest tile. Operands that fit into the
cache are read from it. One efficiency, a share of the geometric mean of the sustained and the peak
GEMM rate, holds for all architectures.

Attention of a few queries, as in decoding, has a different kernel. The queries of all heads of a
group are one tile, whose keys and values stream from memory. If sequences and key heads are fewer
than SMs, the keys of each are divided among SMs (split-KV).

Latent attention (MLA) decodes from one vector per key, which all heads share and whose leading part
is the value. 128 heads multiply each with enough FLOPs per byte that GEMM rate and memory bandwidth
limit the time in turn.

A score costs its multiply-adds and one exponential. The fit uses forward passes with heads of 128,
whose time includes the exponential. The model adds how other head sizes differ: smaller heads have
fewer FLOPs per exponential, larger ones more. The backward pass has the same exponential, and its
multiply-adds are slower. It first sums the output times its gradient over each row, fills the query
gradient with zeros in float32 and rounds it afterwards, and sums the gradients of keys and values
that a group shares.

Time relative to the forward pass with heads of 128, against FlashAttention-3's figures for an H100
(arXiv 2407.08608, 16,384 tokens, not causal; FA3 and cuDNN):

    heads of             64    256   128 back   64 back
    FlashAttention-3   0.65   1.74       2.89      1.71
    cuDNN              0.72      -       2.88      1.72
    this model         0.67   1.67       2.75      1.62
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import (
    AttentionCoefficients,
    Decode,
    LatentDecode,
)
from onerank.annotate.models.gemm_tiles import Rates, cache_misses, p_norm
from onerank.annotate.models.prediction_terms import Term, TermRecord, norm, quantity, total
from onerank.annotate.op_costs.attention import QUERY_TILE
from onerank.ir.arrays import F64, Mask

_WIDEST = 256  # head size up to which a tile has `QUERY_TILE` queries

# Architectures whose kernels pack only single queries. With 16 to 64 queries of four and more heads
# per key head, a B200's (TensorRT-LLM's) took 2.0 times as long as packed tiles, in the median, and
# 1.2 times as long as separate ones.
_PACK_SINGLE_QUERIES = ("blackwell",)
_FITTED_TO = 128 + 128  # head sizes of query and value
# Exponentials per cycle of an NVIDIA SM since Volta, and of an AMD compute unit.
_EXPONENTIALS = 16
# Vector FLOPs per exponential, for accelerators with few wide cores; an assumption, not measured.
_VECTOR_FLOPS = 16
# Time per FLOP of the backward pass's products over the forward's. 1.36 to 1.42 by
# FlashAttention-3, cuDNN and FlashAttention-2 on an H100, 1.37 by cuDNN's rows in the H200's
# database; less on GPUs whose tensor cores are slower relative to their exponentials.
_BACKWARD = 1.35


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Terms of the time of d attention calls, in ns.

    Attributes:
        floor_ns: launch floor.
        compute_ns: products and exponentials of all tiles, float64[d].
        memory_ns: operands and results that miss the cache, float64[d].
        helper_ns: the backward pass's other kernels, or the sum over divided keys, float64[d].
        overlap: exponent of how compute and memory overlap.
    """

    floor_ns: float
    compute_ns: F64
    memory_ns: F64
    helper_ns: F64
    overlap: float

    @property
    def predicted_ns(self) -> F64:
        """The time, float64[d]."""
        body = p_norm(self.overlap, self.compute_ns, self.memory_ns)
        return self.floor_ns + body + self.helper_ns

    def term(self, i: int, gpu: str) -> Term:
        """Return the time of call `i` on the GPU of this name as a term."""
        on = f"on {gpu}"
        terms = [
            quantity("floor", self.floor_ns, note=f"launch floor {on}"),
            norm(
                self.overlap,
                quantity("compute", self.compute_ns[i], note=f"products and exponentials {on}"),
                quantity("memory", self.memory_ns[i], note=f"bytes that miss the cache {on}"),
            ),
        ]
        if self.helper_ns[i]:
            note = f"copies, sums of gradients or of divided keys, zero fill and rounding {on}"
            terms.append(quantity("helpers", self.helper_ns[i], note=note))
        value = float(self.predicted_ns[i])
        return total(*terms, name="by tiles", value=value, note=on)


def attention_ns(
    gpu: Gpu,
    rates: Rates,
    shapes: F64,
    c: AttentionCoefficients,
    described: tuple[Gpu, Rates] | None = None,
    *,
    decode: tuple[Decode, LatentDecode] | None = None,
    record: TermRecord | None = None,
) -> F64:
    """Return the time of fused attention in ns, float64[d]; arguments as for `attention_terms`.

    `decode` are the coefficients of attention and of latent attention with a few queries; None:
    such calls have those of other attention. `record` takes the terms of calls, as positions among
    the d.
    """
    few = has_few_queries(shapes) if decode is not None else np.zeros(len(shapes), dtype=bool)
    latent = few & is_latent(shapes) & (gpu.architecture in LATENT_ARCHITECTURES)
    rows = np.flatnonzero(~few)
    of_rows = Rates(rates.sustained[rows], rates.peak[rows])
    before = described and (
        described[0],
        Rates(described[1].sustained[rows], described[1].peak[rows]),
    )
    parts = [(rows, attention_terms(gpu, of_rows, shapes[rows], c, before))]
    if decode is not None:
        rows = np.flatnonzero(few & ~latent)
        parts.append((rows, decode_terms(gpu, shapes[rows], decode[0])))
        rows = np.flatnonzero(latent)
        of_rows = Rates(rates.sustained[rows], rates.peak[rows])
        parts.append((rows, latent_terms(gpu, of_rows, shapes[rows], decode[1])))
    predicted_ns = np.empty(len(shapes))
    for rows, terms in parts:
        predicted_ns[rows] = terms.predicted_ns
        if record is not None:
            record.update(rows, lambda i, _, terms=terms: terms.term(i, gpu.name))
    return predicted_ns


# The benchmark sets of `coefficients.decode` have one query per sequence. The few queries of a
# draft model still fit into one tile with the heads of a group.
_FEW_QUERIES = 16
# Rows of a tile: queries of all heads of a group. In the data of `coefficients.decode` the fit is
# 12.3% off with tiles of 64 and 128 rows, and 12.5% with 32.
_DECODE_TILE = 64
_MOST_SPLITS = 128  # as FlashAttention divides the keys of a head
# Least blocks of 128 keys in a part. The fit does not determine it: 12.2% off with 1, 12.3% with 2,
# 12.5% with 4.
_LEAST_BLOCKS = 2
# Architectures on which libraries decode with FlashAttention-2. It copies the queries of one token
# so that the heads of a group become rows of a tile, and copies the results back (`mha_varlen_fwd`
# and `mha_fwd` of flash_api.cpp, "seqlenq_ngroups_swapped"). With one key head the copies are views
# and with equal heads there are no groups: an A100 takes 18.6 us for 32 keys in groups, 12.8 with
# one key head, and 11.0 with equal heads; an L40S 12.3, 8.9 and 7.9.
_COPYING = ("ampere", "ada")


def has_few_queries(shapes: F64) -> Mask:
    """Return whether calls are forward attention of less than 16 queries to a cache, bool[d]."""
    _, _, _, rows, keys, _, _, _, backward, *_ = shapes.T
    return (rows < _FEW_QUERIES) & (keys > rows) & (backward == 0)


def decode_terms(gpu: Gpu, shapes: F64, c: Decode) -> AttentionTerms:
    """Return the terms of the time of attention with a few queries per sequence.

    Keys and values come from memory: between two calls for the same cache, a step reads the weights
    and the caches of all layers.

    Args:
        gpu: the GPU.
        shapes: as for `attention_terms`.
        c: fitted coefficients.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, keys, d, dv, *_ = columns
    cycle, sms = 1e9 / gpu.clock_hz, gpu.sm_count
    group = heads / np.maximum(key_heads, 1)
    units = batch * key_heads * np.ceil(rows * group / _DECODE_TILE)
    # A kernel processes whole blocks, however few keys the last one has.
    blocks = np.ceil(keys / QUERY_TILE)
    splits = _splits(gpu, units, blocks)
    waves = np.maximum(units * splits / sms, 1)
    block_bytes = 2 * QUERY_TILE * (d + dv)  # 16-bit elements
    compute = waves * (blocks / splits * block_bytes / c.bytes_per_cycle + c.unit_cycles) * cycle
    moved = 2 * batch * key_heads * keys * (d + dv)
    floors: F64 = np.where(splits > 1, c.split_floors, 0.0)
    if gpu.architecture in _COPYING:
        floors += np.where((group > 1) & (key_heads > 1), c.copy_floors, 0.0)
    return AttentionTerms(
        floor_ns=c.floor * gpu.launch_floor_ns,
        compute_ns=compute,
        memory_ns=moved * 1e9 / gpu.bandwidth_bytes_per_s,
        helper_ns=floors * gpu.launch_floor_ns,
        overlap=c.overlap,
    )


def _splits(gpu: Gpu, units: F64, blocks: F64) -> F64:
    """Return into how many parts the keys of each unit are divided, so that every SM has a part.

    Args:
        gpu: the GPU.
        units: pairs of a sequence and a tile of queries, float64[d].
        blocks: blocks of 128 keys in each, float64[d].
    """
    parts = np.minimum(np.floor(gpu.sm_count / units), np.ceil(blocks / _LEAST_BLOCKS))
    return np.clip(parts, 1, _MOST_SPLITS)


# Least width of a value of latent attention. DeepSeek's and Kimi's latent vectors have 512
# elements, MiniCPM3's 256; heads without a shared latent vector have at most 256, of equal width.
_LATENT_WIDTH = 256
# Heads of a tile, and heads that its multiply-adds are padded to: those of FlashMLA and
# FlashAttention-3. Tiles of 64 heads have equal errors.
_LATENT_TILE, _PADDED_HEADS = 128, 64
# Share of the geometric mean of sustained and peak rate, and exponent of how multiply-adds and
# memory overlap. Round figures, chosen on both architectures that have such kernels: with both
# fitted, an architecture that the fit leaves out is 17% off, with these 12%.
_LATENT_EFFICIENCY, _LATENT_OVERLAP = 1.0, 3.0
LATENT_ARCHITECTURES = ("hopper", "blackwell")
"""Architectures that libraries have kernels of latent attention for.

Others run kernels that treat the latent vector as a key and a value of one head. Predicted as such,
TensorRT-LLM's on an A100 and an L40S and Triton's on an L40S are 34, 40 and 50% off; predicted as
latent attention they are farther off.
"""


def is_latent(shapes: F64) -> Mask:
    """Return whether calls with a few queries are of latent attention, bool[d].

    All heads share one key, which is wider than the value because it also has the part with the
    rotary position.
    """
    columns: list[F64] = list(shapes.T)
    _, heads, key_heads, _, _, d, dv, *_ = columns
    return (heads >= key_heads) & (key_heads == 1) & (dv >= _LATENT_WIDTH) & (d > dv)


def is_measured_latent(gpu: Gpu, shapes: F64) -> Mask:
    """Return whether calls with values narrower than keys have a measured kernel, bool[d].

    Prefill of latent attention was within 10% on architectures with kernels for heads of 192 and
    128; elsewhere, and by kernels that multiply the latent vectors, it was 19 to 53% off.
    """
    columns: list[F64] = list(shapes.T)
    _, _, _, _, _, d, dv, *_ = columns
    return (d <= dv) | ((dv < _LATENT_WIDTH) & (gpu.architecture in LATENT_ARCHITECTURES))


def latent_terms(gpu: Gpu, rates: Rates, shapes: F64, c: LatentDecode) -> AttentionTerms:
    """Return the terms of the time of latent attention with a few queries per sequence.

    Memory is read once for keys and values, since the value is the leading part of the key.

    Args:
        gpu: the GPU.
        rates: rates of each call's dtype.
        shapes: as for `attention_terms`.
        c: fitted coefficients.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, _, rows, keys, d, dv, *_ = columns
    units = batch * np.ceil(rows * heads / _LATENT_TILE)
    padded = np.ceil(rows * heads / _PADDED_HEADS) * _PADDED_HEADS
    blocks = np.ceil(keys / QUERY_TILE)
    splits = _splits(gpu, units, blocks)
    waves = np.maximum(units * splits / gpu.sm_count, 1)
    rate = _LATENT_EFFICIENCY * (rates.sustained * rates.peak) ** 0.5 / gpu.sm_count
    block_flops = 2 * np.minimum(padded, _LATENT_TILE) * QUERY_TILE * (d + dv)
    cycle, block_bytes = 1e9 / gpu.clock_hz, 2 * QUERY_TILE * d
    block_ns = np.maximum(block_flops * 1e9 / rate, block_bytes / c.bytes_per_cycle * cycle)
    floors: F64 = np.where(splits > 1, c.split_floors, 0.0)
    return AttentionTerms(
        floor_ns=c.floor * gpu.launch_floor_ns,
        compute_ns=waves * (blocks / splits * block_ns + c.unit_cycles * cycle),
        memory_ns=2 * batch * keys * d * 1e9 / gpu.bandwidth_bytes_per_s,
        helper_ns=floors * gpu.launch_floor_ns,
        overlap=_LATENT_OVERLAP,
    )


def attention_terms(
    gpu: Gpu,
    rates: Rates,
    shapes: F64,
    c: AttentionCoefficients,
    described: tuple[Gpu, Rates] | None = None,
) -> AttentionTerms:
    """Return the terms of the time of fused attention.

    Args:
        gpu: the GPU.
        rates: rates of each call's dtype. Power limits attention less than GEMMs: the geometric
            mean of sustained and peak rate counts.
        shapes: `AttentionShape` of each call, float64[d, 10].
        c: fitted coefficients.
        described: the GPU before overrides of its figures; None: no overrides.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, keys, d, dv, causal, back, *_ = columns
    cycle, backward = 1e9 / gpu.clock_hz, back > 0
    tiles = attention_tiles(gpu, shapes)
    # Values narrower than the keys take as long as if they were as wide. Of latent attention's
    # prefill, heads of 192 and 128, the part that grows with the scores takes 1.05 to 1.18 times
    # the time of 192 + 128 (TensorRT-LLM's kernels on H100, H200 and B200), and 192 + 192 takes
    # 1.11 to 1.14.
    width = np.maximum(d, dv)
    tile = queries_of_tile(width)
    blocks = np.maximum(keys, QUERY_TILE / 2) / QUERY_TILE
    # Under a causal mask query tile i of n sees i blocks of keys, (n + 1) / 2 in the mean. Queries
    # of the last keys also see all keys before them. With a window, `keys` has what a tile sees.
    seen = np.where(causal == 2, blocks - rows / QUERY_TILE / 2 + 1 / 2, (blocks + 1) / 2)
    mean: F64 = np.where((causal > 0) & (rows > QUERY_TILE), seen, blocks)
    softmax = _softmax(gpu, rates)
    # The fitted efficiency includes the exponentials of heads of 128, so only other
    # head sizes change the time. An overridden peak must not change what was fitted.
    fitted_to = _FITTED_TO / (_FITTED_TO + _softmax(*(described or (gpu, rates))))
    # The backward pass has five products per score: it repeats QK' (d), then computes
    # the gradients of V and of the weights (dv each), of Q and of K (d each).
    products: F64 = np.where(
        backward, _BACKWARD * (3 * d + 2 * width + softmax), d + width + softmax
    )
    rate = c.efficiency * (rates.sustained * rates.peak) ** 0.5
    block: F64 = 2e9 * tile * QUERY_TILE * products * fitted_to / (rate / gpu.sm_count)
    prologue = c.prologue_cycles * cycle
    compute = np.maximum(
        # Under a causal mask the last query tile still sees all keys, so it bounds the time.
        tiles * (mean * block + prologue) / gpu.sm_count,
        blocks * block + prologue,
    )
    # The backward also reads and writes gradients.
    tensors = np.where(backward, 2.0, 1.0) * 2
    moved = tensors * batch * (rows * heads + keys * key_heads) * (d + dv)
    memory = moved * cache_misses(gpu, moved) * 1e9 / gpu.bandwidth_bytes_per_s
    return AttentionTerms(
        floor_ns=c.floor * gpu.launch_floor_ns,
        compute_ns=compute,
        memory_ns=memory,
        helper_ns=np.where(backward, _backward_helpers_ns(gpu, columns), 0.0),
        overlap=c.overlap,
    )


def _softmax(gpu: Gpu, rates: Rates) -> F64:
    """Return the head size whose multiply-adds take as long as one exponential, float64[d]."""
    exponentials_per_s = _EXPONENTIALS * gpu.sm_count * gpu.clock_hz
    # Cores that are few and wide have fewer "SMs" than exponential units.
    exponentials_per_s = max(exponentials_per_s, (gpu.vector_flops_per_s or 0) / _VECTOR_FLOPS)
    return rates.peak / 2 / exponentials_per_s


def _backward_helpers_ns(gpu: Gpu, columns: Sequence[F64]) -> F64:
    """Return the time of the helper kernels of attention's backward, in ns, float64[d].

    They sum the products of gradients, fill the query gradient with zeros and round it, and sum
    the gradients of keys and values that heads share.

    Args:
        gpu: the GPU.
        columns: fields of `AttentionShape`, float64[d] each.
    """
    batch, heads, key_heads, rows, keys, d, dv, *_ = columns
    shared = heads > key_heads
    sums = np.where(shared, (keys * (heads + key_heads)) * (d + dv), 0.0)
    # In elements of 2 bytes: the float32 query gradient is filled and read (2d each)
    # and written rounded (d); the output and its gradient are read once (dv each).
    moved = 2 * batch * (heads * rows * (5 * d + 2 * dv) + sums)
    memory_ns = moved * cache_misses(gpu, moved) * 1e9 / gpu.bandwidth_bytes_per_s
    return memory_ns + np.where(shared, 4, 2) * gpu.launch_floor_ns


def queries_of_tile(width: F64) -> F64:
    """Return the number of queries of a tile, float64[d].

    Args:
        width: the larger of the head sizes of keys and values, float64[d].
    """
    # The accumulators of wider heads do not fit into the registers: with one tile of 16 queries and
    # heads of 512 Triton's kernel takes 9.7 us on an H100, FlashAttention-4's 12.0.
    return np.where(width > _WIDEST, QUERY_TILE / 2, QUERY_TILE)


def attention_tiles(gpu: Gpu, shapes: F64) -> F64:
    """Return the number of query tiles of fused attention on a GPU, float64[d]."""
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, _, d, dv, *_ = columns
    tile = queries_of_tile(np.maximum(d, dv))
    group = heads / np.maximum(key_heads, 1)
    # FlashAttention packs the queries of the heads that share a key head into one tile
    # (`pack_gqa`), which pays off in decoding, where a head has one query.
    packs = (gpu.architecture not in _PACK_SINGLE_QUERIES) | (rows == 1)
    grouped_tiles = key_heads * np.ceil(rows * group / tile)
    separate_tiles = heads * np.ceil(rows / tile)
    return batch * np.where(packs, np.minimum(grouped_tiles, separate_tiles), separate_tiles)
