"""The public names, and the library as a user would call it."""

import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import onerank
from onerank.converters.sources.kineto import convert_directory

RAW = Path(__file__).parents[1] / "traces" / "h200-llama-8b-4l-tp4"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("api") / "trace.et"
    convert_directory(RAW)[0].write(path)
    return path


def test_public_names():
    assert sorted(onerank.__all__) == ["Graph", "predict", "read", "recost"]
    for name in onerank.__all__:
        assert getattr(onerank, name).__doc__


def test_importing_it_is_light():
    """Neither torch nor polars nor protobuf is loaded before it is needed."""
    heavy = "{'torch', 'polars', 'google.protobuf', 'numpy', 'networkx', 'rich', 'transformers'}"
    code = f"import sys, onerank, onerank.cli; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_read_recost_write(trace, tmp_path):
    graph = onerank.read(trace)
    h100 = onerank.recost(graph, target="H100")
    h100.write(tmp_path / "h100.et")
    again = onerank.read(tmp_path / "h100.et")
    assert again.job.device.name == "H100-SXM"
    assert again.job.annotations[-1].source == "H200"
    gpu = again.gpu_compute
    before, after = graph.nodes.duration_ns[gpu].sum(), again.nodes.duration_ns[gpu].sum()
    assert 1.0 < after / before < 4800 / 3350  # slower memory, equal tensor cores


def test_frames(trace):
    graph = onerank.read(trace)
    nodes, edges = graph.nodes_frame(), graph.edges_frame()
    assert nodes.height == len(graph)
    kernels = nodes.filter(nodes["kind"] == "kernel")
    assert kernels["duration_ns"].sum() > 0
    assert set(edges["reason"]) == {"launch", "program_order", "stream_order", "sync"}
    assert set(edges["source"]) | set(edges["target"]) <= set(nodes["id"])


def test_networkx(trace):
    graph = onerank.read(trace)
    made = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(made)
    assert made.number_of_nodes() == len(graph)
    assert made.number_of_edges() == len(graph.edges)
    source, target, data = next(iter(made.edges(data=True)))
    assert data["reason"] in {"launch", "program_order", "stream_order", "sync"}
    assert made.nodes[source]["name"]
    assert source != target
