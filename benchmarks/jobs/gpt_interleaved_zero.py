"""Train a GPT by an interleaved pipeline of two ranks, two replicas of it, and ZeRO-1.

torchrun --nproc-per-node 4 benchmarks/jobs/gpt_interleaved_zero.py

Each rank has two stages. After the schedule the replicas add their gradients in one all-reduce;
ZeroRedundancyOptimizer gives each of them the states of half of the parameters.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn import functional

HEAD, VOCABULARY = 128, 50304


class Block(nn.Module):
    """A block with attention and MLP side by side, as in GPT-J, and dropout."""

    def __init__(self, width, dropout):
        """Create the layers."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """Return the next hidden states [batch, tokens, width]."""
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.out(attended.transpose(1, 2).flatten(2))
        return x + self.dropout(attended + self.down(functional.gelu(self.up(y))))


class Stage(nn.Module):
    """A part of the blocks; the first embeds tokens, the last returns logits."""

    def __init__(self, args, index, stages):
        """Create the layers."""
        super().__init__()
        if index == 0:
            self.words = nn.Embedding(VOCABULARY, args.width)
            self.places = nn.Embedding(args.length, args.width)
        depth = args.depth // stages
        self.blocks = nn.ModuleList(Block(args.width, args.dropout) for _ in range(depth))
        if index == stages - 1:
            self.norm = nn.LayerNorm(args.width)
            self.head = nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, x):
        """Return hidden states, or logits."""
        if hasattr(self, "words"):
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits, labels):
    """Return the mean cross-entropy of the next tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=2, help="stages of a rank")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    replicas, stages = dist.get_world_size() // args.pp, args.pp * args.chunks
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (args.pp, replicas), mesh_dim_names=("pp", "dp"))
    rank, pipe_group, data_group = mesh["pp"].get_local_rank(), *map(mesh.get_group, ("pp", "dp"))
    torch.manual_seed(0)
    parts, piped = [], []
    for chunk in range(args.chunks):
        index = chunk * args.pp + rank
        parts.append(Stage(args, index, stages).to(device, torch.bfloat16))
        piped.append(
            PipelineStage(parts[-1], index, stages, torch.device(device), group=pipe_group)
        )
    schedule = ScheduleInterleaved1F1B(piped, args.micro_batches, loss_fn=loss_of)
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = ZeroRedundancyOptimizer(
        weights, torch.optim.AdamW, process_group=data_group, lr=1e-4, weight_decay=0.1
    )
    torch.manual_seed(mesh["dp"].get_local_rank())
    shape = (args.micro_batch * args.micro_batches, args.length)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        tokens = torch.randint(0, VOCABULARY, shape, device=device)
        given = (tokens,) if rank == 0 else ()
        schedule.step(*given, **({"target": tokens} if rank == args.pp - 1 else {}))
        joined = torch.cat([weight.grad.flatten() for weight in weights])
        dist.all_reduce(joined, group=data_group)
        joined /= replicas
        parts_of_joined = joined.split([weight.numel() for weight in weights])
        for weight, gradient in zip(weights, parts_of_joined, strict=True):
            weight.grad.copy_(gradient.view_as(weight))
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
