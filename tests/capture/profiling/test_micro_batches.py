"""Schedules of a script's own: which forward and backward are of one micro-batch, what it holds."""

import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from notes import has_note

from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Graph, Phase

# Each action is a call or a backward of a micro-batch on a chunk of layers: F0, B0, or F0.1. Inputs
# and gradients are made before; chunks are of one class, as a pipeline's often are.
SCRIPT = """
    import torch
    from torch import nn
    chunks = [nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 20)) for _ in range(CHUNKS)]
    chunks = [chunk.to("DEVICE") for chunk in chunks]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    x, gradient = torch.randn(2, 20).to("DEVICE"), torch.ones(2, 20).to("DEVICE")
    def act(action, made):
        phase, (number, _, chunk) = action[0], action[1:].partition(".")
        if phase == "E":
            with torch.no_grad():
                kept.append(chunks[0](x).sum())
        elif phase == "F":
            made[action[1:]] = chunks[int(chunk or 0)](x)
        elif phase in "BC":
            if phase == "B":
                gradient.fill_(1)  # as if received
            made.pop(action[1:]).backward(gradient)
        else:  # of all at once
            torch.autograd.backward([*made.values()], [gradient] * len(made))
            made.clear()
    kept = []
    for step in range(40):
        made = {}
        for action in "ACTIONS".split():
            act(action, made)
        optimizer.step()
        optimizer.zero_grad()
"""

HELD = 2 * 50 * 4 + 2 * 20 * 4

"""Of a call: what Tanh keeps for its backward, which is its output, and the chunk's output."""


def run(directory: Path, actions: str, device: str = "cpu") -> Graph:
    chunks = 2 if "." in actions else 1
    text = textwrap.dedent(SCRIPT).replace("ACTIONS", actions).replace("CHUNKS", str(chunks))
    text = text.replace("DEVICE", device)
    path = directory / "train.py"
    path.write_text(text)
    return capture(path, [], Options(windows=WindowPlan(warm_up=1, timed_steps=1))).graph


def numbers(graph: Graph, phase: Phase) -> list[int]:
    """The micro-batch of each Tanh, in the order of time."""
    tanh = {Phase.FORWARD: "aten::tanh", Phase.BACKWARD: "aten::tanh_backward"}[phase]
    return [node.value("micro_batch") for node in graph if node.name == tanh]


SCHEDULES = {
    "1F1B": "F0 F1 F2 B0 F3 B1 B2 B3",
    "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3",
    "GPipe, one chunk after the other": "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
    "interleaved 1F1B": "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
    "accumulation": "F0 B0 F1 B1 F2 B2",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_backward_has_the_number_of_its_forward(tmp_path, schedule):
    actions = SCHEDULES[schedule]
    graph = run(tmp_path, actions)
    for letter, phase in (("F", Phase.FORWARD), ("B", Phase.BACKWARD)):
        expected = [int(action[1]) for action in actions.split() if action[0] == letter]
        assert numbers(graph, phase) == expected
    count = len({action[1] for action in actions.split()})
    held = 2 * HELD if "." in actions else HELD
    assert graph.job.measurement.activation_bytes == (held,) * count
    by_phase = defaultdict[Phase, set[int]](set)
    for node in graph:
        if node.name != "aten::fill_":  # its micro-batch is unknown
            by_phase[node.phase].add(node.value("micro_batch"))
    assert by_phase[Phase.FORWARD] == by_phase[Phase.BACKWARD] == set(range(count))
    assert by_phase[Phase.OPTIMIZER] == {-1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_where_autograd_has_a_thread_of_its_own(tmp_path):
    actions = SCHEDULES["interleaved 1F1B"]
    graph = run(tmp_path, actions, "cuda")
    for letter, phase in (("F", Phase.FORWARD), ("B", Phase.BACKWARD)):
        expected = [int(action[1]) for action in actions.split() if action[0] == letter]
        assert numbers(graph, phase) == expected
    held = graph.job.measurement.activation_bytes
    assert len(held) == 4
    assert len(set(held)) == 1


def test_calls_with_one_backward_are_one_micro_batch(tmp_path):
    graph = run(tmp_path, "F0 F1 S F2 F3 S")
    assert numbers(graph, Phase.FORWARD) == numbers(graph, Phase.BACKWARD) == [0, 0, 1, 1]
    assert graph.job.measurement.activation_bytes == (2 * HELD, 2 * HELD)


def test_backwards_with_nothing_between_are_numbered_in_the_order_of_their_forwards(tmp_path):
    graph = run(tmp_path, "F0 F1 F2 C0 C1 C2")
    assert numbers(graph, Phase.FORWARD) == numbers(graph, Phase.BACKWARD) == [0, 1, 2]


def test_in_another_order_their_micro_batches_are_unknown(tmp_path):
    """Autograd may have run those of 0 and 1 as one."""
    graph = run(tmp_path, "F0 F1 F2 C1 C0 C2")
    assert numbers(graph, Phase.FORWARD) == numbers(graph, Phase.BACKWARD) == [-1, -1, -1]
    assert graph.job.measurement.activation_bytes == ()


EVALUATED = {
    "in a schedule": "E F0 F1 B0 B1",
    "before each micro-batch and behind the last": "E F0 B0 E E F1 B1 E",
    "of the one micro-batch's step": "E F0 B0",
}


@pytest.mark.parametrize("where", EVALUATED)
def test_an_evaluation_is_of_no_micro_batch(tmp_path, where):
    actions = EVALUATED[where].split()
    graph = run(tmp_path, EVALUATED[where])
    calls = [-1 if action == "E" else int(action[1]) for action in actions if action[0] in "EF"]
    assert numbers(graph, Phase.FORWARD) == calls
    count = max(calls) + 1
    assert numbers(graph, Phase.BACKWARD) == [*range(count)]
    assert graph.job.measurement.activation_bytes == (HELD,) * count


def test_what_is_made_for_each_call_is_no_model_of_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 20))
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            made = [model[2:](model[:2](torch.randn(2, 20))) for _ in range(3)]
            losses = [nn.MSELoss()(one, torch.ones(2, 20)) for one in made]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    captured = capture(path, [], Options(windows=WindowPlan(warm_up=1, timed_steps=1)))
    assert (
        numbers(captured.graph, Phase.FORWARD)
        == numbers(captured.graph, Phase.BACKWARD)
        == [0, 1, 2]
    )
    assert not has_note(captured.conversion.notes, "host-events-unpaired")
    assert not has_note(captured.conversion.notes, "profiled-times-dropped")
