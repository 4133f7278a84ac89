"""Fitting the tile model, to products whose coefficients are known."""

from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
import pytest
from raised import raises_code

from onerank.annotate import load_gpu, with_figures
from onerank.annotate.gpus.datasheet_estimates import sustained_fraction
from onerank.annotate.models.attention_time import attention_ns
from onerank.annotate.models.coefficients import AttentionCoefficients, load, shipped
from onerank.annotate.models.gemm_tiles import GemmTarget, gemm_ns
from onerank.ir.errors import FormatError
from tools.fit import Attention, Products, fit_gemm, read_products
from tools.fit.__main__ import to_toml
from tools.fit.case_errors import errors_of
from tools.fit.evaluate_fit import (
    VIDUR_FILE,
    Case,
    as_by_datasheet,
    step_cases,
    unmeasured_cases,
)
from tools.fit.fit_tiles import fit_attention, fit_robustly, rates_of, stored_ns
from tools.fit.leave_one_out import at_rate_of, memory_cases


def test_fit_robustly_bears_outliers():
    x = np.linspace(0, 1, 50)
    y = 3 * x + 0.5
    y[::10] += 5
    found = fit_robustly(lambda p: p[0] * x + p[1] - y, np.zeros(2))
    assert found == pytest.approx([3, 0.5], abs=0.1)


def test_known_coefficients_are_found_again():
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.uniform(6, 14, (400, 3))
    shapes = np.concatenate([np.ones((400, 1)), np.rint(sizes), np.full((400, 2), 2.0)], axis=1)
    gpus = [load_gpu("A100"), load_gpu("H100")]
    truth = shipped().gemm
    runs = [GemmTarget(g, rates_of(g, "bfloat16", 400), per_call=True) for g in gpus]
    measured_ns = {run.gpu.name: gemm_ns(run, shapes, truth) for run in runs}
    products = Products("bfloat16", shapes, measured_ns)
    made = fit_gemm(products, gpus, shapes=400)
    for run in runs:
        times = gemm_ns(run, shapes, made)
        assert np.abs(times / products.times_ns[run.gpu.name] - 1).mean() < 0.03


def test_gemms_are_fitted_at_the_rate_of_their_own_set():
    """Large GEMMs of a set reach 0.6 of the peak, whatever the fraction of the description."""
    gpu = load_gpu("H200")
    sizes = (4096, 4096, 4096), (8192, 4096, 4096), (16, 64, 64)
    shapes = np.array([(1, *size, 2, 2) for size in sizes])
    flops = 2 * shapes[:, 1:4].prod(axis=1)
    peak = gpu.peak_tensor_flops_per_s("bfloat16")
    assert peak
    times_ns = flops / (0.6 * peak) * 1e9 * np.array([1, 1, 50])
    products = Products("bfloat16", shapes.astype(float), {gpu.name: times_ns})
    rate = at_rate_of(products, gpu).tensor_flops_per_s("bfloat16")
    assert rate == pytest.approx(0.6 * peak)
    # Without large GEMMs, of another GPU or in another type, the description's rate stays.
    small = Products("bfloat16", shapes[2:].astype(float), {gpu.name: times_ns[2:]})
    assert at_rate_of(small, gpu) is gpu
    assert at_rate_of(products, load_gpu("H100")).name == "H100-SXM"
    assert at_rate_of(replace(products, dtype="float8_e4m3fn"), gpu) is gpu


def test_known_coefficients_of_attention_are_found_again():
    gpus = [load_gpu(name) for name in ("A100", "H100")]
    lengths = 2.0 ** np.arange(4, 15)
    shapes = np.array(
        [(b, 32, h, s, s, 128, 128, 1, 0) for b in (1, 16) for h in (4, 32) for s in lengths]
    )
    truth = AttentionCoefficients(floor=1.5, efficiency=0.6, prologue_cycles=5000, overlap=2)
    times = {
        gpu.name: attention_ns(gpu, rates_of(gpu, "bfloat16", len(shapes)), shapes, truth)
        + stored_ns(gpu, shapes)
        for gpu in gpus
    }
    made = fit_attention(Attention(shapes, times), gpus)
    assert made.efficiency == pytest.approx(truth.efficiency, rel=0.02)
    assert made.prologue_cycles == pytest.approx(truth.prologue_cycles, rel=0.1)


