"""Train a Llama by tensor parallelism and a zero-bubble pipeline in the shape of a V.

torchrun --nproc-per-node 4 benchmarks/jobs/llama_tp_zbv.py

Each pipeline rank has two stages, the first rank the first and the last one. Backwards are split:
gradients of weights fill what would be bubbles. Two ranks share each stage's tensors, as in
Megatron-LM.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn import functional

HEAD, VOCABULARY = 128, 32768


class Split(torch.autograd.Function):
    """Pass a tensor to the ranks' parts of a layer; the backward adds their gradients."""

    @staticmethod
    def forward(ctx, x, group):
        """Return x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """Return the sum over the ranks."""
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Join(torch.autograd.Function):
    """Add the ranks' results of a layer."""

    @staticmethod
    def forward(ctx, x, group):
        """Return the sum over the ranks."""
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient."""
        return grad, None


class Block(nn.Module):
    """This rank's part of a block of Llama."""

    def __init__(self, args, group):
        """Create the layers."""
        super().__init__()
        self.group, width = group, args.width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width // args.tp, bias=False)
        self.out = nn.Linear(width // args.tp, width, bias=False)
        self.up = nn.Linear(width, 2 * args.hidden // args.tp, bias=False)
        self.down = nn.Linear(args.hidden // args.tp, width, bias=False)

    def forward(self, x, cos, sin):
        """Return the next hidden states [batch, tokens, width]."""
        y = Split.apply(self.norm1(x), self.group)
        q, k, v = self.qkv(y).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Join.apply(self.out(y.transpose(1, 2).flatten(2)), self.group)
        gate, up = self.up(Split.apply(self.norm2(x), self.group)).chunk(2, -1)
        return x + Join.apply(self.down(functional.silu(gate) * up), self.group)


def rotated(x, cos, sin):
    """Return x [batch, heads, tokens, head] with rotary positions."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Stage(nn.Module):
    """A part of the blocks; the first embeds tokens, the last returns logits."""

    def __init__(self, args, index, stages, group):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, args.width) if index == 0 else None
        self.blocks = nn.ModuleList(Block(args, group) for _ in range(args.depth // stages))
        last = index == stages - 1
        self.norm = nn.RMSNorm(args.width) if last else None
        self.head = nn.Linear(args.width, VOCABULARY, bias=False) if last else None
        frequency = 5e5 ** -(torch.arange(0, HEAD, 2) / HEAD)
        angle = torch.outer(torch.arange(args.length), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        """Return hidden states, or logits."""
        if self.words is not None:
            x = self.words(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.head is not None else x


def loss_of(logits, labels):
    """Return the mean cross-entropy of the next tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    ranks = dist.get_world_size() // args.tp
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (ranks, args.tp), mesh_dim_names=("pp", "tp"))
    rank, (pipe_group, group) = mesh["pp"].get_local_rank(), map(mesh.get_group, ("pp", "tp"))
    torch.manual_seed(0)
    parts, piped = [], []
    for index in (rank, 2 * ranks - 1 - rank):
        parts.append(Stage(args, index, 2 * ranks, group).to(device, torch.bfloat16))
        piped.append(
            PipelineStage(parts[-1], index, 2 * ranks, torch.device(device), group=pipe_group)
        )
    schedule = ScheduleZBVZeroBubble(piped, args.micro_batches, loss_fn=loss_of)
    weights = [weight for part in parts for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1)
    shape = (args.micro_batch * args.micro_batches, args.length)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        tokens = torch.randint(0, VOCABULARY, shape, device=device)
        if rank == 0:
            schedule.step(tokens, target=tokens)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
