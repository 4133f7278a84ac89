"""`capture run --device none`: parameters of a script's own class."""

from own_process import run_command

import onerank

# As nanotron marks its parameters.
MARKED = """
import torch
from torch import nn

class Marked(nn.Parameter):
    def __new__(cls, tensor, requires_grad=True):
        parameter = nn.Parameter.__new__(cls, tensor.data.detach(), requires_grad)
        if isinstance(tensor, Marked):
            assert type(tensor) == Marked
        parameter.marks = {}
        return parameter

    def mark(self, name):
        self.marks[name] = True

model = nn.Linear(64, 32, bias=False, device="cuda")
weight = Marked(model.weight)
weight.mark("sharded")
assert isinstance(weight, Marked) and weight.is_leaf and weight.requires_grad
again = Marked(weight, False)
assert isinstance(again, Marked) and again.marks == {} and not again.requires_grad
assert {Marked: 1}.get(type(again)) == 1 and type(again) != nn.Parameter
assert isinstance(Marked(torch.zeros(3)), Marked)
model.weight = weight
assert [parameter.marks for parameter in model.parameters()] == [{"sharded": True}]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_parameter_keeps_the_class_of_the_script(tmp_path):
    (tmp_path / "train.py").write_text(MARKED)
    command = ("capture", "run", tmp_path / "train.py", "--device", "none")
    done = run_command(*command, "-o", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.et")
    operators = graph.text("op")
    assert operators.count("aten::mm") == 2
