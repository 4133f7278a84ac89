"""The captures of the repository: Llama-3-8B's shapes, 4 layers, tensor-parallel 4, on an H200."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kept_traces import kept_graph

from onerank.annotate import MODELS, Gpu, OpClass, gpu_names, load_gpu, recost, summarise
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import KINDS, kinds_of
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.scale_by_ratio import predict_by_ratio as by_ratio
from onerank.annotate.models.scale_measured import lower_bound_ns
from onerank.annotate.models.scale_measured import predict_by_residual as by_residual
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.passes.change_dtype import keeps_times_in_float16, run_in_float16
from onerank.converters.sources.kineto import convert_directory
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


def test_a_step_predicted_for_an_h100_is_what_an_h100_takes(h200: Graph, tmp_path: Path):
    """By the datasheet: 34.1 ms there; the ratio rule is 9.5% off, the roofline 6.6%."""
    h100 = kept_graph("h100-llama-8b-4l-tp4/trace", tmp_path)
    predicted = recost(h200, "H100")
    measured_ns, predicted_ns = (
        graph.nodes.duration_ns[graph.gpu_compute] for graph in (h100, predicted)
    )
    assert measured_ns.sum() == 34_143_700
    assert predicted_ns.sum() == pytest.approx(measured_ns.sum(), rel=0.015)
    here = {row.op_class: row for row in summarise(h200, predicted).classes}
    there = {row.op_class: row for row in summarise(h100, recost(h100, "H100")).classes}
    long = [kind for kind, row in there.items() if row.after_ns > 10**6]
    assert len(long) == 6
    for kind in long:
        assert here[kind].count == there[kind].count
        assert here[kind].after_ns == pytest.approx(there[kind].after_ns, rel=0.05)
    low, high = (
        column[predicted.gpu_compute] for column in (predicted.nodes.p10_ns, predicted.nodes.p90_ns)
    )
    # A bound that holds 65% on every GPU left out holds more on one of the source's die.
    assert 0.75 < ((low <= measured_ns) & (measured_ns <= high)).mean() < 0.85


def test_products_add_up_to_six_flops_a_parameter_and_token(h200: Graph):
    gemm = next(
        row for row in summarise(h200, recost(h200, "H200")).classes if row.op_class is OpClass.GEMM
    )
    # of rank 0 of 4: q and o, k and v, three of the MLP; and the vocabulary's 32064 rows
    layer = 4096 * (2 * 1024 + 2 * 256 + 3 * 3584)
    expected = 6 * (4 * layer + 4096 * 32064) * 4096
    assert gemm.flops == pytest.approx(expected, rel=1e-4)


def test_no_kernel_beats_its_gpu(h200: Graph):
    """FLOPs and bytes of every node are such that an H200 can have done them in the time it took.

    Data that fits the L2 cache may come from there. Rows picked by an index may repeat, so of
    those only the results must pass through memory.
    """
    gpu = load_gpu("H200")
    found = op_costs_of(h200)
    kernels = KernelFeatures.of(h200, found)
    picked = found.is_class(OpClass.INDEX, OpClass.EMBEDDING)
    moved = np.where(picked, found.bytes_written, kernels.bytes)
    moved = np.where(np.isnan(kernels.bytes) | (kernels.bytes <= gpu.l2_bytes), 0, moved)
    seconds = 1.05 * kernels.duration_ns / 1e9
    assert (moved <= gpu.peak_bandwidth_bytes_per_s * seconds).all()
    assert (moved > 0.5 * gpu.peak_bandwidth_bytes_per_s * seconds).sum() > 200  # and comes near
    flops = np.nan_to_num(kernels.flops)
    peak = kernels.rates(gpu).peak
    assert (flops <= peak * seconds).all()
    assert (flops > 0.7 * peak * seconds).sum() > 50


def test_rows_of_the_embedding_are_counted_once(h200: Graph):
    found = op_costs_of(h200)
    ops = np.array(h200.text("op"))[found.index]
    # of a vocabulary's 32064 rows of 4096 bf16: one for each of 4096 tokens, and its int64 index
    rows = 4096 * 4096 * 2
    assert found.bytes_read[ops == "aten::gather"].max() == rows + 4096 * 8
    assert found.bytes_written[ops == "aten::gather"].max() == rows


def total(graph: Graph) -> int:
    return int(graph.nodes.duration_ns[graph.gpu_compute].sum())


@pytest.mark.parametrize("model", [name for name in MODELS if name != "auto"])
class TestEveryModel:
    def test_the_same_gpu_changes_no_node(self, h200: Graph, model: str):
        made = recost(h200, "H200", model=model)
        assert (made.nodes.duration_ns == h200.nodes.duration_ns).all()

    def test_slower_and_faster_gpus(self, h200: Graph, model: str):
        for faster, slower in (
            ("B200", "H200"),
            ("H200", "H100-SXM"),
            ("H100-SXM", "H100-PCIe"),
            ("H100-PCIe", "A100-SXM-80GB"),
            ("H100-SXM", "H20"),
            ("A100-SXM-80GB", "A100-SXM-40GB"),
            ("A100-SXM-80GB", "A100-PCIe-80GB"),
            ("A100-SXM-80GB", "A40"),
            ("L40S", "L4"),
            ("A100-SXM-40GB", "V100"),
            ("V100", "T4"),
            ("MI325X", "MI300X"),
            ("MI300X", "MI250X"),
        ):
            assert total(recost(h200, faster, model=model)) < total(
                recost(h200, slower, model=model)
            ), (faster, slower)


def test_on_another_vendors_gpu_fills_take_as_long_as_the_shortest_products(h200: Graph):
    source, target = load_gpu("H200"), load_gpu("MI300X")
    kernels = KernelFeatures.of(h200, op_costs_of(h200))
    made = recost(h200, "MI300X", model="residual").nodes.duration_ns[h200.gpu_compute]
    long = (kernels.duration_ns >= kernels.floor_ns(source)) & ~kernels.over_link
    assert long.sum() > 500
    assert (made[long] >= target.launch_floor_ns - 1).all()  # 0.27 of it, as of an H200's, before


def test_what_another_vendors_gpu_measured_is_as_unsure_as_what_is_told_of_it(h200: Graph):
    device = msgspec.structs.replace(h200.job.device, name="MI300X")
    there = replace(h200, job=msgspec.structs.replace(h200.job, device=device))
    widths = []
    for graph, target in ((h200, "MI300X"), (there, "H200"), (h200, "H100-SXM")):
        nodes = recost(graph, target, model="residual").nodes
        rows = np.flatnonzero(graph.gpu_compute & (nodes.p10_ns > 0) & (nodes.duration_ns > 10_000))
        widths.append(np.median(np.log(nodes.p90_ns[rows] / nodes.p10_ns[rows])))
    assert widths[0] == pytest.approx(widths[1], rel=0.1)
    assert widths[0] > 1.5 * widths[2]


@pytest.fixture(scope="module")
def kernels_of_h200(h200: Graph) -> dict[str, KernelFeatures]:
    """Its kernels by the type of their products; of a V100 or a T4, that is float16."""
    source, found = load_gpu("H200"), op_costs_of(h200)
    assert keeps_times_in_float16(found, "fp16", source)
    in_float16, _ = run_in_float16(found, (source, load_gpu("V100")))
    return {
        "bf16": KernelFeatures.of(h200, found),
        "fp16": KernelFeatures.of(h200, in_float16),
    }


@pytest.mark.parametrize("model", ["ratio", "residual"])
class TestScaling:
    @pytest.mark.parametrize("target", gpu_names())
    def test_no_node_changes_by_more_than_some_resource_does(
        self, h200: Graph, kernels_of_h200: dict[str, KernelFeatures], model: str, target: str
    ):
        source, gpu = load_gpu("H200"), load_gpu(target)
        kernels = kernels_of_h200["bf16"]
        here, there = kernels.rates(source), kernels.rates(gpu)
        shared = [
            source.peak_bandwidth_bytes_per_s / gpu.peak_bandwidth_bytes_per_s,
            source.bandwidth_bytes_per_s / gpu.bandwidth_bytes_per_s,
            source.sm_count * source.max_clock_hz / (gpu.sm_count * gpu.max_clock_hz),
        ]
        resources = [np.full(len(kernels.flops), ratio) for ratio in shared]
        resources += [kernels.floor_ratio(source, gpu)]
        # A larger cache serves more bytes, and its elements faster.
        resources += [kernels.s_per_byte(gpu) / kernels.s_per_byte(source)]
        elements = np.divide(
            *(kernels.issue_s(one) for one in (gpu, source)),
            out=np.ones(len(kernels.cycles)),
            where=kernels.cycles > 0,
        )
        resources += [elements]
        resources += [here.peak / there.peak, here.sustained / there.sustained]
        made = recost(h200, target, model=model).nodes.duration_ns[h200.gpu_compute]
        low = kernels.duration_ns * np.nanmin(resources, axis=0)  # no rate, no bound
        high = kernels.duration_ns * np.nanmax(resources, axis=0)
        if source.architecture == gpu.architecture:
            # A launch takes the same time longer or shorter, whatever the kernel's length.
            change_ns = kernels.launch_change_ns(source, gpu)
            low = np.minimum(low, np.maximum(low + change_ns, low / 2))
            high += np.maximum(change_ns, 0)
        stays = kernels.over_link
        assert (stays | (made >= low - 1)).all()
        # what the source's cache held may come from the target's memory
        high = np.maximum(high, lower_bound_ns(kernels, gpu))
        assert (stays | (made <= high + 1)).all()

    @pytest.mark.parametrize("target", gpu_names())
    @pytest.mark.parametrize(
        "figure", ["memory_bandwidth_gb_per_s", "boost_clock_mhz", "sm_count", "bf16_tensor_tflops"]
    )
    def test_more_of_a_resource_slows_no_node(
        self, kernels_of_h200: dict[str, KernelFeatures], model: str, target: str, figure: str
    ):
        source, gpu = load_gpu("H200"), load_gpu(target)
        dtype = "bf16"
        if figure not in gpu.figures:  # a V100 or a T4: training is in float16 there
            figure, dtype = "fp16_tensor_tflops", "fp16"
        predict = {"ratio": by_ratio, "residual": by_residual}[model]
        kernels = kernels_of_h200[dtype]
        before = predict(kernels, source, gpu)[0]
        after = predict(kernels, source, doubled(gpu, figure))[0]
        assert (after <= before * (1 + 1e-12)).all()
        if "tensor" in figure:
            assert (after < before).sum() > 60


def doubled(gpu: Gpu, figure: str) -> Gpu:
    more = msgspec.structs.replace(gpu.figures[figure], value=2 * gpu.figures[figure].value)
    return msgspec.structs.replace(gpu, figures={**gpu.figures, figure: more})


def test_the_intervals_of_what_nobody_measured_hold_for_a_captured_step(h200: Graph):
    """The kernels of a step by their shapes alone, as those of a CPU capture, against their times.

    No coefficient and no error of these kinds is of this step. Operators of one kernel each.
    """
    h200 = h200.with_columns(input_strides=np.zeros(len(h200)))
    gpu, found = load_gpu("H200"), op_costs_of(h200)
    kernels = KernelFeatures.of(h200, found)
    made = predict_from_description(kernels, gpu)
    (low, high), step = intervals(kernels, made, None, gpu, shipped())
    measured = kernels.duration_ns
    lengths = [f"memory_unmeasured{length}" for length in ("", "_short", "_long")]
    of_memory = [KINDS.index(kind) for kind in (*lengths, "memory_unknown_layout")]
    memory = np.isin(kinds_of(kernels, made, None, gpu), of_memory)
    each = memory & (measured > 0) & ~kernels.over_link & (kernels.operator_ns == measured)
    assert each.sum() > 400
    assert 0.75 < ((low <= measured) & (measured <= high))[each].mean() < 0.95
    gemm = np.isin(made[1], [Rule.GEMM_TILES])
    assert made[0][gemm].sum() == pytest.approx(measured[gemm].sum(), rel=0.09)
    assert made[0].sum() == pytest.approx(measured.sum(), rel=0.02)
    assert step.p10_ns < measured.sum() < step.p90_ns
    # Steps were measured on this die, so their classes share less than those of a GPU that was not.
    unseen = msgspec.structs.replace(shipped(), shared_in_steps={})
    _, wider = intervals(kernels, made, None, gpu, unseen)
    half_widths = [np.log(interval.p90_ns / made[0].sum()) for interval in (step, wider)]
    alone = shipped().errors["memory_unmeasured"].shared
    assert 0.03 < half_widths[0] < 0.6 * half_widths[1]
    # Products are surer: the step is between them and what streams memory.
    assert np.log(1.1) < half_widths[1] < 1.2816 * alone


def test_cpu_capture():
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    made = recost(graph, "H100-SXM")
    kernels = made.gpu_compute
    assert set(made.nodes.evidence[kernels].tolist()) == {Evidence.DATASHEET}
    assert not made.mask(Kind.HOST_OP).any()
    assert made.communication.sum() == graph.communication.sum()
    floor = 0.27 * load_gpu("H100-SXM").launch_floor_ns  # of fills
    assert (made.nodes.duration_ns[kernels] >= int(floor)).all()
    assert sorted(made.topological_order().tolist()) == list(range(len(made)))
    assert (np.diff(made.nodes.start_ns[kernels]) != 0).all()
    assert summarise(graph, made).unknown == ()
