"""Fused attention: the captured kernel, the kernel that the target runs, and its time.

A kernel's name shows its family. Libraries pick another family on another architecture: PyTorch
runs FlashAttention-2 on Ampere and Ada, cuDNN on Hopper and Blackwell; FlashAttention-3 exists for
Hopper only. Kernels written for a generation reach about the same share of the geometric mean of
the sustained and the peak GEMM rate: 0.73 (A100), 0.68 (H100), 0.70 (H200) and 0.74 (L40S) in the
campaign of `coefficients.toml` at 2 TFLOP and more. The learned model uses one share for all.

Kernels of an older generation need separate figures. cuDNN's kernel belongs to its generation:
0.53 to 0.58 of the peak on an H200, where FlashAttention-3 reaches 0.56; on a B200, 0.88 of its
published rates is predicted. Where cuDNN has no figure, its share of the peak is assumed equal to
the measured one.

On AMD GPUs PyTorch runs AOTriton's kernels; Composable Kernel's and AITER's assembly kernels come
with libraries. The model was fitted to none of them and all are slower than predicted: their
figures are published times over the predicted times (`benchmarks/attention_published.py` and its
TOML file, with sources).

The time follows from the shape. An SM processes 128 queries of one head, or of several heads that
share a key head if that makes fewer tiles, against all their keys. The time is the longer of the
work of all tiles spread over the SMs and the longest tile. Operands that fit into the cache are
read from it.

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

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import AttentionCoefficients
from onerank.annotate.models.gemm_tiles import F64, Rates, cache_misses, p_norm
from onerank.annotate.models.prediction_terms import Term, TermRecord, norm, quantity, total
from onerank.ir.errors import AnnotateError

CHOICES = (
    *("usual", "fused", "flash2", "flash3", "cudnn", "aotriton", "ck", "aiter", "same", "eager"),
)
"""Choices of the attention kernel on the target.

"usual": the kernel that libraries run there. "same": the captured one. "eager": separate kernels
instead of a fused one (see `unfuse`). "fused": eager attention becomes the kernel that PyTorch runs
there (see `fuse`). A kernel's name: that kernel, for fused and eager attention.
"""
FUSED = frozenset(CHOICES) - {"usual", "same", "eager"}
"""Choices with which eager attention becomes a fused kernel."""

# (family, pattern of kernel names); the first match wins. Helpers that only move data match the
# first pattern and belong to no family.
_NAMES = (
    # First, because helpers of FlashAttention-2 also
    # match its pattern: `flash_bwd_dot_do_o_kernel`.
    ("", r"dot_?do_?o|convert_?[dq]|clear_d|combine|preprocess|postprocess|reduce_head|shuffle"),
    ("flash3", r"flashattn(fwd|bwd)sm90"),
    ("cudnn", r"cudnn.*(sdpa|flash_[fb]prop|fmha)"),
    ("flash2", r"flash_(fwd|bwd)\w*kernel"),
    ("aotriton", r"^(attn_fwd|bwd_kernel_(dk_dv|dq|fuse)|attn_bwd)"),
    ("ck", r"ck_tile.*fmha(fwd|bwd|batchprefill)"),
    ("aiter", r"fmha_(fwd|bwd)_hd\d"),
)

# architecture -> families that libraries run on it; the first replaces any other family.
# A captured kernel of a listed family stays: users of
# Hopper choose between FlashAttention-3 and cuDNN.
_USUAL = {
    "ampere": ("flash2",),
    "ada": ("flash2",),
    "hopper": ("flash3", "cudnn"),
    "blackwell": ("cudnn",),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), ("aotriton", "ck", "aiter")),
}
# architecture -> family of `scaled_dot_product_attention`, if it is not the first in `_USUAL`.
_BY_TORCH = {"hopper": "cudnn"}
_SUPPORTED = {
    "flash2": ("ampere", "ada", "hopper", "blackwell"),
    "flash3": ("hopper",),
    "cudnn": ("ampere", "ada", "hopper", "blackwell"),
    "aotriton": ("cdna2", "cdna3", "cdna4"),
    "ck": ("cdna2", "cdna3", "cdna4"),
    "aiter": ("cdna3", "cdna4"),
}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Time of a kernel over that of the kernel written for its architecture.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass.
        source: where the figures are from.
    """

    forward: float
    backward: float
    source: str


