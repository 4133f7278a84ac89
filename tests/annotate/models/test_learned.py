"""Durations by the learned model, and how far off they may be."""

import msgspec
import numpy as np
import pytest
from error_width import error_width

from onerank.annotate import load_gpu, recost, with_figures
from onerank.annotate.models.coefficients import Error, shipped
from onerank.annotate.models.error_kinds import KINDS
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import distance_from_fitted, same_die, tile_model_weight
from onerank.annotate.models.intervals import ErrorKinds, compute_interval, widening
from onerank.annotate.models.tile_times import tile_times
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import UNKNOWN, Evidence, Graph, Kind
from onerank.ir.chakra import read

SIZE = (4096, 4096, 4096)


def tiles(graph: Graph, gpu: str) -> float:
    return tile_times(KernelFeatures.of(graph, op_costs_of(graph)), load_gpu(gpu), shipped())[0][0]


def times(graph: Graph) -> list[int]:
    return graph.nodes.duration_ns[graph.gpu_compute].tolist()


def rules(graph: Graph) -> dict[str, int]:
    return graph.job.annotations[-1].details["rules"]


def test_the_same_die_shares_most_of_the_deviation(trace, mm):
    graph = trace(mm(*SIZE))
    graph = trace(mm(*SIZE, ns=round(1.2 * tiles(graph, "H200"))))
    expected = tiles(graph, "H100") * 1.2**0.8
    assert times(recost(graph, "H100")) == [pytest.approx(expected, rel=1e-4)]
    assert rules(recost(graph, "H100")) == {"GEMM by its tiles": 1}


def test_another_die_shares_little_of_it(trace, mm):
    graph = trace(mm(*SIZE, ns=round(1.2 * tiles(trace(mm(*SIZE)), "H200"))))
    expected = tiles(graph, "A100") * 1.2**0.15
    assert times(recost(graph, "A100")) == [pytest.approx(expected, rel=0.01)]


def test_what_is_mostly_launch_takes_about_the_floor(trace, mm):
    graph = trace(mm(1, 64, 64, ns=2640))  # the floor of an H200; that of an A100 is 3280 ns
    assert times(recost(graph, "A100")) == [pytest.approx(3280, rel=0.2)]


def test_another_die_shares_more_of_it_in_eight_bits(trace):
    e4m3, bf16 = "Tensor(c10::Float8_e4m3fn)", "Tensor(c10::BFloat16)"
    product = {
        "op": "aten::_scaled_mm",
        "inputs": [(e4m3, [4096, 4096]), (e4m3, [4096, 4096])],
        "outputs": [(bf16, [4096, 4096])],
    }
    one, half_more = (
        times(recost(trace(product | {"ns": ns}), "L40S"))[0] for ns in (120_000, 180_000)
    )
    assert half_more / one == pytest.approx(1.5**0.3, rel=1e-3)


def test_what_takes_far_longer_than_a_product_keeps_doing_so(trace, mm):
    usual = tiles(trace(mm(*SIZE)), "H200")
    (twice,), (tenfold,) = (
        times(recost(trace(mm(*SIZE, ns=round(factor * usual))), "A100")) for factor in (2, 10)
    )
    assert tenfold > 2.5 * twice


def test_the_kernels_of_an_operator_share_its_factor(trace, mm):
    whole = times(recost(trace(mm(*SIZE, ns=300_000)), "A100"))
    parts = trace(mm(*SIZE, kernels=[("main", 240_000), ("reduce", 60_000)]))
    made = times(recost(parts, "A100"))
    assert made[0] / made[1] == pytest.approx(4, rel=0.05)
    assert sum(made) == pytest.approx(whole[0], rel=0.05)


@pytest.mark.parametrize(
    ("operator", "rule"),
    [
        ({"op": "mylib::x"}, "FLOPs and bytes unknown: memory bandwidth"),
        ({"op": "aten::mm"}, "GEMM or attention, FLOPs unknown: 16-bit matmul rate"),
        (
            {"op": "aten::mm", "inputs": [("Tensor(c10::Float8_e4m3fn)", [8192, 8192])] * 2,
             "outputs": [("Tensor(c10::BFloat16)", [8192, 8192])]},
            "compute-bound, no matmul units for the data type: rate of a wider type",
        ),
    ],
)  # fmt: skip
def test_what_the_tiles_do_not_know_goes_by_the_residual_model(trace, operator, rule):
    graph = trace({**operator, "kernels": [("k", 900_000)]})
    made = recost(graph, "A100")
    assert rules(made) == {rule: 1}
    assert times(made) == times(recost(graph, "A100", model="residual"))


