"""What is taken of torch's profiler: the trace it writes, and nothing else."""

import gzip
import json
import warnings

import pytest
import torch

from onerank.capture.windows.profilers import kineto, write
from onerank.capture.windows.scopes import Modules


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
