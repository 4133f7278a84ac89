"""Other hosts: a factor on host operators and nothing else."""

from pathlib import Path

import pytest
from notes import note_of
from raised import raises_code

from onerank.annotate import recost
from onerank.annotate.passes.host_time import scale_host
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Evidence, Kind


def host_graph(trace, mm):
    graph = trace(mm(64, 64, 64), mm(64, 64, 64))
    duration = graph.nodes.duration_ns.copy()
    duration[graph.mask(Kind.HOST_OP)] = 1000
    return graph.with_columns(duration_ns=duration)


@pytest.mark.parametrize(("factor", "each"), [(0, 0), (0.5, 500), (3, 3000)])
def test_host_operators_are_scaled_and_kernels_are_not(trace, mm, factor, each):
    graph = recost(host_graph(trace, mm), "H200")
    made = scale_host(graph, factor)
    host = graph.mask(Kind.HOST_OP)
    assert made.nodes.duration_ns[host].tolist() == [each, each]
    assert (made.nodes.evidence[host] == Evidence.SCALED).all()
    assert (made.nodes.duration_ns[~host] == graph.nodes.duration_ns[~host]).all()
    note_of(made.job.measurement.notes, "host-scaled", 2)
    assert made.job.annotations[-1].target == "H200"
    assert made.job.annotations[-1].details["host_factor"] == factor


def test_the_host_of_a_cpu_capture_is_its_compute():
    traces = Path(__file__).parents[3] / "traces"
    graph, _ = convert_directory(traces / "cpu-llama-2l-tp4")
    with raises_code("host-scale-cpu-capture"):
        scale_host(graph, 2)


def test_a_factor_of_one_changes_nothing(trace, mm):
    graph = host_graph(trace, mm)
    assert scale_host(graph, 1) is graph
