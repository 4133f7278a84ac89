"""Recording of CUDA graphs. Without a GPU, methods that do nothing stand for those of a graph."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from onerank.capture.profiling import cuda_graphs
from onerank.capture.profiling.cuda_graphs import GraphRecorder
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.profiled_windows import kineto


class Graph:
    """Stands for a torch.cuda.CUDAGraph."""


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(torch.cuda.CUDAGraph, name, lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "kineto", lambda *_, **__: kineto(
        Modules(), on_gpu=False, record_shapes=True))  # fmt: skip
    monkeypatch.setattr(cuda_graphs, "_kernels_of_capture", lambda: ["kernel"])
    (tmp_path / "recordings").mkdir()
    (tmp_path / "step").mkdir()
    recorder = GraphRecorder(Modules(), tmp_path / "recordings", tmp_path / "step")
    with recorder.installed():
        yield recorder


def replay_profiled(graph: Graph) -> list[str]:
    """Return the names of the events of a profiled replay."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.cuda.CUDAGraph.replay(graph)
    return [event.name for event in profiler.events()]


def test_a_recording_is_kept_with_the_steps_that_replay_its_graph(recorder, tmp_path):
    graphs = [Graph(), Graph()]
    for graph in graphs:
        torch.cuda.CUDAGraph.capture_begin(graph)
        nn.functional.relu(torch.ones(2))
        torch.cuda.CUDAGraph.capture_end(graph)
    torch.cuda.CUDAGraph.replay(graphs[0])
    assert not any((tmp_path / "step").iterdir())
    assert "onerank::graph::1" in replay_profiled(graphs[1])
    kept = sorted(path.name for path in (tmp_path / "step").iterdir())
    assert kept == ["graph.1.et.json.gz", "graph.1.json.gz", "graph.1.kernels.json"]
    assert not recorder.notes()


def test_a_graph_that_is_captured_under_a_profiler_has_a_note(recorder):
    graph = Graph()
    with profile(activities=[ProfilerActivity.CPU]):
        torch.cuda.CUDAGraph.capture_begin(graph)
        torch.cuda.CUDAGraph.capture_end(graph)
    replay_profiled(graph)
    assert [note.code for note in recorder.notes()] == ["graph-not-recorded"]
