"""What a call takes in a benchmark beyond its kernels: the gap before the next call.

Public benchmark sets replay a CUDA graph and divide its time by the calls in it, and the tile
models are fitted to such times per call (`GemmCoefficients.call_gap`). A profiler's durations have
no gap. The gaps of a step are counted elsewhere: by the replay of a capture, and by
`serving.graph_gaps`.

On an H100, in graphs of 24 calls, the gap is 0.69 us after GEMMs, 0.68 after norms and elementwise
kernels and 0.76 after FlashAttention 2, in the median; 0.5 to 1.1 us for four of five calls of all
these (2026-11-28-fine-scales-h100). On an H200 the median over 70 such calls and decodes is the
same, 0.69 us (2026-11-28-serving-blind-h200). No other architecture was measured: the gap is the
same part of its launch floor.
"""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.prediction_terms import BY_TILES, Rule
from onerank.ir.arrays import F64, U8, Mask, membership_mask

ATTENTION_GAP = 0.43
"""Launch floors in the times per call of the sets that attention is fitted to.

Their graphs have one call. On an H100 such a graph takes 1.17 us longer than the kernel, in the
median of FlashAttention 2's calls of 8 to 21 us.
"""

KERNEL_GAP = 0.26
"""Launch floors between the end of a kernel and the next in a graph of several calls."""

_MEASURED_ON = ("hopper",)

# Rules whose times already are those of calls, if calls are predicted.
_PER_CALL = (*(rule for rule in BY_TILES if rule != Rule.SCHEDULED), Rule.PARTS)


def gap_after_kernels_ns(rules: U8, gpu: Gpu) -> F64:
    """Return the gap that times of kernels do not contain in ns, float64[n]; 0 for other times.

    Args:
        rules: a `Rule` for each predicted time, uint8[n].
        gpu: where they run.
    """
    without = ~membership_mask(rules, _PER_CALL)
    return np.where(without, KERNEL_GAP * gpu.launch_floor_ns, 0.0)


def has_uncertain_gap(rules: U8, gpu: Gpu) -> Mask:
    """Return whether durations lack a gap not measured on the GPU's architecture, bool[n].

    Arguments as for `gap_after_kernels_ns`.
    """
    if gpu.architecture in _MEASURED_ON:
        return np.zeros(len(rules), dtype=bool)
    return membership_mask(rules, _PER_CALL)
