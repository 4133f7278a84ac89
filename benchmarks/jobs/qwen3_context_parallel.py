"""Train a Qwen3-shaped model whose ranks share each sequence: torch's ring attention, and FSDP2.

torchrun --nproc-per-node 4 benchmarks/jobs/qwen3_context_parallel.py

Queries and keys are normalized before the rotary embedding. Weights are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD, VOCABULARY = 128, 151936


class Attention(nn.Module):
    """Causal attention with groups of queries, norms of heads and rotary embeddings."""

    def __init__(self, width, heads, groups):
        """Create the layers."""
        super().__init__()
        self.heads, self.groups = heads, groups
        self.qkv = nn.Linear(width, (heads + 2 * groups) * HEAD, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)
        self.out = nn.Linear(heads * HEAD, width, bias=False)

    def forward(self, x, angles):
        """Return the results [batch, tokens, width]; angles are cosines and sines."""
        heads = self.qkv(x).unflatten(-1, (-1, HEAD))
        q, k, v = heads.split((self.heads, self.groups, self.groups), 2)
        q, k = rotated(self.q_norm(q), angles), rotated(self.k_norm(k), angles)
        share = self.heads // self.groups
        k, v = (each.repeat_interleave(share, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotated(x, angles):
    """Return x [batch, tokens, heads, HEAD] turned by angles [2, tokens, 1, HEAD]."""
    a, b = x.chunk(2, -1)
    return (x * angles[0] + torch.cat((-b, a), -1) * angles[1]).to(x.dtype)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width, hidden, heads, groups):
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention = Attention(width, heads, groups)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, angles):
        """Return the next hidden states [batch, tokens, width]."""
        x = x + self.attention(self.norm1(x), angles)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, width, hidden, depth, heads, groups):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        blocks = (Block(width, hidden, heads, groups) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words, labels, angles):
        """Return the loss of a rank's words [batch, tokens]."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), labels.flatten())


def angles_of(length):
    """Return cosines and sines of the rotary embedding, [2, tokens, 1, HEAD]."""
    rates = 1e6 ** (-torch.arange(0, HEAD, 2, device="cuda") / HEAD)
    angles = torch.arange(length, device="cuda")[:, None] * rates
    angles = torch.cat((angles, angles), -1)[:, None]
    return torch.stack((angles.cos(), angles.sin())).to(torch.bfloat16)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=32768, help="tokens of all ranks")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with torch.device("cuda"):
        model = Model(args.width, args.hidden, args.layers, args.width // HEAD, 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    angles = angles_of(args.length)
    sequence = torch.randint(0, VOCABULARY, (1, args.length + 1), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        words, labels, turns = sequence[:, :-1].clone(), sequence[:, 1:].clone(), angles.clone()
        shared = context_parallel(
            mesh,
            buffers=(words, labels, turns),
            buffer_seq_dims=(1, 1, 1),
            no_restore_buffers={words, labels, turns},
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), shared:
            loss = model(words, labels, turns)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
