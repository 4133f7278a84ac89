"""Other hosts: a factor on host operators and nothing else."""

import pytest

from onerank.annotate import recost
from onerank.annotate.host_scaling import parse_host, rehost
from onerank.ir import Evidence, Kind
from onerank.ir.errors import AnnotateError


def host_graph(trace, mm):
    graph = trace(mm(64, 64, 64), mm(64, 64, 64))
    duration = graph.nodes.duration_ns.copy()
    duration[graph.mask(Kind.HOST_OP)] = 1000
    return graph.with_columns(duration_ns=duration)


@pytest.mark.parametrize(("text", "each"), [("none", 0), ("scale:0.5", 500), ("scale:3", 3000)])
def test_host_operators_are_scaled_and_kernels_are_not(trace, mm, text, each):
    graph = recost(host_graph(trace, mm), "H200")
    made = rehost(graph, parse_host(text))
    host = graph.mask(Kind.HOST_OP)
    assert made.nodes.duration_ns[host].tolist() == [each, each]
    assert (made.nodes.evidence[host] == Evidence.SCALED).all()
    assert (made.nodes.duration_ns[~host] == graph.nodes.duration_ns[~host]).all()
    assert made.job.measurement.notes[-1].startswith("another host: 2 host operators take")
    assert made.job.annotations[-1].target == "H200"
    assert made.job.annotations[-1].details["host_factor"] == parse_host(text)


def test_keep_changes_nothing(trace, mm):
    graph = host_graph(trace, mm)
    assert rehost(graph, parse_host("keep")) is graph


@pytest.mark.parametrize("text", ["warp", "scale", "scale:0", "scale:-1", "scale:x", "none:1", ""])
def test_nonsense_is_an_error_that_names_the_forms(text):
    with pytest.raises(AnnotateError, match=r"expected keep, none or scale:F"):
        parse_host(text)
