"""A kernel's time from a GPU description only: launch floor plus memory or compute time."""

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

    The floor is that of the operator's class (see `launch_floors`). Memory streams the bytes as
    often as the operator's kernels do (see `passes`), at the achievable bandwidth; rates are the
    sustained ones. A dtype without units on the target runs at the rate of a wider one (see
    `kernels`). Without any rate, or without a formula for the operator, only memory counts.
    Elements handled one by one take cycles of the SMs. A recurrent layer is costed GEMM by GEMM,
    step by step (see `record.Part`).
    """
    rates = kernels.rates(target)
    rate = rates.sustained
    compute = np.nan_to_num(kernels.flops / rate)
    streamed = np.nan_to_num(kernels.bytes * kernels.passes)
    memory = streamed / target.bandwidth_bytes_per_s
    rule = np.where(compute > memory, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where((compute > memory) & rates.wider, Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & np.isnan(rate), Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes) & np.isnan(kernels.flops), Rule.FLOOR_ONLY, rule)
    issue = kernels.cycles * kernels.part_of_operator / issue_rate(target)
    rule = np.where(issue > np.maximum(compute, memory), Rule.ISSUE, rule)
    longest = np.maximum(np.maximum(compute, memory), issue)
    made = kernels.floor_ns(target) + longest * 1e9
    in_steps = np.isin(kernels.call, kernels.parts.calls_in_steps)
    composed = np.flatnonzero(in_steps & np.isfinite(rate))
    parts, owner, once = parts_ns(kernels, target, composed, rate[composed])
    each = parts.times * (once + parts.launches * target.launch_floor_ns)
    made[composed] = np.bincount(owner, weights=each, minlength=len(composed))
    made[composed] *= kernels.part_of_operator[composed]
    return made, rule.astype(np.uint8)


def parts_ns(kernels: KernelFeatures, target: Gpu, rows: I64, rate: F64) -> tuple[Parts, I64, F64]:
    """Return (products of some nodes, of which of `rows` each is, its time done once in ns)."""
    parts, owner = kernels.parts.of_calls(kernels.call[rows])
    once = np.maximum(parts.flops / rate[owner], parts.bytes / target.bandwidth_bytes_per_s)
    return parts, owner, target.launch_floor_ns + 1e9 * once
