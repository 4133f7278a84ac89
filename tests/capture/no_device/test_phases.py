"""`capture run --device none`: the phase of operators between a backward and an optimizer."""

from own_process import run_command

import onerank
from onerank.ir import Phase

# As Megatron-LM looks for NaN in gradients, after a backward that computed activations again.
RECOMPUTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(64, 64, device="cuda"), nn.Linear(64, 64, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    inputs = torch.randn(16, 64, device="cuda", requires_grad=True)
    output = checkpoint(model, inputs, use_reentrant=True)
    checkpoint(model, output, use_reentrant=True).sum().backward()
    torch.linalg.vector_norm(model[0].weight.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_norm_of_gradients_is_no_forward_after_recomputation(tmp_path):
    (tmp_path / "train.py").write_text(RECOMPUTED)
    command = ("capture", "run", tmp_path / "train.py", "--device", "none")
    done = run_command(*command, "-o", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.et")
    operators = graph.text("op")
    phases = {
        Phase(phase)
        for operator, phase in zip(operators, graph.nodes.phase.tolist(), strict=True)
        if operator == "aten::linalg_vector_norm"
    }
    assert phases == {Phase.NONE}
