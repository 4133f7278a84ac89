"""Conversion of a real CPU capture: two small Llama layers as rank 0 of TP=4, hf flavour."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from small_traces import Trace

from onerank.annotate import characterise
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Collective, Graph, Kind, Phase, Reason

RAW = Path(__file__).parents[4] / "traces" / "cpu-llama-2l-tp4"

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 512, 1536, 8192
HEADS, KV_HEADS, HEAD_WIDTH = 8, 4, 64
TOKENS, TP = 2 * 64, 4


@pytest.fixture(scope="module")
def graph() -> Graph:
    return convert_directory(RAW)[0]


@pytest.fixture(scope="module")
def operators() -> list[dict]:
    events = json.loads(gzip.decompress((RAW / "profile.json.gz").read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "cpu_op"]


def test_products_are_whole_leaves(graph, operators):
    """Every mm of the trace is a node with its whole duration, whatever it calls."""
    expected = sorted(round(e["dur"] * 1000) for e in operators if e["name"] == "aten::mm")
    names = graph.text("name")
    durations_ns = [
        ns for name, ns in zip(names, graph.nodes.duration_ns, strict=True) if name == "aten::mm"
    ]
    assert sorted(durations_ns) == expected


def test_views_and_wrappers_are_no_nodes(graph):
    names = set(graph.text("name"))
    assert not names & {"aten::view", "aten::t", "aten::transpose", "aten::empty", "aten::linear"}
    assert not any(name.startswith(("autograd::", "c10d::", "onerank::")) for name in names)


def test_leaves_do_not_overlap(graph):
    """Leaf operators of one thread follow each other: no time is counted twice."""
    host = graph.mask(Kind.HOST_OP)
    start, duration = graph.nodes.start_ns[host], graph.nodes.duration_ns[host]
    assert (start[1:] >= start[:-1] + duration[:-1] - 2).all()  # Kineto rounds both ends


def test_collectives_are_those_of_transformers(graph):
    """7 all-reduces per layer (2 forward, 5 backward), embedding, head; gathered logits."""
    chosen = np.flatnonzero(graph.mask(Kind.COLLECTIVE))
    kinds = [graph.node(i).collective for i in chosen]
    assert kinds.count(Collective.ALL_REDUCE) == 7 * LAYERS + 2
    assert kinds.count(Collective.ALL_GATHER) == 1
    gather = chosen[kinds.index(Collective.ALL_GATHER)]
    assert graph.nodes.comm_bytes[gather] == TOKENS * VOCABULARY // TP * 4
    assert graph.node(gather).text("module") == "lm_head"
    backward = graph.nodes.phase[chosen] == Phase.BACKWARD
    assert backward.sum() == 5 * LAYERS + 1


def test_gemm_flops_are_those_of_the_sliced_model(graph):
    attention = HIDDEN * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS)
    weights = LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE) + HIDDEN * VOCABULARY
    costed = characterise(graph)
    products = np.array([op == "aten::mm" for op in costed.text("op")])
    assert costed.nodes.flops[products].sum() == 6 * TOKENS * weights // TP


def test_program_order_chains_operators_and_collectives(graph):
    assert set(graph.edges.reason.tolist()) == {Reason.PROGRAM_ORDER}
    assert len(graph.edges) == len(graph) - 1
    assert graph.topological_order().tolist() == list(range(len(graph)))


def test_peak_memory_counts_what_was_live_before(graph):
    """Sliced fp32 parameters, two Adam moments and gradients are live: 4 x 4 bytes each."""
    parameters = 3672576
    measurement = graph.job.measurement
    assert measurement.start_memory_bytes >= 4 * 4 * parameters
    assert measurement.start_memory_bytes < 4 * 4 * parameters * 1.02
    assert measurement.peak_memory_bytes > measurement.start_memory_bytes


def test_a_cpus_convolutions_in_groups_and_transposed_are_one_node_each(tmp_path):
    """As a CPU without bfloat16 in hardware does them: groups in turn, the bias by an addition."""
    trace = Trace()
    trace.op("aten::_convolution", 0, 50)
    for start in (1, 20):  # a group each
        trace.op("aten::copy_", start, 2)
        trace.op("aten::thnn_conv2d", start + 3, 10)
        trace.op("aten::_slow_conv2d_forward", start + 4, 8)
    trace.op("aten::cat", 45, 2)
    trace.op("aten::_convolution", 60, 20)
    trace.op("aten::slow_conv_transpose2d", 61, 15)
    trace.op("aten::zero_", 62, 1)
    trace.op("aten::add_", 64, 1)
    trace.op("aten::_convolution", 90, 20)  # of one group
    trace.op("aten::thnn_conv2d", 91, 15)
    graph, _ = trace.convert(tmp_path)
    assert graph.text("name") == [
        "aten::_convolution", "aten::slow_conv_transpose2d", "aten::thnn_conv2d",
    ]  # fmt: skip
