"""Train Hugging Face's T5 by FSDP1 with hybrid sharding: groups of two share the weights.

torchrun --nproc-per-node 4 benchmarks/jobs/t5_hsdp.py

Attention adds a bias for each distance and is not fused. Weights are random.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from step_events import StepEvents
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

VOCABULARY = 32128


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--depth", type=int, default=24, help="of encoder and of decoder")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--target-length", type=int, default=128)
    parser.add_argument("--shard", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device != "cpu" else "gloo")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=args.width,
        d_kv=64,
        d_ff=args.hidden,
        num_layers=args.depth,
        num_heads=args.width // 64,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        use_cache=False,
    )
    shape = (dist.get_world_size() // args.shard, args.shard)
    mesh = init_device_mesh(torch.device(device).type, shape, mesh_dim_names=("replicate", "shard"))
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    kind = torch.bfloat16
    model = FullyShardedDataParallel(
        T5ForConditionalGeneration(config),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=wrap,
        mixed_precision=MixedPrecision(param_dtype=kind, reduce_dtype=kind, buffer_dtype=kind),
        device_id=None if device == "cpu" else device,
        use_orig_params=True,
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    events = StepEvents()
    for _ in range(args.steps):
        events.begin_step()
        text = torch.randint(2, VOCABULARY, (args.batch, args.length), device=device)
        labels = torch.randint(2, VOCABULARY, (args.batch, args.target_length), device=device)
        loss = model(input_ids=text, labels=labels).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    events.report()
    dist.destroy_process_group()


main()
