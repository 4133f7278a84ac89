"""Decoding by FlashAttention 2: parts of the keys and waves, against kernels on H100 and H200."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.flash2_decode import (
    FLASH2_DECODE,
    FLASH2_PREFILL,
    WaveTerms,
    _parts,
    divides_keys,
    flash2_decode_terms,
    flash2_prefill_terms,
)

H100 = load_gpu("H100")

# Sequences, tokens of each in the cache, parts that the kernel's grid shows, and time of its
# kernels in us: a Llama-8B (32 heads of 128, 8 key heads) on an H100 with torch 2.11, mean of 32
# layers in replays of a CUDA graph.
MEASURED = (
    (1, 407, 4, 9.1),
    (2, 2602, 11, 17.3),
    (3, 1024, 9, 13.5),
    (5, 300, 3, 9.9),
    (5, 6000, 6, 50.0),
    (7, 150, 2, 9.2),
    (7, 3788, 4, 45.9),
    (10, 992, 3, 22.8),
    (12, 1024, 5, 28.8),
    (13, 7896, 5, 150.7),
    (24, 300, 1, 19.9),
    (24, 700, 6, 39.4),
    (24, 6000, 4, 204.8),
    (27, 3190, 1, 162.5),
    (40, 1024, 1, 92.2),
    (40, 6000, 1, 471.6),
    (80, 1024, 1, 151.0),
    (100, 1024, 1, 200.0),
    (240, 1024, 1, 430.4),
)


# Size of heads, and the times of an H200 and an H100: medians of the layers of two models.
# The coefficients were fitted to these among others.
OF_AN_H200 = (
    (40, 3000, 128, 241.7, 243.6),
    (128, 512, 128, 126.0, 133.1),
    (8, 16384, 128, 138.5, 190.2),
    (1, 16384, 128, 30.4, 36.7),
    (40, 3000, 64, 175.4, 173.5),
    (128, 512, 64, 83.9, 86.5),
    (8, 16384, 64, 83.5, 106.3),
)


def terms(
    sequences: int, context: int, *, kv_heads: int = 8, size: int = 128, gpu: Gpu = H100
) -> WaveTerms:
    """Return the terms of a decode of 32 heads."""
    shape = [[sequences, 32, kv_heads, 1, context + 1, size, size, 0, 0]]
    shapes = np.array(shape, dtype=np.float64)
    return flash2_decode_terms(gpu, shapes, FLASH2_DECODE["hopper"])


@pytest.mark.parametrize(("sequences", "context", "parts", "time_us"), MEASURED)
def test_parts_and_time_of_a_decode(sequences: int, context: int, parts: int, time_us: float):
    assert _parts(8 * sequences, -(-(context + 1) // 128), 2 * 132) == parts
    (predicted_ns,) = terms(sequences, context).predicted_ns
    assert predicted_ns / 1000 == pytest.approx(time_us, rel=0.16)


def test_the_mean_error_of_the_measured_decodes():
    errors = [terms(n, context).predicted_ns[0] / us / 1000 - 1 for n, context, _, us in MEASURED]
    assert np.abs(errors).mean() < 0.06


@pytest.mark.parametrize(("sequences", "context", "size", "h200_us", "h100_us"), OF_AN_H200)
def test_whole_keys_take_as_long_with_more_bandwidth(
    sequences: int, context: int, size: int, h200_us: float, h100_us: float
):
    for gpu, time_us in ((load_gpu("H200"), h200_us), (H100, h100_us)):
        (predicted_ns,) = terms(sequences, context, size=size, gpu=gpu).predicted_ns
        assert predicted_ns / 1000 == pytest.approx(time_us, rel=0.1)


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "size", "time_us"),
    [(16, 32, 160, 190.8), (256, 32, 160, 2888.5), (64, 8, 256, 129.3), (256, 8, 256, 484.2)],
)
def test_each_size_of_heads_has_the_tiles_of_its_kernel(
    sequences: int, kv_heads: int, size: int, time_us: float
):
    # Zamba 2 and Gemma 2 on an H200. The kernel of heads of 160 has one block on an SM; with heads
    # of 256 the memory limits it.
    decode = terms(sequences, 1000, kv_heads=kv_heads, size=size, gpu=load_gpu("H200"))
    assert decode.predicted_ns[0] / 1000 == pytest.approx(time_us, rel=0.11)


def test_a_wave_of_few_blocks_takes_longer_than_its_share():
    # 33 sequences with 8 key heads fill 264 places.
    one, two, full = (terms(n, 6000) for n in (33, 34, 66))
    assert [int(t.waves[0]) for t in (one, two, full)] == [1, 2, 2]
    assert two.waves_ns[0] > 1.3 * one.waves_ns[0]
    assert full.waves_ns[0] == pytest.approx(2 * one.waves_ns[0], rel=0.01)


def test_the_heads_of_a_group_share_a_block():
    # One key head for each head: four times the blocks, and no head waits in another's tile.
    grouped, separate = terms(66, 1000), terms(66, 1000, kv_heads=32)
    assert (grouped.waves[0], separate.waves[0]) == (2, 8)
    assert separate.predicted_ns[0] > 3.5 * grouped.predicted_ns[0]


# New tokens, tokens before them, parts that the grid shows, and time of both kernels in us: the
# same model, medians of 32 layers.
PREFILLS = (
    (64, 2048, 6, 20.8),
    (64, 8192, 8, 41.7),
    (256, 0, 2, 17.0),
    (256, 2048, 2, 44.0),
    (256, 8192, 2, 125.4),
)


def prefill_shape(tokens: int, context: int):
    """Return the shape of a prefill of one sequence, aligned with the last key."""
    return np.array([[1, 32, 8, tokens, context + tokens, 128, 128, 2, 0]], dtype=np.float64)


@pytest.mark.parametrize(("tokens", "context", "parts", "time_us"), PREFILLS)
def test_prefills_of_few_tokens_divide_their_keys(
    tokens: int, context: int, parts: int, time_us: float
):
    shape = prefill_shape(tokens, context)
    assert _parts(32 * tokens // 64, -(-(context + tokens) // 128), 2 * 132) == parts
    assert divides_keys(H100, shape).all()
    (predicted_ns,) = flash2_prefill_terms(H100, shape, FLASH2_PREFILL["hopper"]).predicted_ns
    assert predicted_ns / 1000 == pytest.approx(time_us, rel=0.06)


def test_prefills_that_fill_the_gpu_do_not_divide_their_keys():
    # 512 tokens of 32 heads are 256 tiles, more than 0.8 of two per SM.
    assert not divides_keys(H100, prefill_shape(512, 8192)).any()
