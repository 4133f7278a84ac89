"""Torch's C++ code in a process whose GPU is emulated."""

import sys

import pytest
from own_process import run_code
from without_device import run

DDP_ON_A_CPU = """
import os, sys, torch
from torch import distributed
from onerank.capture.no_device.cuda_stubs import remove_ddp_timer

CPU = 0
if sys.argv[1] == "without":
    assert remove_ddp_timer(CPU)
    assert not remove_ddp_timer(CPU)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
distributed.init_process_group("gloo", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
try:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
except RuntimeError as error:
    print("no timer" if "timer_" in str(error) else error)
else:
    print(model._get_ddp_logging_data()["avg_backward_compute_time"] > 0)
"""


# A CPU build has a timer for the CPU alone; torch's log of DDP asserts that its reducer has one.
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has CUDA builds")
@pytest.mark.parametrize(("timer", "printed"), [("with", "True"), ("without", "no timer")])
def test_the_timer_of_ddp_is_removed(timer, printed):
    done = run_code(DDP_ON_A_CPU, timer)
    assert done.stdout.strip() == printed, done.stderr


AFTER_BACKWARD = """
import torch
from onerank.capture.no_device import cuda_stubs
from onerank.ir.errors import CaptureError

torch.ones(1, requires_grad=True).sum().backward()
for _ in range(2):
    try:
        cuda_stubs.install()
    except CaptureError as error:
        print(error.code)
"""


def test_stubs_are_refused_after_a_backward():
    done = run_code(AFTER_BACKWARD)
    assert done.stdout.split() == ["no-device-after-backward"] * 2, done.stderr


LEGACY = """
    import torch
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.cuda.LongTensor([1, 2, 3]).tolist() == [1, 2, 3]
    assert torch.cuda.HalfTensor(2, 3).shape == (2, 3) and not torch.cuda.FloatTensor().numel()
    try:
        torch.cuda.LongTensor(model.weight)
    except TypeError:
        pass
    else:
        raise AssertionError("a float tensor became one of integers")
    for kind in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor", model.weight.half().type()):
        rows = torch.randn(4, 8).type(kind)
        assert isinstance(rows, torch.cuda.HalfTensor) and rows.is_cuda
    torch.set_default_tensor_type(torch.cuda.HalfTensor)
    assert torch.zeros(2).is_cuda and torch.zeros(2).dtype == torch.float16
    assert torch.Tensor([2.0]).tolist() == [2] and torch.Tensor([2.0]).is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    assert not torch.zeros(2).is_cuda and not torch.Tensor([2.0]).is_cuda
    for _ in range(3):
        model(rows.float()).sum().backward()
        optimizer.step()
"""


def test_legacy_types_of_the_gpu_create_and_convert_tensors(tmp_path):
    done = run(tmp_path, LEGACY)
    assert done.returncode == 0, done.stderr
