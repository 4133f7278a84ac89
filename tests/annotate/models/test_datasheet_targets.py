"""Targets whose description has datasheet figures alone."""

from pathlib import Path

import numpy as np
import pytest
from notes import note_of

from onerank.annotate import load_gpu, recost
from onerank.annotate.gpus.datasheet_estimates import fp32_vector_tflops
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.intervals import widening
from onerank.ir import Graph

DATASHEET = """
name = "H100 by its datasheet"
vendor = "NVIDIA"
architecture = "hopper"
[sources]
sheet = "NVIDIA H100 datasheet"
[figures]
sm_count = { value = 132, source = "sheet" }
boost_clock_mhz = { value = 1830, source = "sheet" }
memory_gb = { value = 80, source = "sheet" }
memory_bandwidth_gb_per_s = { value = 3350, source = "sheet" }
l2_mb = { value = 52.43, source = "sheet" }
bf16_tensor_tflops = { value = 989, source = "sheet" }
fp32_vector_tflops = { value = 67, source = "sheet" }
tdp_w = { value = 700, source = "sheet" }
"""


@pytest.fixture
def datasheet(tmp_path: Path) -> str:
    path = tmp_path / "h100.toml"
    path.write_text(DATASHEET, encoding="utf-8")
    return str(path)


def reach(graph: Graph) -> list[float]:
    """Return ln(p90 / duration) of the compute nodes."""
    nodes, compute = graph.nodes, graph.gpu_compute
    return np.log(nodes.p90_ns[compute] / nodes.duration_ns[compute]).tolist()


def test_intervals_have_the_errors_of_the_estimates(trace, mm, add, datasheet):
    graph = trace(mm(8192, 8192, 8192, ns=1_500_000), add(10**8, ns=700_000))
    by_sheet, described = (recost(graph, target) for target in (datasheet, "H100"))
    c, gpu = shipped(), load_gpu(datasheet)
    # The trace is of an H200, so both are from an SKU of the same die.
    gemm, memory = (c.datasheet_errors[kind] for kind in ("gemm_same_die_long", "memory_same_die"))
    times_ns = by_sheet.nodes.duration_ns[by_sheet.gpu_compute]
    at_length = [
        float(error.of_length(times_ns[[at]])[0]) for at, error in enumerate((gemm, memory))
    ]
    assert reach(by_sheet) == pytest.approx(
        [
            gemm.high * at_length[0] * widening(gpu, c, "gemm_same_die_long"),
            memory.high * at_length[1],
        ],
        rel=1e-3,
    )
    assert reach(by_sheet)[0] > reach(described)[0]
    note_of(by_sheet.job.measurement.notes, "target-figures-estimated", "launch_floor_ns")


def test_the_estimates_are_near_the_measured_figures(datasheet):
    gpu, measured = load_gpu(datasheet), load_gpu("H100")
    for estimate, figure in (
        (gpu.bandwidth_bytes_per_s, measured.bandwidth_bytes_per_s),
        (gpu.tensor_flops_per_s("bfloat16"), measured.tensor_flops_per_s("bfloat16")),
        (gpu.launch_floor_ns, measured.launch_floor_ns),
    ):
        assert estimate == pytest.approx(figure, rel=0.1)


@pytest.mark.parametrize(
    "name", ["V100", "T4", "A100", "RTX-3090", "L40S", "B200", "MI250X", "MI300X"]
)
def test_the_float32_rate_follows_from_lanes_and_clock(name):
    """An H100's datasheet states 8% more, at a higher clock than its boost clock."""
    gpu = load_gpu(name)
    stated = gpu.figures["fp32_vector_tflops"].value
    assert fp32_vector_tflops(gpu) == pytest.approx(stated, rel=0.01)


def test_a_missing_float32_rate_is_estimated_or_a_note_says_so(trace, tmp_path):
    square = ("Tensor(float)", [4096, 4096])
    operator = {"op": "aten::mm", "inputs": [square] * 2, "outputs": [square], "ns": 3_000_000}
    graph = trace(operator)
    lines = DATASHEET.splitlines()
    text = "\n".join(line for line in lines if not line.startswith("fp32_vector_tflops"))
    for architecture, code in (("hopper", ""), ("other", "target-rate-missing")):
        path = tmp_path / f"{architecture}.toml"
        path.write_text(text.replace('"hopper"', f'"{architecture}"'), encoding="utf-8")
        gpu = load_gpu(str(path))
        notes = recost(graph, gpu).job.measurement.notes
        if code:
            note_of(notes, code, "1 GEMMs", "fp32_vector_tflops")
        else:
            assert gpu.figures["fp32_vector_tflops"].confidence == "estimated"
            assert "target-rate-missing" not in {note.code for note in notes}
