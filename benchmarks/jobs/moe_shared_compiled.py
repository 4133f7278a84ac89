"""Train a compiled mixture of experts with shared experts, expert parallelism and FSDP2.

torchrun --nproc-per-node 4 benchmarks/jobs/moe_shared_compiled.py

Each expert takes at most its capacity of each rank's tokens, so all-to-alls are even and nothing
reads the GPU. All tokens also pass a shared expert. FSDP2 shards all weights but the experts'.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

HEAD, VOCABULARY, TOP_K = 128, 32000, 4


class Attention(nn.Module):
    """Causal attention with normalized queries and keys."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x):
        """Return the attended tokens [batch, tokens, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """The experts of this rank, in batched products, and the exchange of tokens."""

    def __init__(self, width, hidden, experts, capacity_factor):
        """Create the weights."""
        super().__init__()
        self.count, self.ranks = experts, dist.get_world_size()
        self.capacity_factor = capacity_factor
        local = experts // self.ranks
        self.gate = nn.Parameter(torch.randn(local, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(local, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(local, hidden, width) * hidden**-0.5)

    def forward(self, tokens, weights, chosen):
        """Return the weighted sum of each token's experts, for tokens [tokens, width]."""
        count, width = tokens.shape
        capacity = int(self.capacity_factor * count * TOP_K / self.count)
        flat = chosen.flatten()
        is_mine = (flat[:, None] == torch.arange(self.count, device=flat.device)).int()
        place = is_mine.cumsum(0, dtype=torch.int32).gather(1, flat[:, None]).squeeze(1) - 1
        # Tokens beyond the capacity share a last row, which no expert takes.
        overflow = self.count * capacity
        slot = torch.where(place < capacity, flat * capacity + place, overflow)
        source = tokens.repeat_interleave(TOP_K, 0)
        sent = tokens.new_zeros(overflow + 1, width).index_copy(0, slot, source)[:-1]
        given = self.exchange(sent).view(self.ranks, -1, capacity, width)
        given = given.transpose(0, 1).flatten(1, 2)
        gate, up, down = (each.to(given.dtype) for each in (self.gate, self.up, self.down))
        done = torch.bmm(functional.silu(torch.bmm(given, gate)) * torch.bmm(given, up), down)
        back = done.unflatten(1, (self.ranks, capacity)).transpose(0, 1).reshape(overflow, width)
        result = functional.pad(self.exchange(back), (0, 0, 0, 1))[slot]
        return (result.view(count, TOP_K, width) * weights[..., None]).sum(1)

    @staticmethod
    def exchange(rows):
        """Send an equal part of the rows to each rank."""
        return all_to_all_single_autograd(rows.contiguous(), None, None, dist.group.WORLD)


class Block(nn.Module):
    """Attention, a shared expert and routed experts."""

    def __init__(self, args):
        """Create the layers."""
        super().__init__()
        width = args.width
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width)
        self.norm2 = nn.RMSNorm(width)
        self.router = nn.Linear(width, args.experts, bias=False)
        self.shared_up = nn.Linear(width, 4 * args.hidden, bias=False)
        self.shared_down = nn.Linear(2 * args.hidden, width, bias=False)
        self.experts = Experts(width, args.hidden, args.experts, args.capacity_factor)

    def forward(self, x):
        """Return the next hidden states [batch, tokens, width]."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        gate, up = self.shared_up(y).chunk(2, -1)
        shared = self.shared_down(functional.silu(gate) * up)
        tokens = y.flatten(0, 1)
        weights, chosen = self.router(tokens).float().sigmoid().topk(TOP_K, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        return x + shared + self.experts(tokens, weights, chosen).view_as(x)


class Mixture(nn.Module):
    """A language model with experts."""

    def __init__(self, args):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.depth))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)

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
    parser.add_argument("--hidden", type=int, default=1408, help="of an expert")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        model = Mixture(args)
    owned = [weight for block in model.blocks for weight in block.experts.parameters()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(
            block, mesh=mesh, mp_policy=policy, ignored_params={*block.experts.parameters()}
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params={*owned})
    sharded = [weight for weight in model.parameters() if all(weight is not own for own in owned)]
    groups = [{"params": sharded}, {"params": owned}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=device == "cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        tokens = torch.randint(0, VOCABULARY, (args.batch, args.length), device=device)
        logits = model(tokens)
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        # Experts got the sum over the ranks' losses, the others the mean.
        torch._foreach_div_([weight.grad for weight in owned], dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    events.report()
    dist.destroy_process_group()


main()