class TestLikeness:
    def test_cuts_of_one_die(self):
        pairs = [("H100", "H200"), ("B200", "GB200"), ("A100", "A40"), ("H100", "B200")]
        assert [same_die(*map(load_gpu, pair)) for pair in pairs] == [True, True, False, False]

    def test_gpus_fitted_to_are_inside(self):
        c = shipped()
        for name in ("A100", "L40S", "H100", "H200", "B200"):
            assert distance_from_fitted(load_gpu(name), c) < 0.001  # the file has four figures
        # 40 SMs where the least is 108, 4 MB of cache where it is 40; the rest is inside
        t4 = np.log(108 / 40) + np.log(40 / 4)
        assert distance_from_fitted(load_gpu("T4"), c) == pytest.approx(t4, rel=0.02)
        # as an L40S would be, 1.3 outside where its family is left out
        assert tile_model_weight(load_gpu("T4"), c) == pytest.approx(np.exp(1 - 1.3), rel=0.1)
        mi250x = load_gpu("MI250X")  # of which no product was measured
        assert tile_model_weight(mi250x, c) == pytest.approx(
            np.exp(1 - distance_from_fitted(mi250x, c))
        )
        assert distance_from_fitted(load_gpu("MI300X"), c) > 0.7

    def test_a_gpu_unlike_them_has_a_wider_interval(self, trace, mm):
        def width(target: str) -> float:
            made = recost(trace(mm(*SIZE)), target)
            kernel = made.gpu_compute
            nodes = made.nodes.take(kernel)
            return float(np.log(nodes.p90_ns / nodes.duration_ns)[0])

        assert width("T4") > 1.5 * width("A100")


def of_ampere(error: Error, predicted_ns: float) -> tuple[float, float]:
    """Return the shared and the independent part of an error on Ampere's measured die."""
    at_length = float(error.of_length(np.array([predicted_ns]))[0])
    return error.dies["ampere"] * error.shared, error.dies["ampere"] * at_length * error.independent


class TestIntervals:
    def test_of_nodes(self, trace, mm, add, tmp_path):
        copy = {"op": "aten::copy_", "kernels": [("Memcpy HtoD", 9_000, Kind.MEMCPY)]}
        made = recost(trace(mm(*SIZE, ns=250_000), add(10**8), copy), "A100")
        made.write(tmp_path / "out.et")
        nodes = read(tmp_path / "out.et").nodes.take(made.gpu_compute)
        for kernel, kind in enumerate(("gemm", "memory_other_die")):
            width = error_width(kind, "A100", nodes.duration_ns[kernel])
            ends = nodes.duration_ns[kernel] * np.exp([-width, width])
            assert [nodes.p10_ns[kernel], nodes.p90_ns[kernel]] == pytest.approx(ends, abs=2)
        assert (nodes.p10_ns[2], nodes.p90_ns[2]) == (UNKNOWN, UNKNOWN)  # kept as measured
        host = made.nodes.take(~made.gpu_compute)
        assert (host.p10_ns == UNKNOWN).all()

    def test_errors_that_classes_share_are_independent_between_classes(self):
        """Half of the time in each: the root of the summed squares, not the sum."""
        c, gpu = shipped(), load_gpu("A100")
        kinds = np.array([KINDS.index(name) for name in ("gemm", "memory")], dtype=np.uint8)
        half_each = np.full(2, 1e9)
        step = compute_interval(half_each, ErrorKinds.of(kinds), np.arange(2), gpu, c)
        of_each = [of_ampere(c.errors[kind], 1e9) for kind in ("gemm", "memory")]
        spread = np.sqrt(np.square(of_each).sum()) / 2
        assert np.log(step.p90_ns / 2e9) == pytest.approx(1.2816 * spread, rel=1e-3)

    def test_what_kernels_have_in_common_does_not_average_out(self):
        c, gpu = shipped(), load_gpu("A100")
        shared, independent = of_ampere(c.errors["gemm"], 1000.0)
        count = 10_000
        kinds = np.full(count, KINDS.index("gemm"), dtype=np.uint8)
        moved = np.full(count, 1000.0)

        def half(calls: int) -> float:
            found = compute_interval(moved, ErrorKinds.of(kinds), np.arange(count) % calls, gpu, c)
            return float(np.log(found.p90_ns / 1e7) / 1.2816)

        assert half(1) == pytest.approx(np.hypot(shared, independent), rel=1e-3)
        assert half(100) == pytest.approx(np.hypot(shared, independent / 10), rel=1e-3)
        assert half(count) == pytest.approx(shared, rel=0.01)

    def test_the_step_is_reported(self, trace, mm):
        made = recost(trace(mm(*SIZE), mm(*SIZE)), "A100")
        low, high = made.job.annotations[-1].details["interval"]
        assert low < sum(times(made)) < high

    def test_a_step_of_one_kernel_is_as_sure_as_that_kernel(self, trace, mm):
        made = recost(trace(mm(*SIZE)), "A100")
        nodes = made.nodes.take(made.gpu_compute)
        ends = [nodes.p10_ns[0], nodes.p90_ns[0]]
        assert made.job.annotations[-1].details["interval"] == pytest.approx(ends, abs=1)

    def test_there_is_none_for_models_without_known_errors(self, trace, mm):
        made = recost(trace(mm(*SIZE)), "A100", model="ratio")
        assert (made.nodes.p10_ns == UNKNOWN).all()
        assert "interval" not in made.job.annotations[-1].details

    def test_nor_where_nothing_was_predicted(self, trace, mm):
        assert (recost(trace(mm(*SIZE)), "H200").nodes.p90_ns == UNKNOWN).all()


