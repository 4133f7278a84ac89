"""Conversion of a real H200 capture: rank 0 of TP=4, a Llama-8B shape with 4 layers.

The expected figures come from the capture's files, read here with json only, or from
arithmetic on the model's shape that a person can redo.
"""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from onerank.annotate import characterise
from onerank.converters.sources.kineto import Conversion, convert_directory
from onerank.ir import Collective, Evidence, Graph, Kind, Phase, Reason

RAW = Path(__file__).parents[4] / "traces" / "h200-llama-8b-4l-tp4"

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_WIDTH = 32, 8, 128
TOKENS, TP = 4096, 4


@pytest.fixture(scope="module")
def converted() -> tuple[Graph, Conversion]:
    return convert_directory(RAW)


@pytest.fixture(scope="module")
def graph(converted: tuple[Graph, Conversion]) -> Graph:
    return converted[0]


@pytest.fixture(scope="module")
def profile() -> list[dict]:
    return json.loads(gzip.decompress((RAW / "profile.json.gz").read_bytes()))["traceEvents"]


def gpu_events(profile: list[dict]) -> list[dict]:
    return [e for e in profile if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_every_gpu_operation_is_linked(converted, profile):
    report = converted[1]
    assert report.gpu_ops == len(gpu_events(profile))
    assert report.gpu_ops_linked == {"external id": report.gpu_ops}
    assert report.gpu_ops_unlinked == {}
    assert report.gpu_ops_dropped == (0, 0)


def test_kernel_time_is_conserved_to_the_nanosecond(graph, profile):
    expected = sum(round(event["dur"] * 1000) for event in gpu_events(profile))
    assert graph.nodes.duration_ns[graph.gpu_compute].sum() == expected


def test_kinds_are_those_of_the_events(graph, profile):
    for kind, category in (
        (Kind.KERNEL, "kernel"),
        (Kind.MEMCPY, "gpu_memcpy"),
        (Kind.MEMSET, "gpu_memset"),
    ):
        expected = sum(event.get("cat") == category for event in profile)
        assert graph.mask(kind).sum() == expected > 0


def test_peak_memory_is_the_allocators(graph, profile):
    on_gpu = [e for e in profile if e["name"] == "[memory]" and e["args"]["Device Type"] == 1]
    highest_total = max(event["args"]["Total Allocated"] for event in on_gpu)
    assert graph.job.measurement.peak_memory_bytes == highest_total


def test_memory_of_the_operators_adds_up(graph, profile):
    on_gpu = [
        e["args"]["Bytes"]
        for e in profile
        if e["name"] == "[memory]" and e["args"]["Device Type"] == 1
    ]
    assert graph.nodes.bytes_allocated.sum() == sum(size for size in on_gpu if size > 0)
    assert graph.nodes.bytes_freed.sum() == -sum(size for size in on_gpu if size < 0)


def test_collectives_are_megatrons(graph):
    """Two all-reduces per layer and direction; embedding and head; three of the loss."""
    collectives = np.flatnonzero(graph.mask(Kind.COLLECTIVE))
    assert {graph.node(i).collective for i in collectives} == {Collective.ALL_REDUCE}
    sizes = graph.nodes.comm_bytes[collectives]
    forward = graph.nodes.phase[collectives] == Phase.FORWARD
    hidden_states = TOKENS * HIDDEN * 2
    per_token = TOKENS * 4
    assert sorted(sizes[forward]) == [per_token] * 3 + [hidden_states] * (2 * LAYERS + 1)
    assert sorted(sizes[~forward]) == [hidden_states] * (2 * LAYERS + 1)
    assert set(graph.text("group")) == {"", "tp"}
    assert graph.job.group("tp").ranks == (0, 1, 2, 3)


def test_gemm_flops_are_those_of_the_sliced_model(graph):
    """Each weight costs 2 FLOPs per token in forward and 4 in backward."""
    attention = HIDDEN * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS)
    weights = LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE) + HIDDEN * VOCABULARY
    costed = characterise(graph)
    products = np.array([op == "aten::mm" for op in costed.text("op")]) & costed.gpu_compute
    assert costed.nodes.flops[products].sum() == 6 * TOKENS * weights // TP


