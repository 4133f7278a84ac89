"""Train a Llama with grouped queries by tensor and sequence parallelism and FSDP2, compiled.

torchrun --nproc-per-node 4 benchmarks/jobs/llama_2d_compiled.py

The mesh has two dimensions: FSDP2 over the outer, tensor parallelism over the inner one.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

HEAD, VOCABULARY = 128, 32768


class Attention(nn.Module):
    """Causal attention in which three heads of queries share keys and values."""

    def __init__(self, width, kv_heads):
        """Create the layers."""
        super().__init__()
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * HEAD, bias=False) for _ in range(2))

    def forward(self, x, cos, sin):
        """Return the attended hidden states; heads are those of this rank."""
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotated(x, cos, sin):
    """Return x [batch, tokens, heads, head] with rotary positions."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Block(nn.Module):
    """A block of Llama."""

    def __init__(self, width, hidden, kv_heads):
        """Create the layers."""
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, kv_heads)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        """Return the next hidden states [batch, tokens, width]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, args):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.ModuleList(
            Block(args.width, args.hidden, args.kv_heads) for _ in range(args.depth)
        )
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, tokens, cos, sin):
        """Return logits, split by vocabulary."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def parallelize(model, mesh):
    """Split the model's tensors, compile its blocks and shard its parameters."""
    parallelize_module(
        model,
        mesh["tp"],
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh["tp"],
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None),
                    desired_input_layouts=(Replicate(), None, None),
                ),
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "mlp_norm": SequenceParallel(),
                "gate": ColwiseParallel(input_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="of each data-parallel rank")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(args)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    position = torch.arange(args.length, device=device)
    angle = torch.outer(position, 5e5 ** -(torch.arange(HEAD // 2, device=device) / (HEAD // 2)))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    torch.manual_seed(mesh["dp"].get_local_rank())
    events = StepEvents()
    for step in range(args.steps):
        events.begin_step()
        text = torch.randint(0, VOCABULARY, (args.batch, args.length + 1), device=device)
        with loss_parallel():
            logits = model(text[:, :-1], cos, sin)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            loss = loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    events.report()
    dist.destroy_process_group()


main()
