"""Kernels of a replayed CUDA graph get the operators that were captured into it."""

import gzip
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from notes import note_of

from onerank.annotate import characterise
from onerank.converters.sources.kineto import (
    EXECUTION_TRACE,
    GRAPH_REPLAY,
    PROFILE,
    STRUCTURE,
    Conversion,
    Sources,
    convert,
    convert_directory,
)
from onerank.ir import Graph

TRACES = Path(__file__).parents[5] / "traces" / "h100-cuda-graphs"


def converted(name: str) -> tuple[Graph, Conversion]:
    graph, report = convert_directory(TRACES / name)
    return characterise(graph), report


def kernels(graph: Graph) -> list[tuple[str, str, str, str, int]]:
    """Return kernel, operator, module, shapes and FLOPs of each GPU operation, by start."""
    places = np.flatnonzero(graph.gpu_compute)
    places = places[np.argsort(graph.nodes.start_ns[places], kind="stable")]
    columns = [graph.text(name) for name in ("name", "op", "module", "input_shapes")]
    flops = graph.nodes.flops.tolist()
    return [(*(column[place] for column in columns), flops[place]) for place in places.tolist()]


def events(path: Path) -> Iterable[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_replayed_decode_has_the_operators_of_the_eager_one():
    graph, report = converted("decode")
    eager, _ = convert(Sources(TRACES / "eager" / STRUCTURE, TRACES / "eager" / EXECUTION_TRACE))
    expected = kernels(characterise(eager))
    assert len(expected) == 125
    assert kernels(graph) == expected
    assert report.gpu_ops_linked == {"graph launch: external id": 125}
    durations = [e["dur"] for e in events(TRACES / "decode" / PROFILE) if e.get("cat") == "kernel"]
    total = sum(round(duration * 1000) for duration in durations)
    assert int(graph.nodes.duration_ns[graph.gpu_compute].sum()) == total


def test_the_operators_take_the_time_of_the_launch():
    graph, _ = converted("decode")
    (launch,) = (
        event for event in events(TRACES / "decode" / PROFILE) if event["name"] == "cudaGraphLaunch"
    )
    host = ~graph.gpu_compute
    begin = graph.nodes.start_ns[host]
    assert begin.max() - begin.min() <= launch["dur"] * 1000
    assert int(graph.nodes.duration_ns[host].sum()) <= launch["dur"] * 1000


def test_kernels_of_a_compiled_graph_have_their_operators():
    graph, report = converted("compiled")
    assert report.gpu_ops_linked == {"external id": 1, "graph launch: external id": 40}
    for kernel, operator, *_ in kernels(graph):
        if kernel.startswith("triton"):
            assert operator == kernel
        if kernel.startswith("nvjet"):
            assert operator == "aten::mm"


@pytest.fixture
def streams(tmp_path) -> Path:
    return Path(shutil.copytree(TRACES / "streams", tmp_path / "streams"))


def test_names_of_kernels_order_the_nodes_of_several_streams():
    pairs = [(kernel, operator) for kernel, operator, *_ in kernels(converted("streams")[0])]
    expected = {
        "gemm": "aten::mm",
        "Gelu": "aten::gelu",
        "Memcpy": "aten::copy_",
        "clamp": "aten::clamp_min",
        "FillFunctor": "aten::fill_",
        "softmax": "aten::_softmax",
        "OnSelf_add": "aten::add",
    }
    for part, operator in expected.items():
        assert {op for kernel, op in pairs if part in kernel} == {operator}
    assert len(pairs) == 12


def test_recorded_nodes_order_the_operations(streams):
    """As newer profilers record them."""
    (streams / "graph.0.kernels.json").unlink()
    captured = ["mm", "mm", "gelu", "copy_", "mm", "mm", "clamp_min", "fill_", "_softmax"]
    captured += ["add", "add", "add_"]
    for name in (PROFILE, STRUCTURE):
        trace = json.loads(gzip.decompress((streams / name).read_bytes()))
        gpu = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
        gpu.sort(key=lambda event: event["ts"])
        for node, event in enumerate(reversed(gpu), start=1):
            event["args"]["graph node id"] = node
        (streams / name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    graph, _ = convert_directory(streams)
    found = [operator.removeprefix("aten::") for _, operator, *_ in kernels(graph)]
    assert found == captured[::-1]


def test_an_order_by_start_is_noted(streams):
    assert "graph-nodes-by-start" not in [note.code for note in converted("streams")[1].notes]
    (streams / "graph.0.kernels.json").unlink()
    _, report = convert_directory(streams)
    note_of(report.notes, "graph-nodes-by-start", "graph 0")
    assert report.gpu_ops_linked == {"graph launch: external id": 12}


def test_a_graph_replayed_twice_has_its_operators_twice(streams):
    for name in (PROFILE, STRUCTURE):
        trace = json.loads(gzip.decompress((streams / name).read_bytes()))
        later = []
        for event in trace["traceEvents"]:
            is_replay = event["name"].startswith((GRAPH_REPLAY, "cudaGraphLaunch"))
            if is_replay or event.get("cat") in ("kernel", "gpu_memcpy"):
                args = dict(event["args"])
                if "correlation" in args:
                    args["correlation"] += 1
                later.append({**event, "ts": event["ts"] + 5000, "args": args})
        trace["traceEvents"] += later
        (streams / name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    graph, report = convert_directory(streams)
    assert report.gpu_ops_linked == {"graph launch: external id": 24}
    names = [operator for _, operator, *_ in kernels(graph)]
    assert names[:12] == names[12:]


def test_a_recording_of_another_graph_links_nothing(streams):
    shutil.copy(TRACES / "decode" / "graph.0.json.gz", streams)
    shutil.copy(TRACES / "decode" / "graph.0.et.json.gz", streams)
    shutil.copy(TRACES / "eager" / STRUCTURE, streams)
    shutil.copy(TRACES / "eager" / EXECUTION_TRACE, streams)
    shutil.copy(TRACES / "streams" / PROFILE, streams)
    sources = Sources(streams / PROFILE, operators=True, graphs=streams)
    _, report = convert(sources)
    assert report.gpu_ops_linked == {}
    assert "graph-recording-differs" in [note.code for note in report.notes]
