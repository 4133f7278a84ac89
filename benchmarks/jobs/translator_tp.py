"""Train an encoder and a decoder, tensor-parallel by DTensor's `parallelize_module`.

torchrun --nproc-per-node 2 benchmarks/jobs/translator_tp.py --width 4096 --batch 16

SGD without foreach runs operators for each parameter, which the host dispatches one by one in
Python.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

HEAD, WORDS, SOURCE, TARGET = 128, 32000, 1024, 512


class Attention(nn.Module):
    """Attention of one sequence to itself or to another."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, memory, *, causal=False):
        """Attend from `x` to `memory`."""
        projected = (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in projected)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        """Return the layers' result."""
        return self.down(functional.relu(self.up(x)))


class Layer(nn.Module):
    """A layer of the encoder, or with `cross` of the decoder."""

    def __init__(self, width, *, cross):
        super().__init__()
        self.attention, self.feed_forward = Attention(width), FeedForward(width)
        self.cross = Attention(width) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if cross else 2))

    def forward(self, x, memory=None):
        """Return the next hidden states."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory)
        return x + self.feed_forward(self.norms[1](x))


class Translator(nn.Module):
    """An encoder, a decoder and a head."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList(Layer(width, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, cross=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, source, target):
        """Return logits."""
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(self.norm(x))


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Translator(args.width, args.layers).to(torch.bfloat16)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for layer in (*model.encoder, *model.decoder):
        plan = {"feed_forward.up": columns, "feed_forward.down": rows}
        for name in ("attention", "cross") if layer.cross is not None else ("attention",):
            plan |= {f"{name}.{part}": columns for part in "qkv"} | {f"{name}.o": rows}
        parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    source = torch.randint(0, WORDS, (args.batch, SOURCE), device="cuda")
    target = torch.randint(0, WORDS, (args.batch, TARGET + 1), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        logits = model(source, target[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
