"""`capture run --device none`: asynchronous calls of a forward and a backward on one group."""

from itertools import pairwise

import numpy as np
from own_process import run_command

import onerank
from onerank.ir import Reason

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
    (tmp_path / "train.py").write_text(RING)
    options = ("--device", "none", "--torchrun", "--dp", "2")
    command = ("capture", "run", tmp_path / "train.py", *options)
    done = run_command(*command, "-o", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.et")
    assert not [note for note in graph.job.measurement.notes if "cycle" in note.code]
    names, edges = graph.text("name"), graph.edges
    calls = [node for node, name in enumerate(names) if name in ("send", "recv")]
    assert len(calls) == 2 * 2 * 3
    assert (np.diff(graph.nodes.start_ns[calls]) >= 0).all()
    ordered = edges.reason == Reason.STREAM_ORDER
    pairs = set(zip(edges.source[ordered].tolist(), edges.target[ordered].tolist(), strict=True))
    assert set(pairwise(calls)) <= pairs
