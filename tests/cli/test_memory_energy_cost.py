"""Memory, energy, money and storage of captured steps."""

import json
import re

import pytest
from invoke_cli import ROOT, invoke, refused
from notes import note_of

from onerank.cli import onerank


def test_memory_tells_the_peak_by_class_and_that_it_fits(traces):
    report = json.loads(
        invoke(onerank, "memory", traces / "gpu.et", "--target", "T4", "--json").stdout
    )
    assert report["peak_bytes"] == report["measured_peak_bytes"] == 6_468_319_232
    assert report["fits"] is True
    assert report["capacity_bytes"] == 15_630_000_000
    assert [buffer["bytes"] for buffer in report["non_allocator"]] == [
        806_000_000,
        354 << 20,
        630 << 20,
    ]
    shown = invoke(onerank, "memory", traces / "gpu.et").stdout
    assert "6.694 GB in the capture, 6.705 GB simulated (+0.16%)" in shown
    assert "optimizer      1.925 GB  29.8%" in shown
    args = ("--target", "T4", "--non-allocator-gb", 9)
    shown = invoke(onerank, "memory", traces / "gpu.et", *args).stdout
    assert "15.630 GB: fits only without" in shown
    assert "What would make it fit T4" in shown


def test_memory_of_an_unknown_gpu_is_an_error(traces):
    args = ("memory", traces / "gpu.et", "--target", "H999")
    refused(onerank, *args, error="gpu-unknown", naming='"H999"')


def test_energy_and_cost_of_a_captured_step(traces):
    report = json.loads(invoke(onerank, "energy", traces / "gpu.et", "--json").stdout)
    assert report["step_ns"] == 31_526_976
    assert len(report["node_uj"]) == 850
    assert report["step_low_uj"] < report["step_uj"] < report["step_high_uj"]
    assert "Energy by class" in invoke(onerank, "energy", traces / "gpu.et").stdout
    set_to = ("--target", "H200", "--override", "tdp_w=600")  # which changes no time
    less = json.loads(invoke(onerank, "energy", traces / "gpu.et", *set_to, "--json").stdout)
    assert less["step_ns"] == report["step_ns"]
    assert less["step_uj"] < report["step_uj"]
    prices = ("--prices", ROOT / "examples" / "prices.toml")
    report = json.loads(invoke(onerank, "cost", traces / "gpu.et", *prices, "--json").stdout)
    assert (report["gpus"], report["tokens"]) == (4, 4096)
    assert report["bills"][0]["per_step"] == pytest.approx(4 * 4.0 * 0.031526976 / 3600)
    shown = invoke(onerank, "cost", traces / "gpu.et", *prices).stdout
    assert "Calculation: own" in shown
    assert re.search(r"rent +4\.000 +0\.0001401 +0\.03421\s", shown)  # 4 x 4 / 3600 x 0.031527 s


def test_cost_and_energy_of_the_smallest_steps_are_shown_with_digits(traces):
    args = ("--target", "H200", "--prices", ROOT / "examples" / "prices.toml", "--gpus", 1)
    shown = invoke(onerank, "cost", traces / "cpu.et", *args, "--tokens", 10**7).stdout
    step, million = re.findall(r"rent +4\.000 +(\S+) +(\S+)\s", shown)[0]
    output = invoke(onerank, "cost", traces / "cpu.et", *args, "--tokens", 10**7, "--json").stdout
    bill = json.loads(output)["bills"][0]
    assert float(step) == pytest.approx(bill["per_step"], rel=5e-4)
    assert float(million) == pytest.approx(bill["per_million_tokens"], rel=5e-4)
    assert float(million) < 1e-6
    assert "idle    0 J" in invoke(onerank, "energy", traces / "cpu.et", "--target", "H200").stdout


def test_energy_without_a_known_gpu_or_power_is_an_error(traces):
    args = ("energy", traces / "gpu.et", "--target", "TPU-v6e")
    names = ("--override tdp_w=WATTS", "--override idle_w=WATTS")
    refused(onerank, *args, error="energy-gpu-incomplete", naming=names)
    refused(onerank, "energy", traces / "cpu.et", error="device-no-description")


def test_storage_is_added_as_nodes(traces, tmp_path):
    out = tmp_path / "s.et"
    args = ("--storage-gb-s", 2, "--batch-bytes", 100_000, "--checkpoint-every", 500)
    stored = json.loads(
        invoke(onerank, "storage", traces / "gpu.et", "-o", out, *args, "--json").stdout
    )
    assert [(row["kind"], row["bytes"]) for row in stored["nodes"]] == [
        ("mem_load", 100_000),
        ("mem_store", 5_775_999),
    ]
    note_of(stored["notes"], "storage-checkpoint", 2887999488, 500, 2)
    args = ("-o", out, "--storage-gb-s", 0, "--batch-bytes", 1)
    refused(
        *(onerank, "storage", traces / "gpu.et", *args),
        error="usage-invalid-value",
        naming="'--storage-gb-s'",
    )


def test_a_checkpoint_every_no_steps_is_an_error_that_tells_the_range(traces, tmp_path):
    args = ("-o", tmp_path / "s.et", "--storage-gb-s", 2, "--checkpoint-every", 0)
    refused(
        *(onerank, "storage", traces / "gpu.et", *args),
        error="usage-invalid-value",
        naming=("'--checkpoint-every'", "1<=x<="),
    )
    assert not (tmp_path / "s.et").exists()
