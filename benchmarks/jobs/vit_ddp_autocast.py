"""Train Hugging Face's ViT on images by DDP: autocast in bfloat16, gradients in two micro-batches.

torchrun --nproc-per-node 4 benchmarks/jobs/vit_ddp_autocast.py

The shape is ViT-L/16 (arXiv:2010.11929). Images with channels last and weights are random.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

CLASSES, SIZE = 1000, 224


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=96, help="images of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=args.width,
        num_hidden_layers=args.depth,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
        num_labels=CLASSES,
        image_size=SIZE,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = ViTForImageClassification(config).to(memory_format=torch.channels_last)
    model.train()
    model = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    torch.manual_seed(dist.get_rank())
    images = torch.randn(args.micro_batches, args.batch, 3, SIZE, SIZE, device="cuda")
    labels = torch.randint(0, CLASSES, (args.micro_batches, args.batch), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        for index in range(args.micro_batches):
            last = index == args.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                given = images[index].to(memory_format=torch.channels_last)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = model(pixel_values=given).logits
                    loss = functional.cross_entropy(logits, labels[index], label_smoothing=0.1)
                (loss / args.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    events.report()
    dist.destroy_process_group()


main()
