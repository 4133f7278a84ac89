"""Memory-efficient attention by its blocks, against calls on an H100 and in a step on an H200."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.attention_kernels import shape_factors
from onerank.annotate.op_costs.cost_record import AttentionShape


@pytest.mark.parametrize(
    ("gpu", "sizes", "causal", "backward", "measured_us"),
    [
        ("H200", (4096, 49, 4, 32), 0, 0, 238.8),  # windows of images
        ("H200", (256, 49, 16, 32), 0, 1, 130.0),
        ("H100", (8, 2048, 16, 64), 1, 0, 602.6),
        ("H100", (8, 2048, 16, 64), 1, 1, 1901.4),
        ("H100", (32, 512, 16, 64), 1, 0, 184.4),
    ],
)
def test_many_short_sequences_take_the_starts_of_their_blocks(
    gpu, sizes, causal, backward, measured_us
):
    batch, tokens, heads, size = sizes
    target = load_gpu(gpu)
    factors = shape_factors("efficient", target)
    assert factors is not None
    assert factors.blocks is not None
    call = {
        "batch": batch,
        "heads": heads,
        "rows": tokens,
        "keys": tokens,
        "d": size,
        "dv": size,
        "causal": causal,
        "backward": backward,
    }
    row = [float(call.get(name, 0)) for name in AttentionShape._fields]
    above_ns = factors.blocks.above_floor_ns(target, np.array([row]), training=False)
    time_us = (above_ns[0] + target.launch_floor_ns) / 1000
    assert time_us == pytest.approx(measured_us, rel=0.15)
