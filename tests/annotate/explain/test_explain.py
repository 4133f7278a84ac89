"""The arithmetic of one node."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from raised import raises_code

from onerank.annotate import explain, recost
from onerank.annotate.kernel_db import database_set as library
from onerank.annotate.kernel_db.database_set import open_library
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def cpu_llama() -> Graph:
    return convert_directory(TRACES / "cpu-llama-2l-tp4")[0]


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
    assert result == pytest.approx(told.duration_ns, rel=1e-3)
    predicted = recost(graph, "A100").nodes.duration_ns[graph.gpu_compute]
    assert predicted.tolist() == [told.duration_ns]
    assert "GPUs that no fit had seen" in lines["80% interval"]


def worked(line: str) -> tuple[float, float]:
    """Return what the left side of `a x b^c + max(d, e) = f ns` comes to, and the right one."""
    left, right = re.sub(r"(?<=\d),(?=\d{3})", "", line).split(" = ")
    made = left.replace(" x ", "*").replace("^", "**")
    return eval(made, {"__builtins__": {}, "max": max}), number(right.split()[0])


@pytest.mark.parametrize(
    ("operator", "rule"),
    [
        ({"ns": 10_000}, "memory-bound"),  # 6 MB: 1.5 of 9.1 us above the floor are memory's
        ({"ns": 5_000}, "memory-bound"),  # faster than memory: in cache
        ({"ns": 900}, "not longer than the launch floor"),  # 0.35 of 2640
    ],
)
@pytest.mark.parametrize("target", ["A100", "B200", "TPU-v6e", "MI300X"])
def test_the_terms_of_the_residual_model_give_the_prediction(trace, add, operator, rule, target):
    graph = trace(add(10**6, **operator))
    (node,) = kernel_ids(graph)
    told = explain(graph, target, node)
    lines = dict(told.lines)
    assert lines["rule"] == f"residual model: {rule}"
    for term in ("rest", "factor", "residual"):
        if term in lines:
            made, said = worked(lines[term])
            assert made == pytest.approx(said, rel=1e-3)
    assert worked(lines["residual"])[1] == told.duration_ns
    assert recost(graph, target).nodes.duration_ns[graph.gpu_compute] == told.duration_ns


def test_each_figure_comes_with_its_source(trace, mm, add):
    graph = trace(mm(4096, 4096, 4096), add(10**6))
    told = [explain(graph, "A100", node).lines for node in kernel_ids(graph)]
    product, sum_ = ([text for name, text in one if name.endswith("figure")] for one in told)
    assert "bf16_tensor_tflops = 312 (datasheet): NVIDIA A100 80GB" in " ".join(product)
    assert "memory_achievable_fraction = 0.86 (measured): 90th percentile" in " ".join(sum_)
    assert [text.split(" = ")[0] for text in sum_[:5]] == [
        "launch_floor_ns",
        "memory_bandwidth_gb_per_s",
        "memory_achievable_fraction",
        "fp32_vector_tflops",
        "vector_sustained_fraction",
    ]
    assert "sglang" in dict(told[0])["coefficients"]


def test_on_the_same_gpu(trace, add):
    graph = trace(add(10**6))
    (node,) = kernel_ids(graph)
    assert explain(graph, "H200", node).duration_ns == 10_000


@pytest.fixture
def _databases_read_once(monkeypatch):
    """`explain` tells of one call; here it is asked of all calls of a graph in turn."""
    found = []

    def once(*given):
        if not found:
            found.append(open_library(*given))
        return found[0]

    monkeypatch.setattr(library, "open_library", once)


@pytest.mark.usefixtures("_databases_read_once")
@pytest.mark.parametrize("target", ["A100", "T4", "TPU-v6e", "H200"])
def test_an_operator_of_a_cpu_capture_is_explained_by_the_datasheet(cpu_llama, target):
    """Each distinct call of a real capture: the arithmetic is that of the graph made."""
    made = recost(cpu_llama, target)
    durations = dict(zip(made.nodes.id.tolist(), made.nodes.duration_ns.tolist(), strict=True))
    found = op_costs_of(cpu_llama)
    _, first = np.unique(found.call, return_index=True)
    for node in cpu_llama.nodes.id[found.index[first]].tolist():
        told = explain(cpu_llama, target, node)
        lines = dict(told.lines)
        assert told.duration_ns == durations.get(node, 0)
        if node not in durations:
            assert lines["rule"] == "dropped: launches nothing"
            continue
        assert ("measured", "on no GPU: the trace was captured on a CPU") in told.lines
        term = "datasheet" if "datasheet" in lines else "product"
        made_ns, said = worked(lines[term])
        assert made_ns == pytest.approx(said, rel=2e-3)


def test_nodes_that_are_not_recosted(trace, mm):
    graph = trace(mm(8, 8, 8))
    with pytest.raises(AnnotateError, match="no compute node has the id 999"):
        explain(graph, "A100", 999)


def test_what_was_predicted_is_explained_by_its_own_trace_alone(trace, mm):
    graph = recost(trace(mm(4096, 4096, 4096)), "H100")
    (node,) = kernel_ids(graph)
    with raises_code("recost-not-measured"):
        explain(graph, "A100", node)
