"""Finetune Hugging Face's Llama by LoRA under DDP: frozen bfloat16 weights, small float32 adapters.

torchrun --nproc-per-node 4 benchmarks/jobs/llama_lora_ddp.py

The shape is Llama-3.1-8B; adapters (arXiv:2106.09685) go next to every linear layer of a block.
Weights are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 128256


class Adapted(nn.Module):
    """A frozen linear layer and a product of low rank."""

    def __init__(self, base, rank):
        """Create the adapters of a layer."""
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        """Return the results [..., out features]."""
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


def adapt(model, rank):
    """Freeze the weights, and put adapters next to the linear layers of the blocks."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(parent, name, Adapted(layer, rank))


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=args.width,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 128,
        num_key_value_heads=8,
        use_cache=False,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        adapt(model, args.rank)
    model.train()
    model = DistributedDataParallel(model, device_ids=[device])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    torch.manual_seed(dist.get_rank())
    words = torch.randint(0, WORDS, (args.batch, args.length), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
