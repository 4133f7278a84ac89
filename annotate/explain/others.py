"""The arithmetic of figures that are set, and of the least that a description allows."""

import numpy as np

from onerank.annotate.explain.terms import Lines
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import learned
from onerank.annotate.models.attention_tiles import attention_tiles
from onerank.annotate.models.kernels import F64, U8, Kernels
from onerank.annotate.models.least import least_ns, no_less
from onerank.annotate.models.rules import BY_DATABASE


def others_lines(told: F64, rules: U8, before: F64, after: F64, there: Gpu) -> Lines:
    """Return what figures that are set make of a time that was looked up without them.

    Args:
        told: what was looked up, in ns, float64[1].
        rules: by what rule, uint8[1].
        before: what the model says of it, float64[1].
        after: the same with the figures set, float64[1].
        there: the target with them.
    """
    if rules[0] not in BY_DATABASE:
        return []
    made = told[0] * after[0] / before[0]
    product = f"{told[0]:,.0f} x {after[0]:,.0f} / {before[0]:,.0f} = {made:,.0f} ns"
    said = f"what the model says with {there.changes} over what it says without"
    return [("figures set", f"{product}: {said}")]


def least_lines(kernels: Kernels, here: Gpu, there: Gpu) -> Lines:
    """Return what the target's description allows, where the prediction is no more than that."""
    (moved,), _ = learned.predict(kernels, here, there)
    (least,) = no_less(np.zeros(1), kernels, here, kernels, there)
    if not 0 < moved <= least:
        return []
    allowed = float(least_ns(kernels, there)[0])
    measured = ", as the part of it that was measured on " + here.name if least < allowed else ""
    return [
        (
            "least",
            f"{least:,.0f} ns{measured}: products at the datasheet's peak, bytes beyond the "
            f"last-level cache at its bandwidth on {there.name} take {allowed:,.0f}",
        )
    ]


def wave_lines(kernels: Kernels, there: Gpu) -> Lines:
    """Return how the tiles fall on another number of SMs, where that is what is asked."""
    before = there.as_described
    if before.sm_count == there.sm_count:
        return []
    call = int(kernels.call[0])
    if kernels.attention[call, :7].all():
        tiles, what = attention_tiles(kernels.attention[[call]]).item(), "tiles of 128 queries"
    else:
        batch, m, n, *_ = kernels.gemm[call]
        tiles = batch * np.ceil(m / 128) * np.ceil(n / 128)
        what = "tiles, if they are of 128 x 128"
    waves = [f"{tiles / gpu.sm_count:.2f} on {gpu.sm_count} SMs" for gpu in (before, there)]
    old, new = (_of_one_sm(kernels, gpu) for gpu in (before, there))
    text = f"{tiles:.0f} {what}: {waves[0]}, {waves[1]}; a part of a wave takes as long as one; "
    return [("waves", f"{text}an SM does {new:.2f} TFLOP/s at the peak, {old:.2f} as described")]


def _of_one_sm(kernels: Kernels, gpu: Gpu) -> float:
    """Return the peak rate of one SM, in TFLOP/s."""
    return float(kernels.rates(gpu).peak[0]) / 1e12 / gpu.sm_count
