"""Train ConvNeXt on images by DDP in channels-last layout, float16 and a gradient scaler.

torchrun --nproc-per-node 4 benchmarks/jobs/convnext_ddp_scaled.py

The shape is ConvNeXt-B (arXiv:2201.03545). Images are random, labels are smoothed and mixed.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CLASSES, SIZE = 1000, 224
DEPTHS, WIDTHS = (3, 3, 27, 3), (128, 256, 512, 1024)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images [batch, channels, height, width]."""

    def forward(self, x):
        """Return the normalized images."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise convolution, norm and MLP, which training drops from part of the images."""

    def __init__(self, width, drop):
        """Create the layers."""
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))
        self.drop = drop

    def forward(self, x):
        """Return the next images [batch, width, height, width]."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = (self.scale * self.down(functional.gelu(self.up(y)))).permute(0, 3, 1, 2)
        if self.drop:
            kept = y.new_empty(len(y), 1, 1, 1).bernoulli_(1 - self.drop)
            y = y * kept.div_(1 - self.drop)
        return x + y


class ConvNext(nn.Module):
    """Stages of blocks; each but the first halves the image."""

    def __init__(self):
        """Create the layers."""
        super().__init__()
        drops = iter(torch.linspace(0, 0.5, sum(DEPTHS)).tolist())
        layers, before = [], 3
        for index, (depth, width) in enumerate(zip(DEPTHS, WIDTHS, strict=True)):
            if index:
                layers += [ChannelNorm(before), nn.Conv2d(before, width, 2, 2)]
            else:
                layers += [nn.Conv2d(before, width, 4, 4), ChannelNorm(width)]
            layers += [Block(width, next(drops)) for _ in range(depth)]
            before = width
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(before), nn.Linear(before, CLASSES)

    def forward(self, images):
        """Return logits [batch, classes]."""
        return self.head(self.norm(self.layers(images).mean((2, 3))))


def mixed(images, labels):
    """Return images blended with others of the batch, and the labels' probabilities."""
    share = torch.rand((), device=images.device)
    targets = functional.one_hot(labels, CLASSES).float() * 0.9 + 0.1 / CLASSES
    blended = images * share + images.flip(0) * (1 - share)
    return blended, targets * share + targets.flip(0) * (1 - share)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    torch.manual_seed(0)
    model = ConvNext().to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(model, device_ids=None if device == "cpu" else [device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind)
    torch.manual_seed(dist.get_rank())
    shape = (args.batch, 3, SIZE, SIZE)
    images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (args.batch,), device=device)
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        given, targets = mixed(images, labels)
        with torch.autocast(kind, dtype=torch.float16):
            loss = functional.cross_entropy(model(given), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
    events.report()
    dist.destroy_process_group()


main()
