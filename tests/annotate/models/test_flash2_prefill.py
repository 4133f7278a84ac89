"""FlashAttention 2's forward by the schedule of its tiles, against kernels on H100s."""

import numpy as np
import pytest

from onerank.annotate import load_gpu, with_figures
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.flash2_prefill import (
    _key_blocks,
    _makespan,
    flash2_schedule_terms,
    is_scheduled,
)
from onerank.annotate.op_costs.attention import KeyWindow
from onerank.annotate.op_costs.cost_record import LOWER_RIGHT, AttentionShape

H100 = load_gpu("H100")

# Sequences, heads, size of heads, new tokens, tokens before them, us: median of the layers of a
# Llama-8B, a Qwen3-4B and a Llama-1B in whole steps, or of a CUDA graph of 10 to 20 calls, torch
# 2.11. The cycles were fitted to other measurements; the ragged edges of heads above 64 were chosen
# later, with these in view.
MEASURED = (
    (1, 32, 128, 700, 0, 50.8),
    (1, 32, 128, 1024, 2048, 154.0),
    (1, 32, 128, 2048, 0, 163.0),
    (1, 32, 128, 3000, 3000, 770.0),
    (1, 32, 128, 8192, 8192, 4953.0),
    (1, 32, 128, 1024, 4096, 248.4),
    (4, 32, 128, 1024, 1024, 349.7),
    (1, 32, 64, 384, 0, 11.3),
    (1, 32, 64, 700, 0, 34.7),
    (1, 32, 64, 3000, 3000, 460.4),
    (1, 32, 64, 4096, 16384, 2090.1),
    (1, 16, 192, 8192, 0, 1463.3),
    (1, 16, 256, 1024, 8192, 480.6),
)


def predicted_us(
    *sizes: int, causal: int = LOWER_RIGHT, gpu: Gpu = H100, training: bool = False
) -> float:
    """Return the time of sequences, heads, size of heads, queries and keys."""
    batch, heads, size, rows, keys = sizes
    call = np.array([[batch, heads, 8, rows, keys, size, size, causal, 0]], dtype=float)
    assert is_scheduled(gpu, call).all()
    return flash2_schedule_terms(gpu, call, training=training).predicted_ns[0] / 1e3


@pytest.mark.parametrize("case", MEASURED)
def test_prefills(case: tuple[int, int, int, int, int, float]):
    batch, heads, size, tokens, context, time_us = case
    made = predicted_us(batch, heads, size, tokens, tokens + context)
    assert made == pytest.approx(time_us, rel=0.08)


def test_the_mean_error_of_the_measured_prefills():
    errors = [predicted_us(*sizes, t, t + c) / us - 1 for *sizes, t, c, us in MEASURED]
    assert np.abs(errors).mean() < 0.05


def test_two_blocks_of_an_sm_take_less_than_twice_one():
    # Four heads of 33 tiles occupy each SM once, eight twice.
    one, two = (predicted_us(1, heads, 128, 33 * 128, 4096, causal=0) for heads in (4, 8))
    assert 1.5 < two / one < 1.7


def test_a_list_schedule():
    # SMs with one place: the third block waits for the first to end.
    assert _makespan((3.0, 5.0), 1, 2, 1, 1.0) == 5.0
    assert _makespan((3.0, 5.0), 2, 2, 1, 1.0) == 10.0  # 5 and 5 on the second SM
    # Two blocks of an SM at 0.6 of the speed of one: 3 / 0.6, and the rest of the other alone.
    assert _makespan((3.0, 5.0), 1, 1, 2, 0.6) == pytest.approx(5 + 2)


def test_heads_that_are_not_simulated_keep_all_sms_busy():
    few, many = (_makespan((100.0,) * 4, heads, 132, 2, 0.6) for heads in (3300, 33000))
    assert many == pytest.approx(10 * few, rel=0.01)


@pytest.mark.parametrize(("rows", "keys", "window"), [(4096, 4096, 1024), (2048, 3071, 1024)])
def test_blocks_of_a_window(rows: int, keys: int, window: int):
    """As `n_block_min` and `n_block_max` of the kernel."""
    seen = KeyWindow(window - 1, 0)
    mean, last = seen.keys_of_tile(rows, keys), seen.keys_of_last_tile(rows, keys)
    made = _key_blocks(128, AttentionShape(1, 1, 1, rows, mean, 128, 128, 0, 0, last)).seen
    tile = 128 * np.arange(rows // 128)
    low = np.maximum(0, tile + keys - rows - window + 1) // 64
    high = -(-np.minimum(keys, tile + 128 + keys - rows) // 64)
    # The first key of the cache is not known: a block more or less.
    assert np.abs(made - (high - low)).max() <= 1
    assert made.sum() == pytest.approx((high - low).sum(), rel=0.04)


def test_a_better_figure_makes_no_call_slower():
    plain = predicted_us(1, 32, 128, 3000, 6000)
    for name in ("sm_count", "max_clock_mhz", "bf16_tensor_tflops"):
        better = with_figures(H100, {name: H100.figures[name].value * 1.5})
        assert predicted_us(1, 32, 128, 3000, 6000, gpu=better) < plain


def test_a_step_of_training_has_the_boost_clock():
    alone, step = (predicted_us(2, 32, 128, 8192, 8192, training=t) for t in (False, True))
    assert step / alone == pytest.approx(1980 / 1830, rel=1e-3)


def test_calls_without_cycles():
    calls = np.array([
        [1, 32, 8, 1024, 1024, 32, 32, 1, 0],  # heads of 32 have another kernel
        [1, 32, 8, 1024, 1024, 128, 64, 1, 0],
        [1, 32, 8, 1024, 1024, 128, 128, 1, 1],
        [1, 32, 8, 1024, 1024, 512, 512, 1, 0],
    ], dtype=float)  # fmt: skip
    assert not is_scheduled(H100, calls).any()
    calls[:, 5:7] = 128
    assert not is_scheduled(load_gpu("A100"), calls).any()
