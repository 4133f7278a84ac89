"""The kinds of predictions, which have separate errors: what was predicted, and from what."""

from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import is_known_by_shape
from onerank.annotate.models.attention_time import (
    has_few_queries,
    is_latent,
    is_measured_latent,
)
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.prediction_terms import (
    AS_MEASURED,
    BY_DATABASE,
    BY_TILES,
    PredictedDurations,
    Rule,
)
from onerank.annotate.models.tile_kernels import has_measured_grouped_kernels
from onerank.annotate.op_costs.cost_record import Scales
from onerank.ir.arrays import F64, I64, U8, Mask, membership_mask

KINDS = (
    "kept",
    "gemm",
    "gemm_short",
    "gemm_same_die",
    "gemm_same_die_short",
    "gemm_same_die_long",
    "gemm_uncalibrated",
    "gemm_uncalibrated_short",
    "gemm_unmeasured",
    "gemm_unmeasured_short",
    "gemm_8bit",
    "gemm_8bit_same_die",
    "gemm_8bit_unmeasured",
    "gemm_8bit_unmeasured_short",
    "gemm_8bit_tensor_unmeasured",
    "gemm_4bit_unmeasured",
    "attention",
    "attention_same_die",
    "attention_unmeasured",
    "attention_other",
    "decode",
    "decode_unmeasured",
    "decode_unmeasured_short",
    "decode_other",
    "decode_flash2",
    "decode_flash_mla",
    "latent_other",
    "product",
    "product_short",
    "product_unmeasured",
    "retyped",
    "memory",
    "memory_short",
    "memory_other_die",
    "memory_other_die_short",
    "memory_same_die",
    "memory_same_die_short",
    "memory_unmeasured",
    "memory_unmeasured_short",
    "memory_unmeasured_long",
    "memory_unknown_layout",
    "memory_library_unmeasured",
    "memory_library_unmeasured_short",
    "resized_product",
    "resized_attention",
    "resized_memory",
    "looked_up",
    "looked_up_short_or_data_dependent",
    "looked_up_other_versions",
    "composed",
    "experts_unmeasured",
    "grouped_unmeasured",
    "state_unmeasured",
)
"""Kinds of prediction with separate errors; "kept" has none.

A kind names what is known: the dtype; whether the call was measured on another GPU ("unmeasured":
it was not), or on an SKU of the same die; whether attention's kernel was measured on the target's
architecture ("other": it was not). "tensor" are 8-bit GEMMs with one scale for a tensor, "4bit" are
GEMMs in NVFP4, to which nothing is fitted, and "decode" is attention of a few queries, "latent"
that of a latent vector, for which Ampere and Ada run Triton's kernels. "flash2" and "flash_mla" are
decodes by the schedule of these kernels' thread blocks, whose errors are those of sizes that chose
no coefficient. "product" are GEMMs on vector units or without tiles. "short" are predictions under
`SHORT_NS`, which the launch determines, "long" those over `LONG_NS`: bandwidth alone determines
memory-bound kernels, and the clock that the power limit allows GEMMs. "memory_same_die" has the
errors of two A100s, which differ in their memory, and of a step on an H100 and an H200. "library"
are memory-bound kernels of other libraries than PyTorch: on an A100 and an H100 vLLM's norms,
activations and rotary embeddings take 1.3 to 2.0 times as long as their bytes, and PyTorch's
additions 0.8 to 1.0 times.

"memory_unknown_layout" are those of three axes or more in a graph without strides: a transposed
operand takes 1.8 to 2.7 times as long as a contiguous one.

"resized" kinds are of another size on one GPU and add to those of another GPU. Memory-bound kernels
without a measurement ("memory_unmeasured") are much less certain than measured ones. So are GEMMs
with misaligned rows, of which eight were measured, up to 1.5 times off. Unmeasured convolutions and
recurrent layers ("composed") have errors from DeepBench, of two GPUs that differ from the fitted
ones (benchmarks/predictions/deepbench.py), so they are not widened. Unmeasured experts of an MoE
layer are GEMMs by the tiles of a known kernel, whose errors were measured on four die families.
"grouped" are torch's grouped GEMMs where their tiles are known and were measured. "state" are
operators of layers with a state per sequence on Hopper, by the kernels of fla and mamba_ssm.
"""

KIND_AT = {kind: np.uint8(at) for at, kind in enumerate(KINDS)}
"""Kind -> its position in `KINDS`."""

SHORT_NS = 10_000
"""Shorter predictions have separate errors, because the launch determines their time."""

LONG_NS = 100_000
"""Longer memory-bound kernels without a measurement have separate errors.

By their shapes, four of five of PyTorch's are within 3 to 9% on V100, T4, A100, H100 and H200, and
within 10 to 30% from 10 to 100 us.
"""

