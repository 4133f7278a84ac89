"""Times of modules without a profiler: work of a known length, and nothing changed."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from onerank.capture.profiling import step_timers
from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.capture.profiling.step_timers import ModuleTimer

MS = 1_000_000
SLACK = 1000  # readings of the clock that stands still but for work: each takes a nanosecond


class Clock:
    """Stands in for the module `time`: what takes time is work alone, whatever else runs here."""

    def __init__(self) -> None:
        self._readings, self._worked_ns = itertools.count(), 0

    def perf_counter_ns(self) -> int:
        return next(self._readings) + self._worked_ns

    def work(self, ms: int) -> None:
        self._worked_ns += ms * MS


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(step_timers, "time", CLOCK)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_ms, backward_ms):
        ctx.backward_ms = backward_ms
        CLOCK.work(forward_ms)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        CLOCK.work(ctx.backward_ms)
        return grad * 1, None, None


class SlowNorm(nn.LayerNorm):
    def __init__(self, forward_ms: int, backward_ms: int) -> None:
        super().__init__(4)
        self.ms = forward_ms, backward_ms

    def forward(self, x):
        return super().forward(Work.apply(x, *self.ms))


class Branches(nn.Module):
    """Two norms that read the same tensor, as attention and mlp do in a parallel block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SlowNorm(20, 40), SlowNorm(60, 80)

    def forward(self, x):
        return self.first(x) + self.second(x)


class Model(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Branches()])
        self.recomputes = recomputes

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            if self.recomputes:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return hidden.sum()


def timed(model: nn.Module, steps: int = 1, calls: int = 1) -> dict[tuple[str, str], tuple]:
    """Return (duration, calls, samples) by path and phase."""
    modules = Modules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(8)
    with modules.installed():
        with torch.no_grad():
            model(tokens)  # the capture knows the modules from the first step
        times = ModuleTimer(modules, on_gpu=False)
        with times.running():
            for _ in range(steps):
                for _ in range(calls):
                    model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                times.end_step(counts=True)
    return {(t.path, t.phase): (t.duration_ns, t.calls, t.samples) for t in times.times()}


def assert_near(found: int, expected_ms: int) -> None:
    assert expected_ms * MS <= found < expected_ms * MS + SLACK


def test_each_branch_has_its_own_time_forward_and_backward():
    found = timed(Model())
    assert_near(found["layers.0.first", "forward"][0], 20)
    assert_near(found["layers.0.second", "forward"][0], 60)
    assert_near(found["layers.0.first", "backward"][0], 40)
    assert_near(found["layers.0.second", "backward"][0], 80)
    assert_near(found["layers.0", "forward"][0], 80)
    assert_near(found["layers.0", "backward"][0], 120)
    assert found["embed", "backward"][0] > 0  # it ends with its weight's gradient
    assert found["optimizer", "optimizer"][1:] == (1, 1)


def test_calls_of_a_step_add_up_and_steps_are_samples():
    found = timed(Model(), steps=2, calls=2)
    assert found["layers.0.first", "forward"][1:] == (2, 2)
    assert_near(found["layers.0.first", "forward"][0], 40)


def test_recomputation_is_backward():
    found = timed(Model(recomputes=True))
    assert_near(found["layers.0", "forward"][0], 80)
    assert_near(found["layers.0", "backward"][0], 120 + 80)
    assert_near(found["layers.0.first", "backward"][0], 40 + 20)