_NATIVE = Slowdown(1.0, 1.0, "the architecture's own")
_MI300X = "published of an MI300X (causal, 1024 to 16384 tokens, heads of 64 and 128)"
_MI355X = "published of an MI355X (2048 to 16384 tokens, heads of 64 and 128, backward of 128)"
_SLOWNESS = {
    ("flash2", "ampere"): _NATIVE,
    ("flash2", "ada"): _NATIVE,
    ("flash3", "hopper"): _NATIVE,
    ("cudnn", "hopper"): _NATIVE,
    ("cudnn", "blackwell"): _NATIVE,
    ("flash2", "hopper"): Slowdown(
        1.73,
        1.69,
        "measured on an H200, torch 2.11 and CUDA 13: times cuDNN's, geometric mean of 8 causal "
        "shapes (head size 64: 1.57 and 1.62, 128: 1.91 and 1.75; forward, backward)",
    ),
    ("flash2", "blackwell"): Slowdown(
        2.02, 2.90, "published of a B200 (not causal, 512 to 16384 tokens, heads of 64)"
    ),
    ("aotriton", "cdna2"): Slowdown(
        2.61, 5.46, f"forward {_MI300X}, backward {_MI355X}; neither measured on this architecture"
    ),
    ("aotriton", "cdna3"): Slowdown(2.61, 5.46, f"forward {_MI300X}; backward {_MI355X}"),
    ("aotriton", "cdna4"): Slowdown(2.17, 5.46, _MI355X),
    ("ck", "cdna4"): Slowdown(1.66, 2.85, _MI355X),
    ("aiter", "cdna3"): Slowdown(1.90, 1.32, f"forward {_MI300X}; backward {_MI355X}"),
    ("aiter", "cdna4"): Slowdown(1.60, 1.32, _MI355X),
}


@dataclass(frozen=True, slots=True)
class ShapeFactors:
    """Time of a kernel that torch runs over that of the model, by the shape of the call.

    Kernels that do not start the longest tiles of a causal mask first wait for the last ones: their
    time grows by `forward_tail` or `backward_tail` of the longest tile, which with w tiles for each
    SM is 2 / w of the time of all.

    Attributes:
        heads: head sizes, ascending.
        forward: time over the model's for each head size, forward.
        backward: the same of the backward pass.
        forward_tail: share of the longest tile.
        backward_tail: the same of the backward pass.
        source: where the figures are from.
    """

    heads: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_tail: float
    backward_tail: float
    source: str

    def of(self, gpu: Gpu, shapes: F64) -> F64:
        """Return the factor of each call, float64[d].

        Args:
            gpu: the GPU.
            shapes: as for `attention_terms`, float64[d, 9].
        """
        columns: list[F64] = list(shapes.T)
        batch, heads, _, rows, _, d, _, causal, back = columns
        backward = back > 0
        by_head: F64 = np.where(
            backward,
            np.interp(d, self.heads, self.backward),
            np.interp(d, self.heads, self.forward),
        )
        per_sm: F64 = batch * heads * np.ceil(rows / _TILE) / gpu.sm_count
        tail: F64 = np.where(backward, self.backward_tail, self.forward_tail)
        waiting: F64 = 1 + 2 * tail / np.maximum(per_sm, _FEW_TILES)
        return np.where(causal > 0, by_head * waiting, by_head)


# Tiles per SM below which the wait grows no further: the model's time is that of the longest tile.
_FEW_TILES = 4
# Of benchmarks/results/2026-11-26-attention-kernels-h100.txt; the factors are fitted to all of it.
_H100 = "measured on an H100 SXM, torch 2.11 and CUDA 13, heads of 64 to 256"
# (family, architecture) -> factors of the operators that torch runs there: geometric means over
# 4096 tokens and more without a mask; the tails fit the causal calls.
_BY_SHAPE = {
    ("flash2", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (1.45, 1.53, 1.69, 2.12, 2.25),
        (1.72, 1.82, 1.85, 2.37, 2.43),
        *(0.75, 0.35, _H100),
    ),
    ("cudnn", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (1.0, 1.07, 0.98, 0.98, 1.02),
        (1.08, 1.22, 1.055, 1.72, 1.64),
        *(0.4, 0.3, _H100),
    ),
    # Causal calls alone were measured, so their figures hold the wait for the last tiles.
    ("efficient", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (3.4, 4.5, 3.55, 5.5, 5.75),
        (4.2, 5.8, 4.4, 19.5, 25.0),
        *(0.0, 0.0, _H100),
    ),
}