def test_evidence_tells_whether_the_target_was_measured(trace, mm, gpu_file):
    def evidence(target: str) -> Evidence:
        made = recost(trace(mm(*SIZE)), target)
        return made.node(int(np.flatnonzero(made.gpu_compute)[0])).evidence

    assert evidence("A100") is Evidence.CALIBRATED
    assert evidence("MI300X") is Evidence.SCALED
    assert evidence(gpu_file()) is Evidence.SCALED


def test_what_if_a_figure_that_does_not_matter_were_another(trace, mm):
    graph = trace(mm(*SIZE, ns=400_000))  # far from what its tiles say
    made = recost(graph, with_figures(load_gpu("H200"), {"memory_gb": 282}))
    assert times(made) == [400_000]


@pytest.mark.parametrize("figure", ["memory_bandwidth_gb_per_s", "bf16_tensor_tflops", "l2_mb"])
@pytest.mark.parametrize("name", ["H100", "A100", "L40S", "RTX-4090", "MI300X"])
def test_a_better_figure_makes_no_product_slower(name, figure, trace, mm):
    """Neither another mixture of models nor another die comes of a figure that is set.

    Nor do ways to cut a product that are not the best make it slower as they get faster.
    """
    sizes = [(4096, 1024, 4096), (4096, 8192, 1024), (512, 4096, 14336), (16, 4096, 4096)]
    sizes += [(m, n, k) for m in (64, 320, 1536) for n in (512, 3072) for k in (768, 6144)]
    graph = trace(*(mm(m, n, k, ns=30_000 + m * n * k // 600_000) for m, n, k in sizes))
    gpu, before = load_gpu(name), np.array(times(recost(graph, name)))
    for factor in (1.1, 1.5, 3, 6):
        better = with_figures(gpu, {figure: factor * gpu.figures[figure].value})
        made = np.array(times(recost(graph, better)))
        assert (made <= before + 1).all(), factor  # whole ns
        before = made


def test_a_gpu_unlike_those_fitted_to_is_less_sure_wherever_the_model_speaks():
    # four times an H200's clock, so that FLOPs per cycle fall to 1930, is ln(7.32 / 2.52) outside
    fast = with_figures(load_gpu("H200"), {"boost_clock_mhz": 7320})
    distance = np.log(7320 / 2520)
    assert distance_from_fitted(fast, shipped()) == pytest.approx(distance)
    for kind in ("gemm", "resized_product", "resized_attention"):
        assert widening(fast, shipped(), kind) == pytest.approx(1 + distance / 4)
        assert widening(load_gpu("H200"), shipped(), kind) == 1
    assert widening(fast, shipped(), "resized_memory") == 1  # by its bytes
    assert widening(fast, shipped(), "looked_up") == 1


def test_what_goes_by_bandwidth_is_as_sure_on_older_gpus_and_less_on_other_vendors():
    for name in ("V100", "T4"):
        assert distance_from_fitted(load_gpu(name), shipped()) > 2
        assert [
            widening(load_gpu(name), shipped(), k) for k in ("memory", "memory_unmeasured")
        ] == [
            1,
            1,
        ]
    mine = msgspec.structs.replace(load_gpu("T4"), vendor="Nvidia")
    assert widening(mine, shipped(), "memory") == 1
    for name in ("TPU-v6e", "MI300X"):  # 10.9 and 2.1 outside
        assert widening(load_gpu(name), shipped(), "memory") == 2.1
        assert widening(load_gpu(name), shipped(), "memory_unmeasured") == 2.4
        distance = distance_from_fitted(load_gpu(name), shipped())
        assert widening(load_gpu(name), shipped(), "gemm") == pytest.approx(min(4.5, distance + 2))
