"""Steps of a script whose work differs: noted, or captured as one."""

import textwrap

import pytest
from notes import has_note, note_of
from raised import raises_code

from onerank.capture import Options, WindowPlan, capture

CRITIC_AND_GENERATOR = """
    import torch
    critic, generator = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
    optimizers = [torch.optim.SGD(m.parameters()) for m in (critic, generator)]
    while True:
        for _ in range(3):
            critic(generator(torch.randn(2, 4)).detach()).sum().backward()
            optimizers[0].step()
        critic(generator(torch.randn(2, 4))).sum().backward()
        optimizers[1].step()
"""


@pytest.mark.parametrize("together", [1, 3])
def test_steps_of_different_work_are_noted_or_captured_as_one(together, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(CRITIC_AND_GENERATOR))
    plan = WindowPlan(warm_up=1, timed_steps=1, optimizer_steps=together)
    graph = capture(path, [], Options(windows=plan)).graph
    products = sum(node.name == "aten::mm" for node in graph)
    differ = has_note(graph.job.measurement.notes, "steps-differ")
    if together == 3:  # 2 forward and 1 backward for each of the critic's, 2 and 3 the generator's
        assert products == 3 * 3 + 5
        assert not differ
    else:
        assert products in (3, 3 + 5)
        note_of(graph.job.measurement.notes, "steps-differ", "2 to 4", "--optimizer-steps 3")


EVERY_SECOND = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    own = torch.optim.SGD(model.parameters())
    for step in range(60):
        model(torch.randn(2, 8)).sum().backward()
        for parameter in model[step % 2 :].parameters():
            dist.all_reduce(parameter.grad)
        own.step()
        own.zero_grad()
"""


@pytest.mark.parametrize("together", [1, 2])
def test_steps_with_different_counts_of_calls_are_noted_or_captured_as_one(together, tmp_path):
    """As of an optimizer that updates some parameters in every second step (modded-nanogpt's)."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(EVERY_SECOND))
    plan = WindowPlan(warm_up=1, timed_steps=1, optimizer_steps=together)
    done = capture(path, [], Options(dp=2, windows=plan))
    notes = done.graph.job.measurement.notes
    calls = int(done.graph.communication.sum())
    if together == 2:
        assert calls == 4 + 2
        assert not has_note(notes, "steps-differ")
    else:
        note_of(notes, "steps-differ", "2 to 4", calls, "--optimizer-steps 2")
    # The structure is that of a step like the profiled one.
    assert not has_note(notes, "profiled-times-dropped")


def test_a_script_may_end_before_a_step_does_the_work_of_the_profiled_one(tmp_path):
    path, raw = tmp_path / "train.py", tmp_path / "raw"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(9):\n"
        "    for _ in range(step + 1):\n"
        "        model(torch.randn(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise SystemExit(0)\n"
    )
    plan = WindowPlan(warm_up=1, timed_steps=1)
    graph = capture(path, [], Options(windows=plan, raw_dir=raw)).graph
    note_of(graph.job.measurement.notes, "steps-differ", "2 to 9", 7)
    assert sorted(p.name for p in raw.glob("*et*")) == ["et.json.gz"]


def test_a_script_that_ends_within_the_first_of_several_steps(tmp_path):
    path = tmp_path / "train.py"
    text = CRITIC_AND_GENERATOR.replace("while True:", "for _ in range(4):")
    path.write_text(textwrap.dedent(text))
    plan = WindowPlan(warm_up=1, timed_steps=1, optimizer_steps=25)
    with raises_code("script-too-few-steps", naming=("12 optimizer steps", "200")):
        capture(path, [], Options(windows=plan))
