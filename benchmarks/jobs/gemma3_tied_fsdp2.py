"""Train Hugging Face's Gemma 3 by FSDP2: tied embeddings of 262,144 words, layers recomputed.

torchrun --nproc-per-node 4 benchmarks/jobs/gemma3_tied_fsdp2.py

The shape is Gemma-3-1B (arXiv:2503.19786): five of six layers attend to a window of 512 tokens.
Weights are random.
"""

import argparse
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

WORDS = 262144


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1152)
    parser.add_argument("--hidden", type=int, default=6912)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=WORDS,
        hidden_size=args.width,
        intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = Gemma3ForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(dist.get_rank())
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
