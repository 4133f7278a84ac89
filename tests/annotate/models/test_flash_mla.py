"""FlashMLA's decode by the division of its keys, against kernels on an H100 and an H200."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.flash_mla import (
    _plan,
    combination_ns,
    flash_mla_terms,
    runs_flash_mla,
)
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.passes.unmeasured_attention import swap_unmeasured_attention
from tools.fit.measured_kernels import Attention, of_attention

# Heads, sequences, tokens of each, and times of both kernels in us on each GPU. The coefficients
# were fitted to other sizes.
MEASURED = (
    (128, 1, 384, ("H100", 8.5, 3.1), ("H200", 8.5, 3.0)),
    (128, 48, 768, ("H100", 28.2, 2.6), ("H200", 27.3, 2.5)),
    (32, 96, 2048, ("H100", 90.5, 5.8), ("H200", 65.7, 5.9)),
    (64, 12, 192, ("H100", 10.1, 3.1), ("H200", 9.7, 2.9)),
    (16, 32, 64, ("H100", 8.1, 1.2), ("H200", 7.5, 1.1)),
)


def shapes_of(heads: int, batch: int, keys: int, *, d: int = 576):
    """Return the shape of a decode."""
    return np.array([[batch, heads, 1, 1, keys, d, 512, 0, 0]], dtype=np.float64)


@pytest.mark.parametrize("case", MEASURED)
def test_decodes(case: tuple[int, int, int, tuple[str, float, float], tuple[str, float, float]]):
    heads, batch, keys, *measured = case
    for name, attention_us, combine_us in measured:
        gpu = load_gpu(name)
        (attention_ns,) = flash_mla_terms(gpu, shapes_of(heads, batch, keys)).predicted_ns
        both_ns = attention_ns + combination_ns(gpu, batch, heads, keys)
        assert both_ns / 1e3 == pytest.approx(attention_us + combine_us, rel=0.15)
        assert attention_ns / 1e3 == pytest.approx(attention_us, rel=0.15)


@pytest.mark.parametrize(("batch", "blocks", "tiles"), [(1, 16, 1), (3, 12, 2), (24, 8, 1)])
def test_every_block_is_in_a_part(batch: int, blocks: int, tiles: int):
    plan = _plan(tiles, batch, blocks, 132)
    assert plan.pieces >= 1
    assert plan.blocks * (132 // tiles) >= batch * blocks
    assert plan.most <= blocks
    assert plan.parts <= batch * blocks


def test_a_sequence_of_few_blocks_has_a_part_for_each():
    # 16 blocks and 5 more of one sequence, for 132 SMs: 6 blocks each, 5 of them overhead.
    assert _plan(1, 1, 16, 132).most == 16
    # 96 sequences of one block: each in one part.
    assert _plan(1, 96, 1, 132).divided == 0


def test_sequences_in_one_part_are_not_combined():
    gpu = load_gpu("H100")
    whole, divided = (combination_ns(gpu, 96, 16, keys) for keys in (64, 12288))
    assert whole < 2000 < divided


def test_calls_that_flash_mla_does_not_compute():
    h100 = load_gpu("H100")
    assert runs_flash_mla(h100, shapes_of(16, 4, 1024)).all()
    assert not runs_flash_mla(h100, shapes_of(16, 4, 1024, d=320)).any()
    assert not runs_flash_mla(load_gpu("B200"), shapes_of(16, 4, 1024)).any()


def test_the_interval_is_that_of_the_schedule():
    shapes = shapes_of(64, 12, 192)
    kernels = of_attention(Attention(shapes, {}), np.ones(1))
    gpu = load_gpu("H100")
    predicted = predict_from_description(kernels, gpu)
    (durations, rules), _ = swap_unmeasured_attention(
        *(kernels, predicted, gpu, "usual"),
        ["onerank_serving::latent_attention"],
    )
    ((low,), (high,)), _ = intervals(kernels, (durations, rules), None, gpu, shipped())
    assert (durations[0] / low, high / durations[0]) == pytest.approx((1.1, 1.1), rel=0.01)
    assert low < 10.1e3 < high
