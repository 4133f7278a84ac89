"""A description from measurements: round figures, and a file that is read back."""

from dataclasses import replace
from pathlib import Path

import pytest
from notes import note_of
from raised import raises_code

from onerank.annotate import load_gpu
from onerank.annotate.describe_gpu import described, to_toml
from onerank.annotate.energy import StepDurations, report_energy
from onerank.ir.measurement import SustainedCall

CUBE = 2 * 8192**3

LIMIT = 700.0


def held(
    unit: str, tensor: float, memory: float, vector: float = 0, us: int = 1000
) -> SustainedCall:
    """A call that uses shares of 800, 4 TB/s and 50 TFLOPS on a board of the model below."""
    active = max(0, 1 - 1.5 / us)
    drawn = 0.15 + 0.2 * active + 0.5 * tensor + 0.3 * memory + 4 * vector
    flops = (tensor * 800e12 + vector * 50e12) * us * 1e-6
    watts = LIMIT * min(1, drawn)
    return SustainedCall(
        unit, (2048,) * 3, round(flops), round(memory * 4e6 * us), us * 1000, watts
    )


OTHERS = {
    "measured_gemm_tflops": 790.0,
    "measured_skinny_gb_per_s": 3700.0,
    "measured_copy_gb_per_s": 4000.0,
    "launch_floor_ns": 1500.0,
    "idle_w": 120.0,
    "tdp_w": LIMIT,
    "l2_bandwidth_gb_per_s": None,
}

HELD = [
    SustainedCall("bf16", (8192, 8192, 8192), CUBE, 3 * 2 * 8192**2, round(CUBE / 800e3), None),
    SustainedCall("fp8", (8192, 8192, 8192), CUBE, 4 * 8192**2, round(CUBE / 1500e3), LIMIT),
    SustainedCall("fp32", (4096, 4096, 4096), CUBE, 0, round(CUBE / 50e3), 500),
    *(held("bf16", u, m) for u, m in ((0.2, 0.1), (0.5, 0.4), (0.7, 0.1), (0.05, 0.9))),
    *(held("", 0, m, v) for m, v in ((0.5, 0), (0.8, 0.05), (1.0, 0.01))),
    *(held("", 0, m, 0, us) for m, us in ((0.2, 3), (0.9, 6), (0.1, 2))),
]


def test_measured_figures_stand_in_and_the_rest_stays(tmp_path: Path) -> None:
    h200 = load_gpu("H200")
    made = described(h200, HELD, OTHERS, "by hand", "2026-11-21")
    assert 'compute_capability = "9.0"' in to_toml(made).splitlines()
    value = {name: figure.value for name, figure in made.figures.items()}
    assert (value["measured_gemm_tflops"], value["measured_skinny_gb_per_s"]) == (790, 3700)
    mean = (790 * 800) ** 0.5  # of the mean of large products and of those that were held
    assert made.tensor_flops_per_s("bfloat16") == pytest.approx(mean * 1e12, rel=1e-3)
    assert value["fp8_sustained_fraction"] == pytest.approx(1500 / 1979, rel=1e-3)
    assert value["vector_sustained_fraction"] == pytest.approx(50 / 67, rel=1e-3)
    assert made.bandwidth_bytes_per_s == 4e12
    assert (made.launch_floor_ns, made.idle_w) == (1500, 120)
    assert made.figures["link_bandwidth_gb_per_s"] == h200.figures["link_bandwidth_gb_per_s"]
    assert "l2_bandwidth_gb_per_s" not in made.figures
    assert made.calibrated
    assert made.power_coefficients == pytest.approx((0.15, 0.2, 0.5, 0.3, 4), abs=0.01)
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(made))
    read = load_gpu(path)
    assert (read.figures, read.vendor) == (made.figures, made.vendor)
    assert (read.name, read.board) == ("H200 (measured 2026-11-21)", "H200")


def test_energy_goes_by_the_measured_coefficients(trace, mm) -> None:
    made = described(load_gpu("H200"), HELD, OTHERS, "by hand", "2026-11-21")
    found = report_energy(
        trace(mm(4096, 4096, 4096, ns=343_600)), made, StepDurations(0, 343_600, "it")
    )
    # 2 * 4096^3 FLOPs in 343.6 us at 800 TFLOPS: half; 3 * 2 * 4096^2 bytes at 4 TB/s: 7.3 %
    assert found.source == "the GPU's description"
    note_of(found.notes, "energy-described-coefficients", "by hand")
    assert found.node_uj[0] == pytest.approx((0.35 + 0.25 + 0.3 * 0.073) * 700 * 343.6, rel=0.02)


def test_without_power_there_are_no_coefficients() -> None:
    quiet = [replace(one, power_w=None) for one in HELD]
    made = described(load_gpu("H200"), quiet, OTHERS, "by hand", "2026-11-21")
    assert made.power_coefficients is None


def test_a_gpu_faster_than_its_datasheet_is_another_gpu() -> None:
    with raises_code("gpu-measurement-mismatch"):
        described(load_gpu("A100-SXM-80GB"), HELD[3:], OTHERS, "by hand", "2026-11-21")
