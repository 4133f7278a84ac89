"""A kernel's time from a GPU description only: launch floor plus memory or compute time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import F64, U8, KernelFeatures, Parts
from onerank.annotate.models.provenance import Rule
from onerank.annotate.models.residual import issue_rate

I64 = npt.NDArray[np.int64]

MODEL = "datasheet"
"""Model name in the annotation of a graph that was not measured."""


def predict(kernels: KernelFeatures, target: Gpu) -> tuple[F64, U8]:
    """Return (durations in ns, rules): launch floor plus the longest of memory and compute time.

    The floor is that of the operator's class (see `features`). Memory streams the bytes as
    often as the operator's kernels do (see `passes`), at the achievable bandwidth; rates are the
    sustained ones. A dtype without units on the target runs at the rate of a wider one (see
    `kernels`). Without any rate, or without a formula for the operator, only memory counts.
    Elements handled one by one take cycles of the SMs. A recurrent layer is costed GEMM by GEMM,
    step by step (see `record.Part`).
    """
    terms = terms_of(kernels, target)
    made, rate = terms.predicted_ns, terms.rate
    in_steps = np.isin(kernels.call, kernels.parts.calls_in_steps)
    composed = np.flatnonzero(in_steps & np.isfinite(rate))
    parts, owner, once = parts_ns(kernels, target, composed, rate[composed])
    each = parts.times * (once + parts.launches * target.launch_floor_ns)
    made[composed] = np.bincount(owner, weights=each, minlength=len(composed))
    made[composed] *= kernels.part_of_operator[composed]
    return made, terms.rule


@dataclass(frozen=True, slots=True)
class DatasheetTerms:
    """Terms of the time of n kernels by a GPU's description; times in seconds but for the floor.

    Attributes:
        floor_ns: launch floor of the operator's class, float64[n].
        rate: sustained FLOP/s for the kernel's class and dtype, nan if unknown, float64[n].
        compute_s: FLOPs at that rate; 0 if unknown, float64[n].
        memory_s: streamed bytes at the achievable bandwidth; 0 if unknown, float64[n].
        issue_s: SM cycles of elements handled one by one, float64[n].
        rule: a `Rule` for each, uint8[n].
    """

    floor_ns: F64
    rate: F64
    compute_s: F64
    memory_s: F64
    issue_s: F64
    rule: U8

    @property
    def predicted_ns(self) -> F64:
        """Launch floor plus the longest of the three times, float64[n]."""
        longest = np.maximum(np.maximum(self.compute_s, self.memory_s), self.issue_s)
        return self.floor_ns + longest * 1e9


def terms_of(kernels: KernelFeatures, target: Gpu) -> DatasheetTerms:
    """Return the terms of each kernel's prediction."""
    rates = kernels.rates(target)
    rate = rates.sustained
    compute = np.nan_to_num(kernels.flops / rate)
    memory = np.nan_to_num(kernels.bytes * kernels.passes) / target.bandwidth_bytes_per_s
    issue = kernels.cycles * kernels.part_of_operator / issue_rate(target)
    rule = np.where(compute > memory, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where((compute > memory) & rates.wider, Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & np.isnan(rate), Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes) & np.isnan(kernels.flops), Rule.FLOOR_ONLY, rule)
    rule = np.where(issue > np.maximum(compute, memory), Rule.ISSUE, rule)
    floor = kernels.floor_ns(target)
    return DatasheetTerms(floor, rate, compute, memory, issue, rule.astype(np.uint8))


def parts_ns(kernels: KernelFeatures, target: Gpu, rows: I64, rate: F64) -> tuple[Parts, I64, F64]:
    """Return (products of some nodes, of which of `rows` each is, its time done once in ns)."""
    parts, owner = kernels.parts.of_calls(kernels.call[rows])
    once = np.maximum(parts.flops / rate[owner], parts.bytes / target.bandwidth_bytes_per_s)
    return parts, owner, target.launch_floor_ns + 1e9 * once
