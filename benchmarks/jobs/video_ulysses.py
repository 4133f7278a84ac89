"""Train a diffusion transformer on long videos: Ulysses sequence parallelism, and FSDP2.

torchrun --nproc-per-node 4 benchmarks/jobs/video_ulysses.py

Each rank holds a part of the patches of one video. Around attention, an all-to-all gives it all
patches of a part of the heads (arXiv:2309.14509). All ranks share the weights, their gradients and
the moving average of the weights.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEAD, CHANNELS, TEXT = 128, 64, 512


class Exchange(torch.autograd.Function):
    """An all-to-all of heads for patches, and its inverse in the backward."""

    @staticmethod
    def forward(ctx, x, scatter, gather):
        """Split dimension `scatter` of x [batch, patches, heads, head] and join `gather`."""
        ctx.scatter, ctx.gather = scatter, gather
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), scatter)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts)
        return torch.cat(received, gather)

    @staticmethod
    def backward(ctx, grad):
        """Exchange the gradient back."""
        return Exchange.apply(grad, ctx.gather, ctx.scatter), None, None


class Attention(nn.Module):
    """Attention of all patches to each other, by heads."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x, rotary):
        """Return the attended patches [batch, patches of this rank, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).unbind(2)
        q, k = rotated(self.q_norm(q), rotary), rotated(self.k_norm(k), rotary)
        q, k, v = (Exchange.apply(y, 2, 1).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(Exchange.apply(y, 1, 2).flatten(2))


def rotated(x, rotary):
    """Return x [batch, patches, heads, head] with rotary positions."""
    cos, sin = rotary
    even, odd = x.chunk(2, -1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1).type_as(x)


class Block(nn.Module):
    """A block whose norms are shifted, scaled and gated by the time (arXiv:2212.09748)."""

    def __init__(self, width):
        """Create the layers."""
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, condition, rotary):
        """Return the next patches."""
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + gate * self.attention(self.norm1(x) * (1 + scale) + shift, rotary)
        y = self.norm2(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(functional.gelu(self.up(y), approximate="tanh"))


class VideoTransformer(nn.Module):
    """Predicts the velocity of each patch, given a time and the mean of a text."""

    def __init__(self, width, depth, recompute):
        """Create the layers."""
        super().__init__()
        self.patches, self.text = nn.Linear(CHANNELS, width), nn.Linear(TEXT, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CHANNELS)
        self.recompute = recompute

    def forward(self, patches, time, text, rotary):
        """Return velocities [batch, patches, channels]."""
        angle = time[:, None] * torch.exp(-torch.arange(128, device=time.device) / 14)
        sinusoid = torch.cat((angle.cos(), angle.sin()), -1).to(patches.dtype)
        condition = self.time(sinusoid) + self.text(text)
        x = self.patches(patches)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, condition, rotary, use_reentrant=False)
            else:
                x = block(x, condition, rotary)
        return self.out(self.norm(x))


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--patches", type=int, default=32768, help="of all ranks")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = VideoTransformer(args.width, args.depth, args.recompute)
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in (model, average):
        for block in each.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(each, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = args.patches // dist.get_world_size()
    first = dist.get_rank() * own
    position = torch.arange(first, first + own, device="cuda")
    angle = torch.outer(position, 1e4 ** -(torch.arange(64, device="cuda") / 64))
    rotary = (angle.cos()[:, None].bfloat16(), angle.sin()[:, None].bfloat16())
    video = torch.randn(1, own, CHANNELS, device="cuda")
    text = torch.randn(1, TEXT, device="cuda", dtype=torch.bfloat16)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        noise, time = torch.randn_like(video), torch.rand(1, device="cuda")
        mixed = (1 - time) * video + time * noise
        velocity = model(mixed.bfloat16(), 1000 * time, text, rotary)
        loss = functional.mse_loss(velocity.float(), noise - video)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1e-4)
    events.report()
    dist.destroy_process_group()


main()