class BreaksOff(nn.LayerNorm):
    """What torch.compile cannot trace as one."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("timed_steps", [0, 2])
@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
def test_layers_whose_compiled_code_breaks_off_are_timed(timed_steps):
    """Their hooks run between compiled pieces, and must not be taken for more to compile."""
    model = Model()
    model.layers = nn.ModuleList([BreaksOff(4), BreaksOff(4)])
    modules = Modules()
    with modules.installed(), torch.no_grad():
        model(torch.arange(8))
    with modules.installed():
        times = ModuleTimer(modules, on_gpu=False)
        compiled = torch.compile(model, backend="eager")
        with modules.only_models_hooked():
            for _ in range(timed_steps):
                compiled(torch.arange(8)).backward()
        with times.running():
            for step in range(3):
                compiled(torch.arange(8)).backward()
                times.end_step(counts=step > 0)
    found = {(one.path, one.phase, one.samples) for one in times.times()}
    layers = {(f"layers.{at}", phase, 2) for at in (0, 1) for phase in ("forward", "backward")}
    assert found >= layers


def test_a_compiled_step_of_an_optimizer_keeps_its_range():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, foreach=False)
    with Modules().installed():
        step = torch.compile(optimizer.step, backend="eager")
        step()
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#SGD.step") == 1


@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
def test_layers_that_are_compiled_one_by_one_share_their_code():
    """Beyond eight codes of a function torch.compile leaves it as it is."""
    model = Model()
    layers = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(9)]
    model.layers = nn.ModuleList(layers)
    modules = Modules()
    with modules.installed(), torch.no_grad():
        model(torch.arange(8))
    model.layers = nn.ModuleList(torch.compile(one, backend="eager") for one in layers)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with modules.installed(), ModuleTimer(modules, on_gpu=False).running():
        model(torch.arange(8)).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_nothing_is_timed_backward_without_gradients():
    model = Model().requires_grad_(False)
    model.embed.weight.requires_grad_(True)
    model.layers.requires_grad_(False)
    modules = Modules()
    with modules.installed(), torch.no_grad():
        model(torch.arange(8))
        times = ModuleTimer(modules, on_gpu=False)
        with times.running():
            model(torch.arange(8))
            times.end_step(counts=True)
    assert {time.phase for time in times.times()} == {"forward"}


@pytest.mark.parametrize("clocked", [False, True])
def test_neither_gradients_nor_lifetimes_change(clocked):
    """The clock holds no tensor, and a gradient is the same to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    modules = Modules()
    with modules.installed():
        model(x)
        times = ModuleTimer(modules, on_gpu=False)
        with times.running():
            if clocked:
                hidden = model(x)
                alive = weakref.ref(hidden)
                found = torch.autograd.grad(hidden.square().sum(), [*model.parameters()])
                del hidden
                gc.collect()
                assert alive() is None
            else:
                found = expected
            times.end_step(counts=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bool(times.times()) is clocked


def test_attention_to_one_tensor_is_timed_and_recomputed_as_it_is():
    """A query that is its key is one tensor to torch, and remains so under the clock."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = nn.MultiheadAttention(4, 1)

        def forward(self, x):
            return self.self_attn(x, x, x, need_weights=False)[0]

    model, x = Attends(), torch.randn(3, 1, 4, requires_grad=True)
    modules = Modules()
    with modules.installed():
        model(x)
        times = ModuleTimer(modules, on_gpu=False)
        with times.running():
            checkpoint(model, x, use_reentrant=False).sum().backward()
            times.end_step(counts=True)
    assert {(one.path, one.phase) for one in times.times()} >= {("self_attn", "backward")}


class Calls:
    """A listener that stores the path of each forward."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def enter(self, path: str, _: int) -> None:
        self.paths.append(path)

    def leave(self) -> None:
        pass


def test_only_models_are_hooked_while_steps_are_timed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    order: list[str] = []

    def doubles(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        order.append("model's own hook")
        return (torch.cat([*args, *args]),)

    model.register_forward_pre_hook(doubles)
    rows: list[int] = []
    modules, calls = Modules(), Calls()

    def observe(_: nn.Module, arguments: Arguments) -> None:
        order.append("modules")
        rows.append(arguments[0][0].shape[0])

    with modules.installed(), modules.listened_by(calls):
        later = register_module_forward_pre_hook(lambda *_: order.append("global hook"))
        modules.on_model_call.append(observe)
        x = torch.randn(2, 4)
        model(x)
        every, expected = [*calls.paths], [*order]
        calls.paths.clear()
        with modules.only_models_hooked():
            model(x)
            assert calls.paths == every[:1]
        order.clear()
        calls.paths.clear()
        model(x)
    later.remove()
    assert len(every) == 3
    assert calls.paths == every
    assert order == expected
    assert rows == [2, 2, 2]  # before the model's own hook doubles them, in every case
    assert modules.calls == 3
    model(x)
    assert modules.calls == 3


def test_compiled_modules_keep_their_hooks_while_steps_are_timed():
    modules, calls = Modules(), Calls()
    with modules.installed(), modules.listened_by(calls):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        model[0].compile(backend="eager")
        x = torch.randn(2, 4)
        model(x)
        every = [*calls.paths]
        calls.paths.clear()
        with modules.only_models_hooked():
            model(x)
    assert calls.paths == every
    assert len(every) == 3
