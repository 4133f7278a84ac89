"""Train a mixture of experts whose tokens travel to their experts by uneven all-to-alls.

torchrun --nproc-per-node 4 benchmarks/jobs/moe_all_to_all.py

Each rank has a part of the experts, and the whole of all other layers, whose gradients DDP reduces.
A router sends each token to 4 of 32 experts. Ranks exchange how many tokens each sends, read the
numbers, and then exchange the tokens.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

HEAD, VOCABULARY, TOP_K = 128, 32000, 4


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        """Return the attended tokens [batch, tokens, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width, hidden):
        """Create the layers."""
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        """Return the layers' result."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The experts of this rank, and the exchange of tokens with the other ranks."""

    def __init__(self, width, hidden, experts):
        """Create the layers."""
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.ranks = dist.get_world_size()
        self.local = nn.ModuleList(Expert(width, hidden) for _ in range(experts // self.ranks))

    def forward(self, x):
        """Return the weighted sum of each token's experts, for x [batch, tokens, width]."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent_to = sent.view(self.ranks, -1).sum(1).tolist()
        by_rank = received.view(self.ranks, -1)
        received_from = by_rank.sum(1).tolist()
        mine = tokens[order // TOP_K]
        given = tokens.new_empty(sum(received_from), tokens.shape[1])
        given = all_to_all_single(given, mine, received_from, sent_to)
        # Tokens arrive by rank; the experts take them by expert.
        expert = torch.arange(len(self.local), device=x.device).repeat(self.ranks)
        by_expert = expert.repeat_interleave(received).argsort(stable=True)
        parts = given[by_expert].split(by_rank.sum(0).tolist())
        done = torch.cat([each(part) for each, part in zip(self.local, parts, strict=True)])
        back = torch.empty_like(given).index_copy(0, by_expert, done)
        result = all_to_all_single(torch.empty_like(mine), back, sent_to, received_from)
        scaled = result * weights.flatten()[order].unsqueeze(1).to(result.dtype)
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, scaled).view_as(x)


class Layer(nn.Module):
    """Attention and experts."""

    def __init__(self, width, hidden, experts):
        """Create the layers."""
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width)
        self.norm2, self.experts = nn.RMSNorm(width), Experts(width, hidden, experts)

    def forward(self, x):
        """Return the next hidden states."""
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class Mixture(nn.Module):
    """A language model with experts."""

    def __init__(self, width, hidden, depth, experts):
        """Create the layers."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(Layer(width, hidden, experts) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Return logits."""
        return self.head(self.norm(self.layers(self.words(tokens))))


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1408, help="of an expert")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())
    with device:
        model = Mixture(args.width, args.hidden, args.depth, args.experts).to(torch.bfloat16)
    experts = [name for name, _ in model.named_parameters() if ".local." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    model = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # Words are as frequent as in a natural language (Zipf's law).
    frequency = 1 / torch.arange(1, VOCABULARY + 1, device=device)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        drawn = frequency.multinomial(args.batch * args.length, replacement=True)
        tokens = drawn.view(args.batch, args.length)
        logits = model(tokens)
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    events.report()
    dist.destroy_process_group()


main()
