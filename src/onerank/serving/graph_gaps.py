"""The time of a step as a replayed CUDA graph: its kernels, and the gaps between them."""

import math
from dataclasses import dataclass

from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.kernel_gaps import (
    LONGEST_STEP_GAP_NS,
    SAME_DIE_HALF_WIDTH_NS,
    STEP_GAP_GPU,
    STEP_GAP_HALF_WIDTH_NS,
    STEP_GAP_NS,
)
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.recost.recost import source_gpu
from onerank.annotate.recost.recosting_summary import Recosting
from onerank.ir import Graph
from onerank.serving.tables import StepRow

# Half the width of the 80% interval of `_GraphGaps.stretch`. That of a prefill changes by 0.001 to
# 0.006 between two H100s, and by 0.007 to 0.009 from an H100 to an H200.
_GRAPH_STRETCH_HALF_WIDTH = 0.008


def graph_times(
    recosting: Recosting, before: Graph, after: Graph, measured_row: StepRow | None, gpu: Gpu
) -> dict[str, int | None]:
    """Return the times of kernels, and of a CUDA graph of them, as columns of `StepRow`.

    Args:
        recosting: the change of the kernels.
        before: the captured graph.
        after: the predicted graph.
        measured_row: the row of `before`, if it was measured on another GPU.
        gpu: what the step is predicted for.
    """
    gaps = None if measured_row is None else _GraphGaps.transferred(measured_row, before, gpu)
    graph_ns, low, high = (gaps or _GraphGaps.predicted(after, gpu)).step(recosting)
    return {
        "graph_ns": graph_ns,
        "graph_low_ns": low,
        "graph_high_ns": high,
        "gpu_ns": recosting.after_ns,
    }


def _longer_gaps_ns(graph: Graph, source: Gpu, target: Gpu) -> float:
    """Return how much longer the gaps of a step are on another GPU of the same die.

    `launch_floor_ns` is the time from the start of one of the shortest GEMMs in a replayed graph to
    the start of the next. If kernels become shorter by more than this period does, the gaps become
    longer: an H200's short kernels are 0.2 us shorter than an H100's, and its period is only 0.05
    us shorter. Measured gaps of decodes are 0.31 to 0.44 us on an H200, and 0.16 to 0.27 on an H100
    for the same models (2026-11-28-serving-blind-2-h200).
    """
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    longer_period_ns = target.launch_floor_ns - source.launch_floor_ns
    return float((longer_period_ns - kernels.launch_change_ns(source, target)).sum())


@dataclass(frozen=True)
class _GraphGaps:
    """The time of a replayed CUDA graph beyond the sum of its kernels under the profiler.

    Attributes:
        gaps_ns: gaps between the kernels.
        stretch: the difference beyond the gaps, as a share of the kernels' time: positive where the
            clock falls during a long graph; negative where kernels overlap in the graph, or run
            faster than under the profiler.
        half_width_ns: half the width of the 80% interval of `gaps_ns`.
    """

    gaps_ns: float
    stretch: float
    half_width_ns: float

    @classmethod
    def predicted(cls, after: Graph, gpu: Gpu) -> "_GraphGaps":
        """Return the gaps of a step that was not measured as a CUDA graph."""
        count = int(after.gpu_compute.sum())
        gaps_ns = STEP_GAP_NS * count
        measured_on = load_gpu(STEP_GAP_GPU)
        if same_die(measured_on, gpu):
            gaps_ns += _longer_gaps_ns(after, measured_on, gpu)
        return cls(gaps_ns, 0.0, STEP_GAP_HALF_WIDTH_NS * count)

    @classmethod
    def transferred(cls, row: StepRow, before: Graph, gpu: Gpu) -> "_GraphGaps | None":
        """Return the gaps of a measured step on another GPU; None if it has no measured graph."""
        if not (row.graph_ns and row.gpu_ns):
            return None
        count = int(before.gpu_compute.sum())
        longer_ns = row.graph_ns - row.gpu_ns
        # A difference beyond the usual gaps has another cause, such as a lower clock, whose effect
        # grows with the kernels.
        gaps_ns = min(max(0, longer_ns), LONGEST_STEP_GAP_NS * count)
        stretch = (longer_ns - gaps_ns) / row.gpu_ns
        source = source_gpu(before, None)
        if not same_die(source, gpu):
            return cls(gaps_ns, stretch, STEP_GAP_HALF_WIDTH_NS * count)
        change_ns = _longer_gaps_ns(before, source, gpu)
        width_ns = SAME_DIE_HALF_WIDTH_NS * count
        return cls(max(0.0, gaps_ns + change_ns), stretch, width_ns)

    def step(self, recosting: Recosting) -> tuple[int, int | None, int | None]:
        """Return the time of the replayed graph and the ends of its interval."""
        gpu_ns = recosting.after_ns
        graph_ns = gpu_ns * (1 + self.stretch) + self.gaps_ns
        if not recosting.interval:
            return round(graph_ns), None, None
        # The errors of kernels, gaps and stretch have different causes, so they add in quadrature.
        stretch_ns = _GRAPH_STRETCH_HALF_WIDTH * gpu_ns
        below, above = (
            math.hypot(end_ns - gpu_ns, self.half_width_ns, stretch_ns)
            for end_ns in recosting.interval
        )
        return round(graph_ns), round(graph_ns - below), round(graph_ns + above)
