"""Energy of small graphs with round figures and of the captured step; the power model's fit."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from onerank.annotate import load_gpu, recost, with_figures
from onerank.annotate.energy import Course, power_model, report_energy
from onerank.annotate.fit.energy import errors_of, fit, held_out, read_powers, to_toml
from onerank.converters.kineto import convert_directory
from onerank.ir.errors import AnnotateError, FormatError

TRACES = Path(__file__).parents[2] / "traces"


def test_a_kernel_at_full_rate_draws_the_limit_and_gaps_the_idle_power(trace, mm):
    gpu = with_figures(load_gpu("H200"), {"tdp_w": 700, "idle_w": 100})
    # 2 * 4096^3 FLOPs at 989 * 0.678 TFLOPS: 204.97 us, so at the limit of 700 W
    graph = trace(mm(4096, 4096, 4096, ns=204_970))
    found = report_energy(graph, gpu, Course(304_970, 204_970, "made"))
    base = power_model().coefficients["H200"]
    memory = 3 * 4096**2 * 2 / 204_970e-9 / (4.8e12 * 0.856)
    share = min(1, base.base + base.tensor + base.memory * memory)
    assert found.node_uj[0] == pytest.approx(share * 700 * 204.970, rel=1e-3)
    assert found.idle_uj == 100 * 100
    assert found.step_uj == found.busy_uj + found.idle_uj
    assert found.busy_uj == pytest.approx(found.node_uj[0], abs=1)
    assert found.step_low_uj < found.step_uj < found.step_high_uj
    assert found.node_high_uj[0] <= 700 * 204.970 + 1


def test_a_stream_of_bytes_draws_less_than_the_limit(trace, add):
    # 6 bytes an element at 4.8 TB/s * 0.856: 1.46 ms
    graph = trace(add(1_000_000_000, ns=1_460_300))
    found = report_energy(graph, load_gpu("H200"), Course(1_460_300, 1_460_300, "made"))
    c = power_model().coefficients["H200"]
    assert found.mean_power_mw == pytest.approx((c.base + c.memory) * 700_000, rel=1e-3)


def test_a_captured_step_draws_between_idle_power_and_limit():
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    found = report_energy(graph, load_gpu("H200"), Course(31_526_976, 29_865_307, "measured"))
    assert 75_000 < found.mean_power_mw < 700_000
    assert found.classes[0].op_class == "gemm"
    assert found.classes[0].power_mw > 600_000
    assert sum(row.energy_uj for row in found.classes) == pytest.approx(sum(found.node_uj), abs=900)
    assert len(found.node_ids) == 850


def test_a_gpu_without_power_figures_is_an_error_that_says_what_to_set(trace, mm):
    graph = recost(trace(mm(64, 64, 64)), "TPU-v5p")
    with pytest.raises(AnnotateError, match="lacks tdp_w and idle_w: set them with --set tdp_w="):
        report_energy(graph, load_gpu("TPU-v5p"), Course(1, 1, "made"))


def test_a_graph_without_durations_is_an_error(trace, mm):
    with pytest.raises(AnnotateError, match="no compute node has a duration"):
        report_energy(trace(mm(64, 64, 64, ns=0)), load_gpu("H200"), Course(1, 1, "made"))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Return a table whose power follows the model exactly, at the limit for some shapes."""
    rng = np.random.default_rng(1)
    frames: list[pl.DataFrame] = []
    for name, (base, tensor, memory) in {"H200": (0.2, 0.7, 0.4), "B200": (0.3, 0.6, 0.3)}.items():
        gpu = load_gpu(name)
        m, n, k = (2 ** rng.integers(4, 13, 400) for _ in range(3))
        work, moved = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
        rate, stream = gpu.tensor_flops_per_s("bfloat16"), gpu.bandwidth_bytes_per_s
        seconds = 2e-6 + np.maximum(work / rate, moved / stream)
        share = base + tensor * work / seconds / rate + memory * moved / seconds / stream
        frames.append(
            pl.DataFrame(
                {
                    "gpu": [name] * 400,
                    "dtype": ["bfloat16"] * 400,
                    "m": m,
                    "n": n,
                    "k": k,
                    "time_us": seconds * 1e6,
                    "power_w": np.minimum(1, share) * gpu.tdp_w,
                }
            )
        )
    path = tmp_path / "power.parquet"
    pl.concat(frames).write_parquet(path)
    return path


def test_the_fit_finds_the_coefficients_it_was_made_with(measured: Path):
    powers = read_powers(measured)
    assert fit([powers[0]]) == pytest.approx([0.2, 0.7, 0.4], abs=1e-3)
    assert fit([powers[1]]) == pytest.approx([0.3, 0.6, 0.3], abs=1e-3)
    assert abs(errors_of(fit([powers[0]]), powers[0]).energy) < 1e-3


def test_a_gpu_is_judged_by_a_fit_to_the_others(measured: Path):
    powers = read_powers(measured)
    coefficients, errors = held_out(powers)["B200"]
    assert coefficients == pytest.approx([0.2, 0.7, 0.4], abs=1e-3)
    assert errors.energy < 0
    assert 'coefficients."default"' in to_toml(powers, "made")


def test_a_table_without_power_is_an_error(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pl.DataFrame({"gpu": ["H200"], "m": [1]}).write_parquet(path)
    with pytest.raises(FormatError, match="lacks n, k, time_us, power_w"):
        read_powers(path)
    with pytest.raises(FormatError, match="no parquet table"):
        read_powers(tmp_path / "none.parquet")
