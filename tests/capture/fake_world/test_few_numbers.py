"""Sums of a few numbers: peers of a script are taken to hold what rank 1 of 4 does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from onerank.capture.fake_world.recorder import Recorder

OPERATIONS: Any = dist.ReduceOp


@pytest.mark.usefixtures("scripts_recorder")
@pytest.mark.parametrize(
    ("own", "operation", "found"),
    [
        (torch.ones(1), OPERATIONS.SUM, [4.0]),  # what a script checks its world by
        (torch.tensor([3, 5]), OPERATIONS.SUM, [12, 20]),
        (torch.tensor(1.5, dtype=torch.bfloat16), OPERATIONS.SUM, 6.0),
        (torch.tensor([2.0]), OPERATIONS.AVG, [2.0]),
        (torch.tensor([2.0]), OPERATIONS.MAX, [2.0]),
        (torch.tensor([True]), OPERATIONS.SUM, [True]),
        (torch.ones(17), OPERATIONS.SUM, [1.0] * 17),
        (torch.ones(2)[:0], OPERATIONS.SUM, []),
    ],
)
def test_all_ranks_have_equal_numbers(own, operation, found):
    tensor = own.clone()
    dist.all_reduce(tensor, operation)
    assert tensor.tolist() == found


@pytest.mark.usefixtures("scripts_recorder")
def test_every_call_that_sums():
    pair = dist.new_group([0, 1])  # of two
    tensor, kept = torch.ones(1), torch.ones(1)
    work = dist.all_reduce(tensor, group=pair, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.item() == 2
    dist.reduce(tensor, 1)
    dist.reduce(kept, 0)  # not its root, which alone has the sum
    assert (tensor.item(), kept.item()) == (8, 1)
    assert funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [4.0, 4.0]
    with torch.inference_mode():
        seen = torch.ones(1)
    dist.all_reduce(seen)
    assert seen.item() == 4


@pytest.mark.usefixtures("scripts_recorder")
def test_the_norm_of_sharded_gradients_is_of_all_shards():
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model(torch.ones(2, 8)).sum().backward()
    (weight,) = model.parameters()
    own: Any = weight.grad
    norm: Any = nn.utils.clip_grad_norm_([weight], 1e9)
    assert norm.full_tensor().item() == pytest.approx(2 * own.to_local().norm().item())


def test_what_the_tool_slices_adds_its_own_up():
    recorder = Recorder(1, 4)
    recorder.start()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    recorder.stop()
    assert tensor.item() == 1