def test_keys_and_values_are_read_and_written_once():
    # 16 sequences of 4096 tokens, 8 key heads of 128: 268 MB, twice; 2039 GB/s x 0.86
    shape = np.array([[16, 32, 8, 4096, 4096, 128, 128, 1, 0]], dtype=float)
    (time,) = stored_ns(load_gpu("A100"), shape)
    assert time == pytest.approx(3280 + 2 * 2 * 16 * 4096 * 8 * 256 / (2.039e12 * 0.86) * 1e9)


def test_what_the_power_limit_lets_a_gpu_sustain():
    # W per TFLOPS and GHz^2: H100 700 / 989.5 / 1.83^2, B200 1000 / 2250 / 1.965^2; cube root
    h100, b200 = load_gpu("H100"), load_gpu("B200")
    ratio = (1000 / 2250 / 1.965**2 / (700 / 989 / 1.83**2)) ** (1 / 3)
    made = sustained_fraction(b200, [h100, load_gpu("A100")])  # the A100's units are fed otherwise
    assert made == pytest.approx(0.737 * ratio, rel=1e-6)
    cool = with_figures(b200, {"tdp_w": 9000})
    assert sustained_fraction(cool, [h100]) == 0.9


def test_the_file_is_read_as_written(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(shipped()), encoding="utf-8")
    assert load(path) == shipped()
    assert "aiconfigurator" in shipped().provenance["gemm"]
    path.write_text("same_die = 1", encoding="utf-8")
    with pytest.raises(msgspec.ValidationError):
        load(path)


def test_a_folder_without_the_data(tmp_path):
    with raises_code("fit-no-file", FormatError):
        read_products(tmp_path)
    pl.DataFrame({"gpu": ["A100"], "m": [1]}).write_parquet(tmp_path / "gemm.parquet")
    with raises_code("fit-missing-columns", FormatError):
        read_products(tmp_path)


def test_errors_of_what_the_datasheet_alone_tells(tmp_path):
    """An addition of 1.754 GB on an A100: 1 ms by its memory, 0.47 of 3.28 us; measured 2 ms."""
    each = {"gpu": "A100", "model": "m", "tp": 1, "tokens": 1, "op": "add", "kind": "mem"}
    rows = [{**each, "bytes": 1_753_540_000, "time_ms": t} for t in (1.0, 2.0, 9.0)]
    rows += [{**rows[0], "kind": "gemm"}, {**rows[0], "tokens": 2, "time_ms": 0.0}]
    # A norm of vLLM's is a kernel of another library.
    rows.append({**rows[0], "op": "input_layernorm"})
    pl.DataFrame(rows).write_parquet(tmp_path / VIDUR_FILE)
    case, other = unmeasured_cases(tmp_path)
    assert (other.kind, len(other.measured_ns)) == ("memory_library_unmeasured", 1)
    assert (case.kind, case.target.name) == ("memory_unmeasured", "A100-SXM-80GB")
    assert case.measured_ns.tolist() == [2e6]
    assert case.predicted_ns == pytest.approx([1e6 + 1550], rel=1e-6)


def test_additions_that_the_cache_serves_in_part_are_no_cases(tmp_path):
    """An A100 has a cache of 42 MB, an H100 of 52: half of it to 8 times its size do not count."""
    each = {"model": "m", "tp": 1, "op": "add", "kind": "mem"}
    sizes = {
        "A100": ((18, 9.0), (24, 12.0), (300, 170.0), (400, 234.0)),
        "H100": ((10, 2.5), (18, 6.0)),
    }
    rows = [
        {**each, "gpu": gpu, "tokens": size, "bytes": size * 1_000_000, "time_ms": us / 1000}
        for gpu, calls in sizes.items()
        for size, us in calls
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / VIDUR_FILE)
    a100, _, h100, _ = unmeasured_cases(tmp_path)
    assert a100.measured_ns == pytest.approx([9_000, 234_000])
    assert h100.measured_ns == pytest.approx([2_500, 6_000])
    # Both ways between the GPUs, only what neither found in its cache.
    pairs = list(memory_cases(tmp_path))
    assert [case.measured_ns.tolist() for case in pairs] == [[6_000], [9_000]]


