"""Pretrain Hugging Face's RoBERTa on masked tokens, data-parallel by DDP under autocast.

torchrun --nproc-per-node 4 benchmarks/jobs/roberta_ddp.py

Weights are float32, drawn at random; a data loader with workers yields random tokens. The loop
reads the loss in each step, so its host waits for the GPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import RobertaConfig, RobertaForMaskedLM, get_linear_schedule_with_warmup

VOCABULARY, MASK = 50265, 50264


class Sentences(Dataset):
    """Token sequences, drawn at random by their index."""

    def __init__(self, count, length):
        """Create the data set."""
        self.count, self.length = count, length

    def __len__(self):
        """Return the number of sequences."""
        return self.count

    def __getitem__(self, index):
        """Return tokens [length] of a sequence."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(4, MASK, (self.length,), generator=generator)


def masked(tokens):
    """Mask 15% of tokens; labels are -100 elsewhere."""
    chosen = torch.rand(tokens.shape, device=tokens.device) < 0.15
    return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, -100)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        max_position_embeddings=args.length + 2,
        type_vocab_size=1,
        attn_implementation="sdpa",
    )
    model = DistributedDataParallel(RobertaForMaskedLM(config).to(device), device_ids=[device])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 100, 10_000)
    sentences = Sentences(args.steps * args.batch * dist.get_world_size(), args.length)
    sampler = DistributedSampler(sentences)
    loader = DataLoader(sentences, args.batch, sampler=sampler, num_workers=2, pin_memory=True)
    running = 0.0
    events = StepEvents()
    for tokens in loader:
        events.begin_step()
        inputs, labels = masked(tokens.to(device, non_blocking=True))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running += loss.item()
    events.report()
    dist.destroy_process_group()


main()
