from dataclasses import replace

import msgspec
import numpy as np

from onerank.annotate import characterise
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import UNKNOWN, Kind


def kernels_of(graph, column: str) -> list[int]:
    return getattr(graph.nodes, column)[graph.gpu_compute].tolist()


def test_one_kernel_gets_all(trace, mm, add):
    graph = characterise(trace(mm(8192, 4096, 4096), add(1000)))
    assert kernels_of(graph, "flops") == [274_877_906_944, 1000]
    assert kernels_of(graph, "bytes_read") == [100_663_296, 4000]
    assert kernels_of(graph, "bytes_written") == [67_108_864, 2000]
    assert graph.nodes.flops[graph.mask(Kind.HOST_OP)].tolist() == [UNKNOWN, UNKNOWN]


def test_kernels_of_an_instance_share_by_duration(trace, mm):
    split_k = mm(10, 10, 5, kernels=[("gemm", 3000), ("reduce", 1000)])  # 1000 FLOPs
    again = mm(10, 10, 5, kernels=[("gemm", 100)])
    graph = characterise(trace(split_k, again))
    assert kernels_of(graph, "flops") == [750, 250, 1000]
    assert kernels_of(graph, "bytes_read") == [150, 50, 200]


def test_shares_add_up_exactly(trace, add):
    durations = [7, 11, 13, 0, 5]
    chunks = [("multi", duration) for duration in durations]
    graph = characterise(
        trace(add(1_000_003, kernels=chunks), add(5, kernels=[("a", 0), ("b", 0)]))
    )
    flops = kernels_of(graph, "flops")
    assert sum(flops[:5]) == 1_000_003
    assert flops[3] == 0
    assert sorted(flops[5:]) == [2, 3]  # no time: equal parts
    assert sum(kernels_of(graph, "bytes_read")[:5]) == 4 * 1_000_003


def test_shares_add_up_exactly_beyond_float_precision(trace, mm):
    huge = mm(2**20 + 1, 2**20 + 1, 2**14 + 1, kernels=[("a", 1), ("b", 2), ("c", 4)])
    total = 2 * (2**20 + 1) ** 2 * (2**14 + 1)
    assert total > 2**53
    assert sum(kernels_of(characterise(trace(huge)), "flops")) == total


def test_a_fill_within_a_product_is_not_the_product(trace, mm):
    kernels = [("Memset (Device)", 1000, Kind.MEMSET), ("gemm", 1000)]
    graph = characterise(trace(mm(10, 10, 5, kernels=kernels)))
    assert kernels_of(graph, "flops") == [0, 1000]
    assert kernels_of(graph, "bytes_read") == [UNKNOWN, 200]


def test_what_a_node_has_is_kept(trace, mm):
    graph = trace(mm(10, 10, 5))
    flops = graph.nodes.flops.copy()
    flops[graph.gpu_compute] = 42
    assert kernels_of(characterise(graph.with_columns(flops=flops)), "flops") == [42]


def test_unknown_stays_unknown(trace):
    graph = characterise(trace({"op": "mylib::x", "kernels": [("k", 10), ("k", 20)]}))
    assert kernels_of(graph, "flops") == [UNKNOWN, UNKNOWN]


def test_tf32_is_recognised_by_the_kernel(trace, mm):
    product = mm(8, 8, 8)
    product["inputs"] = [("Tensor(float)", [8, 8])] * 2
    names = (
        "ampere_sgemm_128x64_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn",
        "Kernel2<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>",
    )
    found = op_costs_of(trace(*({**product, "kernels": [(name, 10)]} for name in names)))
    assert [found.dtypes[code] for code in found.dtype] == ["float32", "tfloat32", "tfloat32"]


def test_convolutions_run_in_tf32_unless_the_script_forbids_it(trace):
    shapes = [2, 16, 8, 8], [32, 16, 3, 3]
    convolution = {
        "op": "aten::cudnn_convolution",
        "inputs": [("Tensor(float)", list(shape)) for shape in shapes],
        "outputs": [("Tensor(float)", [2, 32, 6, 6])],
        "kernels": [("implicit_convolve_sgemm", 10)],
    }
    graph = trace(convolution)
    measurement = msgspec.structs.replace(graph.job.measurement, tf32_convolutions=False)
    exact = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    for each, dtype in ((graph, "tfloat32"), (exact, "float32")):
        costs = op_costs_of(each)
        assert [costs.dtypes[code] for code in costs.dtype] == [dtype]
        assert costs.exact_by_cudnn.tolist() == [dtype == "float32"]


def test_no_compute_nodes(trace):
    graph = trace()
    assert len(characterise(graph)) == 0
    assert len(op_costs_of(graph).index) == 0


def test_distinct_calls_are_worked_out_once(trace, mm, monkeypatch):
    from onerank.annotate.op_costs import node_costs as module

    calls = []
    real = module.work_of
    monkeypatch.setattr(module, "work_of", lambda *a, **k: calls.append(a) or real(*a, **k))
    graph = module.characterise(
        trace(*[mm(8, 8, size % 3 + 1, values=[size]) for size in range(30)])
    )
    assert len(calls) == 3
    assert np.unique(graph.nodes.flops[graph.gpu_compute]).tolist() == [128, 256, 384]
