"""The arithmetic of one node."""

import math
import re

import numpy as np
import pytest

from onerank.annotate import explain, recost
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError


def kernel_ids(graph: Graph) -> list[int]:
    return graph.nodes.id[np.flatnonzero(graph.gpu_compute)].tolist()


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_the_terms_give_the_prediction(trace, mm):
    graph = trace(mm(4096, 4096, 4096, ns=250_000))
    (node,) = kernel_ids(graph)
    told = explain(graph, "A100", node)
    lines = dict(told.lines)
    assert lines["shape"] == "batch, m, n, k = 1, 4096, 4096, 4096"
    assert lines["tensor"].startswith("137,438,953,472 FLOPs / 247.7 TFLOP/s = 554,7")
    own, made, whole, kept, part, bound, _, rest = map(
        number, re.findall(r"(?<!e)[+-]?[\d.]+(?:,\d{3})*", lines["product"])
    )
    result = own * (made / whole * math.exp(kept)) ** part * (bound / own) ** rest
    assert result == pytest.approx(told.duration_ns, rel=0.02)
    predicted = recost(graph, "A100").nodes.duration_ns[graph.gpu_compute]
    assert predicted.tolist() == [told.duration_ns]
    assert "GPUs that no fit had seen" in lines["80% interval"]


def test_by_the_residual_model_and_on_the_same_gpu(trace, add):
    graph = trace(add(10**6))
    (node,) = kernel_ids(graph)
    assert dict(explain(graph, "A100", node).lines)["rule"] == "residual model: memory-bound"
    assert explain(graph, "H200", node).duration_ns == 10_000


def test_nodes_that_are_not_recosted(trace, mm):
    graph = trace(mm(8, 8, 8))
    with pytest.raises(AnnotateError, match="no compute node has the id 999"):
        explain(graph, "A100", 999)


def test_what_was_predicted_is_explained_by_its_own_trace_alone(trace, mm):
    graph = recost(trace(mm(4096, 4096, 4096)), "H100")
    (node,) = kernel_ids(graph)
    with pytest.raises(AnnotateError, match=r"predicted for H100-SXM .* start from the measured"):
        explain(graph, "A100", node)
