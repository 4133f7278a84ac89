"""`capture run --device none`: what Megatron-LM, TransformerEngine and nanotron do, in short."""

from itertools import pairwise

import numpy as np
from without_device import captured

from onerank.ir import Phase, Reason

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
    graph = captured(tmp_path, FLAGS, "--torchrun", "--dp", 2, "--rank", 1)
    assert graph.text("op").count("aten::mm") == 2


# As TransformerEngine's ring attention exchanges keys and values, and their gradients.
RING = """
import numpy
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()

def exchanged(x):
    received = torch.empty_like(x)
    pair = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    return received

class Ring(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return exchanged(x)

    @staticmethod
    def backward(context, gradient):
        return exchanged(gradient.contiguous())

model = nn.Linear(64, 64, bias=False, device="cuda")
# As nanotron reads ranks from an array.
dist.broadcast(model.weight.detach(), group_src=0, group=dist.new_group([*numpy.arange(size)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
for step in range(5):
    for micro_batch in range(3):
        output = model(Ring.apply(model(torch.randn(16, 64, device="cuda"))))
        with torch.cuda.stream(side):
            output.detach().relu()
        output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_calls_of_both_directions_run_in_the_order_of_the_program(tmp_path):
    graph = captured(tmp_path, RING, "--torchrun", "--dp", 2)
    assert not [note for note in graph.job.measurement.notes if "cycle" in note.code]
    names, edges = graph.text("name"), graph.edges
    calls = [node for node, name in enumerate(names) if name in ("send", "recv")]
    assert len(calls) == 2 * 2 * 3
    assert (np.diff(graph.nodes.start_ns[calls]) >= 0).all()
    ordered = edges.reason == Reason.STREAM_ORDER
    pairs = set(zip(edges.source[ordered].tolist(), edges.target[ordered].tolist(), strict=True))
    assert set(pairwise(calls)) <= pairs


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
    assert captured(tmp_path, MARKED).text("op").count("aten::mm") == 2


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
    graph = captured(tmp_path, RECOMPUTED)
    operators = graph.text("op")
    phases = {
        Phase(phase)
        for operator, phase in zip(operators, graph.nodes.phase.tolist(), strict=True)
        if operator == "aten::linalg_vector_norm"
    }
    assert phases == {Phase.NONE}
