"""Train Hugging Face's Qwen3 under FSDP2: float32 weights that are gathered in bfloat16.

torchrun --nproc-per-node 2 benchmarks/jobs/qwen3_fsdp2.py

Layers are recomputed in the backward. Weights are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

WORDS = 32768


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    words = torch.randint(0, WORDS, (args.batch, args.length), device="cuda")
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
