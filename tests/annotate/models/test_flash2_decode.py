"""Decoding by FlashAttention 2: parts of the keys and waves, against kernels on an H100."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
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


def terms(sequences: int, context: int, *, heads: int = 32, kv_heads: int = 8) -> WaveTerms:
    """Return the terms of a decode on an H100."""
    shape = [[sequences, heads, kv_heads, 1, context + 1, 128, 128, 0, 0]]
    shapes = np.array(shape, dtype=np.float64)
    return flash2_decode_terms(H100, shapes, FLASH2_DECODE["hopper"])


@pytest.mark.parametrize(("sequences", "context", "parts", "time_us"), MEASURED)
def test_parts_and_time_of_a_decode(sequences: int, context: int, parts: int, time_us: float):
    assert _parts(8 * sequences, -(-(context + 1) // 128), 2 * 132) == parts
    (predicted_ns,) = terms(sequences, context).predicted_ns
    assert predicted_ns / 1000 == pytest.approx(time_us, rel=0.16)


def test_the_mean_error_of_the_measured_decodes():
    errors = [terms(n, context).predicted_ns[0] / us / 1000 - 1 for n, context, _, us in MEASURED]
    assert np.abs(errors).mean() < 0.07


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
    coefficients = FLASH2_DECODE["hopper"], FLASH2_PREFILL["hopper"]
    (predicted_ns,) = flash2_prefill_terms(H100, shape, *coefficients).predicted_ns
    assert predicted_ns / 1000 == pytest.approx(time_us, rel=0.06)


def test_prefills_that_fill_the_gpu_do_not_divide_their_keys():
    # 512 tokens of 32 heads are 256 tiles, more than 0.8 of two per SM.
    assert not divides_keys(H100, prefill_shape(512, 8192)).any()
