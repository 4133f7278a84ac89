"""Microbenchmarks of a GPU that the CPU plays, with small products in the place of large ones."""

from statistics import geometric_mean

import pytest
import torch

from onerank.capture.bench import gpu_limits as micro
from onerank.capture.bench.bench_runner import Bench


def test_mean_rates_are_those_of_the_products_that_calibrate(monkeypatch: pytest.MonkeyPatch):
    small = ((64, 64, 64), (128, 64, 32))
    sizes = {"_LARGE_GEMMS": small, "_POWER_GEMMS": (), "LARGE_SHAPES": small,
             "SKINNY_SHAPES": ((16, 64, 64),),
             "_SUSTAINED_S": 0.01, "_COPY_ELEMENTS": 1 << 10,
             "_CACHED_ELEMENTS": (1 << 10,)}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(micro, name, value)
    monkeypatch.setattr(micro, "_pointwise", lambda: iter(()))
    monkeypatch.setattr(micro, "_short_ns", lambda _, m, n, k: m * n * k)  # 2 FLOPs in a ns
    reports: list[None] = []
    found = micro.microbenchmarks(Bench(torch.device("cpu")), lambda: reports.append(None))
    assert found.gemm_tflops == pytest.approx(2e-3)
    moved = 2 * (16 * 64 + 64 * 64 + 16 * 64) / (16 * 64 * 64)
    assert found.skinny_gb_per_s == pytest.approx(geometric_mean([moved]))
    assert {one.sizes for one in found.sustained if one.unit == "bf16"} == {*small}
    # idle, products that are held, the copy, products that are not
    assert len(reports) == 1 + len(list(micro._gemms())) + 2
