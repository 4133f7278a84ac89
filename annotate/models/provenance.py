"""The rules by which a node's duration is predicted, and counts by evidence."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from onerank.ir import Evidence, Graph

I64 = npt.NDArray[np.int64]


def by_evidence(graph: Graph, index: I64, amounts: I64 | None = None) -> dict[str, int]:
    """Return evidence ("measured") -> sum over the nodes at `index` that have it.

    Args:
        graph: graph of the nodes.
        index: indices of the nodes, int64[n].
        amounts: values to sum, int64[n]; None: count the nodes.
    """
    codes = graph.nodes.evidence[index]
    if amounts is None:
        amounts = np.ones(len(index), dtype=np.int64)
    return {e.name.lower(): int(amounts[codes == e].sum()) for e in Evidence if (codes == e).any()}


class Rule(IntEnum):
    """The rule that predicted a node's duration."""

    KEPT = 0
    COMPUTE = 1
    MEMORY = 2
    FLOOR = 3
    MATMUL_WITHOUT_FLOPS = 4
    BANDWIDTH_ONLY = 5
    NO_RATE = 6
    FLOOR_ONLY = 7
    DROPPED = 8
    WIDER_RATE = 9
    NO_DURATION = 10
    GEMM_TILES = 11
    ATTENTION_TILES = 12
    OUTSIDE = 13
    SAME_GPU = 14
    RETYPED = 15
    RESIZED = 16
    LOOKED_UP = 17
    LOOKED_UP_ON_BOTH = 18
    BETWEEN = 19
    RESIZED_BY_ROWS = 20
    RESIZED_BETWEEN = 21
    MEASURED_WITH_OVERRIDES = 22
    LOOKED_UP_WITH_OVERRIDES = 23
    PARTS = 24
    ISSUE = 25
    MISALIGNED = 26

    @property
    def label(self) -> str:
        """The rule as text for a report."""
        return _LABELS[self]


# The labels are keys of the "rules" object in the JSON output: rewording one breaks its readers.
_LABELS = {
    Rule.KEPT: "kept as measured (copies that cross the host link, communication)",
    Rule.COMPUTE: "compute-bound",
    Rule.MEMORY: "memory-bound",
    Rule.FLOOR: "not longer than the launch floor",
    Rule.MATMUL_WITHOUT_FLOPS: "matrix product or attention, FLOPs unknown: 16-bit matmul rate",
    Rule.BANDWIDTH_ONLY: "FLOPs and bytes unknown: memory bandwidth",
    Rule.NO_RATE: "no matmul rate for the data type: memory bandwidth",
    Rule.FLOOR_ONLY: "no shapes: launch floor alone",
    Rule.DROPPED: "dropped: launches nothing",
    Rule.WIDER_RATE: "compute-bound, no matmul units for the data type: rate of a wider type",
    Rule.GEMM_TILES: "matrix product by its tiles",
    Rule.ATTENTION_TILES: "attention by its tiles",
    Rule.OUTSIDE: "matrix product or attention by its tiles and the residual model: the GPU is "
    "far from the fitted ones",
    Rule.RETYPED: "matrix product in another data type, by floor and roofline of both",
    Rule.RESIZED: "measured at another size on this GPU, times the model's ratio of both sizes",
    Rule.LOOKED_UP: "looked up: this call was measured on this GPU",
    Rule.LOOKED_UP_ON_BOTH: "looked up on both GPUs: half of the source's deviation carries over",
    Rule.BETWEEN: "interpolated between calls measured on this GPU",
    Rule.RESIZED_BY_ROWS: "measured at another size, times the looked-up ratio of both sizes",
    Rule.RESIZED_BETWEEN: "measured at another size, times the interpolated ratio of both sizes",
    Rule.MEASURED_WITH_OVERRIDES: "measured on this GPU, times the model's ratio with and without "
    "overrides",
    Rule.LOOKED_UP_WITH_OVERRIDES: "looked up on this GPU, times the model's ratio with and "
    "without overrides",
    Rule.PARTS: "convolution or recurrent layer by the tiles of its products",
    Rule.ISSUE: "bound by SM cycles per element",
    Rule.MISALIGNED: "matrix product whose rows begin off 16 bytes: an older generation's kernel",
    Rule.SAME_GPU: "as measured: on this GPU",
    Rule.NO_DURATION: "kept: the trace has no duration to scale",
}

AS_MEASURED = (Rule.KEPT, Rule.NO_DURATION, Rule.SAME_GPU)

"""Rules that keep the measured duration, if there is one."""

BY_TILES = (Rule.GEMM_TILES, Rule.ATTENTION_TILES, Rule.OUTSIDE, Rule.MISALIGNED)

"""Rules of GEMMs and attention that use the tile model."""

BY_DATABASE = (
    *(Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH, Rule.BETWEEN),
    *(Rule.RESIZED_BY_ROWS, Rule.RESIZED_BETWEEN, Rule.LOOKED_UP_WITH_OVERRIDES),
)

"""Rules that use a kernel database's measurement on the target."""
