"""The arithmetic of one node."""

from pathlib import Path

import numpy as np
import pytest
from kept_traces import kept_graph
from raised import raises_code

from onerank.annotate import Explanation, explain, load_gpu, recost, with_figures
from onerank.annotate.explain import explain_nodes
from onerank.annotate.models.prediction_terms import Term, TermRecord
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph

TRACES = Path(__file__).parents[2] / "traces"


def kernel_ids(graph: Graph) -> list[int]:
    return graph.nodes.id[np.flatnonzero(graph.gpu_compute)].tolist()


def named(explanation: Explanation) -> dict[str, Term]:
    """Return the named terms; of several with one name the last, which is the target's."""
    assert explanation.terms is not None
    return {term.name: term for term in explanation.terms.named()}


def test_the_terms_give_the_prediction(trace, mm):
    graph = trace(mm(4096, 4096, 4096, ns=250_000))
    (node,) = kernel_ids(graph)
    explained = explain(graph, "A100", node)
    lines = dict(explained.lines)
    assert lines["shape"] == "batch, m, n, k = 1, 4096, 4096, 4096"
    assert lines["work"].endswith("137,438,953,472 FLOPs")
    compute = [t.value for t in explained.terms.named() if "sustained rate on A100" in t.note]
    assert compute == [pytest.approx(137_438_953_472 / 247.728e12 * 1e9)]
    assert explained.terms.evaluate() == pytest.approx(explained.duration_ns, abs=0.5)
    predicted = recost(graph, "A100").nodes.duration_ns[graph.gpu_compute]
    assert predicted.tolist() == [explained.duration_ns]
    assert "left out of the fit" in lines["80% interval"]


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
    explained = explain(graph, target, node)
    assert dict(explained.lines)["rule"] == rule
    for term in named(explained).values():
        assert term.evaluate() == pytest.approx(term.value, rel=1e-9)
    assert explained.terms.evaluate() == pytest.approx(explained.duration_ns, abs=0.5)
    assert recost(graph, target).nodes.duration_ns[graph.gpu_compute] == explained.duration_ns


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    """Return kept traces of three kinds: kernels of two GPUs, and operators of a CPU."""
    graphs = {"cpu": convert_directory(TRACES / "cpu-llama-2l-tp4")[0]}
    for name in ("h100-llama-8b-4l-tp4/trace", "h200-llama-8b-4l-tp2-real/real.0"):
        graphs[name] = kept_graph(name, tmp_path_factory.mktemp("traces"))
    return graphs


@pytest.mark.parametrize("model", ["auto", "residual", "roofline", "ratio"])
@pytest.mark.parametrize("target", ["A100", "H200", "T4", "MI300X"])
def test_the_terms_give_every_stored_duration_of_kept_traces(captured, target, model):
    """Of every compute node, so of every class of kernel, on near and far GPUs."""
    for graph in captured.values():
        costs = op_costs_of(graph)
        record = TermRecord(np.arange(len(costs.index)))
        recosted = recost(graph, target, model=model, record=record)
        nodes = recosted.nodes
        durations = dict(zip(nodes.id.tolist(), nodes.duration_ns.tolist(), strict=True))
        classes = set[int]()
        for row, node in enumerate(graph.nodes.id[costs.index].tolist()):
            if node in durations:
                evaluated = record.roots[row].evaluate()
                assert evaluated == pytest.approx(durations[node], abs=0.5 + 1e-6 * evaluated)
                classes.add(int(costs.op_class[row]))
        assert len(classes) >= 8


def test_overridden_figures_are_terms(captured):
    graph = captured["h100-llama-8b-4l-tp4/trace"]
    for target in ("H200", "H100"):  # looked up, and measured
        gpu = with_figures(load_gpu(target), {"memory_bandwidth_gb_per_s": 6000})
        record = TermRecord(np.arange(len(op_costs_of(graph).index)))
        nodes = recost(graph, gpu, record=record).nodes
        stored = nodes.duration_ns[graph.gpu_compute]
        evaluated = [record.roots[row].evaluate() for row in range(len(stored))]
        assert evaluated == pytest.approx(stored.tolist(), abs=0.5)
        assert any(root.name == "overrides" for root in record.roots.values())


def test_each_figure_comes_with_its_source(trace, mm, add):
    graph = trace(mm(4096, 4096, 4096), add(10**6))
    explained = [explain(graph, "A100", node).lines for node in kernel_ids(graph)]
    product, sum_ = ([text for name, text in one if name.endswith("figure")] for one in explained)
    assert "bf16_tensor_tflops = 312 (datasheet): NVIDIA A100 80GB" in " ".join(product)
    assert "memory_achievable_fraction = 0.86 (measured): 90th percentile" in " ".join(sum_)
    assert [text.split(" = ")[0] for text in sum_[:5]] == [
        "launch_floor_ns",
        "memory_bandwidth_gb_per_s",
        "memory_achievable_fraction",
        "fp32_vector_tflops",
        "vector_sustained_fraction",
    ]
    assert "sglang" in dict(explained[0])["coefficients"]


def test_on_the_same_gpu(trace, add):
    graph = trace(add(10**6))
    (node,) = kernel_ids(graph)
    assert explain(graph, "H200", node).duration_ns == 10_000


@pytest.mark.parametrize("target", ["A100", "T4", "TPU-v6e", "H200"])
def test_an_operator_of_a_cpu_capture_is_explained_by_the_datasheet(captured, target):
    """Each distinct call of a real capture: the terms are those of the graph made."""
    graph = captured["cpu"]
    record = TermRecord(np.zeros(0, dtype=np.int64))  # with a record operators stay whole
    made = recost(graph, target, record=record)
    launched = recost(graph, target)
    assert (len(launched) > len(made)) == load_gpu(target).is_nvidia
    assert launched.nodes.duration_ns.sum() == made.nodes.duration_ns.sum()
    durations = dict(zip(made.nodes.id.tolist(), made.nodes.duration_ns.tolist(), strict=True))
    costs = op_costs_of(graph)
    _, first = np.unique(costs.call, return_index=True)
    nodes = graph.nodes.id[costs.index[first]].tolist()
    for explained in explain_nodes(graph, target, nodes):
        assert explained.duration_ns == durations.get(explained.node, 0)
        if explained.terms is None:
            assert dict(explained.lines)["rule"] == "dropped: launches nothing"
            continue
        assert (
            "measured",
            "on no GPU: the capture was on a CPU or without a device",
        ) in explained.lines
        assert explained.terms.evaluate() == pytest.approx(explained.duration_ns, abs=0.5)


def test_nodes_that_are_not_recosted(trace, mm):
    graph = trace(mm(8, 8, 8))
    with raises_code("explain-unknown-node", naming=("999",)):
        explain(graph, "A100", 999)


def test_what_was_predicted_is_explained_by_its_own_trace_alone(trace, mm):
    graph = recost(trace(mm(4096, 4096, 4096)), "H100")
    (node,) = kernel_ids(graph)
    with raises_code("recost-not-measured"):
        explain(graph, "A100", node)
