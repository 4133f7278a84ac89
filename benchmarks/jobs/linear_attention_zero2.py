"""Train a language model with gated linear attention by FSDP1 that shards all but the weights.

torchrun --nproc-per-node 4 benchmarks/jobs/linear_attention_zero2.py

Attention is that of arXiv:2312.06635, in chunks, written in PyTorch: within a chunk by products, a
state of each head passes from chunk to chunk. A short convolution goes before it, as in Mamba.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional

HEAD, CHUNK, VOCABULARY = 128, 128, 32000


def attend(q, k, v, decay):
    """Return gated linear attention of q, k, v [batch, heads, tokens, HEAD].

    Args:
        q: queries.
        k: keys.
        v: values.
        decay: logarithm of each token's decay of the state, [batch, heads, tokens].
    """
    q, k, v = (each.unflatten(2, (-1, CHUNK)) for each in (q, k, v))
    total = decay.float().unflatten(2, (-1, CHUNK)).cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril()
    weights = between.exp().tril().to(q.dtype)
    inner = ((q @ k.transpose(-1, -2)) * weights) @ v
    left = (total[..., -1:] - total).exp()[..., None].to(q.dtype)
    added = (k * left).transpose(-1, -2) @ v
    kept = total[..., -1].exp()[..., None, None].to(q.dtype)
    state, states = torch.zeros_like(added[:, :, 0]), []
    for index in range(added.shape[2]):
        states.append(state)
        state = state * kept[:, :, index] + added[:, :, index]
    passed = total.exp()[..., None].to(q.dtype)
    return (inner + (q * passed) @ torch.stack(states, 2)).flatten(2, 3)


class Block(nn.Module):
    """Convolution, linear attention, gate and MLP."""

    def __init__(self, width, hidden):
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mix = nn.Linear(width, 4 * width, bias=False)
        self.decay = nn.Linear(width, width // HEAD)
        self.short = nn.Conv1d(3 * width, 3 * width, 4, groups=3 * width, padding=3)
        self.head_norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        """Return the next hidden states [batch, tokens, width]."""
        y = self.norm1(x)
        gate, mixed = self.mix(y).tensor_split((x.shape[-1],), -1)
        mixed = self.short(mixed.transpose(1, 2))[..., : x.shape[1]]
        mixed = functional.silu(mixed).transpose(1, 2)
        q, k, v = mixed.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        decay = functional.logsigmoid(self.decay(y)).transpose(1, 2) / 16
        y = self.head_norm(attend(q * HEAD**-0.5, k, v, decay)).transpose(1, 2).flatten(2)
        x = x + self.out(y * functional.silu(gate))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, width, hidden, depth):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Return logits."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=5632)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    torch.manual_seed(0)
    kind = torch.bfloat16
    model = FullyShardedDataParallel(
        Model(args.width, args.hidden, args.depth),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        mixed_precision=MixedPrecision(param_dtype=kind, reduce_dtype=torch.float32),
        device_id=None if device == "cpu" else device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device != "cpu")
    torch.manual_seed(dist.get_rank())
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        text = torch.randint(0, VOCABULARY, (args.batch, args.length + 1), device=device)
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    events.report()
    dist.destroy_process_group()


main()
