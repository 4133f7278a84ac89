"""Train a vision transformer, tensor- and sequence-parallel by DTensor's `parallelize_module`.

torchrun --nproc-per-node 2 benchmarks/jobs/vit_sequence_parallel.py

Norms and residuals run on a part of the patches. Each block gathers them before its linear layers,
and scatters the sums after them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

HEAD, PATCH, IMAGE, CLASSES = 128, 16, 448, 1000


class Attention(nn.Module):
    """Attention of all patches to each other."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        """Return the attended patches."""
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in parts)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with a gate."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        """Return the layers' result."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block of the transformer."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        """Return the next patches."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer whose head sees the mean of all patches."""

    def __init__(self, width, depth):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.position = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images):
        """Return logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


PLAN = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ViT(args.width, args.depth).to(torch.bfloat16)
    blocks = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    gathered = PrepareModuleOutput(
        output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)
    )
    parallelize_module(model, mesh, {"blocks": blocks})
    parallelize_module(model, mesh, {"blocks": gathered})
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    # An operator on a list of tensors takes either DTensors or plain tensors.
    sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    groups = [{"params": sharded}, {"params": whole}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=True)
    images = torch.randn(args.batch, 3, IMAGE, IMAGE, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, CLASSES, (args.batch,), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        loss = functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
