"""What is taken of torch's profiler: the trace it writes, and nothing else."""

import gzip
import json
import textwrap
import warnings
from collections import Counter

import pytest
import torch
from own_process import run_command
from torch.profiler import record_function

import onerank
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.profiled_windows import end_open_ranges, kineto, write
from onerank.ir import Phase


def test_torch_is_not_let_make_an_object_of_each_event(tmp_path, monkeypatch):
    """It does when it accumulates events, which takes longer than the step took."""

    def made(*_, **__):
        pytest.fail("a list of events was made")

    monkeypatch.setattr(torch.autograd.profiler, "EventList", made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch 2.11 warns unless it accumulates events
        with kineto(Modules(), on_gpu=False, record_shapes=False) as profiler:
            torch.ones(2) + 1
    write(profiler, tmp_path / "profile.json.gz")
    with gzip.open(tmp_path / "profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert "aten::add" in {event["name"] for event in events}
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json.gz"]


ATTENTION = """
    import torch
    from torch import nn
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        rows = [torch.ones(2, 4), torch.ones(3, 4)]
        rows = torch.nested.nested_tensor(rows, layout=torch.jagged)
        parts = [one(rows).unflatten(-1, [2, 2]).transpose(1, 2) for one in model]
        nn.functional.scaled_dot_product_attention(*parts).values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_attention_over_jagged_nested_tensors_is_captured(tmp_path):
    """Its backward took more callers off the observer's stack than were there: a crash."""
    path, trace = tmp_path / "train.py", tmp_path / "trace.et"
    path.write_text(textwrap.dedent(ATTENTION))
    done = run_command("capture", "run", path, "-o", trace, "--timed-steps", "1")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(trace)
    products = Counter(node.phase for node in graph if node.name in ("aten::addmm", "aten::mm"))
    assert products == {Phase.FORWARD: 3, Phase.BACKWARD: 3}
    # of two sequences of two heads: scores and results, and two gradients of each
    scores = [node for node in graph if node.name == "aten::bmm"]
    assert Counter(node.phase for node in scores) == {Phase.FORWARD: 2, Phase.BACKWARD: 4}
    assert {len(json.loads(node.text("input_shapes"))[0]) for node in scores} == {3}
    assert "callers" not in run_command("show", trace).stdout


RANGES = """
    import contextlib, torch
    from torch import nn
    from torch.profiler import record_function
    bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    indices, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1])
    while True:
        optimizer.zero_grad()
        with contextlib.ExitStack() as ranges:
            for _ in range(1000):
                ranges.enter_context(record_function("backward and step"))
            bag(indices, offsets).sum().backward()
            optimizer.step()
"""


def test_ranges_that_are_open_at_the_end_of_a_step_are_captured(tmp_path):
    """DLRM has one, and its end wrote into freed memory. A thousand killed 10 of 10 captures."""
    path, trace = tmp_path / "train.py", tmp_path / "trace.et"
    path.write_text(textwrap.dedent(RANGES))
    raw = tmp_path / "raw"
    options = ("--timed-steps", "1", "--raw-dir", raw)
    done = run_command("capture", "run", path, "-o", trace, *options)
    assert done.returncode == 0, done.stderr
    nodes = json.loads(gzip.decompress((raw / "et.json.gz").read_bytes()))["nodes"]
    assert Counter(node["name"] for node in nodes)["backward and step"] == 1000


def test_a_range_that_is_open_when_a_profile_ends_ends_there(tmp_path):
    scope = record_function("outer")
    with kineto(Modules(), on_gpu=False, record_shapes=False) as first:
        scope.__enter__()
        torch.ones(2)
        end_open_ranges()
        torch.zeros(2)
    with kineto(Modules(), on_gpu=False, record_shapes=False) as second:
        scope.__exit__(None, None, None)
    spans = []
    for profiler in (first, second):
        events = profiler.profiler.kineto_results.events()
        spans.append({event.name(): (event.start_ns(), event.end_ns()) for event in events})
    assert "outer" not in spans[1]
    assert spans[0]["outer"][0] <= spans[0]["aten::ones"][0]
    assert spans[0]["outer"][1] <= spans[0]["aten::zeros"][0]


GRAPH_CONVOLUTION = """
    import torch
    from torch import nn
    adjacency = (torch.rand(50, 50) < 0.1).float().to_sparse_csr()
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    while True:
        rows = torch.randn(50, 8)
        for layer in layers:
            rows = torch.relu(adjacency @ layer(rows))
        rows.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_products_with_a_sparse_csr_matrix_are_captured(tmp_path):
    """Its operators took more callers off the observer's stack than were there: 5 of 5 died."""
    path, trace = tmp_path / "train.py", tmp_path / "trace.et"
    path.write_text(textwrap.dedent(GRAPH_CONVOLUTION))
    done = run_command("capture", "run", path, "-o", trace, "--timed-steps", "1")
    assert done.returncode == 0, done.stderr
    products = Counter(node.phase for node in onerank.read(trace) if node.name == "aten::addmm")
    assert products == {Phase.FORWARD: 4, Phase.BACKWARD: 2}
