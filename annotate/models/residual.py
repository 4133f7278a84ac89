"""Floor, roofline and residual: every part of a kernel's time scaled by its own resource."""

import numpy as np

from onerank.annotate.gpu import Gpu
from onerank.annotate.models.kernels import F64, U8, Kernels, Rule, matmul_ratio


def predict(kernels: Kernels, source: Gpu, target: Gpu) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels by floor, roofline and residual.

    The measured time is split; each part goes over to the target by the resource it spends.

    1. The launch floor becomes the target's floor (a kernel shorter than it scales whole).
    2. The roofline's time, the longer of bytes / achievable bandwidth and FLOPs / sustained rate,
       becomes the target's. Call u the share of the time above the floor that it explains.
    3. The rest is what the kernel wastes. Compute-bound: tiles, waves and pipelines run below the
       power-capped ceiling, so the rest scales with the uncapped peak. Memory-bound: the rest is
       between bandwidth (u near 1) and latency and issue slots, which scale with SMs x clock
       (u near 0; see `_issue_rate`); the exponents are u and 1 - u.
    4. A memory-bound kernel faster than its roofline finds its data in cache; how much of its
       time is memory's is then the inverse of u, and the exponents of 3 apply to all of it.

    Copies and fills that no kernel does go above the floor by bandwidth. Products in a data type
    that a GPU has no units for go by the rate of a wider one (counted; see `kernels`).

    There is no fitted coefficient. The form of 3 and 4 was chosen among some thirty on bf16 GEMMs
    of A100, L40S, H100, H200 and B200 (aiconfigurator, sglang 0.5.10); over the 20 ordered pairs
    its mean error is 18.7%, the ratio rule's 50.3%, by `benchmarks/gemm_transfer.py`. Kernels with
    FLOPs unknown: matrix products and attention go above the floor by the sustained 16-bit
    rate; with bytes known, others go by the roofline's memory term; with neither, above the floor
    by bandwidth, since what has no formula here is mostly fused pointwise work, sorting and
    scans, which stream memory. All are counted. See `retarget` for what stays as it is.
    """
    floor = np.minimum(kernels.duration_ns, source.launch_floor_ns)
    above = kernels.duration_ns - floor
    factor, rule = _factor_above_floor(kernels, above, source, target)
    moved = floor * (target.launch_floor_ns / source.launch_floor_ns) + above * factor
    rule = np.where(above <= 0, Rule.FLOOR, rule)
    moved = np.where(kernels.host_copy, kernels.duration_ns, moved)
    rule = np.where(kernels.host_copy, Rule.KEPT, rule)
    return moved, rule.astype(np.uint8)


_SM_BYTES_PER_CYCLE = 64
"""What an SM takes from the last-level cache at most (NVIDIA's whitepapers, Volta to Hopper)."""


def _issue_rate(gpu: Gpu) -> float:
    """Return SMs x clock in Hz; a core of another sort counts as the SMs its memory could feed.

    A TPU has one or two cores, each as wide as many SMs.
    """
    fed = gpu.peak_bandwidth_bytes_per_s / _SM_BYTES_PER_CYCLE
    return max(gpu.sm_count * gpu.clock_hz, fed)


def _factor_above_floor(
    kernels: Kernels, above_ns: F64, source: Gpu, target: Gpu
) -> tuple[F64, U8]:
    """Return (factor on the time above the floor, rule) of each kernel."""
    rates, new_rates = kernels.rates(source), kernels.rates(target)
    by_memory = source.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    by_issue = _issue_rate(source) / _issue_rate(target)

    rated = np.isfinite(rates.sustained / new_rates.sustained)
    flops = np.where(rated, np.nan_to_num(kernels.flops), 0.0)
    memory = np.nan_to_num(kernels.bytes) / source.bandwidth_bytes_per_s
    compute = np.divide(flops, rates.sustained, out=np.zeros_like(flops), where=rated)
    new_memory = memory * by_memory
    new_compute = np.divide(flops, new_rates.sustained, out=np.zeros_like(flops), where=rated)
    bound = compute > memory
    roof = np.maximum(compute, memory) * 1e9
    by_roof = np.divide(
        np.maximum(new_compute, new_memory) * 1e9, roof, out=np.ones_like(roof), where=roof > 0
    )
    by_peak = np.where(rated, rates.peak / new_rates.peak, 1.0)

    share = np.divide(roof, above_ns, out=np.ones_like(roof), where=above_ns > 0)
    explained = np.minimum(share, 1.0)
    cached = (share > 1) & ~bound
    inverse = np.divide(1.0, share, out=np.ones_like(share), where=cached)
    part = np.where(cached, inverse, explained)
    # by_roof^part * by_issue^(1 - part)
    mixed = np.exp(part * np.log(by_roof) + (1 - part) * np.log(by_issue))
    rest = np.where(bound, by_peak, mixed)
    factor = np.where(cached, mixed, explained * by_roof + (1 - explained) * rest)
    rule = np.where(bound, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where(bound & (rates.wider | new_rates.wider), Rule.WIDER_RATE, rule)

    factor = np.where(kernels.transfer, by_memory, factor)
    blind = np.isnan(kernels.bytes) & (np.isnan(kernels.flops) | ~rated)
    factor = np.where(blind, by_memory, factor)
    rule = np.where(blind, Rule.BANDWIDTH_ONLY, rule)
    rule = np.where(kernels.matmul & ~rated, Rule.NO_RATE, rule)
    by_matmul = matmul_ratio(source, target, sustained=True)
    if by_matmul is not None:
        unknown = kernels.matmul_class & np.isnan(kernels.flops)
        factor = np.where(unknown, by_matmul, factor)
        rule = np.where(unknown, Rule.MATMUL_WITHOUT_FLOPS, rule)
    return factor, rule.astype(np.uint8)
