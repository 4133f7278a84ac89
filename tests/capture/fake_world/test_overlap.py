"""Asynchronous calls of real scripts overlap what lies between them and their wait."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from notes import has_note

from onerank.capture import Options, WindowPlan, capture
from onerank.converters.sources.kineto import Conversion
from onerank.ir import Graph, Kind, Phase, Reason

START = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    torch.manual_seed(0)
"""

BY_HAND = """
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    inputs = torch.randn(8, 64)
    for _ in range(12):
        shared = inputs.clone()
        work = dist.all_reduce(shared, async_op=True)
        concurrent = torch.tanh(inputs @ weight)
        work.wait()
        (concurrent + shared).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

DDP = """
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def captured(directory: Path, text: str) -> tuple[Graph, Conversion]:
    script = directory / "train.py"
    script.write_text(textwrap.dedent(START) + textwrap.dedent(text))
    made = capture(script, [], Options(dp=4, windows=WindowPlan(warm_up=1, timed_steps=1)))
    return made.graph, made.conversion


def descendants(graph: Graph, start: int) -> set[int]:
    """Indices of all nodes that wait for `start`."""
    edges, found = graph.edges, {start}
    for node in graph.topological_order().tolist():
        if any(source in found for source, _ in edges.of(node)):
            found.add(node)
    return found


def test_a_call_overlaps_up_to_its_wait(tmp_path):
    graph, conversion = captured(tmp_path, BY_HAND)
    assert not has_note(conversion.notes, "async-assumed-blocking")
    (call,) = np.flatnonzero(graph.mask(Kind.COLLECTIVE)).tolist()
    behind = descendants(graph, call)
    names = {
        graph.node(i).name: i for i in range(len(graph)) if graph.node(i).phase is Phase.FORWARD
    }
    assert names["aten::mm"] not in behind
    assert names["aten::tanh"] not in behind
    assert names["aten::add"] in behind


def test_ddp_overlaps_backward(tmp_path):
    graph, conversion = captured(tmp_path, DDP)
    assert not has_note(conversion.notes, "async-assumed-blocking")
    calls = np.flatnonzero(graph.mask(Kind.COLLECTIVE)).tolist()
    assert len(calls) >= 2
    first = descendants(graph, calls[0])
    backward = [
        i
        for i in range(len(graph))
        if graph.node(i).phase is Phase.BACKWARD and graph.node(i).kind is Kind.HOST_OP
    ]
    later = [i for i in backward if graph.nodes.start_ns[i] > graph.nodes.start_ns[calls[0]]]
    copies = {i for i in later if graph.node(i).name.endswith("copy_bucket_to_grad")}
    assert copies
    assert copies <= first  # what autograd calls at its end waits for the buckets
    assert set(later) - copies
    assert not (set(later) - copies) & first  # the rest of backward runs during the first bucket
    optimizer = [i for i in range(len(graph)) if graph.node(i).phase is Phase.OPTIMIZER]
    assert set(optimizer) <= first
    chained = [r for s, r in graph.edges.of(calls[1]) if s == calls[0]]
    assert chained == [Reason.STREAM_ORDER]


@pytest.mark.parametrize("text", [BY_HAND, DDP])
def test_the_graph_has_an_order(tmp_path, text):
    graph, _ = captured(tmp_path, text)
    assert len(graph.topological_order()) == len(graph)
