"""Work and times of the operators of layers with a state per sequence."""

import json

import numpy as np
import pytest

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call
from onerank.annotate.passes.launch_rules import launches_of
from onerank.annotate.passes.operators_to_kernels import launch_times

BF16, F32 = "Tensor(c10::BFloat16)", "Tensor(float)"


def delta_rule(op: str, n: int, t: int, h: int) -> Call:
    """Return a call with h heads of 128 and half as many key heads."""
    keys, values, state = [n, t, h // 2, 128], [n, t, h, 128], [n, h, 128, 128]
    shapes = [keys, keys, values, [n, t, h], [n, t, h], state]
    inputs = json.dumps(shapes), json.dumps([BF16, BF16, BF16, F32, BF16, F32])
    outputs = [values, state] if t > 1 else [values]
    return Call.parse(op, inputs, (json.dumps(outputs), json.dumps([BF16, F32][: len(outputs)])))


# Summed kernels of fla 0.6.0 in us, by sequences, tokens and heads
# (benchmarks/results/2026-11-27-state-kernels-h100.txt).
MEASURED = {
    (1, 64, 32): 40.2, (1, 256, 32): 47.3, (1, 1024, 32): 97.5, (1, 4096, 32): 309.1,
    (1, 16384, 32): 1202.1, (4, 1024, 32): 289.3, (16, 256, 32): 317.6, (1, 64, 16): 37.3,
    (1, 256, 16): 41.9, (1, 1024, 16): 71.7, (1, 4096, 16): 218.1, (1, 16384, 16): 834.0,
    (1, 1, 32): 3.2, (8, 1, 32): 14.3, (64, 1, 32): 111.2, (256, 1, 32): 437.6,
}  # fmt: skip


def test_times_of_the_delta_rule_on_an_h100():
    h100, errors = load_gpu("H100"), list[float]()
    for (n, t, h), measured_us in MEASURED.items():
        name = "chunk_gated_delta_rule" if t > 1 else "recurrent_gated_delta_rule"
        op, call = f"onerank_serving::{name}", delta_rule(name, n, t, h)
        kernel_ns, _ = predict_from_datasheet(
            kernels_of([work_of_call(op, call)], np.zeros(1)), h100
        )
        launches = list(launches_of(op, call, h100))
        assert len(launches) == (8 if t > 1 else 1)
        assert [launch.share for launch in launches if launch.share] == [1.0]
        _, others_ns = launch_times(op, launches, h100) if t > 1 else (0, 0.0)
        errors.append((kernel_ns[0] + others_ns) / 1e3 / measured_us - 1)
    assert np.abs(errors).max() < 0.16
    assert np.abs(errors).mean() < 0.08


def test_times_of_kimi_delta_attention_on_an_h200():
    """Summed kernels of fla 0.6.0 with 32 heads of 128 (2026-11-28-serving-blind-5-h200)."""
    h200, op = load_gpu("H200"), "onerank_serving::chunk_gated_delta_rule"
    for tokens, measured_us in ((300, 87.0), (512, 117.3), (2048, 465.2)):
        rows, state = [1, tokens, 32, 128], [1, 32, 128, 128]
        inputs = (
            json.dumps([rows] * 4 + [rows[:3], state]),
            json.dumps([BF16] * 3 + [F32, BF16, BF16]),
        )
        call = Call.parse(
            op.partition("::")[2], inputs, (json.dumps([rows, state]), json.dumps([BF16] * 2))
        )
        main_ns, _ = predict_from_datasheet(kernels_of([work_of_call(op, call)], np.zeros(1)), h200)
        launches = list(launches_of(op, call, h200))
        assert len(launches) == 10
        _, others_ns = launch_times(op, launches, h200)
        assert (main_ns[0] + others_ns) / 1e3 == pytest.approx(measured_us, rel=0.08)


# The same of mamba_ssm's scan: heads and their size, groups, size of states and of chunks; then by
# sequences and tokens. The second is Falcon-H1's (2026-11-28-serving-blind-4-h100).
MEASURED_SCANS = {
    (128, 64, 8, 128, 128): {
        (1, 64): 19.2, (1, 256): 33.6, (1, 1024): 95.0, (1, 4096): 341.2, (1, 16384): 1321.5,
        (16, 256): 390.0,
    },
    (24, 128, 1, 256, 256): {(1, 2048): 103.5, (1, 512): 35.8},
}  # fmt: skip


@pytest.mark.parametrize("sizes", MEASURED_SCANS, ids=str)
def test_times_of_mamba_2_on_an_h100(sizes: tuple[int, int, int, int, int]):
    h100, op, errors = load_gpu("H100"), "onerank_serving::mamba_chunk_scan", list[float]()
    heads, size, groups, of_state, chunk = sizes
    for (n, t), measured_us in MEASURED_SCANS[sizes].items():
        x, b, state = [n, t, heads, size], [n, t, groups, of_state], [n, heads, size, of_state]
        of_heads = [[n, t, heads], [heads], b, b, [heads], [heads]]
        call = Call.parse(
            "mamba_chunk_scan",
            (json.dumps([x, *of_heads, state, []]),
             json.dumps([BF16, BF16, F32, BF16, BF16, BF16, F32, F32, "Int"])),
            (json.dumps([x, state]), json.dumps([BF16, F32])),
            json.dumps([*[None] * 8, chunk]), "",
        )  # fmt: skip
        kernel_ns, _ = predict_from_datasheet(
            kernels_of([work_of_call(op, call)], np.zeros(1)), h100
        )
        launches = list(launches_of(op, call, h100))
        assert len(launches) == 5
        others_ns = launch_times(op, launches, h100)[1]
        errors.append((kernel_ns[0] + others_ns) / 1e3 / measured_us - 1)
    # The largest is that of 64 tokens, 22 us for 19.
    assert np.abs(errors).max() < 0.16
    assert np.abs(errors).mean() < 0.055


# Summed kernels of mamba_ssm's scan of Mamba 1 and of the copies of its operands, in us, by
# sequences, tokens and channels (benchmarks/results/2026-11-27-serving-blind-2-h100.txt and
# 2026-11-28-serving-blind-3-h100.txt).
MEASURED_SELECTIVE = {
    (1, 300, 5120): 109.1, (1, 2000, 5120): 482.5, (4, 500, 5120): 468.9, (1, 256, 8192): 76.0,
    (1, 1500, 8192): 668.6, (1, 2048, 8192): 555.5,
}  # fmt: skip


def test_times_of_mamba_1_on_an_h100():
    h100, op, errors = load_gpu("H100"), "onerank_serving::selective_scan", list[float]()
    for (n, t, channels), measured_us in MEASURED_SELECTIVE.items():
        call = selective_scan(t, n, channels)
        kernel_ns, _ = predict_from_datasheet(
            kernels_of([work_of_call(op, call)], np.zeros(1)), h100
        )
        others_ns = launch_times(op, list(launches_of(op, call, h100)), h100)[1]
        errors.append((kernel_ns[0] + others_ns) / 1e3 / measured_us - 1)
    assert np.abs(errors).max() < 0.07


# mamba_ssm's update of Mamba 1 in us, by sequences and channels
# (benchmarks/results/2026-11-28-serving-blind-3-h100.txt).
MEASURED_UPDATES = {
    (16, 8192): 7.06, (96, 8192): 32.98, (200, 8192): 66.34, (16, 5120): 5.17, (96, 5120): 21.28,
    (200, 5120): 41.95,
}  # fmt: skip


def test_times_of_updates_of_mamba_1_on_an_h100():
    errors = list[float]()
    for (n, channels), measured_us in MEASURED_UPDATES.items():
        rows, b, state = [n, channels], [n, 16], [n, channels, 16]
        shapes = [rows, rows, [channels, 16], b, b, [channels], [channels], state, rows]
        call = Call.parse(
            "selective_state_update",
            (json.dumps(shapes), json.dumps([BF16, BF16, F32, BF16, BF16, BF16, F32, BF16, BF16])),
            (json.dumps([rows]), json.dumps([BF16])),
        )
        work = work_of_call("onerank_serving::selective_state_update", call)
        kernel_ns, _ = predict_from_datasheet(kernels_of([work], np.zeros(1)), load_gpu("H100"))
        errors.append(kernel_ns[0] / 1e3 / measured_us - 1)
    assert np.abs(errors).max() < 0.09
    assert np.abs(errors).mean() < 0.06


def selective_scan(t: int, n: int = 1, channels: int = 8192) -> Call:
    """Return a scan of Mamba 1 with 16 numbers of each channel."""
    rows, b, state = [n, t, channels], [n, t, 16], [n, channels, 16]
    shapes = [rows, rows, [channels, 16], b, b, [channels], [channels], state, rows]
    types = [BF16, BF16, F32, BF16, BF16, F32, F32, BF16, BF16]
    inputs, outputs = (
        (json.dumps(shapes), json.dumps(types)),
        (json.dumps([rows]), json.dumps([BF16])),
    )
    return Call.parse("selective_scan", inputs, outputs)


def test_a_scan_of_mamba_1_computes_its_chunks_whole():
    op, h100 = "onerank_serving::selective_scan", load_gpu("H100")
    cycles = {t: work_of_call(op, selective_scan(t)).cycles for t in (100, 700, 1024, 1025, 3000)}
    padded = {t: round(of_t / cycles[100] * 128) for t, of_t in cycles.items() if t != 1024}
    assert padded == {100: 128, 700: 1024, 1025: 2048, 3000: 4096}
    # Without masks.
    assert cycles[1024] < 0.7 * cycles[700]
    # Copies of four operands, the scan, and a copy of the last state.
    assert len(launches_of(op, selective_scan(100), h100)) == 6


@pytest.mark.parametrize("t", [64, 65, 128])
def test_a_chunk_is_computed_whole(t: int):
    work = work_of_call(
        "onerank_serving::chunk_gated_delta_rule", delta_rule("chunk_gated_delta_rule", 2, t, 4)
    )
    of_token = 6 * 64 * 128 + 4 * 64 * 128 + 6 * 128 * 128 + 64 * 64 // 3
    assert work.flops == 2 * 4 * (64 if t == 64 else 128) * of_token
    # Queries, keys, values, decay, rates; the state is read and written, also as a result.
    rows = 2 * t * (2 * 2 * 2 * 128 + 2 * 4 * 128 + 4 * 4 + 2 * 4)
    state = 4 * 2 * 4 * 128 * 128
    assert work.bytes_read == rows + state


def test_a_triangular_system_costs_n_squared_for_each_right_side():
    """As transformers' delta rule solves for each chunk of 64 tokens."""
    shapes = [[1, 4, 2, 64, 64], [1, 4, 2, 64, 16], []]
    inputs = json.dumps(shapes), json.dumps([F32, F32, "Bool"])
    outputs = json.dumps([shapes[1]]), json.dumps([F32])
    call = Call.parse("linalg_solve_triangular", inputs, outputs, "", "")
    work = work_of_call("aten::linalg_solve_triangular", call)
    assert work.flops == 4 * 2 * 16 * 64**2
    assert work.matmul
