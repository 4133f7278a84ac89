"""The target's roofline, independent of the measured time: the usual baseline."""

from dataclasses import replace

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import datasheet
from onerank.annotate.models.features import F64, U8, KernelFeatures
from onerank.annotate.models.provenance import Rule


def predict(kernels: KernelFeatures, source: Gpu, target: Gpu) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels; `source` plays no part.

    The longer of bytes / achievable bandwidth and FLOPs / sustained rate, and a launch floor.

    The kernels of an operator share its work in proportion to their measured durations, and the
    floor is each one's. What the source measured counts for nothing else.
    """
    count = len(kernels.passes)
    once = replace(kernels, passes=np.ones(count), cycles=np.zeros(count))
    moved, rules = datasheet.predict(once, target)
    moved = np.where(kernels.over_link, kernels.duration_ns, moved)
    return moved, np.where(kernels.over_link, np.uint8(Rule.KEPT), rules)
