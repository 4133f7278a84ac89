"""Sources of prediction error, and how they grow with distance from the fitted dies."""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import ASYNCHRONOUS, OTHER_ARCHITECTURE, SYNCHRONOUS
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.features import F64, U8, KernelFeatures, Mask
from onerank.annotate.models.provenance import AS_MEASURED, BY_DATABASE, BY_TILES, Rule
from onerank.ir.arrays import membership_mask

# Additional distance of an architecture without a fitted `Pipeline`, which gets a mean of the two.
_UNKNOWN_ARCHITECTURE = 0.7

# About as far outside the others as the die families that the fit leaves out (up to 1.3).
_VALIDATED_DISTANCE = 1.0

_FULL_WEIGHT_DISTANCES = 1.3, 3.3
"""Distances from the fitted NVIDIA GPUs between which the tile model's weight stays constant.

An L40S, 1.3 outside if its family is left out, is predicted best by three parts of the tile model
and one of the residual model. A V100 and a T4 are 2.3 and 3.3 outside: their GEMMs in DeepBench are
1.17 and 1.19 times off from their shapes, and 1.14 and 1.21 times from each other's measurement. If
the weight kept falling, they would be 1.25 and 1.18, and 1.23 and 1.28 times off
(benchmarks/deepbench.py).
"""


def same_die(gpu: Gpu, other: Gpu) -> bool:
    """Return whether two GPUs are cuts of one die.

    They have the same architecture, and FLOPs per SM and cycle within 10%. Overridden figures do
    not count: a what-if must not switch to the rules of another die.
    """
    # "other" names any unlisted architecture, so two such descriptions may be of different dies.
    if gpu.architecture == OTHER_ARCHITECTURE:
        return gpu.board == other.board
    rates = [properties(board.as_described)["flops_per_sm_and_cycle"] for board in (gpu, other)]
    equal_rates = 0.9 < rates[0] / rates[1] < 1 / 0.9 if all(rates) else False
    return gpu.architecture == other.architecture and equal_rates


def outside(gpu: Gpu, c: Coefficients) -> float:
    """Return a GPU's distance from the range of the fitted GPUs: the sum over properties, in ln."""
    distance = 0.0
    for name, value in properties(gpu).items():
        least, most = c.hull[name]
        distance += max(0.0, np.log(least / value), np.log(value / most)) if value else 1.0
    known = gpu.architecture in (*SYNCHRONOUS, *ASYNCHRONOUS)
    return float(distance) + (0.0 if known else _UNKNOWN_ARCHITECTURE)


