"""The target's roofline, whatever the source measured: the baseline of the field."""

from dataclasses import dataclass

import numpy as np

from onerank.annotate import datasheet
from onerank.annotate.gpu import Gpu
from onerank.annotate.kernels import F64, U8, Kernels, Rule
from onerank.annotate.retarget import retarget
from onerank.annotate.what_if import AS_USUAL, WhatIf
from onerank.ir import Graph


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """The longer of bytes / achievable bandwidth and FLOPs / sustained rate, and a launch floor.

    The kernels of an operator share its work in proportion to their measured durations, and the
    floor is each one's. What the source measured counts for nothing else.

    Attributes:
        source: GPU description the graph was measured on; None: by the name of its device.
        what_if: what to change beside the GPU.
    """

    source: str | None = None
    what_if: WhatIf = AS_USUAL

    name = "roofline"

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph re-costed for `target`.

        Raises:
            AnnotateError: the graph was re-costed before, or its device is not known.
            TargetError: `source` names no GPU description.
        """
        return retarget(
            graph,
            target,
            model=self.name,
            source=self.source,
            predict=predict,
            what_if=self.what_if,
        )


def predict(kernels: Kernels, source: Gpu, target: Gpu) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels; `source` plays no part."""
    moved, rules = datasheet.predict(kernels, target)
    moved = np.where(kernels.host_copy, kernels.duration_ns, moved)
    return moved, np.where(kernels.host_copy, np.uint8(Rule.KEPT), rules)