_OPERATORS = (
    ("flash2", "_flash_attention_"),
    ("cudnn", "_cudnn_attention_"),
    ("efficient", "_efficient_attention_"),
)


def family_of_operator(op: str) -> str:
    """Return the family that an operator of a CUDA GPU runs; "" for any other operator.

    A capture without a device has such operators: it chooses them as torch does on the GPU.
    """
    name = op.removeprefix("aten::")
    return next((family for family, prefix in _OPERATORS if name.startswith(prefix)), "")


def shape_factors(family: str, gpu: Gpu) -> ShapeFactors | None:
    """Return the factors of a family on a GPU's architecture; None if unknown."""
    return _BY_SHAPE.get((family, gpu.architecture))


def _usual(gpu: Gpu) -> str:
    """Return the family that libraries run on a GPU; "" if unknown."""
    return _USUAL.get(gpu.architecture, ("",))[0]


def has_figure(gpu: Gpu) -> bool:
    """Return whether the time of the kernel that libraries run on a GPU has a figure."""
    return slowdown_of(_usual(gpu), gpu) is not None


def is_known_by_shape(gpu: Gpu) -> bool:
    """Return whether the kernel that libraries run on a GPU was measured on its architecture."""
    return slowdown_of(_usual(gpu), gpu) is _NATIVE


@dataclass(frozen=True, slots=True)
class Resolution:
    """The replacement of one attention kernel family on the target.

    Attributes:
        ran: the measured family.
        runs: the predicted family.
        forward: factor on the time above the floor, on top of the cost model.
        backward: the same of the backward pass.
        reason: why, with the source of the factor.
        slower: time of the measured family's forward over that of its architecture's usual family.
    """

    ran: str
    runs: str
    forward: float
    backward: float
    reason: str
    slower: float = 1.0

    def forward_with(self, share: float) -> float:
        """Return the forward factor if the model already carried over only `share` of `slower`."""
        return self.forward * self.slower ** (1 - share)


UNRESOLVED = Resolution("", "", 1.0, 1.0, "no attention kernel known here")


@cache
def family_of(name: str) -> str:
    """Return the family of a kernel by its name, one of `_SUPPORTED`; "" if unknown."""
    lowered = name.lower()
    return next((family for family, pattern in _NAMES if re.search(pattern, lowered)), "")


def slowdown_of(family: str, gpu: Gpu) -> Slowdown | None:
    """Return the slowdown of a family on a GPU's architecture; None if unknown."""
    return _SLOWNESS.get((family, gpu.architecture))


def resolve(ran: str, source: Gpu, target: Gpu, requested: str = "usual") -> Resolution:
    """Return the kernel that replaces `ran` of `source` on `target`.

    Raises:
        AnnotateError: the requested kernel is unknown or does not run on the target.
    """
    if requested not in CHOICES:
        raise AnnotateError(
            f'unknown attention kernel "{requested}"; choose one of {", ".join(CHOICES)}',
            code="attention-kernel-unknown",
        )
    here, there = source.architecture, target.architecture
    if requested == "same":
        return Resolution(
            ran, ran, 1.0, 1.0, "as requested: the part of the peak that was measured"
        )
    if requested in ("usual", "eager"):
        usual = _USUAL.get(there, (ran,))
        runs = ran if here == there or ran in usual else usual[0]
    else:
        _check_supported(requested, target, "same")
        runs = requested
    # H100 to H200: the same architecture runs the same kernel, whatever its slowdown.
    if (runs, there) == (ran, here):
        return Resolution(ran, runs, 1.0, 1.0, "the same kernel")
    before, after = _SLOWNESS.get((ran, here)), _SLOWNESS.get((runs, there))
    if before is None or after is None:
        lacking = f"{ran} on {here}" if before is None else f"{runs} on {there}"
        why = f"no figure for {lacking}: the part of the peak that was measured"
        return Resolution(ran, runs, 1.0, 1.0, why)
    sources = dict.fromkeys(
        slowdown.source for slowdown in (before, after) if slowdown is not _NATIVE
    )
    why = "; ".join(sources) or "each reaches the part of the peak usual for its architecture"
    forward, backward = after.forward / before.forward, after.backward / before.backward
    return Resolution(ran, runs, forward, backward, why, before.forward)


