"""Torch's C++ code in a process whose GPU is emulated."""

import sys

import pytest
from own_process import run_code

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
