"""Train a diffusion transformer of images by DDP and torch.compile, with a moving average.

torchrun --nproc-per-node 4 benchmarks/jobs/dit_ddp_compiled.py

The shape is 12 of 28 blocks of DiT-XL/2 (arXiv:2212.09748): latents of 32 x 32 in patches of 2 x 2,
width 1152, heads of 72. torch.compile gets the DDP module, so it splits the graph at DDP's buckets.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CLASSES, CHANNELS, SIZE, PATCH = 1000, 4, 32, 2


class Block(nn.Module):
    """Attention and MLP, shifted, scaled and gated by the condition."""

    def __init__(self, width, heads):
        """Create the layers."""
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition):
        """Return the next patches [batch, patches, width]."""
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        y = self.norm1(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(y)
        y = self.norm2(x) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(functional.gelu(self.up(y), approximate="tanh"))


class Dit(nn.Module):
    """Predicts the noise and its variance."""

    def __init__(self, width, depth, heads):
        """Create the layers."""
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, width, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, PATCH * PATCH * 2 * CHANNELS)

    def forward(self, images, time, labels):
        """Return noise and variance [batch, 2 * channels, size, size]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        angle = time[:, None] * torch.exp(-torch.arange(128, device=time.device) * (9.21 / 128))
        condition = self.time(torch.cat((angle.cos(), angle.sin()), -1)) + self.labels(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        x = self.out(self.norm(x) * (1 + scale) + shift)
        side = SIZE // PATCH
        x = x.unflatten(1, (side, side)).unflatten(-1, (PATCH, PATCH, 2 * CHANNELS))
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, 2 * CHANNELS, SIZE, SIZE)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    torch.manual_seed(0)
    model = Dit(args.width, args.depth, args.heads).to(device)
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    schedule = torch.cos(torch.linspace(0, 1.57, 1000, device=device))
    images = torch.randn(args.batch, CHANNELS, SIZE, SIZE, device=device)
    labels = torch.randint(0, CLASSES, (args.batch,), device=device)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        time = torch.randint(0, 1000, (args.batch,), device=device)
        dropped = torch.rand(args.batch, device=device) < 0.1
        noise = torch.randn_like(images)
        level = schedule[time][:, None, None, None]
        mixed = level.sqrt() * images + (1 - level).sqrt() * noise
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            predicted = compiled(mixed, time.float(), labels.masked_fill(dropped, CLASSES))
        mean, variance = predicted.float().chunk(2, 1)
        loss = functional.mse_loss(mean, noise) + 1e-3 * variance.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1e-4)
    events.report()
    dist.destroy_process_group()


main()
