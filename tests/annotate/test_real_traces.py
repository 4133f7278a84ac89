"""The captures of the repository: Llama-3-8B's shapes, 4 layers, tensor-parallel 4, on an H200."""

from pathlib import Path

import numpy as np
import pytest

from onerank.annotate import OpClass, load_gpu, recost, summarise
from onerank.converters.kineto import convert_directory
from onerank.ir import Evidence, Graph, Kind

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def test_every_kernel_has_a_class_and_a_formula(h200: Graph):
    found = summarise(h200, recost(h200, "H100-SXM"))
    assert found.unknown == ()
    assert {row.op_class for row in found.classes}.isdisjoint({OpClass.UNKNOWN, OpClass.NOTHING})
    assert found.before_ns == h200.nodes.duration_ns[h200.gpu_compute].sum()


def test_products_add_up_to_six_flops_a_parameter_and_token(h200: Graph):
    gemm = next(
        row for row in summarise(h200, recost(h200, "H200")).classes if row.op_class is OpClass.GEMM
    )
    # of rank 0 of 4: q and o, k and v, three of the MLP; and the vocabulary's 32064 rows
    layer = 4096 * (2 * 1024 + 2 * 256 + 3 * 3584)
    expected = 6 * (4 * layer + 4096 * 32064) * 4096
    assert gemm.flops == pytest.approx(expected, rel=1e-4)


def test_rates_are_possible(h200: Graph):
    gpu = load_gpu("H200")
    for row in summarise(h200, recost(h200, "H200")).classes:
        if row.before_ns > 1_000_000:
            moved = (row.bytes_read + row.bytes_written) / row.before_ns * 1e9
            peak = gpu.peak_tensor_flops_per_s("bfloat16")
            assert moved < gpu.peak_bandwidth_bytes_per_s, row
            assert peak is not None
            assert row.flops / row.before_ns * 1e9 < peak, row


@pytest.mark.parametrize("model", ["ratio", "residual"])
def test_slower_and_faster_gpus(h200: Graph, model: str):
    def total(gpu: str) -> int:
        graph = recost(h200, gpu, model=model)
        return int(graph.nodes.duration_ns[graph.gpu_compute].sum())

    assert total("B200") < total("H200") < total("H100-SXM") < total("A100-SXM-80GB")


def test_cpu_capture():
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    made = recost(graph, "H100-SXM")
    kernels = made.gpu_compute
    assert set(made.nodes.evidence[kernels].tolist()) == {Evidence.DATASHEET}
    assert not made.mask(Kind.HOST_OP).any()
    assert made.communication.sum() == graph.communication.sum()
    floor = load_gpu("H100-SXM").launch_floor_ns
    assert (made.nodes.duration_ns[kernels] >= floor).all()
    assert sorted(made.topological_order().tolist()) == list(range(len(made)))
    assert (np.diff(made.nodes.start_ns[kernels]) != 0).all()
    assert summarise(graph, made).unknown == ()
