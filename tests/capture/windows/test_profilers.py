"""What is taken of torch's profiler: the trace it writes, and nothing else."""

import gzip
import json
import textwrap
import warnings

import pytest
import torch

from onerank.capture import Options, Plan, capture
from onerank.capture.windows.profilers import kineto, write
from onerank.capture.windows.scopes import Modules
from onerank.ir import World


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


def test_nested_tensors_are_warned_of_before_torchs_observer_ends_the_process(tmp_path):
    path, said = tmp_path / "train.py", []
    path.write_text(
        textwrap.dedent(
            """
            import torch
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            while True:
                rows = [torch.ones(2, 4), torch.ones(3, 4)]
                rows = torch.nested.nested_tensor(rows, layout=torch.jagged)
                model(rows).values().sum().backward()
                optimizer.step()
            """
        )
    )
    plan = Plan(warm_up=0, pure=1)
    capture(path, [], Options(World.of(dp=1), plan=plan), progress=said.append)
    (told,) = [line for line in said if line.startswith("structure step")]
    assert told.endswith("torch ends here in backward of attention over nested tensors")
