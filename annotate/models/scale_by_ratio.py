"""The ratio model: the time of a kernel scales with one datasheet rate, FLOPs or bandwidth."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures, matmul_ratio
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    TermRecord,
    factor,
    product,
    quantity,
)


def predict_by_ratio(
    kernels: KernelFeatures, source: Gpu, target: Gpu, *, record: TermRecord | None = None
) -> PredictedDurations:
    """Return the kernels' durations on `target` by the ratio rule.

    T_new = T * FLOPS_known / FLOPS_new if compute-bound, T * BW_known / BW_new if memory-bound.

    Rates are datasheet peaks of the kernel's dtype or, if a GPU has no units for it, of a wider one
    (counted; see `KernelRates`). A kernel is compute-bound if its FLOPs per byte exceed the source
    GPU's peak FLOP/s over its peak bandwidth. For kernels with unknown FLOPs, GEMMs and attention
    use the 16-bit peak; others use bandwidth, since operators without formula are mostly fused
    pointwise work, sorting and scans, which stream memory. Both are counted. Copies over a link
    keep their duration (`KernelFeatures.over_link`).
    """
    by_memory = source.peak_bandwidth_bytes_per_s / target.peak_bandwidth_bytes_per_s
    rates, new_rates = kernels.rates(source), kernels.rates(target)
    peak, new_peak = rates.peak, new_rates.peak
    ridge = peak / source.peak_bandwidth_bytes_per_s
    # nan compares false, so unknown work counts as memory-bound.
    compute = kernels.flops > kernels.bytes * ridge
    rated = np.isfinite(peak / new_peak)
    factors = np.where(compute & rated, peak / new_peak, by_memory)
    rule = np.where(compute, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where(compute & (rates.wider | new_rates.wider), Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & ~rated, Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes), Rule.BANDWIDTH_ONLY, rule)
    by_matmul = matmul_ratio(source, target, sustained=False)
    if by_matmul is not None:
        unknown_flops = kernels.matmul_class & np.isnan(kernels.flops)
        factors = np.where(unknown_flops, by_matmul, factors)
        rule = np.where(unknown_flops, Rule.MATMUL_WITHOUT_FLOPS, rule)
    # Copies over a link stay as measured: neither the GPU's memory nor its FLOPs limit them.
    factors = np.where(kernels.over_link, 1.0, factors)
    rule = np.where(kernels.over_link, Rule.KEPT, rule)
    if record is not None:
        record.update(
            slice(0, len(factors)),
            lambda i, _: product(
                quantity("measured", kernels.duration_ns[i]),
                factor(factors[i], "ratio", Rule(int(rule[i])).label),
                name="by ratio",
            ),
        )
    return PredictedDurations(kernels.duration_ns * factors, rule.astype(np.uint8))