def test_one_stream_runs_in_order(graph):
    """Every operation but the first waits for its predecessor or for the collective between."""
    edges = graph.edges
    lane = graph.gpu_compute | graph.communication
    chained = (edges.reason == Reason.STREAM_ORDER).sum()
    assert len(set(graph.nodes.stream[graph.gpu_compute])) == 1
    assert chained == lane.sum() - 1
    assert len(graph.topological_order()) == len(graph)


def test_collectives_stand_between_the_kernels_they_separate(graph):
    """The all-reduce after o_proj waits for its product and holds back the residual's add."""
    edges = graph.edges
    collective = next(
        index
        for index in np.flatnonzero(graph.mask(Kind.COLLECTIVE))
        if graph.node(index).text("module") == "model.layers.0.self_attn.o_proj"
    )
    before = [s for s, reason in edges.of(collective) if reason is Reason.STREAM_ORDER]
    after = edges.target[(edges.source == collective) & (edges.reason == Reason.STREAM_ORDER)]
    assert [graph.node(i).text("op") for i in before] == ["aten::mm"]
    assert [graph.node(i).text("op") for i in after] == ["aten::add"]


def test_every_launch_comes_from_its_operator(graph):
    edges = graph.edges
    launches = edges.reason == Reason.LAUNCH
    names, ops = graph.text("name"), graph.text("op")
    gpu = graph.gpu_compute
    pairs = zip(edges.source[launches], edges.target[launches], strict=True)
    launches = [(names[s], ops[t]) for s, t in pairs if gpu[t]]
    assert len(launches) == gpu.sum()
    assert all(operator == launcher for launcher, operator in launches)


def test_phases_and_modules(graph):
    gpu = graph.gpu_compute
    phases = graph.nodes.phase[gpu]
    counts = {phase: int((phases == phase).sum()) for phase in Phase}
    assert counts[Phase.FORWARD] > 0
    assert counts[Phase.BACKWARD] > counts[Phase.FORWARD]
    assert counts[Phase.OPTIMIZER] > 0
    assert counts[Phase.NONE] <= 2  # drawing the tokens
    modules = [graph.node(i).text("module") for i in np.flatnonzero(gpu)]
    per_layer = [sum(m.startswith(f"model.layers.{n}.") for m in modules) for n in range(LAYERS)]
    assert len(set(per_layer[1:])) == 1  # equal layers, but for the first one's gradient
    backward = [m for m, phase in zip(modules, phases, strict=True) if phase == Phase.BACKWARD]
    attributed = sum(map(bool, backward))
    assert attributed / len(backward) > 0.95


def test_host_operators_keep_their_own_time(graph, profile):
    """No time is counted twice: all host ops together take no longer than the step's span."""
    host = graph.mask(Kind.HOST_OP)
    operators = [e for e in profile if e.get("cat") == "cpu_op"]
    per_thread = {}
    for event in operators:
        start, end = per_thread.get(event["tid"], (math.inf, 0))
        per_thread[event["tid"]] = (
            min(start, event["ts"]),
            max(end, event["ts"] + event["dur"]),
        )
    span_ns = sum((end - start) * 1000 for start, end in per_thread.values())
    assert 0 < graph.nodes.duration_ns[host].sum() <= span_ns
    assert (graph.nodes.duration_ns[host] >= 0).all()
    assert (graph.nodes.evidence[graph.gpu_compute] == Evidence.MEASURED).all()


def test_reads_back_equal(graph, tmp_path):
    import onerank

    graph.write(tmp_path / "trace.et")
    again = onerank.read(tmp_path / "trace.et")
    assert again.nodes_frame().equals(graph.nodes_frame())
    assert again.edges_frame().equals(graph.edges_frame())
    assert again.job == graph.job
