"""Gaps between the kernels of a replayed CUDA graph, predicted for another GPU."""

import msgspec
import numpy as np
import pytest
from kept_traces import kept_graph

from onerank.annotate import load_gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.capture.serving.compositions import Composition
from onerank.ir import Graph
from onerank.serving.points import Target, measured, predicted


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Return a prefill of 8,192 tokens that an H100 ran."""
    return kept_graph("h100-llama-8b-prefill/8192", tmp_path_factory.mktemp("step"))


def longer_ns(step: Graph, gap_ns: int, gpu: str) -> tuple[float, float, float]:
    """Return the predicted graph's time beyond its kernels, and the ends of its interval.

    Args:
        step: measured on an H100.
        gap_ns: gap after each kernel on the H100.
        gpu: the GPU of the prediction.
    """
    composition = Composition(0, 0, 1, 8192, 0)
    row = measured(composition, step, ()).row
    assert row.gpu_ns is not None
    count = int(step.gpu_compute.sum())
    row = msgspec.structs.replace(row, graph_ns=row.gpu_ns + gap_ns * count)
    there = predicted(composition, step, Target(load_gpu(gpu), None), row).row
    longer, low, high = (
        ns - there.gpu_ns for ns in (there.graph_ns, there.graph_low_ns, there.graph_high_ns)
    )
    return longer, low, high


def test_gaps_grow_where_the_launch_inside_a_kernel_is_shorter(step: Graph):
    """Short kernels of an H200 are 0.23 us shorter than an H100's, their period only 0.05 us."""
    count = int(step.gpu_compute.sum())
    h100, h200 = load_gpu("H100"), load_gpu("H200")
    change = KernelFeatures.of(step, op_costs_of(step)).launch_change_ns(h100, h200)
    assert {*np.round(change)} <= {-230, -50, 0}
    longer, low, high = longer_ns(step, 300, "H200")
    assert longer == pytest.approx(300 * count - 50 * count - change.sum(), abs=count)
    # The interval of the gaps alone is 75 ns a gap; that of the kernels adds to it.
    assert low < longer - 75 * count < longer + 75 * count < high
    assert 100 * count < longer - 300 * count < 180 * count


def test_gaps_of_another_die_stay(step: Graph):
    longer, low, high = longer_ns(step, 300, "B200")
    count = int(step.gpu_compute.sum())
    assert longer == pytest.approx(300 * count, abs=count)
    assert high - low > 2 * 150 * count


def test_a_difference_beyond_the_gaps_is_proportional_to_the_kernels(step: Graph):
    """Long graphs run at a lower clock, and a graph may be faster than its profiled kernels."""
    count = int(step.gpu_compute.sum())
    before_ns = int(step.nodes.duration_ns[step.compute].sum())
    composition = Composition(0, 0, 1, 8192, 0)
    there = predicted(composition, step, Target(load_gpu("B200"), None)).row
    assert there.gpu_ns is not None
    for gap_ns, rest_ns, gaps_ns in ((5370, 5000, 370), (-300, -300, 0)):
        longer, *_ = longer_ns(step, gap_ns, "B200")
        share = rest_ns * count / before_ns
        assert longer == pytest.approx(gaps_ns * count + share * there.gpu_ns, rel=1e-3)


def test_gaps_that_were_never_measured_are_longer_on_an_h200(step: Graph):
    """A capture without a device has no graph: 0.25 us after each kernel are an H100's."""
    composition, count = Composition(0, 0, 1, 8192, 0), int(step.gpu_compute.sum())
    h100, h200 = load_gpu("H100"), load_gpu("H200")
    change = KernelFeatures.of(step, op_costs_of(step)).launch_change_ns(h100, h200)
    for gpu, longer in ((h100, 0.0), (h200, -50 * count - change.sum())):
        row = predicted(composition, step, Target(gpu, None)).row
        assert row.graph_ns - row.gpu_ns == pytest.approx(250 * count + longer, abs=count)
