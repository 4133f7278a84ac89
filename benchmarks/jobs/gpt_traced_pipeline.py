"""Train a GPT that `torch.distributed.pipelining.pipeline` splits into stages, by a 1F1B schedule.

torchrun --nproc-per-node 4 benchmarks/jobs/gpt_traced_pipeline.py

The model knows nothing of stages: torch traces it and splits it before given blocks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional

HEAD, VOCABULARY = 64, 50304


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return the next hidden states [batch, tokens, width]."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """GPT-2 with a head whose weights are separate from the embedding's."""

    def __init__(self, width, depth, length):
        """Create the layers."""
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("place", torch.arange(length), persistent=False)

    def forward(self, tokens):
        """Return logits."""
        x = self.words(tokens) + self.places(self.place)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, labels):
    """Return the mean cross-entropy of the next tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gpt(args.width, args.depth, args.length).to(torch.bfloat16)
    example = torch.zeros(args.micro_batch, args.length, dtype=torch.long)
    starts = [f"blocks.{stage * args.depth // stages}" for stage in range(1, stages)]
    pipe = pipeline(model, (example,), split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING))
    stage = pipe.build_stage(rank, device)
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-4, fused=True)
    shape = (args.micro_batch * args.micro_batches, args.length)
    tokens = torch.randint(0, VOCABULARY, shape, device=device)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        if rank == 0:
            schedule.step(tokens)
        elif rank == stages - 1:
            schedule.step(target=tokens)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
