"""Memory-efficient attention by its blocks, against calls on an H100 and in a step on an H200."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.attention_factors import shape_factors
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


# The main kernel of a call of 4 sequences of 16 heads, us without and with dropout: 360 calls on an
# H200 (2026-11-28-attention-dropout-h200).
@pytest.mark.parametrize(
    ("family", "call", "us"),
    [
        ("cudnn", (64, 1024, 1, 0), (34.5, 76.2)),
        ("cudnn", (64, 4096, 0, 1), (1447.8, 2012.4)),
        ("cudnn", (128, 2048, 1, 0), (145.1, 285.8)),
        ("flash2", (128, 2048, 0, 0), (401.3, 509.7)),
        ("efficient", (64, 4096, 1, 0), (1154.2, 2239.1)),
        ("efficient", (128, 1024, 0, 1), (660.5, 1103.0)),
    ],
)
def test_dropout_takes_a_random_number_for_each_score(family, call, us):
    size, tokens, causal, backward = call
    without, dropping = us
    target = load_gpu("H200")
    factors = shape_factors(family, target)
    assert factors is not None
    drops = AttentionShape(4, 16, 16, tokens, tokens, size, size, causal, backward, dropout=1)
    shapes = np.array([drops, drops._replace(dropout=0)], float)
    added_us = factors.dropout_ns(target, shapes, training=False) / 1e3
    assert without + added_us[0] == pytest.approx(dropping, rel=0.08)
    assert added_us[1] == 0