def trust_in(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of the tile model for a GPU: 1 unless it is far from the fitted GPUs.

    A die family that the fit leaves out is up to 1.3 outside the others, and predicted well.
    """
    # Without overrides: a changed figure should show its own effect. With them, --override of more
    # FLOPs or a larger cache changed the mixture and made GEMMs up to 16% slower.
    distance, (least, most) = outside(gpu.as_described, c), _FULL_WEIGHT_DISTANCES
    if gpu.is_nvidia:
        distance -= min(max(0.0, distance - least), most - least)
    return float(np.exp(-max(0.0, distance - _VALIDATED_DISTANCE)))


def trust_in_parts(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of the tile model for calls composed of several GEMMs.

    1 for NVIDIA GPUs as near as a T4, where the tiles predict convolutions. The residual model sees
    a single GEMM, which takes half the convolution's time on a V100 and a T4.
    """
    near = _FULL_WEIGHT_DISTANCES[1] if gpu.is_nvidia else _VALIDATED_DISTANCE
    return float(np.exp(-max(0.0, outside(gpu.as_described, c) - near)))


def properties(gpu: Gpu) -> dict[str, float]:
    """Return the properties of a GPU that define its distance from others."""
    types = ("bfloat16", "float16", "float32")
    peak = next((rate for dtype in types if (rate := gpu.peak_tensor_flops_per_s(dtype))), 0.0)
    return {
        "sm_count": float(gpu.sm_count),
        "clock_hz": gpu.clock_hz,
        "flops_per_sm_and_cycle": peak / gpu.sm_count / gpu.clock_hz,
        "flops_per_byte": peak / gpu.peak_bandwidth_bytes_per_s,
        "l2_bytes": float(gpu.l2_bytes or 0),
    }


I64 = npt.NDArray[np.int64]

KINDS = (
    "kept",
    "gemm",
    "gemm_short",
    "gemm_same_die",
    "gemm_uncalibrated",
    "gemm_uncalibrated_short",
    "gemm_8bit",
    "attention",
    "attention_same_die",
    "attention_unmeasured",
    "product",
    "retyped",
    "memory",
    "memory_unmeasured",
    "resized_product",
    "resized_attention",
    "resized_memory",
    "looked_up",
    "looked_up_loosely",
    "looked_up_otherwise",
    "composed",
)
"""Kinds of prediction with separate errors; "kept" has none.

"resized" kinds are of another size on one GPU and add to those of another GPU. Memory-bound kernels
without a measurement ("memory_unmeasured") are much less certain than measured ones. So are GEMMs
with misaligned rows, of which eight were measured, up to 1.5 times off, and unmeasured attention
("attention_unmeasured"). Unmeasured convolutions and recurrent layers ("composed") have errors from
DeepBench, of two GPUs that differ from the fitted ones (benchmarks/deepbench.py), so they are not
widened.
"""

_AT = {kind: np.uint8(at) for at, kind in enumerate(KINDS)}

_UNFITTED = ("retyped",)
"""Kinds of GEMM predictions by rules without fitted coefficients."""

_OTHER_VENDORS = {"memory": 2.1, "memory_unmeasured": 1.8, "composed": 1.8}

_FARTHER = 2.0
"""Widening of errors on GPUs of other vendors, to which nothing was fitted.

`_OTHER_VENDORS` has factors on the errors of memory-bound kinds; `_FARTHER` is an additional
distance from the fitted GPUs for GEMMs. With both, 80% intervals contain 80% of the times of five
models on an MI300X, predicted from an H100 (public Kineto traces, AMD-AGI/TraceLens: 134
memory-bound shapes, 26 GEMMs). Of three attention shapes, which took 1.5 to 2.2 times as long as
predicted, one is inside.
"""

_WITHOUT_MODEL = ("resized_memory", "looked_up", "looked_up_loosely", "looked_up_otherwise")

SHORT_NS = 10_000
"""Shorter GEMMs have separate errors, because the launch determines their time."""

TINY_NS = 3000
"""Look-ups of kernels up to this time have separate errors: cache and launch determine it."""


class Uncertainty(NamedTuple):
    """Uncertainty of n look-ups, in addition to that of their kind.

    Attributes:
        spread: standard deviation in ln of each, in addition to that of its kind, float64[n].
        otherwise: whether the row was measured with other library versions than the trace, bool[n].
        loosely: whether the time depends on more than the key records, bool[n].
    """

    spread: F64
    otherwise: Mask
    loosely: Mask

    @classmethod
    def none(cls, count: int) -> Self:
        """Return no additional uncertainty, for predictions by a model."""
        return cls(np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count, dtype=bool))

    def merge(self, other: Self) -> Self:
        """Return the union of the uncertainties of look-ups of different nodes."""
        return type(self)(
            np.maximum(self.spread, other.spread),
            self.otherwise | other.otherwise,
            self.loosely | other.loosely,
        )

    def at(self, where: I64 | Mask) -> Self:
        """Return the uncertainty of the nodes at `where`."""
        return type(self)(self.spread[where], self.otherwise[where], self.loosely[where])


def resize_kinds_of(kernels: KernelFeatures, resized: Mask) -> U8:
    """Return the kind of each prediction for another size, as positions in `KINDS`, uint8[n]."""
    attention = (kernels.attention[:, 0] > 0)[kernels.call]
    product = np.where(kernels.matmul_class, _AT["resized_product"],
                       _AT["resized_memory"])  # fmt: skip
    kind = np.where(attention, _AT["resized_attention"], product)
    return np.where(resized, kind, _AT["kept"]).astype(np.uint8)


