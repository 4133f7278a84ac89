"""No prediction is faster than the target's description allows."""

import pytest

from onerank.annotate import explain, recost


def predicted(graph, target, **how) -> int:
    made = recost(graph, target, **how)
    return int(made.nodes.duration_ns[made.gpu_compute][0])


def test_data_in_the_sources_cache_come_from_the_targets_memory(trace, add):
    # 24.6 MB: an H200's cache holds 52 MB, an A10's 6.29; the rest at 600 GB/s
    graph = trace(add(4_096_000, ns=3_500))
    least = (24.576e6 - 6.291e6) / 600
    assert predicted(graph, "A10", model="residual") == pytest.approx(least, abs=1)
    node = int(graph.nodes.id[graph.gpu_compute][0])
    lines = dict(explain(graph, "A10", node, model="residual").lines)
    assert lines["lower bound"].startswith("30,475 ns: products at the datasheet's peak, bytes")
    # By shape, the H200's kernel runs from its cache and the A10's from memory.
    assert least < predicted(graph, "A10", model="learned") < 24.576e6 / 600


def test_a_product_takes_the_datasheets_peak_at_least(trace, mm):
    # 790 TFLOP/s of an H200, whose long products hold less than its peak
    graph = trace(mm(8192, 8192, 8192, ns=1_391_000))
    least = 2 * 8192**3 / 71.2e3
    assert predicted(graph, "RTX-3090", model="residual") == pytest.approx(least, abs=1)
    assert predicted(graph, "RTX-3090") >= least


def test_what_was_measured_in_less_than_is_counted_may_take_less_again(trace, mm):
    # half the FLOPs that are counted, say: at the H200's peak they would take 1112 us
    graph = trace(mm(8192, 8192, 8192, ns=556_000))
    least = 2 * 8192**3 / 71.2e3
    assert predicted(graph, "RTX-3090", model="residual") < 0.51 * least
