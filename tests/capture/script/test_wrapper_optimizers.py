"""Optimizers that an object of the script's steps among other work, as large trainers do."""

import textwrap

import pytest
import torch
from notes import codes

from onerank.capture import Options, WindowPlan, capture
from onerank.capture.script.optimizer_steps import after_step
from onerank.ir import Phase


class Sharded:
    """Steps one group of parameters after the other, then gathers, as DeepSpeed does."""

    def __init__(self, reported):
        groups = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.optimizer = torch.optim.SGD([{"params": [one]} for one in groups], lr=0.1)
        self.reported = reported

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        for group in self.param_groups:
            group["params"][0].grad = torch.ones(2)
            self.optimizer.step()
        self.reported.append("gathered")


class Chained:
    """Steps others, as Megatron-LM does."""

    def __init__(self, *parts):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_ends_where_the_outer_one_does(parts):
    reported = []
    own = Sharded.step, Chained.step
    outer = Chained(*(Sharded(reported) for _ in range(parts)))
    with after_step(lambda *, skipped: reported.append(f"{skipped=}")):
        for _ in range(3):
            outer.step()
    all_gathered, ended = ["gathered"] * parts, "skipped=False"
    # the first is met while it runs
    assert reported == [ended, *all_gathered, *all_gathered, ended, *all_gathered, ended]
    assert own == (Sharded.step, Chained.step)


def test_an_optimizer_that_is_stepped_otherwise_later_is_reported():
    reported = []
    outer = Sharded([])
    with after_step(lambda *, skipped: reported.append(skipped)):
        outer.step()
        for _ in range(3):
            outer.optimizer.step()
    assert reported == [False] * 4


class Scaled(Sharded):
    """Leaves its optimizer's step out, and tells it one way or the other."""

    def __init__(self, *, returns):
        super().__init__([])
        self.overflow = False
        self.returns = returns

    def step(self, *, infinite=False):
        self.overflow = infinite and not self.returns
        if not infinite:
            super().step()
        return (not infinite, None) if self.returns else None


@pytest.mark.parametrize("returns", [True, False])  # as Megatron-LM, as DeepSpeed
def test_an_outer_step_that_leaves_the_optimizers_out_is_skipped(returns):
    reported = []
    outer, other = Scaled(returns=returns), Scaled(returns=returns)
    with after_step(lambda *, skipped: reported.append(skipped)):
        for infinite in (False, False, True, False):
            outer.step(infinite=infinite)
            other.step(infinite=True)  # a critic's says nothing of the first one's
    assert reported == [False, False, True, False]


def test_what_an_outer_step_does_is_of_the_optimizers_phase(tmp_path):
    path = tmp_path / "train.py"
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")

        class Wrapper:
            def __init__(self, optimizer):
                self.optimizer = optimizer
                self.param_groups = optimizer.param_groups
            def step(self):
                dist.all_reduce(model.weight.grad)
                for _ in range(2):
                    self.optimizer.step()
                dist.broadcast(model.weight.data, 0)

        model = torch.nn.Linear(8, 8)
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    """
    path.write_text(textwrap.dedent(script))
    plan = WindowPlan(warm_up=1, timed_steps=1)
    graph = capture(path, [], Options(dp=2, windows=plan)).graph
    calls = [(node.name, node.phase) for node in graph if node.kind.is_communication]
    assert calls == [("all_reduce", Phase.OPTIMIZER), ("broadcast", Phase.OPTIMIZER)]
    assert codes(graph.job.measurement.notes) == ["captured-on-cpu"]