TINY_NS = 3000
"""Look-ups of kernels up to this time have separate errors: cache and launch determine it."""


class Uncertainty(NamedTuple):
    """Uncertainty of n look-ups, in addition to that of their kind.

    Attributes:
        spread: standard deviation in ln of each, in addition to that of its kind, float64[n].
        other_versions: whether the row has other library versions than the trace, bool[n].
        data_dependent: whether the time depends on more than the key records, bool[n].
    """

    spread: F64
    other_versions: Mask
    data_dependent: Mask

    @classmethod
    def none(cls, count: int) -> Self:
        """Return no additional uncertainty, for predictions by a model."""
        return cls(np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count, dtype=bool))

    def merge(self, other: Self) -> Self:
        """Return the union of the uncertainties of look-ups of different nodes."""
        return type(self)(
            np.maximum(self.spread, other.spread),
            self.other_versions | other.other_versions,
            self.data_dependent | other.data_dependent,
        )

    def at(self, where: I64 | Mask) -> Self:
        """Return the uncertainty of the nodes at `where`."""
        return type(self)(
            self.spread[where], self.other_versions[where], self.data_dependent[where]
        )


def resize_kinds_of(kernels: KernelFeatures, resized: Mask) -> U8:
    """Return the kind of each prediction for another size, as positions in `KINDS`, uint8[n]."""
    attention = kernels.is_fused_attention
    product = np.where(kernels.matmul_class, KIND_AT["resized_product"],
                       KIND_AT["resized_memory"])  # fmt: skip
    kind = np.where(attention, KIND_AT["resized_attention"], product)
    return np.where(resized, kind, KIND_AT["kept"]).astype(np.uint8)


def kinds_of(
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    source: Gpu | None,
    target: Gpu,
    uncertainty: Uncertainty | None = None,
) -> U8:
    """Return the kind of each prediction, as positions in `KINDS`, uint8[n]."""
    predicted_ns, rules = predicted
    die = source is not None and same_die(source, target)
    by_tiles = membership_mask(rules, BY_TILES)
    product, without_tiles = _product_kinds(kernels, predicted_ns, source, target)
    memory = _memory_kinds(kernels, predicted_ns, source, target)
    depthwise = kernels.matmul_class & ~kernels.matmul & np.isfinite(kernels.flops)
    other = np.where(kernels.matmul_class & ~depthwise, without_tiles, memory)
    # Eight misaligned GEMMs were measured, up to 1.5 times off.
    if not die:
        product = np.where(rules == Rule.MISALIGNED, KIND_AT["memory_library_unmeasured"], product)
    attention = _attention_kinds(kernels, predicted, source, target)
    kind = np.where(by_tiles, np.where(kernels.is_fused_attention, attention, product), other)
    if source is None:
        # Convolutions in float32 have no tiles, but are no more certain than others.
        composed = (rules == Rule.PARTS) | np.isin(kernels.call, kernels.parts.call)
        kind = np.where(composed, _composed_kinds(kernels, target), kind)
        known = kernels.sequence_state & (target.architecture == "hopper")
        kind = np.where(known, KIND_AT["state_unmeasured"], kind)
    retyped = np.where(
        kernels.has_four_bit_operands, KIND_AT["gemm_4bit_unmeasured"], KIND_AT["retyped"]
    )
    kind = np.where(rules == Rule.RETYPED, retyped, kind)
    looked_up = membership_mask(rules, BY_DATABASE)
    if uncertainty is not None and looked_up.any():
        loose = uncertainty.data_dependent | (predicted_ns <= TINY_NS)
        same = np.where(loose, KIND_AT["looked_up_short_or_data_dependent"], KIND_AT["looked_up"])
        database = np.where(uncertainty.other_versions, KIND_AT["looked_up_other_versions"], same)
        kind = np.where(looked_up, database, kind)
    # Last, because these rules decide for any class of work.
    kept = membership_mask(
        rules, [*AS_MEASURED, Rule.DROPPED, Rule.RESIZED, Rule.MEASURED_WITH_OVERRIDES]
    )
    return np.where(kept, KIND_AT["kept"], kind).astype(np.uint8)


def _composed_kinds(kernels: KernelFeatures, target: Gpu) -> U8:
    """Return the kinds of calls that are several GEMMs, without a source, uint8[n]."""
    parts = kernels.parts
    experts, engines = (
        np.isin(kernels.call, calls) for calls in (parts.grouped_calls, parts.expert_calls)
    )
    by_expert = np.where(
        engines | (not has_measured_grouped_kernels(target)),
        KIND_AT["experts_unmeasured"],
        KIND_AT["grouped_unmeasured"],
    )
    return np.where(experts, by_expert, KIND_AT["composed"])


