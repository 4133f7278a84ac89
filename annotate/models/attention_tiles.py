"""The time of fused attention from its shape: query tiles, softmax, memory.

An SM processes 128 queries of one head, or of several heads that share a key head if that makes
fewer tiles, against all their keys. The time is the longer of the work of all tiles spread over the
SMs and the longest tile. Operands that fit into the cache are read from it.

A score costs its products and one exponential. The fit uses forward passes with heads of 128, whose
time includes the exponential; the model adds how other head sizes differ: smaller heads have fewer
FLOPs per exponential, larger ones more. The backward pass has the same exponential and slower
products. It also sums gradient products first, fills the query gradient with zeros in float32 and
rounds it afterwards, and sums the gradients of shared keys and values.

Time relative to the forward pass with heads of 128, against FlashAttention-3's figures for an H100
(arXiv 2407.08608, 16,384 tokens, not causal; FA3 and cuDNN):

    heads of             64    256   128 back   64 back
    FlashAttention-3   0.65   1.74       2.89      1.71
    cuDNN              0.72      -       2.88      1.72
    this model         0.67   1.67       2.75      1.62
"""

from dataclasses import dataclass

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import AttentionCoefficients
from onerank.annotate.models.gemm_tiles import F64, Rates, cache_misses, p_norm
from onerank.annotate.models.terms import Term, TermRecord, norm, quantity, total

_TILE = 128
_FITTED_TO = 128 + 128  # head sizes of query and value
# Exponentials per cycle of an NVIDIA SM since Volta, and of an AMD compute unit.
_EXPONENTIALS = 16
# Vector FLOPs per exponential, for accelerators with few wide cores; an assumption, not measured.
_VECTOR_FLOPS = 16
_BACKWARD = 1.35
"""Time per FLOP of the backward pass's products over the forward's.

1.36 to 1.42 by FlashAttention-3, cuDNN and FlashAttention-2 on an H100, 1.37 by cuDNN's rows in the
H200's database; less on GPUs whose tensor units are slower relative to their exponentials.
"""


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Terms of the time of d attention calls, in ns.

    Attributes:
        floor_ns: launch floor.
        compute_ns: products and exponentials of all tiles, float64[d].
        memory_ns: operands and results that miss the cache, float64[d].
        helper_ns: the backward pass's other kernels; 0 forward, float64[d].
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
            note = f"gradient sums, zero fill and rounding of the query gradient {on}"
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
    record: TermRecord | None = None,
) -> F64:
    """Return the time of fused attention in ns, float64[d]; arguments as for `attention_terms`.

    `record` takes the terms of calls, as positions among the d.
    """
    terms = attention_terms(gpu, rates, shapes, c, described)
    predicted_ns = terms.predicted_ns
    if record is not None:
        record.update(slice(0, len(predicted_ns)), lambda i, _: terms.term(i, gpu.name))
    return predicted_ns


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
        shapes: batch, heads, key heads, query and key length, head size of query and value, causal
            (2: the queries are those of the last keys), backward, float64[d, 9].
        c: fitted coefficients.
        described: the GPU before overrides of its figures; None: no overrides.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, keys, d, dv, causal, back = columns
    cycle, backward = 1e9 / gpu.clock_hz, back > 0
    tiles = attention_tiles(shapes)
    blocks = np.maximum(keys, _TILE / 2) / _TILE
    seen = np.where(causal == 2, blocks - rows / _TILE / 2 + 1 / 2, (blocks + 1) / 2)
    mean: F64 = np.where((causal > 0) & (rows > _TILE), seen, blocks)
    softmax = _softmax(gpu, rates)
    fitted_to = _FITTED_TO / (_FITTED_TO + _softmax(*(described or (gpu, rates))))
    products: F64 = np.where(backward, _BACKWARD * (3 * d + 2 * dv + softmax), d + dv + softmax)
    rate = c.efficiency * (rates.sustained * rates.peak) ** 0.5
    block: F64 = 2e9 * _TILE * _TILE * products * fitted_to / (rate / gpu.sm_count)
    prologue = c.prologue_cycles * cycle
    compute = np.maximum(
        tiles * (mean * block + prologue) / gpu.sm_count, blocks * block + prologue
    )
    tensors = np.where(backward, 2.0, 1.0) * 2  # the backward also reads and writes gradients
    moved = tensors * batch * (rows * heads + keys * key_heads) * (d + dv)
    shared = heads > key_heads
    sums = np.where(shared, (keys * (heads + key_heads)) * (d + dv), 0.0)
    # The backward's helper kernels: sums of gradient products, zero fill and rounding of the query
    # gradient, and sums of the gradients of shared keys and values.
    helper_bytes = 2 * batch * (heads * rows * (5 * d + 2 * dv) + sums)
    helper_ns = helper_bytes * cache_misses(gpu, helper_bytes) * 1e9 / gpu.bandwidth_bytes_per_s
    helper_ns += np.where(shared, 4, 2) * gpu.launch_floor_ns
    memory = moved * cache_misses(gpu, moved) * 1e9 / gpu.bandwidth_bytes_per_s
    return AttentionTerms(
        floor_ns=c.floor * gpu.launch_floor_ns,
        compute_ns=compute,
        memory_ns=memory,
        helper_ns=np.where(backward, helper_ns, 0.0),
        overlap=c.overlap,
    )


def _softmax(gpu: Gpu, rates: Rates) -> F64:
    """Return the head size whose multiply-adds take as long as one exponential, float64[d]."""
    exponentials_per_s = _EXPONENTIALS * gpu.sm_count * gpu.clock_hz
    # Cores that are few and wide have fewer "SMs" than exponential units.
    exponentials_per_s = max(exponentials_per_s, (gpu.vector_flops_per_s or 0) / _VECTOR_FLOPS)
    return rates.peak / 2 / exponentials_per_s


def attention_tiles(shapes: F64) -> F64:
    """Return the number of query tiles of fused attention, float64[d]."""
    batch, heads, key_heads, rows, *_ = shapes.T
    group = heads / np.maximum(key_heads, 1)
    grouped_tiles = key_heads * np.ceil(rows * group / _TILE)
    return batch * np.minimum(grouped_tiles, heads * np.ceil(rows / _TILE))
