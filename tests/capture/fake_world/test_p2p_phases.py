"""Hand-written pipelines: the phase and micro-batch of sends and receives."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from user_script import run

from onerank.capture.fake_world.recorder import Recorder
from onerank.ir import Kind, Phase, World

SHAPE = (3, 8, 16)

ONE_F_ONE_B = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    before, after = dist.get_rank() - 1, dist.get_rank() + 1
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x
    model = Stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def exchanged(*, send=None, to=None, come=None):
        got = torch.empty(3, 8, 16, requires_grad=True)
        ops = [] if to is None else [dist.P2POp(dist.isend, send, to)]
        ops += [] if come is None else [dist.P2POp(dist.irecv, got, come)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return got

    def backward(x, y, gradient):
        torch.autograd.backward(y, grad_tensors=gradient)
        return x.grad

    while True:
        x = exchanged(come=before)
        y = model.forward(x)  # without the model's own call, as picotron has it
        exchanged(send=y, to=after)
        held = [(x, y)]
        x = exchanged(come=before)
        for last in (False, False, True):
            y = model.forward(x)
            held.append((x, y))
            gradient = exchanged(send=y, to=after, come=after)
            left = backward(*held.pop(0), gradient)
            x = exchanged(send=left, to=before, come=None if last else before)
        left = backward(*held.pop(0), exchanged(come=after))
        exchanged(send=left, to=before)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_stages_messages_have_a_phase_and_micro_batch(tmp_path):
    graph = run(tmp_path, ONE_F_ONE_B, World.of(pp=3), rank=1)
    ways = {
        ("recv", 0): Phase.FORWARD,
        ("send", 2): Phase.FORWARD,
        ("recv", 2): Phase.BACKWARD,
        ("send", 0): Phase.BACKWARD,
    }
    exchanged = {way: [] for way in ways}
    for node in graph:
        if node.kind in (Kind.SEND, Kind.RECV):
            peer = node.value("comm_src" if node.kind == Kind.RECV else "comm_dst")
            exchanged[node.name, peer].append((node.phase, node.value("micro_batch")))
    assert exchanged == {way: [(phase, n) for n in range(4)] for way, phase in ways.items()}
    layers = [node for node in graph if node.name == "aten::addmm"]
    assert [node.value("micro_batch") for node in layers] == [0, 0, 1, 1, 2, 2, 3, 3]


def received(peer: int, **options: Any) -> Tensor:
    buffer = torch.empty(SHAPE, **options)
    dist.recv(buffer, src=peer)
    return buffer


def third_step(recorder: Recorder, step: Callable[[], None]) -> list[tuple[Any, ...]]:
    """Return (collective, peer, phase, micro-batch) of the third of three equal steps."""
    for _ in range(3):
        begun = len(recorder.calls)
        step()
        recorder.next_step()
    return [(c.collective, c.peer, c.phase, c.micro_batch) for c in recorder.calls[begun:]]


@pytest.fixture
def layer() -> nn.Module:
    return nn.Linear(16, 16)


def test_the_first_stage_and_outputs_sent_without_their_history(recorder, layer):
    def step() -> None:
        outputs = [layer(torch.randn(SHAPE)) for _ in range(2)]
        for output in outputs:
            dist.send(output.detach(), dst=2)
        for output in outputs:
            output.backward(received(2))

    expected = [("send", 2, "forward", 0), ("send", 2, "forward", 1)]
    expected += [("recv", 2, "backward", 0), ("recv", 2, "backward", 1)]
    assert third_step(recorder, step) == expected


def test_the_last_stage_with_autograd_grad(recorder, layer):
    def step() -> None:
        for _ in range(2):
            buffer = received(0)
            x = buffer.detach().requires_grad_()
            dist.send(torch.autograd.grad(layer(x).sum(), [x, layer.weight])[0], dst=0)

    ways = ("recv", "forward"), ("send", "backward")
    expected = [(way, 0, phase, n) for n in (0, 1) for way, phase in ways]
    assert third_step(recorder, step) == expected


def test_an_output_whose_memory_is_freed_once_it_is_sent(recorder, layer):
    def step() -> None:
        output = layer(torch.randn(SHAPE))
        dist.send(output, dst=2)
        output.untyped_storage().resize_(0)
        output.backward(received(2))

    assert third_step(recorder, step) == [("send", 2, "forward", 0), ("recv", 2, "backward", 0)]


class Kept(torch.autograd.Function):
    """Keeps the gradient of a received tensor, to be sent later, as nanotron does."""

    held: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        Kept.held.append(gradients[0])


def test_gradients_outside_leaves_are_classified_by_direction(recorder, layer):
    def step() -> None:
        outputs = [layer(Kept.apply(received(0, requires_grad=True))) for _ in range(2)]
        for output in outputs:
            output.sum().backward()
        while Kept.held:
            dist.send(Kept.held.pop(0), dst=0)

    expected = [("recv", 0, "forward", 0), ("recv", 0, "forward", 1)]
    expected += [("send", 0, "backward", 0), ("send", 0, "backward", 1)]
    assert third_step(recorder, step) == expected


def test_micro_batches_of_two_chunks_start_at_zero(recorder):
    chunks = [nn.Linear(16, 16), nn.Linear(16, 16)]

    def step() -> None:
        held = []
        for chunk in chunks:
            for _ in range(2):
                x = received(0, requires_grad=True)
                held.append((x, chunk(x)))
        while held:
            x, y = held.pop()
            y.sum().backward()
            dist.send(x.grad, dst=0)

    expected = [("recv", 0, "forward", n) for n in (0, 1, 0, 1)]
    expected += [("send", 0, "backward", n) for n in (1, 0, 1, 0)]
    assert third_step(recorder, step) == expected


def test_messages_outside_every_backward_are_unclassified(recorder, layer):
    def ring() -> None:
        x = layer(torch.randn(SHAPE))
        with torch.no_grad():
            dist.send(x.clone(), dst=2)
        received(0)
        dist.send(torch.tensor([3, 4]), dst=2)
        x.sum().backward()

    assert {call[2:] for call in third_step(recorder, ring)} == {(None, None)}


def test_several_micro_batches_in_one_backward_have_a_phase_and_no_number(recorder, layer):
    def step() -> None:
        inputs = [received(0, requires_grad=True) for _ in range(2)]
        torch.stack([layer(x) for x in inputs]).sum().backward()
        for x in inputs:
            dist.send(x.grad, dst=0)

    expected = [("recv", 0, "forward", None)] * 2 + [("send", 0, "backward", None)] * 2
    assert third_step(recorder, step) == expected


def test_a_step_is_classified_up_to_its_first_difference(recorder, layer):
    steps = iter(range(3))

    def step() -> None:
        x = received(0, requires_grad=True)
        y = layer(x)
        dist.send(y, dst=3 if next(steps) == 2 else 2)
        y.sum().backward()
        dist.send(x.grad, dst=0)

    expected = [("recv", 0, "forward", 0), ("send", 3, None, None), ("send", 0, None, None)]
    assert third_step(recorder, step) == expected
