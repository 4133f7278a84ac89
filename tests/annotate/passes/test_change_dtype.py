"""Products in the other 16-bit dtype, and on GPUs that lack units for one of them."""

from pathlib import Path

import numpy as np
import pytest
from notes import has_note, note_of
from raised import raises_code

from onerank.annotate import PassOptions, load_gpu, recost, summarise
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Evidence, Graph

TRACES = Path(__file__).parents[3] / "traces"
FP16 = PassOptions(dtype="fp16")


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def classes(before: Graph, after: Graph) -> dict[str, int]:
    return {row.op_class.value: row.after_ns for row in summarise(before, after).classes}


@pytest.mark.parametrize("name", ["V100", "T4"])
def test_a_bf16_trace_on_a_gpu_without_bf16_units_runs_in_fp16(h200: Graph, name: str):
    """The products near what float16 sustains: 8.588 TFLOP, 99 TFLOP/s on a V100, 33 on a T4."""
    gpu = load_gpu(name)
    slow, converted = recost(h200, name), recost(h200, name, passes=FP16)
    note_of(slow.job.measurement.notes, "no-bfloat16-units", 111, "float32", "--dtype fp16")
    assert not has_note(converted.job.measurement.notes, "no-bfloat16-units")
    was, now = classes(h200, slow), classes(h200, converted)
    rate = gpu.tensor_flops_per_s("float16")
    assert rate is not None
    assert 0.75 < 8.588e12 / rate * 1e9 / now["gemm"] < 1.25
    assert now["gemm"] < was["gemm"] / 3
    assert now["attention"] < was["attention"] / 3
    others = {"gemm", "attention"}
    assert {k: v for k, v in was.items() if k not in others} == {
        k: v for k, v in now.items() if k not in others
    }


def test_nothing_changes_where_both_dtypes_run_at_one_rate(h200: Graph):
    same = recost(h200, "H200", passes=FP16)
    assert (same.nodes.duration_ns == h200.nodes.duration_ns).all()
    assert set(same.nodes.evidence[same.gpu_compute].tolist()) == {Evidence.MEASURED}
    there, converted = recost(h200, "H100"), recost(h200, "H100", passes=FP16)
    note_of(converted.job.measurement.notes, "what-if-float16", 111, "H200")
    assert np.abs(there.nodes.duration_ns - converted.nodes.duration_ns).max() <= 1
    with raises_code("dtype-unsupported-by-gpu", naming=("TPU-v6e", "fp16", "bf16, tf32")):
        recost(h200, "TPU-v6e", passes=FP16)


def test_a_measurement_without_bf16_units_scales_by_the_models_times(trace, mm):
    """4096^3 at 13.5 TFLOP/s take 10.2 ms, at 99.2 1.385 ms: by the roofline 7.36 times less.

    A V100 is far from the fitted GPUs, so part of both times is the roofline's.
    """
    graph = trace(mm(4096, 4096, 4096, ns=11_000_000), device="V100")
    converted = recost(graph, "V100", passes=FP16)
    (now,) = converted.nodes.duration_ns[converted.gpu_compute]
    assert now == pytest.approx(11_000_000 / 7.36, rel=0.06)
    assert now == pytest.approx(11_000_000 / 7.060, rel=1e-3)


def test_fp16_from_a_cpu_capture():
    """Captured in float32: its products change by their width, as for bf16 on an A100."""
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    slow, converted = recost(graph, "T4"), recost(graph, "T4", passes=FP16)
    assert not has_note(slow.job.measurement.notes, "no-bfloat16-units")
    assert classes(graph, converted)["gemm"] < classes(graph, slow)["gemm"]
    note_of(converted.job.measurement.notes, "what-if-dtype", "45 of 49")


def test_tf32_takes_three_passes_on_a_tpu_and_float32_six(trace, mm):
    """As at "high" and "highest": of 459 TFLOP/s x 0.85 in bf16 on a v5p a third, a sixth."""
    gpu = load_gpu("TPU-v5p")
    rates = [gpu.tensor_flops_per_s(name) for name in ("bfloat16", "tfloat32", "float32")]
    assert rates == [pytest.approx(459e12 * 0.85 / passes) for passes in (1, 3, 6)]
    product = mm(4096, 4096, 4096, ns=3_000_000)
    for side in ("inputs", "outputs"):
        product[side] = [("Tensor(float)", shape) for _, shape in product[side]]
    took: list[int] = []
    for dtype in (None, "tf32", "bf16"):
        converted = recost(trace(product), "TPU-v5p", passes=PassOptions(dtype=dtype))
        took += converted.nodes.duration_ns[converted.gpu_compute].tolist()
    assert took[0] / took[1] == pytest.approx(2, rel=0.02)
    assert took[1] / took[2] == pytest.approx(3, rel=0.03)


def test_products_whose_sizes_fp8_does_not_support_are_reported(trace, mm):
    bf16 = "Tensor(c10::BFloat16)"
    image, weight = (bf16, [2, 32, 8, 8]), (bf16, [32, 32, 1, 1])
    convolution = {"op": "aten::cudnn_convolution", "inputs": [image, weight], "outputs": [image]}
    with raises_code(
        "dtype-nothing-to-change",
        naming=("fp8", "the 2 in", "1 are convolutions", "1 have an n or k", "multiple of 16"),
    ):
        recost(trace(mm(4, 1000, 128), convolution), "H100", passes=PassOptions(dtype="fp8"))
