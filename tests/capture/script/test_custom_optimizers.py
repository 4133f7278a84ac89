"""Optimizers of a script's own, which are none of torch.optim's."""

import textwrap

import pytest
import torch
from raised import raises_code

from onerank.capture import Options, WindowPlan, capture
from onerank.capture.script.optimizer_steps import after_step
from onerank.ir import Collective, Phase
from onerank.ir.errors import ScriptError


class Plain:
    """Holds its parameters as keys, with what it knows of each, as modded-nanogpt's does."""

    def __init__(self, parameters):
        self.known = {one: {"step": 0} for one in parameters}

    @torch.no_grad()
    def step(self):
        for one in self.known:
            one.sub_(one.grad, alpha=0.1)
            one.grad = None


class Grouped(Plain):
    def __init__(self, parameters):
        super().__init__([])
        self.param_groups = [{"params": list(parameters)}]
        self.known = ()

    def step(self):
        self.known = self.param_groups[0]["params"]
        super().step()


class Average:
    """Steps, and holds copies that nothing trains."""

    def __init__(self, parameters):
        self.copies = [one.detach().clone() for one in parameters]

    def step(self):
        pass


class Schedule:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass


def steps_reported(steps, iterations):
    """Return what is reported of a script that runs a backward and steps all of these, in turn."""
    reported = []
    with after_step(lambda *, skipped: reported.append((len(seen), skipped))):
        seen = []
        for iteration in range(iterations):
            for one in parameters_of(steps):
                one.square().sum().backward()
            for what in steps:
                what.step()
            seen.append(iteration)
    return reported


def parameters_of(steps):
    return getattr(steps[0], "known", None) or steps[0].param_groups[0]["params"]


@pytest.mark.parametrize("kind", [Plain, Grouped])
def test_their_steps_end_iterations_from_the_second_on(kind):
    step = kind.step
    optimizer = kind([torch.nn.Parameter(torch.ones(2))])
    others = [Average(parameters_of([optimizer])), Schedule(optimizer)]
    assert steps_reported([optimizer, *others], 4) == [(1, False), (2, False), (3, False)]
    assert kind.step is step


def test_the_first_of_several_marks_iterations():
    weight = [torch.nn.Parameter(torch.ones(2))]
    both = [Plain(weight), Plain([torch.nn.Parameter(torch.ones(2))])]
    both[1].step = lambda: None  # its gradients are not there
    assert steps_reported(both, 3) == [(1, False), (2, False)]


def test_torchs_come_first_where_both_step():
    weight = torch.nn.Parameter(torch.ones(2))
    own = Plain([weight])
    own.step = lambda: None
    torchs = torch.optim.SGD([weight], lr=0.1)
    assert steps_reported([torchs, own], 3) == [(0, False), (1, False), (2, False)]


class Trainer:
    """Runs its backwards itself: what it steps is no update alone."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(2))

    def step(self):
        self.weight.square().sum().backward()


def test_a_step_that_runs_a_backward_is_no_optimizers():
    reported, trainer = [], Trainer()
    with after_step(lambda *, skipped: reported.append(skipped)):
        for _ in range(6):
            trainer.step()
    assert reported == []


SCRIPT = textwrap.dedent("""
    import torch, torch.distributed as dist
    from torch import nn

    class Own:
        def __init__(self, parameters):
            self.state = {one: torch.zeros_like(one) for one in parameters}

        @torch.no_grad()
        def step(self):
            for one, momentum in self.state.items():
                dist.all_reduce(one.grad)
                momentum.mul_(0.9).add_(one.grad)
                one.sub_(momentum, alpha=1e-3)
                one.grad = None

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    own = Own(model.parameters())
    for _ in range(12):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        UPDATE
""")

PLAN = WindowPlan(warm_up=1, timed_steps=1)


def test_what_one_does_is_of_the_optimizers_phase(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT.replace("UPDATE", "own.step()"))
    graph = capture(script, (), Options(dp=4, windows=PLAN)).graph
    names = graph.text("name")
    updates = [phase for name, phase in zip(names, graph.nodes.phase, strict=True)
               if name in ("aten::mul_", "aten::sub_")]  # fmt: skip
    assert updates == [Phase.OPTIMIZER] * 8  # of four parameters, in one step
    sums = graph.nodes.collective == Collective.ALL_REDUCE
    assert graph.nodes.comm_bytes[sums].tolist() == [128, 32, 128, 16]


def test_an_update_by_hand_is_refused_by_name(tmp_path):
    script = tmp_path / "hand.py"
    script.write_text(SCRIPT.replace("UPDATE", "[p.data.sub_(p.grad) for p in own.state]"))
    with raises_code("script-no-step", ScriptError):
        capture(script, (), Options(dp=4, windows=PLAN))
