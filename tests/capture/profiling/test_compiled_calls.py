"""Modules compiled in place are watched as if they were not: `torch.compile` hides their hooks."""

import copy

import pytest
import torch
from torch import nn

from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.step_timers import ModuleTimer


class Block(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.norm, self.project, self.breaks = nn.LayerNorm(4), nn.Linear(4, 4), breaks

    def forward(self, x, scale=1.0):
        x = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.project(x) * scale


class Model(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(breaks=breaks) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return x


class Heard:
    """Keeps which forwards lie in which."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.found: list[str] = []

    def enter(self, path: str, model: int) -> None:
        self.open.append(path)
        self.found.append(" > ".join(self.open))

    def leave(self) -> None:
        self.open.pop()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_each_forward_is_heard_of(whole, breaks):
    torch._dynamo.reset()
    modules, heard, x = Modules(), Heard(), torch.randn(2, 4)
    with modules.installed():
        model = Model(breaks=breaks)
        for part in [model] if whole else model.layers:
            part.compile(backend="eager")
        model(x)
        with modules.listened_by(heard):
            model(x)
    assert heard.open == []
    assert modules.calls == 2
    layers = [line for line in heard.found if line.startswith("Model > layers")]
    if not whole:
        assert [line for line in layers if line.count(">") == 1] == [
            "Model > layers.0",
            "Model > layers.1",
        ]
    assert heard.found[0] == "Model"
    assert sum(line == "Model" for line in heard.found) == 1


def test_a_forward_that_raises_ends():
    modules, heard = Modules(), Heard()
    with modules.installed():
        model = Model(breaks=False)
        model.layers[1].compile(backend="eager")
        model(torch.randn(2, 4))
        with modules.listened_by(heard), pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
    assert heard.open == []


def test_layers_are_timed_forward_and_backward():
    modules = Modules()
    with modules.installed():
        model = Model(breaks=False)
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        model(torch.randn(2, 4)).sum().backward()
        clock = ModuleTimer(modules, on_gpu=False)
        with clock.running():
            model(torch.randn(2, 4)).sum().backward()
            clock.end_step(counts=True)
    times = {(time.path, time.phase): time.duration_ns for time in clock.times()}
    assert times.keys() == {
        (f"layers.{place}", phase) for place in (0, 1) for phase in ("forward", "backward")
    }
    assert min(times.values()) > 0


def test_a_copy_is_not_compiled_and_nothing_is_left_behind():
    original = nn.Module.compile
    with Modules().installed():
        model = Model(breaks=False)
        model.compile(backend="eager")
        assert copy.deepcopy(model)._compiled_call_impl is None
    assert nn.Module.compile is original
