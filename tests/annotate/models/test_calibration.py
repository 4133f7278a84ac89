"""A GPU by which the tiles tell the times of its measured products."""

import msgspec
import numpy as np
import pytest

from onerank.annotate import Gpu, load_gpu, with_figures
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.models.calibration import (
    calibrated,
    calibrated_source,
    gemm_shapes,
    rates_in,
)
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.gemm_tiles import GemmTarget, gemm_ns
from onerank.annotate.models.learned import predict_from_description
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES
from tools.fit import Products
from tools.fit.evaluate_fit import as_calibrated
from tools.fit.fit_tiles import rates_of
from tools.fit.measured_kernels import of_products


def described(gpu: Gpu, values: dict[str, float]) -> Gpu:
    """Return a GPU whose description has other figures."""
    source = next(iter(gpu.sources))
    figures = {name: Figure(value, source) for name, value in values.items()}
    return msgspec.structs.replace(gpu, figures={**gpu.figures, **figures})


def test_mean_rates_are_geometric() -> None:
    # 2 * 4096^3 FLOPs in 1 and 4 ms: 137.4 and 34.4 TFLOPS; 6 * 4096^2 bytes: 100.7 and 25.2 GB/s
    shapes = gemm_shapes([(4096, 4096, 4096)] * 2)
    flops, moved = rates_in(shapes, np.array([1e6, 4e6]))
    assert flops == pytest.approx(68.7e12, rel=1e-3)
    assert moved == pytest.approx(50.3e9, rel=1e-3)


def test_a_gpu_is_as_its_products_have_it_whatever_its_description_tells() -> None:
    measured = {"bf16_sustained_fraction": 0.8, "memory_achievable_fraction": 0.8}
    true = described(load_gpu("B200"), measured)
    every, c = gemm_shapes([*LARGE_SHAPES, *SKINNY_SHAPES]), shipped().gemm
    run = GemmTarget(true, rates_of(true, "bfloat16", len(every)), per_call=True)
    times = gemm_ns(run, every, c)
    assert calibrated(true, c) == (true, 1)  # nothing of it was measured
    large, skinny = len(LARGE_SHAPES), len(SKINNY_SHAPES)
    measured = {
        "measured_gemm_tflops": rates_in(every[:large], times[:large]).flops / 1e12,
        "measured_skinny_gb_per_s": rates_in(every[-skinny:], times[-skinny:]).bytes / 1e9,
    }
    wrong = {"bf16_sustained_fraction": 0.6, "memory_achievable_fraction": 0.95}
    gpu = described(true, {**wrong, **measured})
    made = calibrated(gpu, c)
    rate = gpu.tensor_flops_per_s("bfloat16")
    assert rate is not None
    assert rate * made.compute == pytest.approx(0.8 * 2250e12, rel=1e-3)
    assert made.gpu.bandwidth_bytes_per_s == pytest.approx(0.8 * 7.7e12, rel=1e-3)

    found, _ = predict_from_description(of_products(Products("bfloat16", every, {}), times), gpu)
    assert found == pytest.approx(times, rel=2e-3)
    wide = every * [1, 1, 1, 1, 0.5, 1]  # in 8 bits the units and libraries are others
    eight = of_products(Products("float8_e4m3fn", wide, {}), times)
    memory = {name: figure for name, figure in wrong.items() if name.startswith("memory")}
    assert predict_from_description(eight, gpu)[0] == pytest.approx(
        predict_from_description(eight, described(true, memory))[0]
    )


def test_a_what_if_changes_what_was_measured_by_as_much() -> None:
    c, h200 = shipped().gemm, load_gpu("H200")
    measured = {"measured_gemm_tflops": 700, "measured_skinny_gb_per_s": 3600}
    own = calibrated(with_figures(h200, {**measured, "measured_copy_gb_per_s": 4000}), c)
    for figure, factor in (("memory_bandwidth_gb_per_s", 0.5), ("memory_bandwidth_gb_per_s", 2.0),
                           ("l2_mb", 20.0)):  # fmt: skip
        value = factor * h200.figures[figure].value
        changed = with_figures(with_figures(h200, {**measured, "measured_copy_gb_per_s": 4000}),
                               {figure: value})  # fmt: skip
        made = calibrated(changed, c)
        assert made.compute == own.compute
        faster = factor if figure == "memory_bandwidth_gb_per_s" else 1
        assert changed.bandwidth_bytes_per_s == pytest.approx(faster * 4e12)
        expected = faster * own.gpu.bandwidth_bytes_per_s
        assert made.gpu.bandwidth_bytes_per_s == pytest.approx(expected)
    shipped_set = with_figures(
        h200, {"measured_gemm_tflops": 650, "measured_skinny_gb_per_s": 3600}
    )
    assert calibrated(shipped_set, c).compute < own.compute
    twice = with_figures(with_figures(h200, measured), {"bf16_tensor_tflops": 2 * 989.0})
    doubled, rate = (gpu.tensor_flops_per_s("bfloat16") for gpu in (twice, own.gpu))
    assert doubled == pytest.approx(2 * (rate or 0))


def test_what_was_measured_counts_as_the_peak_at_most() -> None:
    """Else a fraction that is set would have a part of its effect."""
    c, h200 = shipped().gemm, load_gpu("H200")
    gpu = with_figures(h200, {"measured_gemm_tflops": 980, "measured_skinny_gb_per_s": 4790})
    made, rate = calibrated(gpu, c), gpu.tensor_flops_per_s("bfloat16")
    assert made.compute == pytest.approx(989e12 / (rate or 0))
    assert made.gpu.bandwidth_bytes_per_s == pytest.approx(4800e9)
    half = calibrated(with_figures(gpu, {"memory_achievable_fraction": 0.856 / 2}), c)
    assert half.gpu.bandwidth_bytes_per_s == pytest.approx(2400e9)


def test_a_source_of_the_same_die_reads_memory_as_the_target() -> None:
    c, h100 = shipped().gemm, load_gpu("H100")
    measured = {"measured_gemm_tflops": 680, "measured_skinny_gb_per_s": 3900}
    target = with_figures(load_gpu("H200"), measured)
    made = calibrated(target, c)
    factor = made.gpu.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    assert factor > 1.02
    source = calibrated_source(h100, target, c)
    assert source.compute == 1
    assert source.gpu.bandwidth_bytes_per_s == pytest.approx(factor * h100.bandwidth_bytes_per_s)
    assert calibrated_source(load_gpu("A100"), target, c) == (load_gpu("A100"), 1)
    own = with_figures(h100, {"measured_gemm_tflops": 700, "measured_skinny_gb_per_s": 2600})
    assert calibrated_source(own, target, c) == calibrated(own, c)


def test_a_target_is_known_by_its_datasheet_and_two_microbenchmarks() -> None:
    gpus = [load_gpu(name) for name in ("A100", "H100", "L40S")]
    every = gemm_shapes([*LARGE_SHAPES, *SKINNY_SHAPES])
    times = np.concatenate([np.full(len(LARGE_SHAPES), 5e6), np.full(len(SKINNY_SHAPES), 2e5)])
    made = as_calibrated(gpus, Products("bfloat16", every, {"H100-SXM": times}))(gpus[1])
    # 27 products of 8192^3 FLOPs * 2 in the geometric mean; 8 of 8192 * 16384 bytes * 2 and more
    assert made.figures["measured_gemm_tflops"].value == pytest.approx(219.9, rel=1e-3)
    assert made.figures["measured_skinny_gb_per_s"].value == pytest.approx(1352, rel=1e-3)
    assert made.calibrated
    assert made.launch_floor_ns != gpus[1].launch_floor_ns
