"""Durations on another GPU, with the arithmetic next to them."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from notes import codes, note_of
from raised import raises_code

from onerank.annotate import load_gpu, recost
from onerank.ir import Evidence, Graph, GraphBuilder, Job, Kind

WIDER = "compute-bound, no matmul units for the data type: rate of a wider type"


def times(graph: Graph) -> list[int]:
    return graph.nodes.duration_ns[graph.gpu_compute].tolist()


def rules(graph: Graph) -> dict[str, int]:
    return graph.job.annotations[-1].details["rules"]


class TestRatio:
    def test_by_the_bound_of_the_source(self, trace, mm, add):
        # H200 to H100: the same FLOPS, 4800 to 3350 GB/s. 8192^3 is compute-bound, an addition not
        graph = trace(mm(8192, 8192, 8192, ns=1_500_000), add(10**8, ns=335_000))
        made = recost(graph, "H100-SXM", model="ratio")
        assert times(made) == [1_500_000, 480_000]
        assert rules(made) == {"compute-bound": 1, "memory-bound": 1}

    def test_by_the_peak_of_the_data_type(self, trace, mm):
        graph = trace(mm(8192, 8192, 8192, ns=1_500_000))
        made = recost(graph, "A100-SXM-80GB", model="ratio")
        assert times(made) == [round(1_500_000 * 989 / 312)]

    def test_unknown_kernels_go_by_bandwidth(self, trace):
        graph = trace({"op": "mylib::x", "kernels": [("k", 3350)]})
        made = recost(graph, "H100-SXM", model="ratio")
        assert times(made) == [4800]
        assert rules(made) == {"FLOPs and bytes unknown: memory bandwidth": 1}
        assert made.job.annotations[-1].details["unknown_class"] == 1


class TestResidual:
    def recost(self, graph: Graph, gpu_file, **target: float) -> Graph:
        target_file = gpu_file("two", **target)
        return recost(graph, target_file, model="residual", source=gpu_file("one"))

    def test_memory_bound_at_its_roofline(self, trace, add, gpu_file):
        # 6e8 bytes at 1 TB/s are 600 us after 0.35 of 2 us; then 500 GB/s and 0.35 of 3 us
        graph = trace(add(10**8, ns=600_700))
        assert times(self.recost(graph, gpu_file, bandwidth=500, floor=3000)) == [1_201_050]

    def test_compute_bound_rest_scales_with_the_uncapped_peak(self, trace, mm, gpu_file):
        # 2e12 FLOPs at 100 TFLOPS are 20 ms, half of the time above the floor. The target has
        # twice the peak and holds half of it: 20 ms stay 20, the other 20 become 10.
        graph = trace(mm(10_000, 10_000, 10_000, ns=40_002_000))
        made = self.recost(graph, gpu_file, bf16=200, sustained=0.5)
        assert times(made) == [30_002_000]

    def test_memory_bound_rest_partly_overlaps_the_memory(self, trace, add, gpu_file):
        # 600 us explained of 1200 become 1200 with the halved bandwidth; the rest, 776 us next to
        # them (1200^1.5 = 600^1.5 + 776^1.5), becomes a quarter with four times the SMs
        graph = trace(add(10**8, ns=1_200_700))
        made = self.recost(graph, gpu_file, bandwidth=500, sm=400)
        rest = (1200**1.5 - 600**1.5) ** (2 / 3) / 4
        assert rest == pytest.approx(224.3, abs=0.1)
        assert times(made) == [
            pytest.approx(700 + 1000 * (1200**1.5 + rest**1.5) ** (2 / 3), abs=1)
        ]

    def test_memory_bound_rest_on_another_vendors_core(self, trace, add, gpu_file):
        # half doubles with the halved bandwidth, the rest takes 2 ** 0.5 from bandwidth and
        # 0.25 ** 0.5 from four times the cores; another vendor's floor is whole
        graph = trace(add(10**8, ns=1_200_700))
        made = self.recost(graph, gpu_file, bandwidth=500, sm=400, vendor="AMD")
        assert times(made) == [2000 + 1_200_000 + round(600_000 * 2**0.5 * 0.25**0.5)]

    def test_a_core_as_wide_as_many_sms_is_not_one_sm(self, trace, add, gpu_file):
        # the one core of a TPU: fed with 500 GB/s, 64 bytes a cycle each, it is 7.8125 SMs at
        # 1 GHz, of which the source has 100
        graph = trace(add(10**8, ns=1_200_700))
        made = self.recost(graph, gpu_file, bandwidth=500, sm=1, vendor="Google")
        assert times(made) == [2000 + 1_200_000 + round(600_000 * 2**0.5 * 12.8**0.5)]

    def test_faster_than_memory_is_partly_cache(self, trace, add, gpu_file):
        # 300 us where memory needs 600: exponents 0.5 and 0.5 on all of it
        graph = trace(add(10**8, ns=300_700))
        made = self.recost(graph, gpu_file, bandwidth=500, sm=400)
        assert times(made) == [700 + round(300_000 * 2**0.5 * 0.25**0.5)]

    def test_short_kernels_are_floor(self, trace, add, mm, gpu_file):
        # an addition's floor is 0.35 of a product's, 0.7 us; a product's 2. Shorter kernels of the
        # architecture take as much longer.
        graph = trace(add(8, ns=500), add(8, ns=700 + 300), mm(1, 1, 1, ns=1000))
        made = self.recost(graph, gpu_file, floor=3000)
        assert times(made) == [500 + 350, 1050 + 300, 1000 + 1000]
        assert rules(made) == {"memory-bound": 1, "not longer than the launch floor": 2}

    def test_unknown_kernels_go_by_bandwidth_above_the_floor(self, trace, gpu_file):
        graph = trace({"op": "mylib::x", "kernels": [("k", 12_000)]})
        assert times(self.recost(graph, gpu_file, bandwidth=500)) == [22_000]

    def test_products_without_shapes_go_by_the_matmul_rate(self, trace, gpu_file):
        graph = trace({"op": "", "kernels": [("nvjet_gemm", 12_000)]})
        made = self.recost(graph, gpu_file, bf16=50)
        assert times(made) == [22_000]
        assert rules(made) == {"GEMM or attention, FLOPs unknown: 16-bit matmul rate": 1}

    def test_a_data_type_that_nothing_on_the_target_takes(self, trace, mm, gpu_file):
        product = mm(64, 64, 64, ns=10_000)
        product["inputs"] = [("Tensor(signed char)", [64, 64])] * 2
        made = recost(trace(product), gpu_file("two"), model="residual", source="H200")
        assert rules(made) == {"no matmul rate for the data type: memory bandwidth": 1}

    def test_a_data_type_without_units_goes_by_the_next_wider_one(self, trace, mm, gpu_file):
        # at the roof of 100 TFLOPS in bf16; the V100 has none and multiplies in float32
        graph = trace(mm(8192, 8192, 8192, ns=2000 + round(2 * 8192**3 / 100e12 * 1e9)))
        v100 = load_gpu("V100")
        made = recost(graph, "V100", model="residual", source=gpu_file())
        assert v100.vector_flops_per_s is not None
        expected = v100.launch_floor_ns + 2 * 8192**3 / v100.vector_flops_per_s * 1e9
        assert times(made) == [pytest.approx(expected, abs=60)]
        assert rules(made) == {WIDER: 1}

    def test_float8_goes_by_bfloat16_where_there_are_no_units(self, trace, mm):
        product = mm(8192, 8192, 8192, ns=1_000_000)
        product["inputs"] = [("Tensor(c10::Float8_e4m3fn)", [8192, 8192])] * 2
        made = recost(trace(product), "A100", model="residual")
        assert rules(made) == {WIDER: 1}
        sustained = (1979 * 0.571) / (312 * 0.794)
        assert sustained < times(made)[0] / 1_000_000 < 1979 / 312

    def test_h200_to_h100_scales_the_memory_term(self, trace, add):
        h200, h100 = load_gpu("H200"), load_gpu("H100-SXM")
        moved = 6 * 10**9 / h200.bandwidth_bytes_per_s * 1e9  # 6 bytes each
        graph = trace(add(10**9, ns=round(moved + h200.elementwise_floor_ns)))
        expected = moved * h200.bandwidth_bytes_per_s / h100.bandwidth_bytes_per_s
        assert times(recost(graph, "H100-SXM", model="residual"))[0] == pytest.approx(
            expected + h100.elementwise_floor_ns
        )


@pytest.mark.parametrize("model", ["ratio", "residual"])
class TestBoth:
    def test_copies_over_the_host_link_stay(self, model, trace, gpu_file):
        copy = {"op": "aten::copy_", "inputs": [("Tensor(float)", [10**6])] * 2}
        copies = [
            {**copy, "kernels": [("Memcpy HtoD (Pinned -> Device)", 50_000, Kind.MEMCPY)]},
            {**copy, "kernels": [("Memcpy DtoD (Device -> Device)", 50_000, Kind.MEMCPY)]},
        ]
        made = recost(
            trace(*copies), gpu_file("two", bandwidth=500), model=model, source=gpu_file()
        )
        host, device = times(made)
        assert host == 50_000
        assert device == (100_000 if model == "ratio" else 99_260)  # 0.37 of 2 us stay
        evidence = made.nodes.evidence[made.gpu_compute].tolist()
        assert evidence == [Evidence.MEASURED, Evidence.SCALED]
        assert rules(made)["kept as measured (copies that cross the host link, communication)"] == 1

    def test_communication_of_no_known_group_stays(self, model, trace, gpu_file):
        """A NCCL kernel recorded without its arguments is no collective, and no memory traffic."""
        kernel = ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50_000, Kind.KERNEL)
        graph = trace({"op": "record_param_comms", "inputs": [], "kernels": [kernel]})
        made = recost(graph, gpu_file("two", bandwidth=500), model=model, source=gpu_file())
        assert times(made) == [50_000]
        assert made.nodes.evidence[made.gpu_compute].tolist() == [Evidence.MEASURED]

    def test_the_same_gpu_changes_nothing(self, model, trace, mm):
        graph = trace(mm(512, 512, 512, ns=9000))
        made = recost(graph, "H200", model=model)
        assert times(made) == [9000]
        assert made.nodes.evidence[made.gpu_compute].tolist() == [Evidence.MEASURED]
        assert made.job.measurement.step_ns == (1_000_000,)
        assert times(recost(made, "H100-SXM", model=model)) != [9000]  # still measured: allowed

    def test_books(self, model, trace, mm, add):
        graph = trace(mm(512, 512, 512), add(100))
        made = recost(graph, "B200", model=model)
        assert (made.job.device.type, made.job.device.name) == ("cuda", "B200")
        assert made.job.measurement.step_ns == ()
        assert made.job.measurement.peak_memory_bytes == 5
        note_of(made.job.measurement.notes, "recost-from-measurement", "B200", "H200")
        last = made.job.annotations[-1]
        assert (last.target, last.model, last.source) == ("B200", model, "H200")
        assert last.details["evidence"] == {"calibrated": 2}
        assert made.nodes.flops[made.gpu_compute].tolist() == [2 * 512**3, 100]
        # host operators and start times are as measured
        host = ~made.gpu_compute
        assert made.nodes.duration_ns[host].tolist() == graph.nodes.duration_ns[host].tolist()
        assert made.nodes.start_ns.tolist() == graph.nodes.start_ns.tolist()

    def test_a_prediction_is_not_built_on_another(self, model, trace, mm):
        made = recost(trace(mm(512, 512, 512)), "H100-SXM", model=model)
        with raises_code("recost-not-measured", naming=("1 of 1", "H100-SXM")):
            recost(made, "B200", model=model)

    def test_unknown_source(self, model, trace, mm):
        with raises_code("recost-source-unknown"):
            recost(trace(mm(2, 2, 2), device="Voodoo 2"), "H100-SXM", model=model)
        with raises_code("recost-source-unknown"):
            recost(trace(mm(2, 2, 2), device=""), "H100-SXM", model=model)
        assert recost(trace(mm(2, 2, 2), device=""), "H100-SXM", model=model, source="H200")

    def test_a_data_type_without_units(self, model, trace, mm):
        made = recost(trace(mm(8192, 8192, 8192, ns=1_500_000)), "T4", model=model)
        assert rules(made) == {WIDER: 1}
        assert times(made)[0] > 2 * 8192**3 / 8.1e12 * 1e9  # no faster than its float32 peak

    def test_nodes_without_a_duration_get_none(self, model, gpu_file):
        builder = GraphBuilder()
        builder.add(kind=Kind.KERNEL, name="k")
        made = recost(builder.build(Job()), gpu_file("two"), model=model, source=gpu_file())
        assert times(made) == [0]
        assert made.nodes.evidence.tolist() == [Evidence.NONE]
        assert rules(made) == {"kept: the trace has no duration to scale": 1}

    def test_a_graph_without_gpu_compute_is_refused(self, model):
        builder = GraphBuilder()
        builder.add(kind=Kind.HOST_OP, name="aten::mm", duration_ns=1000)
        with raises_code("recost-no-compute", naming=("1 nodes",)):
            recost(builder.build(Job()), "H100", model=model, source="H200")

    def test_a_step_too_large_for_the_target_is_reported(self, model, trace, mm):
        graph = trace(mm(512, 512, 512))
        measured = msgspec.structs.replace(graph.job.measurement, peak_memory_bytes=16 * 10**9 + 1)
        graph = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))
        notes = recost(graph, "T4", model=model).job.measurement.notes
        figures = 16_000_000_001, 806_000_000, 15_630_000_000
        note_of(notes, "target-memory-exceeded", *figures, "T4")
        roomy = recost(graph, "L4", model=model).job.measurement.notes
        assert codes(roomy) == ["recost-from-measurement"]

    def test_empty_graph(self, model, trace):
        assert len(recost(trace(), "H100-SXM", model=model)) == 0


def test_unknown_model_and_target(trace, mm):
    with raises_code("recost-unknown-model"):
        recost(trace(mm(2, 2, 2)), "H100-SXM", model="magic")
    with raises_code("gpu-unknown", naming=("H1000", "H100-SXM")):
        recost(trace(mm(2, 2, 2)), "H1000")


def test_communication_stays(trace, mm):
    graph = trace(mm(512, 512, 512, kernels=[("k", 9000), ("nccl", 7000, Kind.COLLECTIVE)]))
    made = recost(graph, "B200")
    assert made.nodes.duration_ns[made.communication].tolist() == [7000]
    assert np.array_equal(made.edges.source, graph.edges.source)
