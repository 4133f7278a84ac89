"""Train a hybrid of Mamba-2 and attention by FSDP2, the state space layers written in PyTorch.

torchrun --nproc-per-node 4 benchmarks/jobs/mamba2_hybrid_fsdp2.py

State space duality (arXiv:2405.21060) in chunks: products within a chunk, and a state of each head
that passes between chunks by one product with their decays. Each fourth layer is attention.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

HEAD, STATE, CHUNK, VOCABULARY = 64, 128, 256, 50304


def differences(logs):
    """Return exp of the sums of logs [..., tokens] from each token to each later one."""
    total = logs.cumsum(-1)
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=logs.device).tril()
    return between.masked_fill(~later, -torch.inf).exp()


def scan(x, logs, b, c):
    """Return the state space layer of x [batch, tokens, heads, HEAD].

    Args:
        x: inputs times their step sizes.
        logs: logarithm of each token's decay, [batch, heads, tokens].
        b: what each token adds to the states, [batch, tokens, STATE].
        c: what each token reads of them, [batch, tokens, STATE].
    """
    x, logs = x.transpose(1, 2).unflatten(2, (-1, CHUNK)), logs.unflatten(-1, (-1, CHUNK))
    b, c = (each.unflatten(1, (-1, CHUNK))[:, None] for each in (b, c))
    total = logs.cumsum(-1)
    y = (c @ b.transpose(-1, -2) * differences(logs).to(x.dtype)) @ x
    left = (total[..., -1:] - total).exp()[..., None].to(x.dtype)
    states = (x * left).transpose(-1, -2) @ b
    states = torch.cat([torch.zeros_like(states[:, :, :1]), states], 2).flatten(3)
    passed = differences(functional.pad(total[..., -1], (1, 0))).to(x.dtype)
    states = (passed @ states)[:, :, :-1].unflatten(3, (HEAD, STATE))
    y = y + (c @ states.transpose(-1, -2)) * total.exp()[..., None].to(x.dtype)
    return y.flatten(2, 3).transpose(1, 2)


class StateSpace(nn.Module):
    """Projection, short convolution, scan, gated norm and projection."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.inner, self.heads = 2 * width, 2 * width // HEAD
        mixed = self.inner + 2 * STATE
        self.project = nn.Linear(width, self.inner + mixed + self.heads, bias=False)
        self.short = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.decay = nn.Parameter(torch.zeros(self.heads))
        self.bias = nn.Parameter(torch.zeros(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner)
        self.out = nn.Linear(self.inner, width, bias=False)

    def forward(self, x):
        """Return the results [batch, tokens, width]."""
        parts = (self.inner, self.inner + 2 * STATE, self.heads)
        gate, mixed, step = self.project(x).split(parts, -1)
        mixed = functional.silu(self.short(mixed.transpose(1, 2))[..., : x.shape[1]])
        values, b, c = mixed.transpose(1, 2).split((self.inner, STATE, STATE), -1)
        values = values.unflatten(-1, (-1, HEAD))
        step = functional.softplus(step.float() + self.bias)
        logs = (-step * self.decay.float().exp()).transpose(1, 2)
        y = scan(values * step[..., None].to(values.dtype), logs, b, c)
        y = y + values * self.skip[:, None]
        return self.out(self.norm(y.flatten(2) * functional.silu(gate)))


class Attention(nn.Module):
    """Causal attention with groups of queries."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.Linear(width, width // 2, bias=False)

    def forward(self, x):
        """Return the results [batch, tokens, width]."""
        q = self.q(x).unflatten(-1, (-1, 128)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, -1, 128)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A mixer of tokens and an MLP."""

    def __init__(self, width, attends):
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer = Attention(width) if attends else StateSpace(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        """Return the next hidden states [batch, tokens, width]."""
        x = x + self.mixer(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, width, depth):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, index % 4 == 3) for index in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words, labels):
        """Return the loss of words [batch, tokens]."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(args.width, args.depth)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    words = torch.randint(0, VOCABULARY, (args.batch, args.length + 1), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        loss = model(words[:, :-1], words[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