def test_kernels_of_captured_steps_are_cases_of_their_gpu():
    cases = {(case.kind, case.target.name): case for case in step_cases()}
    for name in ("H100-SXM", "H200"):
        known, unknown = (
            cases.pop((kind, name)) for kind in ("memory_unmeasured", "memory_unknown_layout")
        )
        assert len(known.measured_ns) + len(unknown.measured_ns) > 150
        assert (np.concatenate([known.measured_ns, unknown.measured_ns]) > 0).all()
        # Half of the kernels by their shapes alone.
        assert np.median(np.abs(known.error)) < 0.2
        # Elementwise kernels with strided operands take about twice as long as with dense ones.
        assert np.quantile(unknown.error, 0.85) > 0.6
    assert not cases


def test_products_of_several_gpus_are_paired(tmp_path):
    rows = {"gpu": ["A100", "H100", "A100"], "dtype": ["bfloat16"] * 3, "m": [1, 1, 2],
            "n": [3] * 3, "k": [4] * 3, "time_us": [7.0, 5.0, 8.0]}  # fmt: skip
    pl.DataFrame(rows).write_parquet(tmp_path / "gemm.parquet")
    found = read_products(tmp_path)
    assert found.shapes.tolist() == [[1, 1, 3, 4, 2, 2]]  # measured on both
    assert {n: t.tolist() for n, t in found.times_ns.items()} == {
        "A100-SXM-80GB": [7000],
        "H100-SXM": [5000],
    }


def test_errors_have_a_shared_and_an_independent_part():
    a, h = load_gpu("A100"), load_gpu("H100")
    around = np.tile([-0.2, 0.2], 500)
    cases = [  # the first off by e^(0.1 +- 0.2), the second by e^(-0.1 +- 0.2)
        Case("gemm", a, h, np.exp(middle + around), np.ones(1000), np.ones(1000))
        for middle in (0.1, -0.1)
    ]
    error = errors_of(cases)
    assert (error.shared, error.independent) == (pytest.approx(0.1, abs=2e-3), 0.2)
    assert error.count == 2000


def test_gemms_with_as_many_rows_share_an_error():
    """The GEMMs of a step have as many rows: their errors do not average over numbers of rows."""
    a, h = load_gpu("A100"), load_gpu("H100")
    errors = np.concatenate([0.1 + np.tile([-0.02, 0.02], 50), -0.1 + np.tile([-0.02, 0.02], 50)])
    rows = np.repeat([8.0, 4096.0], 100)
    gemm, memory = (
        errors_of([Case(kind, a, h, np.exp(errors), np.ones(200), rows)])
        for kind in ("gemm", "memory")
    )
    assert gemm.shared == pytest.approx(0.1, abs=1e-3)
    assert gemm.independent == pytest.approx(0.02, abs=1e-3)
    assert memory.shared < 0.01  # the case's mean is 0
    assert memory.independent == pytest.approx(0.102, abs=1e-3)


def test_a_mean_of_few_errors_is_no_shared_error():
    a, h = load_gpu("A100"), load_gpu("H100")
    errors = np.random.default_rng(0).normal(0, 0.1, 4000)
    rows = np.repeat(np.arange(1000.0), 4)
    error = errors_of([Case("gemm", a, h, np.exp(errors), np.ones(4000), rows)])
    assert error.shared < 0.02  # 0.05, if the means counted whole


def test_what_was_measured_on_a_target_can_be_forgotten():
    gpus = [load_gpu(name) for name in ("A100", "H100", "H200", "L40S")]
    made = as_by_datasheet(gpus)(load_gpu("H100"))
    others = [gpus[0], gpus[3]]
    fraction = made.figures["tensor_sustained_fraction"].value
    assert fraction == sustained_fraction(gpus[1], others)
    at_1_ghz = 3280 * 1.41 ** (2 / 3), 2220 * 2.52 ** (2 / 3)
    assert made.launch_floor_ns == round(sum(at_1_ghz) / 2 / 1.83 ** (2 / 3))
    assert not made.calibrated
    assert load_gpu("H100").calibrated
