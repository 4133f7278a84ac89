"""SimAI's ratio rule: a kernel takes longer as the rate that bounds it is lower."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import F64, U8, KernelFeatures, matmul_ratio
from onerank.annotate.models.provenance import Rule


def predict(kernels: KernelFeatures, source: Gpu, target: Gpu) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels by the ratio rule.

    T_new = T * FLOPS_known / FLOPS_new if compute-bound, T * BW_known / BW_new if memory-bound.

    Rates are datasheet peaks, of the kernel's own data type or, where a GPU has no units for it,
    of a wider one (counted; see `kernels`). A kernel is compute-bound when its
    FLOPs per byte exceed the source GPU's peak FLOPS over its peak bandwidth. Of a kernel whose
    FLOPs are not known: matrix products and attention go by the 16-bit peak, all others by
    bandwidth, since what has no formula here is mostly fused pointwise work, sorting and scans,
    which stream memory. Both are counted. See `measured` for what stays as it is.
    """
    by_memory = source.peak_bandwidth_bytes_per_s / target.peak_bandwidth_bytes_per_s
    rates, new_rates = kernels.rates(source), kernels.rates(target)
    peak, new_peak = rates.peak, new_rates.peak
    ridge = peak / source.peak_bandwidth_bytes_per_s
    compute = kernels.flops > kernels.bytes * ridge  # false where either is not known
    rated = np.isfinite(peak / new_peak)
    factor = np.where(compute & rated, peak / new_peak, by_memory)
    rule = np.where(compute, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where(compute & (rates.wider | new_rates.wider), Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & ~rated, Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes), Rule.BANDWIDTH_ONLY, rule)
    by_matmul = matmul_ratio(source, target, sustained=False)
    if by_matmul is not None:
        blind = kernels.matmul_class & np.isnan(kernels.flops)
        factor = np.where(blind, by_matmul, factor)
        rule = np.where(blind, Rule.MATMUL_WITHOUT_FLOPS, rule)
    factor = np.where(kernels.over_link, 1.0, factor)
    rule = np.where(kernels.over_link, Rule.KEPT, rule)
    return kernels.duration_ns * factor, rule.astype(np.uint8)