def _attention_kinds(
    kernels: KernelFeatures, predicted: PredictedDurations, source: Gpu | None, target: Gpu
) -> U8:
    """Return the kinds of attention, uint8[n]; arguments as for `kinds_of`."""
    predicted_ns, rules = predicted
    die = source is not None and same_die(source, target)
    few, latent = (of(kernels.attention)[kernels.call] for of in (has_few_queries, is_latent))
    # Between SKUs of a die the same attention kernel runs, whose deviation carries over whole.
    kind = KIND_AT["attention_same_die" if die else "attention"]
    if source is None:
        known = is_known_by_shape(target)
        kind = KIND_AT["attention_unmeasured" if known else "attention_other"]
        other = np.where(
            few,
            np.where(latent, KIND_AT["latent_other"], KIND_AT["decode_other"]),
            KIND_AT["attention_other"],
        )
        without_figure = ~is_measured_latent(target, kernels.attention)[kernels.call] & ~few
        without_figure |= rules == Rule.OTHER_ATTENTION
        kind = np.where(without_figure, other, kind)
    if not die:
        decode_kind = KIND_AT["decode"]
        if source is None:
            short = KIND_AT["decode_unmeasured_short"]
            decode_kind = np.where(predicted_ns < SHORT_NS, short, KIND_AT["decode_unmeasured"])
        kind = np.where(rules == Rule.DECODE, decode_kind, kind)
    scheduled = np.where(latent, KIND_AT["decode_flash_mla"], KIND_AT["decode_flash2"])
    return np.where(rules == Rule.SCHEDULED, scheduled, kind)


def _product_kinds(
    kernels: KernelFeatures, predicted_ns: F64, source: Gpu | None, target: Gpu
) -> tuple[U8, U8]:
    """Return the kinds of GEMMs by tiles, and of products without, uint8[n] each."""
    short, long = predicted_ns < SHORT_NS, predicted_ns >= LONG_NS

    def by_length(kind: str) -> U8:
        return np.where(short, KIND_AT[f"{kind}_short"], KIND_AT[kind])

    # The errors of 16-bit GEMMs are not those of vector units, whose tiles have no fit.
    vector = kernels.has_dtype("float32")
    without_tiles = by_length("product")
    if source is None:
        without_tiles = np.full(len(short), KIND_AT["product_unmeasured"])
        sixteen = by_length("gemm_unmeasured")
        fine = kernels.scales[kernels.call] != Scales.TENSOR
        narrow = np.where(
            fine, by_length("gemm_8bit_unmeasured"), KIND_AT["gemm_8bit_tensor_unmeasured"]
        )
    elif same_die(source, target):
        sixteen = np.where(long, KIND_AT["gemm_same_die_long"], by_length("gemm_same_die"))
        narrow = KIND_AT["gemm_8bit_same_die"]
    else:
        sixteen = by_length("gemm" if target.calibrated else "gemm_uncalibrated")
        narrow = KIND_AT["gemm_8bit"]
    product = np.where(
        vector, without_tiles, np.where(kernels.has_narrow_operands, narrow, sixteen)
    )
    # One GPU with units for 4 bits was measured, so their errors are those without a source.
    four = kernels.has_four_bit_operands
    return np.where(four, KIND_AT["gemm_4bit_unmeasured"], product), without_tiles


def _memory_kinds(
    kernels: KernelFeatures, predicted_ns: F64, source: Gpu | None, target: Gpu
) -> U8:
    """Return the kinds of memory-bound kernels, uint8[n]; arguments as for `kinds_of`."""
    short = predicted_ns < SHORT_NS
    if source is None:
        kinds = ("memory_library_unmeasured", "memory_unmeasured")
    elif source.is_nvidia and target.is_nvidia:
        if same_die(source, target):
            return np.where(short, KIND_AT["memory_same_die_short"], KIND_AT["memory_same_die"])
        kinds = ("memory_other_die",) * 2
    else:
        kinds = ("memory",) * 2
    of_library, of_torch = (
        np.where(short, KIND_AT[f"{kind}_short"], KIND_AT[kind]) for kind in kinds
    )
    # Long softmax and norms take 1.3 to 2.4 times as long as their bytes on an MI300X.
    if source is None and target.is_nvidia:
        of_torch = np.where(predicted_ns >= LONG_NS, KIND_AT["memory_unmeasured_long"], of_torch)
    if source is None:
        of_torch = np.where(kernels.unknown_layout, KIND_AT["memory_unknown_layout"], of_torch)
    return np.where(kernels.from_torch, of_torch, of_library)