def kinds_of(
    kernels: KernelFeatures,
    predicted: tuple[F64, U8],
    source: Gpu | None,
    target: Gpu,
    doubt: Uncertainty | None = None,
) -> U8:
    """Return the kind of each prediction, as positions in `KINDS`, uint8[n]."""
    predicted_ns, rules = predicted
    die = source is not None and same_die(source, target)
    by_tiles = membership_mask(rules, BY_TILES)
    attention = (kernels.attention[:, 0] > 0)[kernels.call]
    gemm_kind = "gemm" if target.calibrated else "gemm_uncalibrated"
    product = np.where(predicted_ns < SHORT_NS, _AT[f"{gemm_kind}_short"], _AT[gemm_kind])
    # No coefficient is fitted to 8-bit GEMMs, so on another cut of the die they keep wider errors.
    eight_bit = (kernels.gemm[:, 4] == 1)[kernels.call]
    product = np.where(eight_bit, _AT["gemm_8bit"], product)
    if die:
        product = np.where(eight_bit, product, _AT["gemm_same_die"])
    attention_kind = _AT["attention_same_die" if die else "attention"]
    if source is None:
        attention_kind = _AT["attention_unmeasured"]
    memory = "memory_unmeasured" if source is None else "memory"
    depthwise = kernels.matmul_class & ~kernels.matmul & np.isfinite(kernels.flops)
    multiplied = kernels.matmul_class & ~depthwise
    other = np.where(multiplied, _AT["product"], _AT[memory])
    # Eight misaligned GEMMs were measured, up to 1.5 times off.
    if not die:
        product = np.where(rules == Rule.MISALIGNED, _AT["memory_unmeasured"], product)
    kind = np.where(by_tiles, np.where(attention, attention_kind, product), other)
    if source is None:
        kind = np.where(rules == Rule.PARTS, _AT["composed"], kind)
    kind = np.where(rules == Rule.RETYPED, _AT["retyped"], kind)
    looked_up = membership_mask(rules, BY_DATABASE)
    if doubt is not None and looked_up.any():
        loose = doubt.loosely | (predicted_ns <= TINY_NS)
        same = np.where(loose, _AT["looked_up_loosely"], _AT["looked_up"])
        database = np.where(doubt.otherwise, _AT["looked_up_otherwise"], same)
        kind = np.where(looked_up, database, kind)
    # Last, because these rules decide for any class of work.
    kept = membership_mask(
        rules, [*AS_MEASURED, Rule.DROPPED, Rule.RESIZED, Rule.MEASURED_WITH_OVERRIDES]
    )
    return np.where(kept, _AT["kept"], kind).astype(np.uint8)


def less_known_gpu(source: Gpu | None, target: Gpu) -> Gpu:
    """Return the GPU whose distance from the fitted ones widens the error.

    This is the target, or the source if the source is another vendor's and the target NVIDIA's.

    Args:
        source: GPU that measured; None: not measured.
        target: GPU to predict.
    """
    if source is None or source.is_nvidia or not target.is_nvidia:
        return target
    return source


def widening(target: Gpu, c: Coefficients, kind: str) -> float:
    """Return the factor on the errors of a kind of prediction, for a GPU far from the fitted ones.

    With a die family left out of the fit, errors grew by about a quarter per unit of distance (see
    `outside`). None was more than 1.3 outside, so errors grow faster beyond. `_UNFITTED` kinds are
    widened only beyond a distance of 1, since no fit favours a GPU. Look-ups on the GPU itself, and
    changes of size by bytes, are not widened. Nor are memory-bound kernels on NVIDIA GPUs: on a
    V100 and a T4, 2.3 and 3.3 outside, norms, softmax and elementwise kernels of 30 us and more are
    as close to their roofline as on an A100.
    """
    if kind in _WITHOUT_MODEL:
        return 1.0
    if kind in _OTHER_VENDORS:
        return 1.0 if target.is_nvidia else _OTHER_VENDORS[kind]
    distance = outside(target, c)
    if kind in _UNFITTED:
        return max(1.0, distance)
    distance += 0.0 if target.is_nvidia else _FARTHER
    return max(1 + distance / 4, distance)
