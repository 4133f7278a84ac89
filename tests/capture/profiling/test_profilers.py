"""What is taken of torch's profiler: the trace it writes, and nothing else."""

import gzip
import json
import textwrap
import warnings
from collections import Counter

import pytest
import torch
from own_process import run_command

import onerank
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.profiled_windows import kineto, write
from onerank.ir import Phase


def test_torch_is_not_let_make_an_object_of_each_event(tmp_path, monkeypatch):
    """As it does when it is told to accumulate events, for longer than the step took."""

    def made(*_, **__):
        pytest.fail("a list of events was made")

    monkeypatch.setattr(torch.autograd.profiler, "EventList", made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch 2.11 warns when it is told not to
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
