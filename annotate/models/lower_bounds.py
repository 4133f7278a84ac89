"""The lower bound of a kernel's time from a GPU description."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import F64, KernelFeatures


def least_ns(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the least time of each kernel on a GPU in ns, float64[n].

    Products take their FLOPs at the datasheet's peak; what does not fit into the last-level cache
    comes from memory, at the datasheet's bandwidth. 0 where the work, or the cache, is not known.
    """
    compute = np.where(kernels.matmul, kernels.flops / kernels.rates(gpu).peak, 0.0)
    cache = np.inf if gpu.l2_bytes is None else gpu.l2_bytes
    beyond = np.maximum(0.0, kernels.bytes - cache)
    memory = beyond / gpu.peak_bandwidth_bytes_per_s
    return 1e9 * np.maximum(np.nan_to_num(compute), np.nan_to_num(memory))


def clamp_to_lower_bound(
    moved_ns: F64, before: KernelFeatures, here: Gpu, after: KernelFeatures, there: Gpu
) -> F64:
    """Return predictions that are at least the target's lower bound.

    A kernel measured faster than the source's bound (its work is overcounted: a mask hides some, or
    a convolution uses another algorithm) may be faster than the target's bound by the same factor.

    Args:
        moved_ns: predicted durations, float64[n].
        before: the kernels as measured; unmeasured ones use the description.
        here: the GPU they were measured on.
        after: the kernels as they are predicted.
        there: the GPU they are predicted for.
    """
    allowed = least_ns(before, here)
    measured = (allowed > 0) & (before.duration_ns > 0)
    passed = np.divide(before.duration_ns, allowed, out=np.ones(len(allowed)), where=measured)
    least = least_ns(after, there) * np.minimum(1.0, passed)
    return np.where(after.over_link, moved_ns, np.maximum(moved_ns, least))
