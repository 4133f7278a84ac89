"""Gaps between the kernels of a replayed CUDA graph, and what a benchmark's calls take beyond them.

A replay takes the durations of its kernels, a gap after each, and a launch of the graph. On an
H200, in a process in which no profiler has run (2026-11-28-hopper-kernels-h200), in us:

    after an elementwise kernel, norm or softmax      0.16 in a graph of 480, 0.2 with the launch
    after a GEMM                                      0.33 of 480, 0.35 to 0.5 with the launch
    after a kernel of decoder layers                  0.28 to 0.35, 0.33 in the median
    launch of a graph                                 1.2 to 2.1, and 4 to 5 if the host waits
    graph of one kernel, in all                       at least 5.6

An H100 has 0.33 to 0.36 in decodes (2026-11-28-serving-blind-3-h100), so both GPUs have one gap.
Two conditions give other figures for it:

- Durations of kernels that Python launched one by one. On an H100 they are 0.08 us longer than in
  the graph, on an H200 up to 0.1 us shorter, so a graph exceeds their sum by 0.25 us for each
  kernel on an H100 and 0.4 on an H200 (`STEP_GAP_NS`, by which `serving.graph_gaps` predicts).
- A profiler that has run in the process. Replays that the host waits for then take 0.2 to 0.4 us
  more for each kernel, which the 0.69 us of 2026-11-28-fine-scales-h100 contain.

Public benchmark sets replay a graph of one to six calls and divide its time by them, so their
calls hold a part of the launch. The tile models are fitted to such times
(`GemmCoefficients.call_gap`, six calls; `ATTENTION_GAP`, one). No other architecture was measured:
a gap is the same part of its launch floor.
"""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.prediction_terms import BY_TILES, Rule
from onerank.ir.arrays import F64, U8, Mask, membership_mask

ATTENTION_GAP = 0.43
"""Launch floors in the times per call of the sets that attention is fitted to.

Their graphs have one call. On an H100 such a graph takes 1.17 us longer than the kernel, in the
median of FlashAttention 2's calls of 8 to 21 us; on an H200 1.47 us longer than a GEMM.
"""

KERNEL_GAP = 0.09
"""Launch floors from the end of a memory-bound kernel to the next in a graph of 24 such calls.

0.22 us in the median of 20 kernels of an H200, 0.18 to 0.35 for four of five.
"""

STEP_GAP_NS, STEP_GAP_GPU = 250, "H100"
"""Time of a replayed step beyond its kernels as Python launches them, for each, and the GPU.

Decodes of Gemma 3 and Qwen2.5-1.5B have 170 to 310 ns while other graphs exist, as in engines.
Solar Open and prefills have less, but their kernels are long (2026-11-28-serving-blind-3-h100).
"""

LONGEST_STEP_GAP_NS = 370
"""The longest usual gap of a measured step.

Of 22 decodes of a Llama-8B at TP 2 (1,439 to 1,534 kernels) on an H100, 352 to 383 ns in most.
"""

STEP_GAP_HALF_WIDTH_NS, SAME_DIE_HALF_WIDTH_NS = 150, 75
"""Half the width of the 80% interval of `STEP_GAP_NS`; the same from another GPU of the die.

Measured gaps of decodes are 173 to 303 ns on H100s (Llama-8B, Llama-1B and a Qwen3-MoE, whole) and
357 to 417 ns on an H200 (the two Llamas). Gaps predicted for another GPU of the same die differ by
up to 90 ns from the measured ones. Those of one composition differ by up to 41 ns between two
H100s.
"""

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
