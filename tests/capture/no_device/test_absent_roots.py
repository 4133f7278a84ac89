"""`capture run --device none`: small integers that a script broadcasts from an absent rank."""

from own_process import run_command

import onerank

# As Megatron-LM's middle stages learn from the first rank whether there is training data.
FLAGS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
steps = torch.zeros(2, dtype=torch.long, device="cuda")
if dist.get_rank() == 0:
    steps = torch.tensor([5, 7], device="cuda")
dist.broadcast(steps, 0)
assert steps.tolist() == [5, 7]
model = nn.Linear(64, 64, bias=False, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps[0].item()):
    model(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_flags_of_the_first_rank_reach_another(tmp_path):
    (tmp_path / "train.py").write_text(FLAGS)
    options = ("--device", "none", "--torchrun", "--dp", "2", "--rank", "1")
    command = ("capture", "run", tmp_path / "train.py", *options)
    done = run_command(*command, "-o", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    assert onerank.read(tmp_path / "trace.et").text("op").count("aten::mm") == 2
