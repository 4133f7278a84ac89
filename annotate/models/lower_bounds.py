"""The lower bound of a kernel's time from a GPU description."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import F64, KernelFeatures
from onerank.annotate.models.terms import I64, Term, TermRecord, factor, longest, product, quantity


def lower_bound_ns(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the least time of each kernel on a GPU in ns, float64[n].

    The longer of the GEMM FLOPs at the datasheet's peak, and the bytes beyond the capacity of the
    last-level cache at the datasheet's bandwidth. 0 if the work or the cache is unknown.
    """
    compute = np.where(kernels.matmul, kernels.flops / kernels.rates(gpu).peak, 0.0)
    cache_bytes = np.inf if gpu.l2_bytes is None else gpu.l2_bytes
    uncached_bytes = np.maximum(0.0, kernels.bytes - cache_bytes)
    memory = uncached_bytes / gpu.peak_bandwidth_bytes_per_s
    return 1e9 * np.maximum(np.nan_to_num(compute), np.nan_to_num(memory))


def clamp_to_lower_bound(
    predicted_ns: F64,
    before: KernelFeatures,
    source: Gpu,
    after: KernelFeatures,
    target: Gpu,
    *,
    record: tuple[TermRecord, slice | I64] | None = None,
) -> F64:
    """Return predictions that are at least the target's lower bound.

    Args:
        predicted_ns: predicted durations, float64[n].
        before: the kernels as measured; unmeasured ones have duration 0.
        source: GPU that measured them.
        after: the kernels as predicted.
        target: GPU they are predicted for.
        record: takes the bound as a term where it decides, and the rows of these kernels.
    """
    # A kernel measured below the source's bound has overcounted work: a mask hides part of it, or a
    # convolution uses another algorithm. It may be as far below the target's bound.
    source_bound = lower_bound_ns(before, source)
    measured = (source_bound > 0) & (before.duration_ns > 0)
    ratio = np.divide(
        before.duration_ns, source_bound, out=np.ones(len(source_bound)), where=measured
    )
    target_bound, share = lower_bound_ns(after, target), np.minimum(1.0, ratio)
    bound = target_bound * share
    clamped = np.where(after.over_link, predicted_ns, np.maximum(predicted_ns, bound))
    if record is not None:

        def clamped_term(i: int, root: Term | None) -> Term | None:
            if root is None or clamped[i] <= predicted_ns[i]:
                return root
            allowed = quantity("lower bound", target_bound[i], note=_BOUND_NOTE)
            measured = factor(share[i], "measured part", f"of the lower bound on {source.name}")
            least = allowed if share[i] == 1 else product(allowed, measured, name="least")
            return longest(root, least, name="clamped", value=clamped[i])

        record[0].update(record[1], clamped_term)
    return clamped


_BOUND_NOTE = "products at the datasheet's peak, bytes beyond the last-level cache at its bandwidth"