def resolve_unmeasured(target: Gpu, requested: str) -> Resolution:
    """Return the requested or usual kernel of unmeasured attention on `target`.

    Raises:
        AnnotateError: it does not run on the target, its figure there is not known, or "same" was
            requested.
    """
    if requested in ("usual", "eager", "fused"):
        runs = _usual(target)
        runs = _BY_TORCH.get(target.architecture, runs) if requested == "fused" else runs
        usual = _SLOWNESS.get((runs, target.architecture), _NATIVE)
        return Resolution("", runs, usual.forward, usual.backward, usual.source)
    if requested == "same":
        raise AnnotateError(
            "the trace was captured on a CPU and has no attention kernel to keep; omit `--kernel`, "
            "or name a kernel",
            code="attention-kernel-cpu",
        )
    _check_supported(requested, target)
    slowness = _SLOWNESS.get((requested, target.architecture))
    if slowness is None:
        raise AnnotateError(
            f"{requested} has no measured slowdown on {target.architecture}; omit `--kernel`, or "
            "name another kernel",
            code="attention-kernel-unmeasured",
        )
    return Resolution("", requested, slowness.forward, slowness.backward, slowness.source)


def _check_supported(requested: str, target: Gpu, *alternatives: str) -> None:
    """Refuse a kernel that does not run on the target's architecture.

    Raises:
        AnnotateError: it does not; the message lists the kernels that do, and `alternatives`.
    """
    there = target.architecture
    if there not in _SUPPORTED[requested]:
        names = [family for family, places in _SUPPORTED.items() if there in places]
        names += alternatives
        advice = f"choose {', '.join(names)}" if names else "omit it"
        raise AnnotateError(
            f"{requested} does not run on {target.name} ({there}); {advice}",
            code="attention-kernel-unsupported",
        )


_TILE = 128
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
# database; less on GPUs whose tensor units are slower relative to their exponentials.
_BACKWARD = 1.35


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
    tiles = attention_tiles(gpu, shapes)
    blocks = np.maximum(keys, _TILE / 2) / _TILE
    # Query tile i of n sees i blocks of keys under a causal mask, (n + 1) /
    # 2 on average. Queries of the last keys also see all keys before them.
    seen = np.where(causal == 2, blocks - rows / _TILE / 2 + 1 / 2, (blocks + 1) / 2)
    mean: F64 = np.where((causal > 0) & (rows > _TILE), seen, blocks)
    softmax = _softmax(gpu, rates)
    # The fitted efficiency includes the exponentials of heads of 128, so only other
    # head sizes change the time. An overridden peak must not change what was fitted.
    fitted_to = _FITTED_TO / (_FITTED_TO + _softmax(*(described or (gpu, rates))))
    # The backward pass has five products per score: it repeats QK' (d), then computes
    # the gradients of V and of the weights (dv each), of Q and of K (d each).
    products: F64 = np.where(backward, _BACKWARD * (3 * d + 2 * dv + softmax), d + dv + softmax)
    rate = c.efficiency * (rates.sustained * rates.peak) ** 0.5
    block: F64 = 2e9 * _TILE * _TILE * products * fitted_to / (rate / gpu.sm_count)
    prologue = c.prologue_cycles * cycle
    compute = np.maximum(
        # Under a causal mask the last query tile still sees all keys, so it bounds the time.
        tiles * (mean * block + prologue) / gpu.sm_count,
        blocks * block + prologue,
    )
    # The backward also reads and writes gradients.
    tensors = np.where(backward, 2.0, 1.0) * 2
    moved = tensors * batch * (rows * heads + keys * key_heads) * (d + dv)
    shared = heads > key_heads
    sums = np.where(shared, (keys * (heads + key_heads)) * (d + dv), 0.0)
    # The backward's helper kernels: sums of gradient products, zero fill and rounding of the query
    # gradient, and sums of the gradients of shared keys and values.
    # In elements of 2 bytes: the float32 query gradient is filled and read (2d each)
    # and written rounded (d); the output and its gradient are read once (dv each).
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


def attention_tiles(gpu: Gpu, shapes: F64) -> F64:
    """Return the number of query tiles of fused attention on a GPU, float64[d]."""
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, *_ = columns
    group = heads / np.maximum(key_heads, 1)
    # FlashAttention packs the queries of the heads that share a key head into one tile
    # (`pack_gqa`), which pays off in decoding, where a head has one query.
    packs = (gpu.architecture not in _PACK_SINGLE_QUERIES) | (rows == 1)
    grouped_tiles = key_heads * np.ceil(rows * group / _TILE)
    separate_tiles = heads * np.ceil(rows / _TILE)
    return batch * np.where(packs, np.minimum(grouped_tiles, separate_tiles), separate_tiles)
