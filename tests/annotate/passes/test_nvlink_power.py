"""Re-costing with active NVLinks, compared with a rank of a real job."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from kept_traces import kept_graph
from notes import note_of
from raised import raises_code

from onerank.analysis.step_time import step_change
from onerank.annotate import (
    OpClass,
    PassOptions,
    compute_mask,
    load_gpu,
    recost,
    summarise,
    with_figures,
)
from onerank.annotate.passes.nvlink_power import NvlinkActive
from onerank.annotate.passes.pass_options import parse_sizes
from onerank.cli.commands.annotate import annotate
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import UNKNOWN, Evidence, Graph, Kind
from onerank.ir.steady_state import slowest_rank_excess_ns

ACTIVE = PassOptions(nvlink_active=True)
TRACES = Path(__file__).parents[3] / "traces" / "h200-llama-8b-4l-tp2-real"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, Graph]:
    """Rank 0 of TP=2 on two H200s, and its slice on the same GPU."""
    directory = tmp_path_factory.mktemp("ranks")
    return {
        name: kept_graph(f"h200-llama-8b-4l-tp2-real/{name}.0", directory)
        for name in ("slice", "real")
    }


def time_ns(graph: Graph, *classes: OpClass) -> int:
    rows = summarise(graph, recost(graph, "H200")).classes
    return sum(row.before_ns for row in rows if not classes or row.op_class in classes)


def test_the_slice_is_the_real_rank(ranks):
    kernels = [
        Counter(np.array(graph.text("name"))[compute_mask(graph)].tolist())
        for graph in ranks.values()
    ]
    assert kernels[0] == kernels[1]
    peaks = {graph.job.measurement.peak_memory_bytes for graph in ranks.values()}
    assert len(peaks) == 1


def test_products_take_as_long_as_in_the_real_job(ranks):
    real, idle = ranks["real"], ranks["slice"]
    active = recost(idle, "H200", passes=ACTIVE)
    rows = {row.op_class: row for row in summarise(idle, active).classes}
    products, rest = rows[OpClass.GEMM], rows[OpClass.OPTIMIZER]
    assert products.before_ns / time_ns(real, OpClass.GEMM) - 1 == pytest.approx(-0.0262, abs=1e-3)
    assert products.after_ns / time_ns(real, OpClass.GEMM) - 1 == pytest.approx(-0.006, abs=1e-3)
    assert rest.after_ns == rest.before_ns  # the memory's clock is no part of it
    slower = active.nodes.duration_ns > idle.nodes.duration_ns
    assert set(active.nodes.evidence[slower]) == {Evidence.EXTRAPOLATED}
    assert not slower[~compute_mask(idle)].any()
    step = step_change(idle, active, summarise(idle, active).interval)
    measured = real.job.measurement.median_step_ns
    # The kernels' times are new; by how much the slowest rank exceeds the median is not.
    assert active.job.measurement.step_ns == ()
    assert slowest_rank_excess_ns(active, 2) == slowest_rank_excess_ns(idle, 2) > 0
    assert step.after is not None
    assert step.after.step_ns / measured - 1 == pytest.approx(0.0048, abs=1e-3)
    assert step.p10_ns < step.after.step_ns < step.p90_ns


def call(name: str = "all_reduce") -> dict:
    return {"op": "c10d::allreduce_", "kernels": [(name, 1000, Kind.COLLECTIVE)]}


def test_a_product_at_the_power_limit_slows_down(trace, mm, add):
    graph = trace(mm(8192, 8192, 8192, ns=1_700_000), add(1 << 28, ns=400_000), call())
    slowed = NvlinkActive().apply(recost(graph, "H200"), load_gpu("H200"))
    nodes = slowed.nodes
    product, addition = np.flatnonzero(compute_mask(slowed))
    factor = ((700 - 124) / (700 - 23 - 124)) ** 0.5
    assert nodes.duration_ns[product] == pytest.approx(1_700_000 * factor, abs=1)
    assert nodes.p10_ns[product] == pytest.approx(1_700_000 * (1 + 0.7 * (factor - 1)), abs=1)
    assert nodes.p90_ns[product] == pytest.approx(1_700_000 * (1 + 1.5 * (factor - 1)), abs=1)
    assert nodes.duration_ns[addition] == 400_000
    assert nodes.p90_ns[addition] == UNKNOWN
    low, high = slowed.job.annotations[-1].details["interval"]
    assert nodes.p10_ns[product] + 400_000 == pytest.approx(low, abs=1)
    assert nodes.p90_ns[product] + 400_000 == pytest.approx(high, abs=1)
    note_of(slowed.job.measurement.notes, "nvlink-active", 1, 2.1)


def test_the_command_notes_idle_links(ranks, tmp_path):
    path = tmp_path / "t.et"
    ranks["slice"].write(path)
    for options, is_noted in (
        (["--target", "H200"], True),
        (["--target", "H200", "--nvlink-active"], False),
        (["--target", "A100"], False),
    ):
        done = CliRunner().invoke(annotate, [*options, str(path)])
        assert done.exit_code == 0, done.output
        assert ("[nvlink-idle]" in done.output) == is_noted
        assert not is_noted or "492.282 us" in " ".join(done.output.split())


def test_operators_of_a_capture_on_a_cpu():
    graph = convert_directory(TRACES.parent / "cpu-llama-2l-tp4")[0]
    big = PassOptions(sizes=parse_sizes("64=65536", None))
    plain, slowed = (
        recost(graph, "H100", passes=replace(big, nvlink_active=active)) for active in (False, True)
    )
    factor = (
        slowed.nodes.duration_ns[slowed.gpu_compute] / plain.nodes.duration_ns[slowed.gpu_compute]
    )
    assert (factor >= 1).all()
    assert factor.max() == pytest.approx(((700 - 123) / (700 - 23 - 123)) ** 0.5, rel=1e-4)


def test_intervals_of_a_prediction_move_with_it(trace, mm):
    graph = trace(mm(8192, 8192, 8192, ns=1_700_000), call())
    plain, slowed = (recost(graph, "H100", passes=options) for options in (PassOptions(), ACTIVE))
    (product,) = np.flatnonzero(compute_mask(graph))
    factors = [
        getattr(slowed.nodes, name)[product] / getattr(plain.nodes, name)[product]
        for name in ("duration_ns", "p10_ns", "p90_ns")
    ]
    factor = ((700 - 123) / (700 - 23 - 123)) ** 0.5
    assert factors == pytest.approx([factor] * 3, rel=1e-5)
    assert slowed.nodes.evidence[product] == plain.nodes.evidence[product]


def test_links_that_draw_nothing_change_nothing(trace, mm):
    graph = trace(mm(8192, 8192, 8192, ns=1_700_000), call())
    gpu = with_figures(load_gpu("H200"), {"nvlink_active_w": 0})
    slowed = recost(graph, gpu, passes=ACTIVE)
    assert (slowed.nodes.duration_ns == graph.nodes.duration_ns).all()


def test_links_draw_power_where_no_kernel_is_at_the_limit(trace, add):
    graph = trace(add(1 << 28, ns=400_000), call())
    slowed = recost(graph, "H200", passes=ACTIVE)
    assert (slowed.nodes.duration_ns == graph.nodes.duration_ns).all()
    assert slowed.job.measurement.step_ns == graph.job.measurement.step_ns
    assert slowed.job.annotations[-1].details["nvlink_active_w"] == 23
    note_of(slowed.job.measurement.notes, "nvlink-active", 0)


def test_links_that_draw_all_the_power_are_refused(trace, mm):
    gpu = with_figures(load_gpu("H200"), {"nvlink_active_w": 576})
    with raises_code("nvlink-power-above-limit"):
        recost(trace(mm(64, 64, 64), call()), gpu, passes=ACTIVE)


@pytest.mark.parametrize(
    ("operators", "target", "code"),
    [
        ([], "H200", "nvlink-no-communication"),
        ([call("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")], "H200", "nvlink-already-active"),
        ([call()], "A100", "nvlink-gpu-incomplete"),
    ],
)
def test_graphs_and_gpus_that_are_refused(trace, mm, tmp_path, *, operators, target, code):
    graph = trace(mm(4096, 4096, 4096, ns=250_000), *operators)
    with raises_code(code):
        recost(graph, target, passes=ACTIVE)
    path = tmp_path / "t.et"
    graph.write(path)
    refused = CliRunner().invoke(annotate, ["--target", target, "--nvlink-active", str(path)])
    assert refused.exit_code == 2
    assert f"error[{code}]" in refused.output
    assert [*tmp_path.iterdir()] == [path]
